"""The page: result files in, HTML out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from outpace.report import compare, evaluated, measured, swept, tuned
from outpace.report.section import Content, Section
from outpace.report.source import models, source
from outpace.report.verdict import Files, Verdict, verdicts

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
    found = _sections(files)
    if not found:
        names = ", ".join(name for name, _ in files)
        raise ValueError(f"results: nothing was measured yet in {names}; run the command to its end")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    answers = verdicts(files)
    return environment.get_template("page.html").render(
        targets=_all(contents, "target"),
        devices=list(
            dict.fromkeys((one.get("machine") or {}).get("device") or "a machine" for one in contents)
        ),
        verdicts=[(one, source(one.content), _doubts(one, found)) for one in answers],
        partial=[name for name, content in files if not content.get("complete")],
        sections=[section for _, section in _compared(found)],
        files=files,
        models=models,
        parted=_parted,
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
                made = [one for one in sections(content) if not one.empty]
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                command = f"bench {kind}" if kind in ("alpha", "sweep") else kind
                raise ValueError(f"{name}: it is not as `outpace {command}` writes it: {error!r}") from error
            found += [(name, _titled(one, name) if several else one) for one in made]
    return found


def _compared(found: Sequence[tuple[str, Section]]) -> list[tuple[str, Section]]:
    """Add notes to each section on earlier ones of other files."""
    made = []
    for i, (name, section) in enumerate(found):
        earlier = [there for other, there in found[:i] if other != name]
        made.append((name, dataclasses.replace(section, notes=compare.notes(earlier, section))))
    return made


def _doubts(verdict: Verdict, found: Sequence[tuple[str, Section]]) -> list[str]:
    others = [section for name, section in found if name != verdict.file]
    return compare.doubts(verdict.way, verdict.speed, others)


def _parted(cell: str) -> Markup:
    """Return a cell whose interval is never split, but may stand on a line of its own."""
    figure, bracket, interval = cell.partition(" (")
    if not bracket or not interval.endswith(")"):
        return Markup("{}").format(cell)
    return Markup('{} <span class="whole">({}</span>').format(figure, interval)


def _titled(section: Section, name: str) -> Section:
    """Add the name of its file to the title of a section."""
    return dataclasses.replace(section, title=f"{section.title}: {name}")


def _all(contents: Sequence[Content], part: str) -> list[str]:
    return list(dict.fromkeys(str(one[part]) for one in contents if one.get(part)))
