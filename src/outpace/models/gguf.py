"""GGUF files: their header, and their model with dense weights."""

from __future__ import annotations

import functools
import math
import mmap
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outpace.models.auto import auto_class, gguf_reading, quiet
from outpace.models.store import first_line


def stamp_of(path: Path) -> list[int]:
    """Return numbers that change when the file changes."""
    seen = path.stat()
    return [seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino, seen.st_dev]


def count_weights(path: Path) -> int:
    """Return the number of weights in a GGUF file, by its header alone.

    Raises:
        OSError: The header is damaged, or the file ends before its last tensor does.
    """
    return _counted(path, tuple(stamp_of(path)))


@functools.lru_cache(maxsize=8)  # files are checked more than once before they are read
def _counted(path: Path, stamp: tuple[int, ...]) -> int:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(data).weights()
    except (struct.error, ValueError, OverflowError) as error:
        raise OSError(f"{path}: cannot be loaded, as it is damaged or cut off ({error})") from None


# Value types of a header: bytes of each number type, and the two types with a length field.
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")


class _Header:
    """A GGUF header, read from its beginning to the end of the table of tensors."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 4
        (version,) = self._take("<I")
        if version not in (2, 3):
            raise ValueError(f"version {version}; it must be 2 or 3")
        self.tensors, self.entries = self._take("<QQ")

    def weights(self) -> int:
        from gguf import GGML_QUANT_SIZES

        alignment = 32  # bytes, unless the file says otherwise
        for _ in range(self.entries):
            key = self._text()
            (kind,) = self._take("<I")
            if key == b"general.alignment" and kind == 4:
                alignment = max(1, *struct.unpack_from("<I", self.data, self.at))
            self._skip(kind)
        total, ends = 0, [0]
        for _ in range(self.tensors):
            self._text()
            (dimensions,) = self._take("<I")
            shape = self._take(f"<{dimensions}Q")
            kind, offset = self._take("<IQ")
            total += math.prod(shape)
            if kind in GGML_QUANT_SIZES:  # a type unknown here may be known to Transformers
                block, size = GGML_QUANT_SIZES[kind]
                ends.append(offset + math.prod(shape) // block * size)
        needed = -(-self.at // alignment) * alignment + max(ends)
        if needed > len(self.data):
            raise ValueError(f"its tensors end at byte {needed}, the file at {len(self.data)}")
        return total

    def _take(self, form: str) -> Any:
        found = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return found

    def _text(self) -> bytes:
        (length,) = self._take("<Q")
        self._move(length)
        return self.data[self.at - length : self.at]

    def _move(self, count: int) -> None:
        self.at += count
        if self.at > len(self.data):
            raise ValueError("its header is cut off")

    def _skip(self, kind: int, count: int = 1) -> None:
        if kind == STRING:
            at = self.at
            for _ in range(count):  # a vocabulary has some hundred thousand strings
                at += 8 + LENGTH.unpack_from(self.data, at)[0]
            self._move(at - self.at)
        elif kind == ARRAY:
            for _ in range(count):
                self._skip(*self._take("<IQ"))
        elif kind in WIDTHS:
            self._move(count * WIDTHS[kind])
        else:
            raise ValueError(f"its header has a value of type {kind}")


def read(path: Path, precision: Any, device_map: Any = None) -> tuple[Any, Any]:
    """Return the model and the tokenizer of a GGUF file, with dense weights.

    Products with quantized weights would need kernels from the hub.

    Raises:
        OSError: Transformers cannot load the file.
        ValueError: Some weights overflow float16.
    """
    import torch
    from transformers import AutoConfig, AutoTokenizer, GgufConfig

    named: dict[str, Any] = {"gguf_file": path.name, "trust_remote_code": False}
    try:
        with _alone(path) as folder, quiet(), gguf_reading():
            config = AutoConfig.from_pretrained(folder, **named)
            tokenizer = AutoTokenizer.from_pretrained(folder, **named)
            model = auto_class(config).from_pretrained(
                folder,
                config=config,
                dtype=precision,
                device_map=device_map,
                quantization_config=GgufConfig(dequantize=True),
                **named,
            )
    except Exception as error:
        raise OSError(f"{path}: cannot be loaded ({first_line(error)})") from error
    if precision == torch.float16 and not all(bool(one.isfinite().all()) for one in model.parameters()):
        raise ValueError(f"dtype: float16 cannot hold all weights of {path}; give bfloat16 or float32")
    return model, tokenizer


@contextmanager
def _alone(path: Path) -> Iterator[Path]:
    """Yield a folder that holds only this file. Transformers would read other files beside it, too."""
    with tempfile.TemporaryDirectory() as name:
        link = Path(name) / path.name
        try:
            link.symlink_to(path.absolute())
        except OSError:  # Windows allows links to few users
            yield path.parent
        else:
            yield Path(name)
