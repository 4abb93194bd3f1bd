"""Two tiers of tests: the default one takes minutes, the full one (`pytest --full`) draws everything."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

Cell = TypeVar("Cell")
T = TypeVar("T")
full = False  # set by conftest.py from the command line, before tests are collected


def pairwise(
    cells: Sequence[Cell],
    factors: Callable[[Cell], Iterable[Hashable]],
    others: Callable[[Cell], Iterable[Hashable]] = lambda cell: (),
) -> list[Cell]:
    """Return few cells that cover what all cells cover; in the full tier all cells.

    Every pair of values of two ``factors`` that occurs in some cell still occurs, and every value of the
    ``others``. Greedy: the cell with the most that is not covered yet is next, the first of equals.
    """
    if full:
        return list(cells)
    covers: list[set[Hashable]] = [
        {*itertools.combinations(enumerate(factors(cell)), 2), *enumerate(others(cell))} for cell in cells
    ]
    missing, chosen = set[Hashable]().union(*covers), set[int]()
    while missing:
        best = max(range(len(cells)), key=lambda i: len(covers[i] & missing))
        chosen.add(best)
        missing -= covers[best]
    return [cells[i] for i in sorted(chosen)]


def each_value(*factors: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return few combinations in which every value of every factor occurs; in the full tier all of them."""
    values = [list(factor) for factor in factors]
    if full:
        return list(itertools.product(*values))
    return [tuple(one[i % len(one)] for one in values) for i in range(max(map(len, values)))]


def sized(default: T, full_size: T) -> T:
    """Return the size of a test for this tier."""
    return full_size if full else default
