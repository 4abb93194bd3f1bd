"""The configuration file that ``outpace tune`` writes, and that other commands take their defaults from."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outpace.checks.errors import suggestion

FLAGS: dict[str, tuple[type, ...]] = {
    "target": (str,),
    "draft": (str,),
    "num_draft_tokens": (str, int),
    "rule": (str,),
    "dtype": (str,),
    "device": (str,),
    "revision": (str,),
}
KNOWN: dict[str, tuple[type, ...]] = {**FLAGS, "max_batch": (int,), "measured": (dict,)}
WORDS = {str: "a string", int: "a whole number", dict: "a table"}
COMMENTS = {
    "draft": 'what drafts; "none" decodes without speculation',
    "num_draft_tokens": 'draft tokens per step: a number, or "auto", the fastest by measured time',
    "rule": "how draft tokens are verified",
    "revision": "of the target, on the hub",
    "max_batch": "rows at a time up to which this is expected to pay; not verified",
}


def written(settings: Mapping[str, Any], measured: Mapping[str, Any], verdict: str) -> str:
    """Return the text of a configuration file; values that are None are left out.

    Args:
        settings: Values of the flags.
        measured: Measurements that the choice rests on; no command reads them.
        verdict: The result in a sentence, for the first line.
    """
    lines = [f"# {verdict}", "# Use it: outpace generate --config FILE; a flag beside it wins.", ""]
    for name, value in settings.items():
        if value is not None:
            comment = f"  # {COMMENTS[name]}" if name in COMMENTS else ""
            lines.append(f"{name} = {_toml(value)}{comment}")
    lines += ["", "[measured]  # what this rests on; no command reads it"]
    lines += [f"{name} = {_toml(value)}" for name, value in measured.items() if value is not None]
    return "\n".join(lines) + "\n"


def read(path: Path) -> dict[str, Any]:
    """Return the content of a configuration file.

    The path of an n-gram table is relative to the file.

    Raises:
        ValueError: The file cannot be read, or a key or value does not fit.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"config: {path}: no such file") from None
    except IsADirectoryError:
        raise ValueError(f"config: {path} is a folder") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"config: {path}: not a TOML file ({error})") from None
    except OSError as error:
        raise ValueError(f"config: {path}: it cannot be read ({error.strerror})") from None
    for name, value in content.items():
        if name not in KNOWN:
            raise ValueError(
                f"config: {path}: unknown key {name!r}; known are {', '.join(KNOWN)}{suggestion(name, KNOWN)}"
            )
        if not isinstance(value, KNOWN[name]) or isinstance(value, bool):
            fits = " or ".join(WORDS[one] for one in KNOWN[name])
            raise ValueError(f"config: {path}: {name}: got {value!r}; it must be {fits}")
    draft = content.get("draft", "")
    if draft.startswith("ngram:"):
        content["draft"] = f"ngram:{path.parent / Path(draft.removeprefix('ngram:')).expanduser()}"
    return content


def flags(path: Path) -> dict[str, str]:
    """Return the values in a configuration file of the flags that commands share."""
    return {name: str(value) for name, value in read(path).items() if name in FLAGS}


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        inside = (f"{name} = {_toml(one)}" for name, one in value.items() if one is not None)
        return "{ " + ", ".join(inside) + " }"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # Strings, numbers, and lists of them are as in JSON, but for one character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
