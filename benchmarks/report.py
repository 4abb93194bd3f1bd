"""The JSON report of a benchmark: the machine, and the file."""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import torch

import outpace
from outpace.bench.machine import cpu, version

COMMANDS = ("bench", "cli", "report", "tune")  # packages that decoding does not use


def arguments(purpose: str | None) -> argparse.ArgumentParser:
    """Return a parser with a benchmark's docstring as help, and the flag --out."""
    parser = argparse.ArgumentParser(
        description=purpose, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    return parser


def machine() -> dict[str, Any]:
    """Return the machine, versions, and a digest of the source code that decodes.

    `python benchmarks/report.py` prints the digest of this checkout.
    """
    return {
        "cpu": cpu(),
        "architecture": platform.machine(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers", "triton", "numpy")},
        "outpace": outpace.__version__,
        "source": source(),
    }


def source() -> str:
    """Return a digest of the source code that decodes."""
    root = Path(outpace.__file__).parent
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if place.parts[0] not in COMMANDS:
            found.update(f"{place.as_posix()}\0".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def write(report: dict[str, Any], out: Path | None) -> None:
    """Write a report to a file, if one is named."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    print(source())
