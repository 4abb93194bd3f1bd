"""Longer after a success, shorter after a loss."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.arguments import integer
from outpace.length.base import Done, Hint, Length, Load


class Heuristic(Length):
    """Two more after all were kept, one fewer after a loss, as in Transformers, each row for itself.

    Unlike there it may fall to 0, plain decoding; every 4 tokens of it, one draft shows whether the text has
    become easier. `least` keeps it from falling so far, for drafters that know when to be silent.
    """

    RETRY = 4

    def __init__(self, start: int = 5, most: int = 20, least: int = 0) -> None:
        integer("start", start, "an int >= 1", lambda g: g >= 1)
        integer("most", most, f"an int >= start = {start}", lambda g: g >= start)
        integer("least", least, f"an int in 0..{start}", lambda g: 0 <= g <= start)
        self.start, self.most, self.least = start, most, least
        self._g: dict[int, int] = {}
        self._rested: dict[int, int] = {}  # iterations since a row fell to 0

    def choose(self, rows: Sequence[int], *, load: Load | None = None, hint: Hint | None = None) -> list[int]:
        chosen = [self._g.setdefault(row, self.start) for row in rows]
        return [
            1 if g == 0 and self._rested[row] >= self.RETRY else g
            for row, g in zip(rows, chosen, strict=True)
        ]

    def observe(self, done: Done) -> None:
        for row, guessed, kept in zip(done.rows, done.drafted, done.accepted, strict=True):
            g = self._g.setdefault(row, self.start)
            if guessed == 0:
                if g == 0:
                    self._rested[row] = self._rested.get(row, 0) + 1
                continue
            self._g[row] = min(g + 2, self.most) if kept == guessed else max(g - 1, self.least)
            self._rested[row] = 0

    def reset(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._g.pop(row, None)
            self._rested.pop(row, None)

    def __repr__(self) -> str:
        return f"Heuristic({self.start}" + (f", least={self.least})" if self.least else ")")
