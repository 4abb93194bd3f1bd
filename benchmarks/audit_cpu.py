"""How long `outpace audit` takes with the default model, and whether it finds planted faults every time.

    python benchmarks/audit_cpu.py --runs 20 --out benchmarks/results/audit_cpu.json

The command's own settings: default model, lookup drafter, built-in prompts. The planted runs go through the
faults in turn, each with another seed.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from typing import Any

from report import arguments, machine, write

import outpace
from outpace.audit import Report, audit
from outpace.cli.audit import PROMPTS
from outpace.cli.audit import audit as command
from outpace.decode import Decoder
from outpace.faults import FAULTS, planted

SAMPLES = int(inspect.signature(command).parameters["samples"].default)


def timed(decoder: Decoder, seed: int) -> tuple[Report, float]:
    begun = time.perf_counter()
    report = audit(decoder, PROMPTS, samples=SAMPLES, seed=seed, progress=False)
    return report, time.perf_counter() - begun


def described(report: Report, seconds: float) -> dict[str, Any]:
    return {
        "lossless": report.passed,
        "seconds": round(seconds, 1),
        "p_values": [one.p_value for one in report.joint],
        "greedy_passed": [one.passed for one in report.greedy],
        "detectable": [round(one.detectable, 4) for one in report.joint],
        "drafted": sum(one.drafted for one in report.joint),
        "accepted": sum(one.accepted for one in report.joint),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=20, help="planted runs (default 20)")
    options = parser.parse_args()
    decoder = outpace.load()
    honest = described(*timed(decoder, 0))
    print(json.dumps(honest), file=sys.stderr, flush=True)
    found = []
    for seed in range(options.runs):
        fault = list(FAULTS)[seed % len(FAULTS)]
        with planted(decoder, fault):
            found.append({"fault": fault, "seed": seed, **described(*timed(decoder, seed))})
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    report = {
        "command": f"python benchmarks/audit_cpu.py --runs {options.runs}",
        "machine": machine(),
        "settings": decoder.describe().splitlines(),
        "honest": honest,
        "found": f"{sum(not one['lossless'] for one in found)} of {len(found)}",
        "planted": found,
        "bars": "seconds < 180, every planted fault found",
    }
    print(json.dumps(report, indent=2))
    write(report, options.out)


if __name__ == "__main__":
    main()
