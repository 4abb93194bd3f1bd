"""What a page is made of, before it is HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

Content = dict[str, Any]  # of one file, as `outpace.bench.results.load` gives it


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


@dataclass(frozen=True)
class Text:
    """Words to copy, as they are."""

    caption: str
    text: str


@dataclass(frozen=True)
class Section:
    title: str
    lead: str = ""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    texts: Sequence[Text] = ()

    @property
    def empty(self) -> bool:
        return not (self.figures or self.tables or self.texts)
