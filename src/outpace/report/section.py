"""The parts of a page, before they are HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from outpace.report.words import format_interval

Content = dict[str, Any]  # of one file, as `outpace.report.files.read` returns it
DraftConfig = tuple[str, str]  # name of the draft, and g or the name of the draft-length policy
PHONE_WIDTH = 40  # characters of a table that fit on a phone
COLUMN_GAP = 2  # characters between columns


@dataclass(frozen=True)
class CaptionedFigure:
    """A figure with its caption.

    Attributes:
        html: The figure as HTML.
        caption: The caption.
        wide: Whether it spans the whole width of the page.
    """

    html: Markup
    caption: str
    wide: bool = False


@dataclass(frozen=True)
class Table:
    """A table of cells as they are shown.

    Attributes:
        caption: The caption.
        heads: Head of each column.
        rows: Cells of each row.
        text_columns: Indices of columns of words, which are aligned to the left.
        chosen: Index of a row to highlight.
    """

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Sequence[int] = (0,)
    chosen: int | None = None

    @property
    def wide(self) -> bool:
        """True if its columns together need more characters than a phone shows."""
        widths = (
            max(map(len, (*head.split(), *cells)))
            for head, *cells in zip(self.heads, *self.rows, strict=True)
        )
        return sum(width + COLUMN_GAP for width in widths) > PHONE_WIDTH


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
        column: Name of the table column that shows it.
        value: The speed.
        interval: Its interval, if it has one.
    """

    column: str
    value: float
    interval: Sequence[float] | None = None

    def __str__(self) -> str:
        interval = f" ({format_interval(self.interval, '.2f')})" if self.interval else ""
        return f"{self.column} {self.value:.2f}{interval}"

    def contradicts(self, other: Speed) -> bool:
        """Return whether the two speeds cannot both be right.

        They cannot if their intervals do not overlap. They also cannot if one is above 1 and the other
        below, unless each lies in the other's interval.
        """
        if self.interval and other.interval:
            (low, high), (other_low, other_high) = self.interval, other.interval
            if high < other_low or other_high < low:
                return True
            if low <= other.value <= high and other_low <= self.value <= other_high:
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
        speeds: Speeds in it, by draft and g, for comparison with other sections.
        notes: Sentences on how it agrees with other sections.
    """

    title: str
    lead: str = ""
    figures: Sequence[CaptionedFigure] = ()
    tables: Sequence[Table] = ()
    texts: Sequence[Text] = ()
    source: Mapping[str, str] = field(default_factory=dict)
    speeds: Mapping[DraftConfig, Speed] = field(default_factory=dict)
    notes: Sequence[str] = ()

    @property
    def empty(self) -> bool:
        """True if there is nothing to show."""
        return not (self.figures or self.tables or self.texts)
