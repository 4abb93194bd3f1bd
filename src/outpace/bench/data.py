"""Rows of a task, from a file of JSON lines or a data set of the Hugging Face hub."""

from __future__ import annotations

import codecs
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outpace.checks.errors import import_extra

SOURCES = ("source", "prompt", "article", "document", "dialogue", "question", "text")
REFERENCES = ("reference", "highlights", "summary", "target", "answer", "canonical_solution")
FILES = (".csv", ".json", ".jsonl", ".parquet", ".txt")  # endings that no data set's name has
CONVERSATIONS = (
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"
)  # fmt: skip
SPEECH_REFERENCES = ("text", "transcript", "transcription", "sentence", "reference")


@dataclass(frozen=True)
class Item:
    """One row.

    Attributes:
        name: Name in the file, or its number.
        turns: Messages of a user, one after the other; most tasks have one.
        reference: The expected output; None if the row does not say.
        audio: A file of speech, or its bytes.
        extra: The row as it is.
        problem: Why the row cannot be used; None if it can.
        place: Its line in the file, or its number in the data set, from 1.
    """

    name: str
    turns: Sequence[str] = ()
    reference: str | None = None
    audio: Path | bytes | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    place: int = 1


@dataclass(frozen=True)
class Data:
    """All rows, with a digest that tells whether they are the same ones as before."""

    name: str
    items: list[Item]
    digest: str
    local: bool

    @property
    def left_out(self) -> list[str]:
        """Rows that cannot be used: the place of each, and the reason."""
        where = "line" if self.local else "row"
        return [f"{where} {one.place}: {one.problem}" for one in self.items if one.problem is not None]

    def check(self) -> None:
        """Raise if no row can be used.

        Raises:
            ValueError: No row can be used.
        """
        if len(self.left_out) == len(self.items):
            raise ValueError(f"data: {self.name} has no row that can be used: {self.left_out[0]}")


def read(
    name: str,
    *,
    speech: bool = False,
    languages: tuple[str, str] | None = None,
    limit: int | None = None,
    every: int = 1,
) -> Data:
    """Return the rows of a file or of a data set.

    Args:
        name: A file, or a data set as ``NAME[:CONFIG[:SPLIT]]``; the default split is ``"test"``.
        speech: Whether rows have audio, named relative to the file, and a transcript.
        languages: The source and target language of a translation.
        limit: Maximum number of rows.
        every: Take only every n-th row, from the first on, since data sets are often ordered by kind.

    Raises:
        ValueError: There is no such file or data set, or it has no rows.
    """
    stop = None if limit is None else limit * every
    path = file_of(name)
    if path.is_file():
        rows: Sequence[tuple[int, Any]] = lines(path, stop)[::every]
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    elif path.exists():
        what = "a folder without a manifest.jsonl" if path.is_dir() else "not a regular file"
        raise ValueError(f"data: {path} is {what}; name a file of JSON lines")
    elif path.suffix in FILES or name.partition(":")[0].count("/") > 1:
        raise ValueError(f"data: {name}: no such file")
    else:
        found = hub(name, speech, stop)[::every]
        digest = hashlib.sha256(repr(found).encode("utf-8", "surrogatepass")).hexdigest()
        rows = [(every * i + 1, row) for i, row in enumerate(found)]
    items = [
        Item(f"{path.name}:{place}", problem=row, place=place)
        if isinstance(row, str)
        else replace(item(row, i, path.parent, speech, languages), place=place)
        for i, (place, row) in enumerate(rows)
    ]
    if not items:
        raise ValueError(f"data: {name} has no rows")
    return Data(name, items, digest, path.is_file())


def file_of(name: str) -> Path:
    """Return the file of JSON lines that a name stands for; it may be missing."""
    path = Path(name).expanduser()
    manifest = path / "manifest.jsonl"
    return manifest if path.is_dir() and manifest.is_file() else path


def lines(path: Path, limit: int | None) -> list[tuple[int, dict[str, Any] | str]]:
    """Return the number of each line that is not empty, and its object, or what is wrong with it."""
    found: list[tuple[int, dict[str, Any] | str]] = []
    try:
        with path.open("rb") as file:
            not_empty = ((place, line) for place, line in enumerate(file, 1) if line.strip())
            for place, line in itertools.islice(not_empty, limit):
                found.append((place, parsed(path, place, line)))
    except OSError as error:
        raise ValueError(f"data: {path}: it cannot be read ({error.strerror})") from None
    return found


def parsed(path: Path, place: int, line: bytes) -> dict[str, Any] | str:
    """Return the object of a line, or what is wrong with it."""
    try:
        row = json.loads(line.decode("utf-8-sig" if place == 1 else "utf-8"))
    except UnicodeDecodeError:
        marked = line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        why = "it starts as UTF-16 does" if marked else f"line {place}"
        raise ValueError(f"data: {path} is not a text file in UTF-8 ({why}); convert it") from None
    except json.JSONDecodeError as error:
        return f"not JSON ({error.msg})"
    except (ValueError, RecursionError) as error:  # a number too long, lists too deep
        return f"not JSON that can be read ({error})"
    return row if isinstance(row, dict) else "not a JSON object"


def hub(name: str, speech: bool, limit: int | None) -> list[dict[str, Any]]:
    """Return the rows of a data set of the hub, or of one that the datasets library finds on disk."""
    datasets = import_extra("datasets", "data")
    parts = name.split(":")
    if len(parts) > 3:
        raise ValueError(f"data: got {name!r}; a data set is named NAME, NAME:CONFIG or NAME:CONFIG:SPLIT")
    config = parts[1] if len(parts) > 1 and parts[1] else None
    split = parts[2] if len(parts) > 2 else "test"
    try:
        # False, as versions below 4 would ask on stdin whether to run a data set's own code.
        found = datasets.load_dataset(parts[0], config, split=split, streaming=True, trust_remote_code=False)
        if speech:
            found = found.cast_column("audio", datasets.Audio(decode=False))
        return list(found if limit is None else found.take(limit))
    except Exception as error:  # whatever the network, the hub or the library say
        said = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(f"data: {name} is no file, and no data set that can be had ({said})") from error


def item(
    row: dict[str, Any], number: int, folder: Path, speech: bool, languages: tuple[str, str] | None
) -> Item:
    """Return the item of a row, by the field names that such data use."""
    name = str(
        next((row[key] for key in ("id", "task_id", "question_id", "audio") if is_name(row, key)), number)
    )
    if speech:
        reference = first(row, SPEECH_REFERENCES)
        problem = None if reference else "there is no transcript to compare with"
        audio = row.get("audio")
        sound: Path | bytes | None = None
        if isinstance(audio, dict):
            sound, audio = audio.get("bytes") or None, audio.get("path")
        if sound is None and isinstance(audio, str) and audio:
            sound = folder / audio
        if sound is None:
            problem = "there is no audio"
        return Item(name, (), reference, sound, row, problem)
    source, reference = first(row, SOURCES), first(row, REFERENCES)
    if languages is not None:
        both = row.get("translation") if isinstance(row.get("translation"), dict) else row
        source = first(both, (languages[0], "source"))
        reference = first(both, (languages[1], "reference", "target"))
    turns = row.get("turns")
    if not (isinstance(turns, list) and turns and all(isinstance(one, str) and one.strip() for one in turns)):
        turns = [source] if source else []
    extra = {key: value for key, value in row.items() if isinstance(value, str | int | float | list | dict)}
    return Item(name, turns, reference, None, extra, None if turns else "there is no text to start from")


def is_name(row: dict[str, Any], key: str) -> bool:
    """Return whether a field can be the name of a row."""
    return isinstance(row.get(key), str | int)


def first(row: Any, names: Sequence[str]) -> str | None:
    """Return the first of these fields that holds text."""
    found = (row.get(name) for name in names)
    return next((one for one in found if isinstance(one, str) and one.strip()), None)


def category(item: Item) -> str:
    """Return one of Spec-Bench's six categories; the eight kinds of MT-bench are one of them."""
    own = str(item.extra.get("category") or item.extra.get("task") or "other")
    return "multi-turn conversation" if own in CONVERSATIONS else own.replace("_", " ")
