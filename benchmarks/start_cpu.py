"""Time of the first command after installation, and of later ones.

    python benchmarks/start_cpu.py --out benchmarks/results/start_cpu.json

Each command is a separate process of the `outpace` that belongs to this Python. The first one starts with an
empty model cache and includes the download.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import arguments, machine, write

PROMPT = "Why is the sky blue?"


def seconds(command: list[str], cache: str) -> float:
    started_at = time.perf_counter()
    subprocess.run(
        command,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OUTPACE_CACHE": cache},
    )
    return time.perf_counter() - started_at


def until_first_byte(command: list[str], cache: str) -> float:
    """Return the seconds from the start of a process to its first output."""
    started_at = time.perf_counter()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OUTPACE_CACHE": cache},
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        elapsed = time.perf_counter() - started_at
        process.stdout.read()
    return elapsed


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="later starts (default 5)")
    options = parser.parse_args()
    outpace = [str(Path(sys.executable).with_name("outpace")), "generate", PROMPT]
    with tempfile.TemporaryDirectory() as cache:
        first = seconds([*outpace, "-m", "64"], cache)
        imports = "import torch, transformers; print('done', flush=True)"
        times: dict[str, list[float]] = {"import": [], "first token": [], "64 tokens": []}
        for _ in range(options.repeats):
            times["import"].append(until_first_byte([sys.executable, "-c", imports], cache))
            times["first token"].append(until_first_byte([*outpace, "-m", "64"], cache))
            times["64 tokens"].append(seconds([*outpace, "-m", "64"], cache))
    typical = {name: round(statistics.median(runs), 2) for name, runs in times.items()}
    report = {
        "command": f"python benchmarks/start_cpu.py --repeats {options.repeats}",
        "machine": machine(),
        "first_command_seconds": round(first, 1),
        "import_torch_transformers_seconds": typical["import"],
        "first_token_seconds": typical["first token"],
        "first_token_beyond_imports_seconds": round(typical["first token"] - typical["import"], 2),
        "64_tokens_seconds": typical["64 tokens"],
        "runs": {name: [round(one, 2) for one in runs] for name, runs in times.items()},
        "bars": "first command < 300, first token <= imports + 3, 64 tokens < 25",
    }
    print(json.dumps(report, indent=2))
    write(report, options.out)


if __name__ == "__main__":
    main()
