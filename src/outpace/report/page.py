"""The page: result files in, HTML out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from outpace.report import compare, evaluated, measured, swept, tuned
from outpace.report.answer import Answer, Files, answers
from outpace.report.section import Content, Section
from outpace.report.source import models, source

# In the order of the page: the answer first.
KINDS: dict[str, Callable[[Content], list[Section]]] = {
    "tune": tuned.sections,
    "sweep": swept.sections,
    "alpha": measured.sections,
    "eval": evaluated.sections,
}


def page(files: Files) -> str:
    """Return one HTML page for several files.

    Args:
        files: Name and content of each file.

    Raises:
        ValueError: Nothing was measured yet, or a file is not as its command writes it.
    """
    contents = [content for _, content in files]
    sections = _sections(files)
    if not sections:
        names = ", ".join(name for name, _ in files)
        raise ValueError(f"results: nothing was measured yet in {names}; run the command to its end")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        targets=list(dict.fromkeys(str(content["target"]) for content in contents if content.get("target"))),
        devices=list(
            dict.fromkeys((content.get("machine") or {}).get("device") or "a machine" for content in contents)
        ),
        answers=[
            (answer, source(answer.content), _contradictions(answer, sections)) for answer in answers(files)
        ],
        partial=[name for name, content in files if not content.get("complete")],
        sections=_with_notes(sections),
        files=files,
        models=models,
        unbroken_interval=_unbroken_interval,
    )


def _sections(files: Files) -> list[tuple[str, Section]]:
    """Return all sections, each with the name of its file.

    If there are several files of a kind, the name is also in the title.
    """
    found: list[tuple[str, Section]] = []
    for kind, sections in KINDS.items():
        several = sum(content["kind"] == kind for _, content in files) > 1
        for name, content in files:
            if content["kind"] != kind:
                continue
            try:
                filled = [section for section in sections(content) if not section.empty]
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                command = f"bench {kind}" if kind in ("alpha", "sweep") else kind
                raise ValueError(f"{name}: it is not as `outpace {command}` writes it: {error!r}") from error
            found += [(name, _with_file_name(section, name) if several else section) for section in filled]
    return found


def _with_notes(sections: Sequence[tuple[str, Section]]) -> list[Section]:
    """Return all sections, each with notes on earlier sections of other files."""
    found = []
    for i, (name, section) in enumerate(sections):
        earlier = [other for file, other in sections[:i] if file != name]
        found.append(dataclasses.replace(section, notes=compare.notes(earlier, section)))
    return found


def _contradictions(answer: Answer, sections: Sequence[tuple[str, Section]]) -> list[str]:
    others = [section for name, section in sections if name != answer.file]
    return compare.contradictions(answer.config, answer.speed, others)


def _unbroken_interval(cell: str) -> Markup:
    """Return a cell as HTML; a line break may stand before its interval, but not in it."""
    value, bracket, interval = cell.partition(" (")
    if not bracket or not interval.endswith(")"):
        return Markup("{}").format(cell)
    return Markup('{} <span class="whole">({}</span>').format(value, interval)


def _with_file_name(section: Section, name: str) -> Section:
    """Return a section with the name of its file in the title."""
    return dataclasses.replace(section, title=f"{section.title}: {name}")
