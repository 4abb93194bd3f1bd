"""What a page is made of, before it is HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from outpace.report.words import between

Content = dict[str, Any]  # of one file, as `outpace.report.files.read` gives it
PHONE, BESIDE = 40, 2  # characters of a table on a phone, and of the gap beside a column
Way = tuple[str, str]  # a draft, and its g


@dataclass(frozen=True)
class Figure:
    """A picture with what to see in it."""

    drawn: Markup
    caption: str
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """Cells as they are shown; columns that are `words` start at the left."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = (0,)
    chosen: int | None = None  # a row to point at

    @property
    def wide(self) -> bool:
        """Return whether it needs more characters than a phone shows beside each other."""
        longest = (
            max(map(len, (*head.split(), *cells)))
            for head, *cells in zip(self.heads, *self.rows, strict=True)
        )
        return sum(one + BESIDE for one in longest) > PHONE


@dataclass(frozen=True)
class Text:
    """Words to copy, as they are."""

    caption: str
    text: str


@dataclass(frozen=True)
class Speed:
    """A speed over plain decoding, and the column that it stands in."""

    column: str
    value: float
    interval: Sequence[float] | None = None

    def __str__(self) -> str:
        known = f" ({between(self.interval, '.2f')})" if self.interval else ""
        return f"{self.column} {self.value:.2f}{known}"

    def contradicts(self, other: Speed) -> bool:
        """Return whether the two cannot both be right.

        Their intervals lie apart; or one is faster than plain decoding and the other slower, and they do not
        lie in each other's intervals.
        """
        if self.interval and other.interval:
            (low, high), (least, most) = self.interval, other.interval
            if high < least or most < low:
                return True
            if low <= other.value <= high and least <= self.value <= most:
                return False
        return (round(self.value, 2) - 1) * (round(other.value, 2) - 1) < 0


@dataclass(frozen=True)
class Section:
    """A part of the page.

    source  what its figures were measured on, by what each setting is called
    speeds  speeds over plain decoding in it, to be compared with other sections
    notes   sentences about how it fits in with other sections
    """

    title: str
    lead: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    texts: Sequence[Text] = ()
    source: Mapping[str, str] = field(default_factory=dict)
    speeds: Mapping[Way, Speed] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def empty(self) -> bool:
        return not (self.figures or self.tables or self.texts)
