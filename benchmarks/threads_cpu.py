"""Throughput of a decoding process alone and beside another program, by how its OpenMP threads wait.

    python benchmarks/threads_cpu.py --out benchmarks/results/threads_arm.json

Each cell is a process that decodes without speculation in float32: alone, beside a second such process, and
beside a single-threaded Python loop. Settings take turns, `--rounds` times, and figures are medians.
`--preload` names another OpenMP library (LLVM's libomp, Intel's libiomp5) that replaces PyTorch's own. Its
settings are values of KMP_BLOCKTIME. `--settings` selects settings by name.

`--commands` measures `outpace generate` instead: with its own setting, and with the default of GNU's library
(a spin count of 300,000).
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

from report import arguments, machine, write

GNU: dict[str, dict[str, str]] = {
    "default": {},
    **{f"spin {count}": {"GOMP_SPINCOUNT": f"{count}"} for count in (0, 100, 1000, 10_000, 100_000)},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "active": {"OMP_WAIT_POLICY": "active"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
LLVM: dict[str, dict[str, str]] = {
    "default": {},
    **{f"block {time} ms": {"KMP_BLOCKTIME": f"{time}"} for time in (0, 1, 10)},
    "block 50 us": {"KMP_BLOCKTIME": "50us"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
THREADS = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_")
PROMPT = "Why is the sky blue?"
CHUNK = 16  # tokens between two readings of the clock


def worker(seconds: float, synthetic: bool) -> None:
    """Decode for some seconds, as one process of a cell."""
    import torch

    import outpace

    torch.manual_seed(0)
    decoder = outpace.Decoder(random_model()) if synthetic else outpace.load(None, "none", dtype="float32")
    prompt = list(range(100, 164))
    decoder.generate(prompt, temperature=0, max_new_tokens=CHUNK, ignore_eos=True)
    print(openmp(), flush=True)
    sys.stdin.readline()
    started_at, tokens = time.perf_counter(), 0
    while time.perf_counter() - started_at < seconds:
        decoder.generate(prompt, temperature=0, max_new_tokens=CHUNK, ignore_eos=True)
        tokens += CHUNK
    print(tokens / (time.perf_counter() - started_at), flush=True)


def openmp() -> str:
    """Return the name of the OpenMP library in this process, the preloaded one if there are two."""
    with open("/proc/self/maps") as maps:
        names = {os.path.basename(line.split()[-1]) for line in maps}
    found = [name for name in names if re.match(r"lib(g|i)?omp[\d.-]*\.so", name)]
    return min(found, key=lambda name: name.startswith("libgomp"), default="")


def random_model() -> Any:
    """Return a model with random weights in the shape of SmolLM2-135M."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def throughputs(workers: int, env: dict[str, str], seconds: float, synthetic: bool) -> list[float]:
    """Return the tokens per second of each of several processes that decode at the same time."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(THREADS)}
    command = [sys.executable, __file__, "--worker", f"{seconds}", *(["--synthetic"] if synthetic else [])]
    with ExitStack() as open_processes:
        processes = [
            open_processes.enter_context(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    env=inherited | env,
                )
            )
            for _ in range(workers)
        ]
        preloaded = os.path.basename(env.get("LD_PRELOAD", ""))
        for process in processes:
            library = answer(process)
            if not library or (preloaded and library != preloaded):
                raise RuntimeError(f"a process did not start with {env}, or runs on {library}")
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return [float(answer(process)) for process in processes]


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def beside_a_loop(env: dict[str, str], seconds: float, synthetic: bool) -> float:
    """Return the tokens per second beside a program that keeps one core busy."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as loop:
        try:
            return throughputs(1, env, seconds, synthetic)[0]
        finally:
            loop.kill()


def commands(count: int, env: dict[str, str], draft: str) -> list[float]:
    """Return the tokens per second that `outpace generate` reports, of several processes at the same time."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(THREADS)}
    flags = [
        "--draft",
        draft,
        "--dtype",
        "float32",
        "--ignore-eos",
        "-m",
        "192",
        "--temperature",
        "0",
        "--json",
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "outpace", "generate", PROMPT, "--json", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=inherited | env,
        )
        for _ in range(count)
    ]
    replies = [json.loads(process.communicate()[0]) for process in processes]
    return [one["outputs"][0]["stats"]["tokens_per_second"] for one in replies]


Cells = dict[str, dict[str, list[float]]]


def measure_commands(rounds: int) -> Cells:
    cells: Cells = {}
    for turn in range(rounds):
        for draft in ("none", "lookup"):
            for name, env in (("as it is", {}), ("spin 300000", {"GOMP_SPINCOUNT": "300000"})):
                cell = cells.setdefault(f"--draft {draft}, {name}", {"alone": [], "beside itself": []})
                cell["alone"] += commands(1, env, draft)
                cell["beside itself"] += commands(2, env, draft)
                tell(turn, rounds, f"{draft}, {name}", cell)
    return cells


def measure_workers(
    settings: dict[str, dict[str, str]], rounds: int, seconds: float, synthetic: bool
) -> Cells:
    cells: Cells = {name: {"alone": [], "beside itself": [], "beside a loop": []} for name in settings}
    for turn in range(rounds):
        for name, env in settings.items():
            cell = cells[name]
            cell["alone"] += throughputs(1, env, seconds, synthetic)
            cell["beside itself"] += throughputs(2, env, seconds, synthetic)
            cell["beside a loop"].append(beside_a_loop(env, seconds, synthetic))
            tell(turn, rounds, name, cell)
    return cells


def medians(cell: dict[str, list[float]]) -> dict[str, float]:
    return {where: round(statistics.median(runs), 2) for where, runs in cell.items()}


def tell(turn: int, rounds: int, name: str, cell: dict[str, list[float]]) -> None:
    print(f"{turn + 1}/{rounds} {name:12} {medians(cell)}", file=sys.stderr, flush=True)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds that a cell decodes (default 6)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all settings (default 3)")
    parser.add_argument("--settings", nargs="+", help="names of settings (default: all)")
    parser.add_argument("--preload", help="another OpenMP library, for LD_PRELOAD")
    parser.add_argument("--synthetic", action="store_true", help="random weights in SmolLM2's shape")
    parser.add_argument("--commands", action="store_true", help="measure `outpace generate`")
    parser.add_argument("--worker", type=float, help="run one process of a cell for this many seconds")
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.worker, options.synthetic)
        return
    if options.commands:
        cells = measure_commands(options.rounds)
    else:
        known = LLVM if options.preload else GNU
        if unknown := set(options.settings or ()) - set(known):
            parser.error(f"--settings: no such setting: {', '.join(unknown)}; known are {', '.join(known)}")
        extra = {"LD_PRELOAD": options.preload} if options.preload else {}
        settings = {name: extra | known[name] for name in options.settings or known}
        cells = measure_workers(settings, options.rounds, options.seconds, options.synthetic)
    report = {
        "command": f"python {' '.join(sys.argv)}",
        "machine": machine(),
        "openmp": os.path.basename(options.preload) if options.preload else openmp(),
        "model": "random weights, SmolLM2-135M's shape" if options.synthetic else "SmolLM2-135M-Instruct",
        "unit": "tokens/s of one process, float32",
        "median": {name: medians(cell) for name, cell in cells.items()},
        "runs": cells,
    }
    print(json.dumps(report["median"], indent=2))
    write(report, options.out)


if __name__ == "__main__":
    main()
