"""Tables that fit the terminal: columns that do not fit go into another table below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len

BORDER = 3  # characters between two columns
MAX_WORDS_WIDTH = 16  # characters; longer cells of words take several lines


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        head: Its head.
        cells: Its cells.
        words: Whether cells are words. They are aligned to the left and may take several lines.
    """

    head: str
    cells: Sequence[str]
    words: bool = False

    @property
    def width(self) -> int:
        """Characters of the longest cell or the longest word of the head."""
        longest = max([0, *map(cell_len, self.cells)])
        if self.words:
            longest = min(longest, MAX_WORDS_WIDTH)
        return max([longest, *map(cell_len, self.head.split())])

    @property
    def narrow_width(self) -> int:
        """Characters of the longest word, for a table with each interval below its figure."""
        if self.words:
            return self.width
        return max(cell_len(word) for text in (self.head, *self.cells) for word in text.split() or [""])


def show(console: Any, title: str, columns: Sequence[Column], keys: int = 1, bold: int | None = None) -> None:
    """Print one table, or several that all start with the first columns.

    Args:
        console: Console to print on.
        title: Title of the table.
        columns: Its columns.
        keys: Number of first columns that name a row.
        bold: Index of a row to highlight.
    """
    from rich.table import Table

    widths = {one.head: one.width for one in columns}
    narrow_widths = {one.head: one.narrow_width for one in columns}
    parts = split_columns(columns, keys, console.width, widths)
    narrow_parts = split_columns(columns, keys, console.width, narrow_widths)
    if len(narrow_parts) < len(parts):
        parts, widths = narrow_parts, narrow_widths
    for part in parts:
        table = Table(title=title)
        for one in part:
            if one.words:
                table.add_column(one.head, overflow="fold", min_width=widths[one.head])
            else:
                table.add_column(one.head, justify="right", width=widths[one.head])
        for i, row in enumerate(zip(*(one.cells for one in part), strict=True)):
            table.add_row(*row, style="bold" if i == bold else None)
        console.print(table)


def split_columns(
    columns: Sequence[Column], keys: int, width: int, widths: Mapping[str, int]
) -> list[list[Column]]:
    """Return the columns of each table. A table is wider than ``width`` only if a single column is."""
    key_columns, rest = list(columns[:keys]), columns[keys:]
    free_width = width - 1 - sum(widths[one.head] + BORDER for one in key_columns)
    parts: list[list[Column]] = [[]]
    remaining = free_width
    for one in rest:
        if widths[one.head] + BORDER > remaining and parts[-1]:
            parts.append([])
            remaining = free_width
        parts[-1].append(one)
        remaining -= widths[one.head] + BORDER
    return [[*key_columns, *part] for part in parts]


def columns(heads: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[str] = ()) -> list[Column]:
    """Return columns from rows of cells.

    Args:
        heads: Heads of the columns.
        rows: Rows of cells.
        words: Heads of the columns of words.
    """
    each: list[Sequence[str]] = list(zip(*rows, strict=True)) if rows else [()] * len(heads)
    return [Column(head, cells, head in words) for head, cells in zip(heads, each, strict=True)]
