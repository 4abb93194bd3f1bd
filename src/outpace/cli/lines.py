"""The tables of a sweep in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

from outpace.bench.forecast import SPAN, SweepLine
from outpace.bench.loops import kind_of, name_of
from outpace.checks.errors import counted
from outpace.cli import tables
from outpace.cli.show import screen
from outpace.report.columns import SWEEP_SPEEDS, SWEEP_TIMES


def show(figures: Sequence[SweepLine]) -> None:
    """Print two tables on stdout for each draft and sampling.

    One has times, as in Chen et al. 2023, Figure 1. The other has speeds beside predictions, as in Leviathan
    et al. 2023, Table 4.
    """
    console = screen(sys.stdout)
    for kind in dict.fromkeys(map(kind_of, figures)):
        mine, name = [asdict(one) for one in figures if kind_of(one) == kind], name_of(kind)
        titles = (
            f"{name}: ms of {SPAN} tokens, {counted(mine[0]['texts'], 'text')}",
            f"{name}: speed over plain decoding",
        )
        for title, shown in zip(titles, (SWEEP_TIMES, SWEEP_SPEEDS), strict=True):
            rows = [[cell(one) for cell in shown.values()] for one in mine]
            tables.show(console, title, tables.columns(list(shown), rows))
