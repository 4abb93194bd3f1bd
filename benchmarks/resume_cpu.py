"""Check that an `outpace eval` that is killed and restarted several times ends with the same table.

    python benchmarks/resume_cpu.py --data wmt_en_de.jsonl --rows 100 --kills 8

Both runs translate the same rows with SmolLM2, without speculation and with prompt lookup. One is killed at
random moments and restarted. All texts must be the same in both runs, and so must all table lines without
times.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import arguments, machine, write

TIMED = ("sampling step", "wall clock", "tokens/s", "over baseline", "P50", "P90", "P99")


def untimed(table: Path) -> list[str]:
    return [line for line in table.read_text().splitlines() if not line[2:].startswith(TIMED)]


def texts(journal: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    return {f"{row['runner']} {row['row']}": row["texts"] for row in rows}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with source and reference")
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=6, help="new tokens of each row")
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    options = parser.parse_args()
    words = [
        sys.executable, "-m", "outpace", "eval", "translate", "--data", str(options.data), "--runners",
        "baseline,exact", "--limit", str(options.rows), "-m", str(options.tokens), "--temperature", "1", "-o",
    ]  # fmt: skip
    noise = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole, parts = Path(folder) / "whole.jsonl", Path(folder) / "parts.jsonl"
        started_at = time.monotonic()
        subprocess.run([*words, str(whole)], check=True, capture_output=True)
        spent = time.monotonic() - started_at
        done = []
        for _ in range(options.kills):
            one = subprocess.Popen([*words, str(parts)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(noise.uniform(0, 2 * spent / options.kills))
            one.kill()
            one.wait()
            done.append(len(texts(parts)) if parts.exists() and parts.read_bytes().count(b"\n") else 0)
        subprocess.run([*words, str(parts)], check=True, capture_output=True)
        same = texts(parts) == texts(whole)
        tables = untimed(Path(f"{parts}.md")) == untimed(Path(f"{whole}.md"))
        lines = untimed(Path(f"{whole}.md"))
    print("\n".join(lines))
    print(f"killed with {done} of {2 * options.rows} done; texts the same: {same}, tables: {tables}")
    command = f"python benchmarks/resume_cpu.py --data {options.data.name} --rows {options.rows}"
    command += f" --tokens {options.tokens} --kills {options.kills} --seed {options.seed}"
    found = {"killed_with": done, "texts_the_same": same, "tables_the_same": tables, "table": lines}
    write({"command": command, "machine": machine(), **found}, options.out)
    raise SystemExit(0 if same and tables else 1)


if __name__ == "__main__":
    main()
