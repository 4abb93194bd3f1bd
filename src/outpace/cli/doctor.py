"""``outpace doctor``: versions, device, model cache, and missing packages of extras."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli.options import AsJson

if TYPE_CHECKING:
    from outpace.models.gguf_cache import Converted

CORE = ("outpace", "torch", "transformers", "numpy", "safetensors", "gguf", "accelerate", "typer", "rich")


def doctor(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME",
            help="With --clear-cache: remove only these converted GGUF files.",
            show_default=False,
        ),
    ] = None,
    clear_cache: Annotated[
        bool,
        typer.Option(
            "--clear-cache", help="Remove converted GGUF files, all or those named, and nothing else."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show versions, device, memory bandwidth, model cache, and missing packages of extras."""
    if names and not clear_cache:
        raise ValueError(f"{names[0]}: doctor takes names with --clear-cache only")
    found = clear(names or []) if clear_cache else examine()
    if as_json:
        import json

        print(json.dumps(found, indent=2))
        return
    from rich.table import Table

    from outpace.cli.show import screen

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in found.items():
        if isinstance(value, dict):
            for inner, version in value.items():
                table.add_row(f"{name} {inner}", str(version))
        elif isinstance(value, list):
            for line in map(_line, value) if value else ["none"]:
                table.add_row(name.replace("_", " "), line)
        elif name == "freed_bytes":
            table.add_row("freed", _size(value))
        else:
            table.add_row(name, str(value))
    screen(sys.stdout).print(table)


def clear(names: Sequence[str]) -> dict[str, Any]:
    """Remove converted GGUF files. Return their names and the bytes that were freed."""
    from outpace.models import gguf_cache

    removed, in_use = gguf_cache.clear(names)
    return {
        "removed": [_entry(one) for one in removed],
        "in_use": [_entry(one) for one in in_use],
        "freed_bytes": sum(one.bytes for one in removed),
    }


def _entry(one: Converted) -> dict[str, Any]:
    return {
        "name": one.name,
        "dtype": one.dtype,
        "bytes": one.bytes,
        "last_used": time.strftime("%Y-%m-%d %H:%M", time.localtime(one.used)),
        "in_use": one.in_use,
    }


def _line(entry: dict[str, Any]) -> str:
    now = ", in use now" if entry["in_use"] else ""
    return (
        f"{entry['name']} in {entry['dtype']}, {_size(entry['bytes'])}, last used {entry['last_used']}{now}"
    )


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def examine() -> dict[str, Any]:
    """Return everything that ``outpace doctor`` reports, by name."""
    import torch

    from outpace import __version__
    from outpace.models import gguf_cache
    from outpace.models.default import DEFAULT
    from outpace.models.hub import place_of, precision_of
    from outpace.models.kv_cache import memory_free
    from outpace.models.store import bytes_in, cache_folder, is_complete

    device = place_of(None)
    cuda = device.type == "cuda"
    rate = bandwidth(device)
    folder = cache_folder()
    fetched = is_complete(folder / DEFAULT)
    size = bytes_in(folder)
    free = memory_free(device)
    return {
        "outpace": __version__,
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in CORE},
        "device": f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
        if cuda
        else f"CPU, {torch.get_num_threads()} threads",
        "dtype by default": str(precision_of(None, device)).removeprefix("torch."),
        "free memory": f"{free / 2**30:.1f} GiB",
        "read bandwidth": f"about {rate:.0f} GB/s: without speculation, a model of 1 GB decodes at no more "
        f"than {rate:.0f} tokens/s",
        "model cache": f"{folder} ({_size(size)}; converted GGUF files up to "
        f"{gguf_cache.limit() / 2**30:g} GiB)",
        "default model": "there" if fetched else "not fetched yet",
        "converted GGUF": [_entry(one) for one in gguf_cache.converted()],
        "extras": {name: _missing(needs) for name, needs in _extras().items()},
    }


def bandwidth(device: Any) -> float:
    """Return the memory bandwidth in GB/s: the best of five sums over half a gigabyte."""
    import torch

    data = torch.ones(1 << 27, device=device)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        float(data.sum())
        best = min(best, time.perf_counter() - started)
    return data.nbytes / best / 1e9


def _extras() -> dict[str, list[str]]:
    """Return the packages of each extra that this version declares."""
    extras: dict[str, list[str]] = {}
    try:
        lines = metadata.requires("outpace") or []
    except metadata.PackageNotFoundError:  # run from a checkout
        return extras
    for line in lines:
        need, _, condition = line.partition(";")
        if "extra ==" in condition:
            name = condition.split("extra ==")[1].strip(" '\")")
            package = need.strip()
            for sign in "<>=!~[ ":
                package = package.split(sign)[0]
            if "sys_platform" not in condition or sys.platform == "linux":
                extras.setdefault(name, []).append(package)
    return extras


def _missing(packages: list[str]) -> str:
    missing = [name for name in packages if _version(name) == "missing"]
    return f"missing {', '.join(missing)}" if missing else "complete"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"
