"""`outpace report`: what was measured, as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

KINDS = ("measure", "sweep", "tune")


def report(
    results: Annotated[
        list[Path], typer.Argument(help="Files that `outpace measure`, `sweep` and `tune` wrote.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the page to this file.")] = Path(
        "report.html"
    ),
) -> None:
    r"""Make one page of figures and tables that needs nothing beside it, for a screen, a phone or paper.

    It has what the files have: the answer in a sentence, speed by g, the papers' curves with a dot for each
    draft, acceptance by position, where the time of a run went, its text token by token, the commands and
    the machine. Needs `pip install 'outpace\[plot]'`.
    """
    from outpace.bench.pictures import backend
    from outpace.bench.results import load
    from outpace.cli.show import note
    from outpace.files import check_out, write_whole
    from outpace.tasks.extra import needed
    from outpace.wording import counted

    check_out("--out", out)
    if out.resolve() in {one.resolve() for one in results}:
        raise ValueError(f"out: {out} is one of the results")
    files = [(path.name, load(path, KINDS)) for path in dict.fromkeys(results)]
    backend()  # what is missing is said before anything is drawn
    needed("jinja2", "plot")
    from outpace.report.page import page

    text = page(files)
    write_whole(out, text)
    parts = (counted(text.count(f"<{name}"), name) for name in ("figure", "table"))
    note(f"{out}: {', '.join(parts)}")
