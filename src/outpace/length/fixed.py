"""The same length always."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.arguments import integer
from outpace.length.base import Hint, Length, Load


class Fixed(Length):
    """Always g."""

    def __init__(self, g: int) -> None:
        integer("g", g, "an int >= 0", lambda g: g >= 0)
        self.most = g

    def choose(self, rows: Sequence[int], *, load: Load | None = None, hint: Hint | None = None) -> list[int]:
        return [self.most] * len(rows)

    def __repr__(self) -> str:
        return f"Fixed({self.most})"
