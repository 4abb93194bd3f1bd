"""What a task is about: rows of a file of JSON lines, or of a data set of the Hugging Face hub."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outpace.tasks.extra import needed

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

    name       as the file calls it, or its number
    turns      what a user says, one after the other; most tasks have one
    reference  what is to come out; None if the row does not say
    audio      a file of speech, or its bytes
    extra      the row as it is
    problem    why it cannot be used; None if it can
    place      its line in the file, or its number in the data set, from 1
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
    """All rows, and what tells whether they are the same ones as before."""

    name: str
    items: list[Item]
    digest: str
    local: bool


def read(
    name: str,
    *,
    speech: bool = False,
    languages: tuple[str, str] | None = None,
    limit: int | None = None,
    every: int = 1,
) -> Data:
    """The rows of a file, or of a data set by name: `NAME[:CONFIG[:SPLIT]]`, by default the split "test".

    speech     they have audio, named relative to the file, and a transcript
    languages  from which into which they are translated
    limit      of the first so many
    every      of each so many, the first: data sets often stand ordered by kind
    """
    stop = None if limit is None else limit * every
    path = Path(name).expanduser()
    if path.is_dir() and (path / "manifest.jsonl").is_file():
        path = path / "manifest.jsonl"
    if path.is_file():
        rows: Sequence[tuple[int, Any]] = lines(path, stop)[::every]
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    elif path.exists():
        raise ValueError(f"data: {path} is a folder without a manifest.jsonl; name a file of JSON lines")
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


def lines(path: Path, limit: int | None) -> list[tuple[int, dict[str, Any] | str]]:
    """Of each line that is not empty its number, and its object, or what is wrong with it."""
    found: list[tuple[int, dict[str, Any] | str]] = []
    try:
        with path.open(encoding="utf-8") as file:
            there = ((place, line) for place, line in enumerate(file, 1) if line.strip())
            for place, line in itertools.islice(there, limit):
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    found.append((place, f"not JSON ({error.msg})"))
                    continue
                found.append((place, row if isinstance(row, dict) else "not a JSON object"))
    except UnicodeDecodeError:
        raise ValueError(f"data: {path} is not a text file in UTF-8") from None
    except OSError as error:
        raise ValueError(f"data: {path}: it cannot be read ({error.strerror})") from None
    return found


def hub(name: str, speech: bool, limit: int | None) -> list[dict[str, Any]]:
    """A data set of the hub, or one that the datasets library finds on disk."""
    datasets = needed("datasets", "data")
    parts = name.split(":")
    if len(parts) > 3:
        raise ValueError(f"data: got {name!r}; a data set is named NAME, NAME:CONFIG or NAME:CONFIG:SPLIT")
    config = parts[1] if len(parts) > 1 and parts[1] else None
    split = parts[2] if len(parts) > 2 else "test"
    try:
        found = datasets.load_dataset(parts[0], config, split=split, streaming=True)
        if speech:
            found = found.cast_column("audio", datasets.Audio(decode=False))
        return list(found if limit is None else found.take(limit))
    except Exception as error:  # whatever the network, the hub or the library say
        said = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(f"data: {name} is no file, and no data set that can be had ({said})") from error


def item(
    row: dict[str, Any], number: int, folder: Path, speech: bool, languages: tuple[str, str] | None
) -> Item:
    """A row by the names that such data use."""
    name = str(
        next((row[key] for key in ("id", "task_id", "question_id", "audio") if is_name(row, key)), number)
    )
    if speech:
        reference = first(row, SPEECH_REFERENCES)
        problem = None if reference else "there is no transcript to compare with"
        audio = row.get("audio")
        if isinstance(audio, dict):
            sound: Path | bytes | None = audio.get("bytes") or folder / str(audio.get("path"))
        else:
            sound = folder / audio if isinstance(audio, str) and audio else None
        if sound is None:
            problem = "there is no audio"
        return Item(name, (), reference, sound, row, problem)
    source, reference = first(row, SOURCES), first(row, REFERENCES)
    if languages is not None:
        both = row.get("translation") if isinstance(row.get("translation"), dict) else row
        source = first(both, (languages[0], "source"))
        reference = first(both, (languages[1], "reference", "target"))
    turns = row.get("turns")
    if not (isinstance(turns, list) and turns and all(isinstance(one, str) for one in turns)):
        turns = [source] if source else []
    kept = {key: value for key, value in row.items() if isinstance(value, str | int | float | list | dict)}
    return Item(name, turns, reference, None, kept, None if turns else "there is no text to start from")


def is_name(row: dict[str, Any], key: str) -> bool:
    return isinstance(row.get(key), str | int)


def first(row: Any, names: Sequence[str]) -> str | None:
    """The first of these fields that holds text."""
    found = (row.get(name) for name in names)
    return next((one for one in found if isinstance(one, str) and one.strip()), None)


def category(item: Item) -> str:
    """One of Spec-Bench's six: the eight kinds of MT-bench are one of them."""
    own = str(item.extra.get("category") or item.extra.get("task") or "other")
    return "multi-turn conversation" if own in CONVERSATIONS else own.replace("_", " ")
