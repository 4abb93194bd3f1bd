"""Time of `outpace audit` with the default model, and how often sampling alone finds planted faults.

    python benchmarks/audit_cpu.py --seeds 3 --out benchmarks/results/audit_cpu.json

Settings are the command's defaults: default model, prompt lookup, built-in prompt. Each planted fault is
audited with several seeds, without the greedy check. An audit ends as soon as it finds a fault. The benchmark
takes about ten minutes on two cores.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
import time
from typing import Any

from report import arguments, machine, write

import outpace
from outpace.auditing.audit import audit
from outpace.auditing.faults import FAULTS, planted
from outpace.auditing.pearson import LOOKS
from outpace.auditing.report import DIFFERENCE, NO_DIFFERENCE, Report
from outpace.cli.audit import PROMPTS
from outpace.cli.audit import audit as command
from outpace.decoder import Decoder

DEFAULTS = {name: one.default for name, one in inspect.signature(command).parameters.items()}
SETTINGS = {
    name: DEFAULTS[name]
    for name in ("samples", "misplacement", "tokens", "greedy_tokens", "temperature", "alarm")
}


def described(report: Report) -> dict[str, Any]:
    return {
        "verdict": report.verdict,
        "seconds": round(report.seconds, 1),
        "samples": sum(one.samples for one in report.joint),
        "p_value": report.p_value,
        "detectable": round(report.detectable or 1.0, 4),
        "draft_tokens": report.draft_tokens,
        "accepted_tokens": report.accepted_tokens,
    }


def audit_fault(decoder: Decoder, fault: str, seed: int) -> dict[str, Any]:
    """Audit a planted fault by sampling alone."""
    with planted(decoder, fault):
        report = audit(decoder, PROMPTS, seed=seed, progress=False, **SETTINGS | {"greedy_tokens": 0})
    return {"fault": fault, "seed": seed, **described(report)}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="seeds per planted fault (default 3)")
    options = parser.parse_args()
    started_at = time.perf_counter()
    decoder = outpace.load()
    loading = time.perf_counter() - started_at
    audits, faults = [], []
    changes: dict[str, Any] = {}
    for seed in range(2):
        passed = audit(decoder, PROMPTS, seed=seed, progress=False, **SETTINGS | changes)
        audits.append({"seed": seed, **described(passed)})
        print(json.dumps(audits[-1]), file=sys.stderr, flush=True)
        # The third look settles a 5 % misplacement, so the second audit has as many samples as that look.
        changes = {"samples": math.ceil(LOOKS[2] * audits[0]["samples"])}
    for seed in range(options.seeds):
        for fault in FAULTS:
            faults.append(audit_fault(decoder, fault, seed))
            print(json.dumps(faults[-1]), file=sys.stderr, flush=True)
    bars = {
        "detectable at most 0.05": max(one["detectable"] for one in audits) <= 0.05,
        "seconds of three looks at most 180": audits[1]["seconds"] + loading <= 180,
        "every planted fault found by sampling": all(one["verdict"] == DIFFERENCE for one in faults),
    }
    report = {
        "command": f"python benchmarks/audit_cpu.py --seeds {options.seeds}",
        "machine": machine(),
        "settings": decoder.describe().splitlines(),
        "audits": audits,
        "passed": f"{sum(one['verdict'] == NO_DIFFERENCE for one in audits)} of {len(audits)}",
        "detectable": max(one["detectable"] for one in audits),
        "loading_seconds": round(loading, 1),
        "most_seconds": round(audits[1]["seconds"] + loading, 1),
        "found_by_sampling": f"{sum(one['verdict'] == DIFFERENCE for one in faults)} of {len(faults)}",
        "planted": faults,
        "bars": bars,
    }
    print(json.dumps(report, indent=2))
    write(report, options.out)
    raise SystemExit(0 if all(bars.values()) else 1)


if __name__ == "__main__":
    main()
