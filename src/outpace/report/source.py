"""The prompts, models, machine and date that a file's figures come from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from outpace.checks.errors import counted
from outpace.report.section import Content
from outpace.report.words import describe_sampling

Source = dict[str, str]  # by the name of each setting


def source(content: Content, sampling: str = "") -> Source:
    """Return the conditions of a file's figures; settings that the file does not name are left out.

    Args:
        content: Content of the file.
        sampling: Sampling of some of the figures, where the file has several.
    """
    settings = content.get("settings") or {}
    conditions = {
        "prompts": _prompts(content),
        "length": _max_length(content.get("max_new_tokens") or settings.get("max_new_tokens")),
        "sampling": sampling or _sampling(content, settings),
        "batch": f"{content['batch']} at a time" if content.get("batch") else "",
        "model": ", ".join(
            filter(None, (str(content.get("target") or "model not recorded"), dtype(content)))
        ),
        "machine": _machine(content.get("machine") or {}),
        "date": str(content["date"])[:10] if content.get("date") else "date not recorded",
    }
    return {name: words for name, words in conditions.items() if words}


def differences(other: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that differ, except for the date, with both values in words."""
    changed = [name for name in own if name in other and name != "date" and other[name] != own[name]]
    return {name: f"{other[name]} there, {own[name]} here" for name in changed}


def dtype(content: Content) -> str:
    """Return the precision that the target ran in, as far as the file tells."""
    if content["kind"] == "tune":
        dtypes = dict.fromkeys(
            str(candidate["dtype"]) for candidate in content.get("candidates") or () if candidate.get("dtype")
        )
        return " and ".join(dtypes)
    match = re.search(r"\b(?:b?float\d+)\b", " ".join(models(content)[:1]))
    return match[0] if match else ""


def models(content: Content) -> list[str]:
    """Return the lines in which the decoders describe their models."""
    recorded = content.get("models") or (content.get("settings") or {}).get("models") or []
    by_decoder = recorded.values() if isinstance(recorded, dict) else [recorded]
    return list(dict.fromkeys(" ".join(line.split()) for lines in by_decoder for line in lines))


def _prompts(content: Content) -> str:
    data, count = content.get("data"), content.get("prompts")
    if content["kind"] == "eval":
        return f"{counted(data['rows'], 'row')} of {data['name']}" if data else ""
    if count is None:
        return ""
    number = counted(count, "prompt")
    if data:
        return {
            "built-in": counted(count, "built-in prompt"),
            "--prompt": f"{number} given with --prompt",
        }.get(data["name"], f"{number} of {data['name']}")
    if (content.get("settings") or {}).get("alpha") is not None:
        return f"{number} of random tokens"
    return f"{number}, built in or given with --prompt"


def _max_length(tokens: int | None) -> str:
    return "" if tokens is None else f"at most {counted(tokens, 'new token')} each"


def _sampling(content: Content, settings: Mapping[str, Any]) -> str:
    if content["kind"] == "eval":
        return describe_sampling({name: settings.get(name) for name in ("temperature", "top_k", "top_p")})
    return describe_sampling(content["sampling"]) if content.get("sampling") else ""


def _machine(machine: Mapping[str, Any]) -> str:
    threads = machine.get("threads")
    parts = (machine.get("device") or "machine not recorded", counted(threads, "thread") if threads else "")
    return ", ".join(filter(None, parts))
