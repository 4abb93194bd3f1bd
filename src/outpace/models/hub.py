"""Loading of models by name: the default model, folders, GGUF files, hub ids."""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from outpace.models import gguf, gguf_cache
from outpace.models.auto import auto_class, quiet
from outpace.models.default import DEFAULT, default_model
from outpace.models.store import Say as Say
from outpace.models.store import cache_folder as cache_folder
from outpace.models.store import first_line
from outpace.models.store import is_complete as is_complete
from outpace.models.store import say as say

DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
}

PLACEMENTS = "auto", "balanced", "balanced_low_0", "sequential"  # device maps that accelerate computes

Name = str | os.PathLike[str]

_loading = threading.Lock()  # Transformers changes global state while it loads a model


def load_model(
    name: Name | None,
    *,
    device: str | None = None,
    dtype: Any = None,
    tell: Say = say,
    trust_remote_code: bool = False,
    revision: str | None = None,
    device_map: Any = None,
    quantization_config: Any = None,
) -> tuple[Any, Any]:
    """Load a causal or encoder-decoder model and its tokenizer.

    Args:
        name: A folder, a GGUF file, or an id of the Hugging Face hub. None is the default model.
        device: By default CUDA if the machine has a CUDA device, else the CPU.
        dtype: The default depends on the device. On CUDA it is bfloat16 from Ampere on, else float16. On a
            CPU it is bfloat16 with AMX, else float32. On other devices it is float32.
        tell: Called with each progress message.
        trust_remote_code: Run Python code that comes with the model. The code has your permissions.
        revision: A branch, tag or commit of a model on the hub.
        device_map: As in Transformers, instead of ``device``.
        quantization_config: As in Transformers, such as a ``TorchAoConfig``.

    Returns:
        The model in evaluation mode, and its tokenizer.
    """
    check_model(
        name,
        device=device,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        revision=revision,
        device_map=device_map,
        quantization_config=quantization_config,
    )
    import torch

    place = place_of(device)
    precision = precision_of(dtype, place)
    shown = DEFAULT if name is None else name
    loader_args = {"device_map": device_map, "quantization_config": quantization_config}
    with _loading:
        where, hold = _where(name, precision, tell)
        try:
            if where is None:  # a GGUF file whose converted copy cannot be kept
                model, tokenizer = gguf.read(_path(shown), precision, device_map)
                model = model if device_map else model.to(place)
            else:
                options = _options(trust_remote_code, revision)
                model, tokenizer = _read(where, shown, place, precision, loader_args, options)
        except BaseException as error:
            if hold is not None:
                hold.close()
                if isinstance(error, OSError):  # of a damaged copy, perhaps
                    gguf_cache.discard(hold.folder)
                    raise OSError(f"{error}; its converted copy was removed: try again") from error
            if isinstance(error, torch.OutOfMemoryError):
                raise MemoryError(
                    f"{shown}: in {precision} it does not fit into the memory of {place}; pass a smaller "
                    "dtype, a device_map or a quantization_config"
                ) from error
            raise
    if hold is not None:
        weakref.finalize(model, hold.close)
    tell(f"{shown}: {_described(model, precision)}")
    return model.eval(), tokenizer


def _read(
    where: str, shown: Name, place: Any, precision: Any, loader_args: dict[str, Any], options: dict[str, Any]
) -> tuple[Any, Any]:
    """Read a folder or a model of the hub."""
    import torch
    from transformers import AutoConfig, AutoTokenizer

    own_cache = Path(where).is_relative_to(cache_folder())  # a converted model in the cache of outpace
    is_quiet = own_cache or not sys.stderr.isatty()
    with quiet() if is_quiet else nullcontext(), ThreadPoolExecutor(1) as meanwhile:
        reading = meanwhile.submit(AutoTokenizer.from_pretrained, where, **options)
        try:
            config = AutoConfig.from_pretrained(where, **options)
            quantized = loader_args["quantization_config"] or getattr(config, "quantization_config", None)
            if quantized and loader_args["device_map"] is None:
                # Quantized weights cannot be moved afterwards.
                loader_args = {**loader_args, "device_map": {"": place}}
            placed = loader_args["device_map"] is not None
            loader_args = {name: one for name, one in loader_args.items() if one is not None}
            model = auto_class(config).from_pretrained(
                where, config=config, dtype=precision, **loader_args, **options
            )
            model = model if placed else model.to(place)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise _refusal(shown, "cannot be loaded", error) from error
        try:
            return model, reading.result()
        except Exception as error:
            raise _refusal(shown, "has no tokenizer", error) from error


def _described(model: Any, precision: Any) -> str:
    """Return a description of a model's dtype, quantization and devices."""
    parts = [str(precision).removeprefix("torch.")]
    if quantization := getattr(model.config, "quantization_config", None):
        method = getattr(quantization, "quant_method", "")
        parts.append(f"quantized by {getattr(method, 'value', method)}")
    places = getattr(model, "hf_device_map", None) or {"": model.device}
    return f"{', '.join(parts)} on {', '.join(dict.fromkeys(str(one) for one in places.values()))}"


def load_processor(name: Name, *, trust_remote_code: bool = False, revision: str | None = None) -> Any:
    """Load the processor of a speech model: its feature extractor and tokenizer."""
    from transformers import AutoProcessor

    check_model(name, trust_remote_code=trust_remote_code, revision=revision)
    path = _path(name)
    if path.is_file():
        raise ValueError(f"{name}: a GGUF file has no processor; give a folder or a hub id")
    where = str(path) if path.is_dir() else os.fspath(name)
    try:
        return AutoProcessor.from_pretrained(where, **_options(trust_remote_code, revision))
    except Exception as error:
        raise _refusal(name, "has no processor", error) from error


def _refusal(shown: Name, what: str, error: Exception) -> Exception:
    """Return a one-line error about a model, in place of Transformers' own of several lines."""
    if "trust_remote_code" in str(error):
        return ValueError(
            f"{shown}: needs Python code of its own, which runs only if you allow it: "
            "--trust-remote-code, or trust_remote_code=True in Python"
        )
    return OSError(f"{shown}: {what} ({first_line(error)})")


def place_of(device: str | None) -> Any:
    """Return the PyTorch device of a name. The default is CUDA if available, else the CPU.

    Raises:
        ValueError: There is no such device.
    """
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
        raise ValueError(f"device: got {device!r}, but this PyTorch sees no CUDA device")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device: got {device!r}; it must be at most cuda:{torch.cuda.device_count() - 1} on this machine"
        )
    if place.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device: got {device!r}, but this PyTorch sees no Apple GPU")
    return place


def precision_of(dtype: Any, place: Any) -> Any:
    """Return the PyTorch dtype of a name, or the default dtype of a device.

    Args:
        dtype: Name or dtype; None for the default of ``load_model``.
        place: PyTorch device.

    Raises:
        ValueError: ``dtype`` is not float32, bfloat16 or float16.
    """
    import torch

    if dtype is None:
        if place.type == "cpu":
            # Older versions of PyTorch have no `get_capabilities`.
            known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
            return torch.bfloat16 if known.get("amx_bf16") else torch.float32
        if place.type != "cuda":
            return torch.float32
        with torch.cuda.device(place):
            native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float16
    found = getattr(torch, DTYPES.get(dtype, ""), None) if isinstance(dtype, str) else dtype
    if found not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f'dtype: got {dtype!r}; it must be "float32" (or "fp32", "float"), "bfloat16" ("bf16") or '
            '"float16" ("fp16", "half")'
        )
    return found


# Names


def check_model(
    name: Name | None,
    *,
    device: str | None = None,
    dtype: Any = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    device_map: Any = None,
    quantization_config: Any = None,
) -> None:
    """Check the arguments of ``load_model``, as far as possible before weights are read."""
    if device is not None and device_map is not None:
        raise ValueError(f"device: got {device!r} together with device_map; pass one or the other")
    precision_of(dtype, place_of(device))
    _check_map(device_map)
    if quantization_config is not None and not (
        isinstance(quantization_config, Mapping) or hasattr(quantization_config, "quant_method")
    ):
        raise TypeError(
            f"quantization_config: got {quantization_config!r}; it must be a quantization config of "
            "Transformers, such as TorchAoConfig, or a dict of one"
        )
    if name is None or name == DEFAULT:
        if revision is not None:
            raise ValueError(f"revision: got {revision!r}; it must be None for the default model")
        return
    check_name(name)
    path = _path(name)
    if revision is not None and path.exists():
        raise ValueError(f"revision: got {revision!r}; it must be None for the local {name}")
    if path.is_file():
        if quantization_config is not None:
            raise ValueError(
                f"quantization_config: got one for {name}; it must be None for a GGUF file, whose weights "
                "are loaded dense"
            )
        gguf.count_weights(path)
        return
    if path.is_dir():
        _check_weights(path)
    else:
        check_hub(os.fspath(name), revision)
    from transformers import AutoConfig

    where = str(path) if path.is_dir() else os.fspath(name)
    try:
        AutoConfig.from_pretrained(where, **_options(trust_remote_code, revision))
    except Exception as error:
        raise _refusal(name, "cannot be loaded", error) from error


def _check_map(device_map: Any) -> None:
    """Check that every device of a device map exists."""
    if device_map is None or device_map in PLACEMENTS:
        return
    for place in device_map.values() if isinstance(device_map, Mapping) else [device_map]:
        if place == "disk":
            continue
        try:
            place_of(f"cuda:{place}" if isinstance(place, int) else str(place))
        except ValueError as error:
            raise ValueError(f"device_map: {str(error).removeprefix('device: ')}") from None


def _where(name: Name | None, precision: Any, tell: Say) -> tuple[str | None, gguf_cache.Hold | None]:
    """Return the name or folder for Transformers' loaders, and the hold on a converted GGUF file.

    Both are None for a GGUF file whose converted copy cannot be kept.
    """
    if name is None or name == DEFAULT:
        return str(default_model(tell)), None
    path = _path(name)
    if path.is_file():
        hold = gguf_cache.convert_once(path, precision, tell)
        return (str(hold.folder), hold) if hold else (None, None)
    return str(path) if path.is_dir() else os.fspath(name), None


def _options(trust_remote_code: bool, revision: str | None) -> dict[str, Any]:
    """Return the options of every loader of Transformers.

    Without ``trust_remote_code`` Transformers would ask on stdin.
    """
    return {"trust_remote_code": trust_remote_code} | ({} if revision is None else {"revision": revision})


def _path(name: Name) -> Path:
    return Path(name).expanduser()


def check_name(name: Name) -> None:
    """Check the name of a model without asking the hub."""
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


def _check_weights(folder: Path) -> None:
    """Raise OSError if a safetensors file is missing, cut off, or has a damaged header."""
    from safetensors import SafetensorError, safe_open

    index, whole = folder / "model.safetensors.index.json", "model.safetensors"
    try:
        if index.is_file():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            files = [whole] if (folder / whole).is_file() else []
        for file in files:
            with safe_open(folder / file, "np"):
                pass
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OSError(f"{folder}: cannot be loaded ({first_line(error)})") from error


@functools.cache
def check_hub(name: str, revision: str | None = None) -> None:
    """Check that the hub has this model. Transformers would retry several times before it fails."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        if not isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
            HfApi().model_info(name, revision=revision, timeout=10)
    except GatedRepoError:
        return  # Transformers' own error says how to get access
    except RevisionNotFoundError:
        raise ValueError(
            f"revision: got {revision!r}; {name} has no such branch, tag or commit on the hub"
        ) from None
    except (HFValidationError, RepositoryNotFoundError):
        raise ValueError(f"{name}: no such file, folder or hub model") from None
    except Exception as error:
        raise OSError(
            f"{name}: no such file or folder, and the hub cannot be reached ({first_line(error)})"
        ) from error
