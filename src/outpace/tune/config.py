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
KEYS: dict[str, tuple[type, ...]] = {**FLAGS, "max_batch": (int,), "measured": (dict,)}
TYPE_NAMES = {str: "a string", int: "a whole number", dict: "a table"}
COMMENTS = {
    "draft": 'the drafter; "none" decodes without speculation',
    "num_draft_tokens": 'draft tokens per step: a number, or "auto", which goes by measured times',
    "rule": "verification rule",
    "revision": "version of the target on the hub",
    "max_batch": "largest batch size at which this is expected to pay; not measured",
}


def to_toml(settings: Mapping[str, Any], measured: Mapping[str, Any], verdict: str) -> str:
    """Return the text of a configuration file. Values that are None are left out.

    Args:
        settings: Values of the flags.
        measured: Measurements behind the choice; no command reads them.
        verdict: The result in a sentence, for the first line.
    """
    lines = [f"# {verdict}", "# Use it: outpace generate --config FILE; a flag on the command line wins.", ""]
    for name, value in settings.items():
        if value is not None:
            comment = f"  # {COMMENTS[name]}" if name in COMMENTS else ""
            lines.append(f"{name} = {_toml_value(value)}{comment}")
    lines += ["", "[measured]  # measurements behind the choice; no command reads them"]
    lines += [f"{name} = {_toml_value(value)}" for name, value in measured.items() if value is not None]
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
        if name not in KEYS:
            raise ValueError(
                f"config: {path}: unknown key {name!r}; known are {', '.join(KEYS)}{suggestion(name, KEYS)}"
            )
        if not isinstance(value, KEYS[name]) or isinstance(value, bool):
            types = " or ".join(TYPE_NAMES[one] for one in KEYS[name])
            raise ValueError(f"config: {path}: {name}: got {value!r}; it must be {types}")
    draft = content.get("draft", "")
    if draft.startswith("ngram:"):
        content["draft"] = f"ngram:{path.parent / Path(draft.removeprefix('ngram:')).expanduser()}"
    return content


def flags(path: Path) -> dict[str, str]:
    """Return the flags in a configuration file, with their values."""
    return {name: str(value) for name, value in read(path).items() if name in FLAGS}


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        entries = (f"{name} = {_toml_value(one)}" for name, one in value.items() if one is not None)
        return "{ " + ", ".join(entries) + " }"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # JSON and TOML write strings, numbers and lists alike, except for the character DEL.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
