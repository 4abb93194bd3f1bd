"""``--config``: values of a configuration file as defaults of other flags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

CONFIG_META = "outpace.config"  # key of the configuration file in `Context.meta`


def apply_config(context: typer.Context, path: Path | None) -> Path | None:
    """Use the values of a configuration file as defaults; flags on the command line override them."""
    if path is not None:
        from outpace.tune.config import flags

        found, known = flags(path), {one.name: one for one in context.command.params}
        if "rule" not in known and found.get("rule", "token") != "token":
            raise ValueError(
                f"config: {path}: rule: got {found['rule']!r}; `{context.command_path}` runs rule token "
                "alone, so leave the key out"
            )
        several = {name for name, one in known.items() if getattr(one, "multiple", False)}
        if getattr(getattr(known.get("num_draft_tokens"), "type", None), "name", "") == "integer":
            found.pop("num_draft_tokens", None)  # a measuring command has its own default
        if "draft" in several and found.get("draft") == "none":
            del found["draft"]  # a measuring command has its own default
        values = {
            name: [value] if name in several else value for name, value in found.items() if name in known
        }
        context.default_map = {**(context.default_map or {}), **values}
        context.meta[CONFIG_META] = path, context
    return path


def drop_num_draft_tokens(context: typer.Context, draft: str) -> str:
    """Drop a configuration's num_draft_tokens if the command line names another draft.

    The number was measured with the configuration's draft.
    """
    values = context.default_map or {}
    if _source(context, "draft") == "COMMANDLINE" and values.get("draft") != draft:
        context.default_map = {name: one for name, one in values.items() if name != "num_draft_tokens"}
    return draft


def drop_revision(context: typer.Context, revision: str | None) -> str | None:
    """Drop a configuration's revision if the command line names another target.

    The revision is one of the configuration's target.
    """
    other_target = set_by_config(context, "revision") and _source(context, "target") == "COMMANDLINE"
    return None if other_target else revision


def set_by_config(context: typer.Context, name: str) -> bool:
    """Return whether a flag's value comes from the file that --config names."""
    return _source(context, name) == "DEFAULT_MAP"


def with_config_path(meta: Mapping[str, Any], why: str) -> str:
    """Return an error message, with the path of the configuration if one of its values is wrong."""
    if CONFIG_META not in meta:
        return why
    from outpace.tune.config import FLAGS

    path, context = meta[CONFIG_META]
    for name in FLAGS:
        value = context.params.get(name)
        values = value if isinstance(value, list) else [value]
        flag = f"--{name.replace('_', '-')}"
        starts = f"{name}:", f"{flag}:", *(f"{one}:" for one in values)
        if set_by_config(context, name) and why.startswith(starts):
            return f"config: {path}: {why}"
    return why


def _source(context: typer.Context, name: str) -> str | None:
    source = context.get_parameter_source(name)
    return None if source is None else source.name
