"""Two tiers of tests: the default one takes minutes, the full one (`pytest --full`) draws everything."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Cell = TypeVar("Cell")
full = False  # set by conftest.py from the command line, before tests are collected


def pairwise(cells: Sequence[Cell], factors: Callable[[Cell], Sequence[Hashable]]) -> list[Cell]:
    """Return few cells in which every pair of values that occurs together in some cell still does.

    Greedy: the cell with the most pairs that are not covered yet is next, the first of equals. In the full
    tier all cells are returned.
    """
    if full:
        return list(cells)
    pairs = [set(itertools.combinations(enumerate(factors(cell)), 2)) for cell in cells]
    missing, chosen = set().union(*pairs), set[int]()
    while missing:
        best = max(range(len(cells)), key=lambda i: len(pairs[i] & missing))
        chosen.add(best)
        missing -= pairs[best]
    return [cells[i] for i in sorted(chosen)]
