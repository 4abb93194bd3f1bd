"""Description of the machine and the software of a measurement."""

from __future__ import annotations

import importlib
import os
import platform
import subprocess
from pathlib import Path

import torch

import outpace

CPU_COMMANDS = {"Linux": ("lscpu",), "Darwin": ("sysctl", "machdep.cpu.brand_string")}
CPU_KEYS = ("model name", "machdep.cpu.brand_string")


def machine(device: torch.device) -> dict[str, str | int | None]:
    """Return the device, the number of threads, and the versions of packages."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{package: version(package) for package in ("torch", "transformers", "triton")},
        "outpace": outpace.__version__,
    }


def cpu() -> str:
    """Return the name of the CPU, as the system reports it."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(errors="replace") if path.exists() else ""
    return _cpu_name(text) or _cpu_name(_command_output()) or platform.processor() or platform.machine()


def _cpu_name(text: str) -> str | None:
    """Return the value of the first line that names the CPU."""
    pairs = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for name, _, value in pairs if name.strip().lower() in CPU_KEYS), None)


def _command_output() -> str:
    command = CPU_COMMANDS.get(platform.system())
    if command is None:
        return ""
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=10,
            env={**os.environ, "LC_ALL": "C"},
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return str(importlib.import_module(package).__version__)
    except ImportError:
        return None
