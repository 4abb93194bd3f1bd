"""Tables that are never cut: columns that do not fit side by side go into a further table below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len

BORDER = 3  # characters of a column beside its cells
LINE = 16  # characters of words after which they may go on in the next line


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        head: Its head.
        cells: Its cells.
        words: Whether cells are words, which are aligned to the left and may take several lines.
    """

    head: str
    cells: Sequence[str]
    words: bool = False

    @property
    def width(self) -> int:
        """Characters that it needs for the longest cell, and the longest word of its head."""
        longest = max([0, *map(cell_len, self.cells)])
        return max([min(longest, LINE) if self.words else longest, *map(cell_len, self.head.split())])

    @property
    def narrow(self) -> int:
        """Characters that it needs if an interval stands below its figure."""
        if self.words:
            return self.width
        return max(cell_len(word) for text in (self.head, *self.cells) for word in text.split() or [""])


def show(console: Any, title: str, columns: Sequence[Column], keys: int = 1, bold: int | None = None) -> None:
    """Print one table, or several that each begin with the first columns.

    Args:
        console: Console to print on.
        title: Title of the table.
        columns: Its columns.
        keys: Number of first columns that name a row.
        bold: Index of a row to highlight.
    """
    from rich.table import Table

    widths = {one.head: one.width for one in columns}
    below = {one.head: one.narrow for one in columns}
    if len(fitting(columns, keys, console.width, below)) < len(fitting(columns, keys, console.width, widths)):
        widths = below
    for part in fitting(columns, keys, console.width, widths):
        table = Table(title=title)
        for one in part:
            if one.words:
                table.add_column(one.head, overflow="fold", min_width=widths[one.head])
            else:
                table.add_column(one.head, justify="right", width=widths[one.head])
        for i, row in enumerate(zip(*(one.cells for one in part), strict=True)):
            table.add_row(*row, style="bold" if i == bold else None)
        console.print(table)


def fitting(
    columns: Sequence[Column], keys: int, width: int, widths: Mapping[str, int]
) -> list[list[Column]]:
    """Return the columns of each table, none of which is wider than ``width`` if one column fits."""
    names, rest = list(columns[:keys]), columns[keys:]
    free = width - 1 - sum(widths[one.head] + BORDER for one in names)
    parts: list[list[Column]] = [[]]
    left = free
    for one in rest:
        if widths[one.head] + BORDER > left and parts[-1]:
            parts.append([])
            left = free
        parts[-1].append(one)
        left -= widths[one.head] + BORDER
    return [[*names, *some] for some in parts]


def columns(heads: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[str] = ()) -> list[Column]:
    """Return columns from rows of cells.

    Args:
        heads: Heads of the columns.
        rows: Rows of cells.
        words: Heads of the columns of words.
    """
    each: list[Sequence[str]] = list(zip(*rows, strict=True)) if rows else [()] * len(heads)
    return [Column(head, cells, head in words) for head, cells in zip(heads, each, strict=True)]
