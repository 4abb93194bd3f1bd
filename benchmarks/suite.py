"""Duration of the test suite, and the probability that a correct program fails it.

python benchmarks/suite.py --full --out benchmarks/results/suite_full.json
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

from report import arguments, machine, write

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--full", action="store_true", help="run the full tier")
    options = parser.parse_args()
    tier = ["--full"] if options.full else []
    started_at = time.perf_counter()
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--dist", "worksteal", *tier],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    seconds = time.perf_counter() - started_at
    print(run.stdout)
    counted = re.search(r"statistical assertions: (\d+), false alarms below (\S+) per run", run.stdout)
    passed = re.search(r"(\d+) passed", run.stdout)
    if run.returncode or counted is None or passed is None:
        sys.exit("the suite did not pass; nothing was recorded")
    report = {
        "command": "python " + " ".join(sys.argv),
        "machine": machine(),
        "seconds": round(seconds, 1),
        "passed": int(passed[1]),
        "statistical_assertions": int(counted[1]),
        "false_alarms_per_run_below": float(counted[2]),
    }
    print(json.dumps(report, indent=2))
    write(report, options.out)


if __name__ == "__main__":
    main()
