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
    r"""Make one self-contained HTML page of figures and tables, for a screen, a phone or paper.

    Every section names the prompts, model, machine and date that it was
    measured on. If two files measured the same draft and g, the page says how
    they differ. For an eval run, it shows quality and speed of each decoding
    method, with intervals, and some of the texts.

    Needs `pip install 'outpace\[plot]'`.
    """
    from outpace.bench.curves import backend
    from outpace.checks.errors import counted, import_extra
    from outpace.checks.files import check_output, write_atomic
    from outpace.cli.show import note
    from outpace.report.files import display_names, read, result_files

    check_output("--out", out)
    paths: list[Path] = []
    for path in results:
        if path.is_dir():
            found, others = result_files(path)
            paths += found
            for other in others:
                note(f"left out: {other} was not written by outpace bench alpha, bench sweep, tune or eval")
        else:
            paths.append(path)
    paths = list(dict.fromkeys(paths))
    if out.resolve() in {path.resolve() for path in paths}:
        raise ValueError(f"--out: {out} is one of the results")
    files = list(zip(display_names(paths), map(read, paths), strict=True))
    backend()  # fails before any work if matplotlib is missing
    import_extra("jinja2", "plot")
    from outpace.report.page import page

    text = page(files)
    write_atomic(out, text)
    parts = (counted(text.count(f"<{name}"), name) for name in ("figure", "table"))
    note(f"{out}: {', '.join(parts)}")
