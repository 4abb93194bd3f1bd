"""The page: files of results in, HTML out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from outpace.report import measured, swept, tuned
from outpace.report.section import Content, Section
from outpace.report.verdict import verdict

# In the order of the page: the answer first.
KINDS: dict[str, Callable[[Content], list[Section]]] = {
    "tune": tuned.sections,
    "sweep": swept.sections,
    "measure": measured.sections,
}


def page(files: Sequence[tuple[str, Content]]) -> str:
    """One page of files, each with its name."""
    contents = [content for _, content in files]
    found: list[Section] = []
    for kind, sections in KINDS.items():
        several = sum(content["kind"] == kind for content in contents) > 1
        for name, content in files:
            if content["kind"] == kind:
                try:
                    made = [one for one in sections(content) if not one.empty]
                except (AttributeError, KeyError, TypeError) as error:
                    raise ValueError(f"{name}: it is not as `outpace {kind}` writes it: {error!r}") from error
                found += [_titled(one, name) for one in made] if several else made
    if not found:
        raise ValueError(f"results: there is nothing to draw in {', '.join(name for name, _ in files)}")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        targets=_all(contents, "target"),
        devices=list(
            dict.fromkeys((one.get("machine") or {}).get("device") or "a machine" for one in contents)
        ),
        verdict=verdict(contents),
        partial=[name for name, content in files if not content.get("complete")],
        sections=found,
        files=files,
        models=_models,
    )


def _titled(section: Section, name: str) -> Section:
    """Of several files of a kind, each says which."""
    return dataclasses.replace(section, title=f"{section.title}: {name}")


def _models(content: Content) -> list[str]:
    """What was loaded, in the words of the decoders."""
    found = content.get("models") or (content.get("settings") or {}).get("models") or []
    every = found.values() if isinstance(found, dict) else [found]
    return list(dict.fromkeys(" ".join(line.split()) for lines in every for line in lines))


def _all(contents: Sequence[Content], part: str) -> list[str]:
    return list(dict.fromkeys(str(one[part]) for one in contents if one.get(part)))
