"""Time of a forward pass over n tokens on a CPU, relative to one over a single token.

Methods are Transformers' forward, outpace's scorer, the scorer with packed weights, and the engine's fused
model, in the same run.

    python benchmarks/pass_cpu.py --model SmolLM2-135M-Instruct --out benchmarks/results/pass_cpu.json

Methods take turns, and times are medians. Absolute times depend on the machine.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import arguments, machine, write
from transformers import AutoModelForCausalLM, DynamicCache

from outpace.models.causal import CausalScorer
from outpace.models.fused_scorer import FusedScorer

CONTEXT = 128
TOKENS = (1, 2, 4, 6, 8, 16)
Pass = Callable[[int], Any]


def transformers_pass(model: Any, text: torch.Tensor) -> Pass:
    cache = DynamicCache()
    model(input_ids=text[:, :CONTEXT], past_key_values=cache, use_cache=True)

    def run(n: int) -> None:
        model(input_ids=text[:, CONTEXT : CONTEXT + n], past_key_values=cache, use_cache=True)
        cache.crop(-n)

    return run


def scorer_pass(model: Any, text: torch.Tensor, packed: bool) -> Pass:
    scorer = CausalScorer(model)
    if packed:
        scorer.pack()
    scorer.cache.prepare(1, 2 * CONTEXT)
    scorer.prefill([0], [text[0, :CONTEXT].tolist()])
    return lambda n: scorer.score([0], text[:, CONTEXT : CONTEXT + n])


def fused_pass(model: Any, text: torch.Tensor) -> Pass:
    scorer = FusedScorer(model)
    scorer.prefill([0], [text[0, :CONTEXT].tolist()])
    scorer.cache.reserve([0], [2 * CONTEXT])
    positions = torch.arange(CONTEXT, 2 * CONTEXT)[None]
    return lambda n: scorer.forward(text[:, CONTEXT : CONTEXT + n], positions[:, :n])


def load(name: str, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False).eval()


@torch.inference_mode()
def measure(name: str, dtype: torch.dtype, repeats: int) -> list[dict[str, Any]]:
    text = torch.randint(1000, (1, 2 * CONTEXT), generator=torch.Generator().manual_seed(1))
    runners = {
        "transformers": transformers_pass(load(name, dtype), text),
        "outpace": scorer_pass(load(name, dtype), text, packed=False),
        "outpace, packed": scorer_pass(load(name, dtype), text, packed=True),
        "outpace, rearranged": fused_pass(load(name, dtype), text),
    }
    times: dict[tuple[str, int], list[float]] = {(method, n): [] for method in runners for n in TOKENS}
    for turn in range(-2, repeats):
        print(f"\r{dtype}: {max(turn, 0)} of {repeats}", end="", file=sys.stderr)
        for n in TOKENS:
            for method, run in runners.items():
                started_at = time.perf_counter()
                run(n)
                if turn >= 0:
                    times[method, n].append(1e3 * (time.perf_counter() - started_at))
    print(file=sys.stderr)
    medians = {key: statistics.median(milliseconds) for key, milliseconds in times.items()}
    return [
        {
            "method": method,
            "dtype": str(dtype).removeprefix("torch."),
            "tokens": n,
            "milliseconds": round(medians[method, n], 2),
            "of_one": round(medians[method, n] / medians[method, 1], 2),
        }
        for method, n in times
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument(
        "--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"]
    )
    options = parser.parse_args()
    figures = [
        figure
        for dtype in options.dtype
        for figure in measure(options.model, getattr(torch, dtype), options.repeats)
    ]
    for one in figures:
        print(
            f"{one['dtype']:9} {one['method']:20} {one['tokens']:3} {one['milliseconds']:8.2f} ms "
            f"{one['of_one']:5.2f} x one"
        )
    command = f"python benchmarks/pass_cpu.py --model {Path(options.model).name} --repeats {options.repeats}"
    command += f" --dtype {' '.join(options.dtype)}"
    write({"command": command, "machine": machine(), "context": CONTEXT, "figures": figures}, options.out)


if __name__ == "__main__":
    main()
