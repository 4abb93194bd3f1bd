"""The parts of a page, before they are HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from outpace.report.words import between

Content = dict[str, Any]  # of one file, as `outpace.report.files.read` returns it
PHONE, BESIDE = 40, 2  # characters of a table that fit on a phone, and of the gap beside a column
Way = tuple[str, str]  # a draft, and its g


@dataclass(frozen=True)
class Figure:
    """A figure with its caption.

    Attributes:
        drawn: The figure as HTML.
        caption: The caption.
        wide: Whether it takes the whole width of the page.
    """

    drawn: Markup
    caption: str
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """A table of cells as they are shown.

    Attributes:
        caption: The caption.
        heads: Head of each column.
        rows: Cells of each row.
        words: Columns of words, which are aligned to the left.
        chosen: Index of a row to highlight.
    """

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[int] = (0,)
    chosen: int | None = None

    @property
    def wide(self) -> bool:
        """True if it needs more characters side by side than a phone shows."""
        longest = (
            max(map(len, (*head.split(), *cells)))
            for head, *cells in zip(self.heads, *self.rows, strict=True)
        )
        return sum(one + BESIDE for one in longest) > PHONE


@dataclass(frozen=True)
class Text:
    """A text to copy as it is.

    Attributes:
        caption: The caption.
        text: The text.
    """

    caption: str
    text: str


@dataclass(frozen=True)
class Speed:
    """A speed relative to decoding without speculation.

    Attributes:
        column: The column that it stands in.
        value: The speed.
        interval: Its interval, if it has one.
    """

    column: str
    value: float
    interval: Sequence[float] | None = None

    def __str__(self) -> str:
        known = f" ({between(self.interval, '.2f')})" if self.interval else ""
        return f"{self.column} {self.value:.2f}{known}"

    def contradicts(self, other: Speed) -> bool:
        """Return whether the two cannot both be right.

        They cannot if their intervals lie apart. They also cannot if one is above 1 and the other below, and
        they do not lie in each other's intervals.
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
    """A section of the page.

    Attributes:
        title: The title.
        lead: The first paragraph.
        figures: Its figures.
        tables: Its tables.
        texts: Its texts.
        source: Conditions that its figures were measured under, by the name of each setting.
        speeds: Speeds in it, to be compared with other sections.
        notes: Sentences on how it agrees with other sections.
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
        """True if there is nothing to show."""
        return not (self.figures or self.tables or self.texts)
