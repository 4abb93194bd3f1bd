"""Let `outpace tune` find the fastest drafter on this machine, and generate with what it wrote.

The budget is in seconds; with a longer one the choice is surer.
"""

import subprocess
import sys

BUDGET = sys.argv[1] if len(sys.argv) > 1 else "120"  # seconds
OUTPACE = [sys.executable, "-m", "outpace"]

subprocess.run(
    [*OUTPACE, "tune", "--drafts", "lookup", "ngram", "--budget", BUDGET, "--out", "outpace.toml"], check=True
)
subprocess.run(
    [*OUTPACE, "generate", "Why is the sky blue?", "--config", "outpace.toml", "-m", "64"], check=True
)
