"""``outpace report``: results as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    results: Annotated[
        list[Path],
        typer.Argument(
            help="Files that `outpace bench alpha`, `bench sweep`, `tune` (.json) and `eval` (.jsonl) wrote, "
            "or folders that hold such files."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the page to this file.")] = Path(
        "report.html"
    ),
) -> None:
    r"""Make one page of figures and tables that needs nothing beside it, for a screen, a phone or paper.

    Every section names the prompts, model, machine and date that it was
    measured on. Where two files measured the same thing, the page says how
    they differ. Of an eval run it has quality and speed of each way of
    decoding, with intervals, and some of the texts.

    Needs `pip install 'outpace\[plot]'`.
    """
    from outpace.bench.curves import backend
    from outpace.checks.errors import counted, needed
    from outpace.checks.files import check_out, write_whole
    from outpace.cli.show import note
    from outpace.report.files import named, read, within

    check_out("--out", out)
    paths: list[Path] = []
    for path in results:
        if path.is_dir():
            taken, others = within(path)
            paths += taken
            for one in others:
                note(f"left out: {one} was not written by outpace bench alpha, bench sweep, tune or eval")
        else:
            paths.append(path)
    paths = list(dict.fromkeys(paths))
    if out.resolve() in {one.resolve() for one in paths}:
        raise ValueError(f"out: {out} is one of the results")
    files = list(zip(named(paths), map(read, paths), strict=True))
    backend()  # what is missing is said before anything is drawn
    needed("jinja2", "plot")
    from outpace.report.page import page

    text = page(files)
    write_whole(out, text)
    parts = (counted(text.count(f"<{name}"), name) for name in ("figure", "table"))
    note(f"{out}: {', '.join(parts)}")
