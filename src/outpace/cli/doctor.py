"""`outpace doctor`: what is here, what is missing for what."""

from __future__ import annotations

import platform
import sys
import time
from importlib import metadata
from typing import Annotated, Any

import typer

CORE = ("outpace", "torch", "transformers", "numpy", "safetensors", "gguf", "accelerate", "typer", "rich")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Versions, device, memory bandwidth, model cache, and what is missing for which extra."""
    found = examine()
    if as_json:
        import json

        print(json.dumps(found, indent=2))
        return
    from rich.table import Table

    from outpace.cli.show import screen

    made = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in found.items():
        if isinstance(value, dict):
            for inner, version in value.items():
                made.add_row(f"{name} {inner}", str(version))
        else:
            made.add_row(name, str(value))
    screen(sys.stdout).print(made)


def examine() -> dict[str, Any]:
    import torch

    from outpace import __version__
    from outpace.models.causal import memory_free
    from outpace.models.hub import DEFAULT, cache_folder, is_complete, place_of, precision_of

    place = place_of(None)
    cuda = place.type == "cuda"
    speed = bandwidth(place)
    folder = cache_folder()
    there = is_complete(folder / DEFAULT)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.exists() else 0
    free = memory_free(place)
    return {
        "outpace": __version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in CORE},
        "device": f"{torch.cuda.get_device_name(place)}, CUDA {torch.version.cuda}"
        if cuda
        else f"CPU, {torch.get_num_threads()} threads",
        "dtype by default": str(precision_of(None, place)).removeprefix("torch."),
        "free memory": f"{free / 2**30:.1f} GiB",
        "read bandwidth": f"about {speed:.0f} GB/s: a model of 1 GB decodes plainly at no more than "
        f"{speed:.0f} tokens/s",
        "model cache": f"{folder} ({size / 2**20:.0f} MiB)",
        "default model": "there" if there else "not fetched yet",
        "extras": {name: _missing(needs) for name, needs in _extras().items()},
    }


def bandwidth(place: Any) -> float:
    """GB/s at which weights can be read: a sum over half a gigabyte, the best of five."""
    import torch

    data = torch.ones(1 << 27, device=place)
    best = float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        float(data.sum())
        best = min(best, time.perf_counter() - begun)
    return data.nbytes / best / 1e9


def _extras() -> dict[str, list[str]]:
    """The extras this version declares, with the packages each needs."""
    wanted: dict[str, list[str]] = {}
    try:
        lines = metadata.requires("outpace") or []
    except metadata.PackageNotFoundError:  # run from a checkout
        return wanted
    for line in lines:
        need, _, condition = line.partition(";")
        if "extra ==" in condition:
            name = condition.split("extra ==")[1].strip(" '\")")
            package = need.strip()
            for sign in "<>=!~[ ":
                package = package.split(sign)[0]
            if "sys_platform" not in condition or sys.platform == "linux":
                wanted.setdefault(name, []).append(package)
    return wanted


def _missing(packages: list[str]) -> str:
    missing = [name for name in packages if _version(name) == "missing"]
    return f"missing {', '.join(missing)}" if missing else "complete"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"
