"""How far to guess: policies that choose g for each row and iteration.

A policy is told what came of its choices and may hold any memory per slot. g = 0 is plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outpace.arguments import integer


class Length(Protocol):
    most: int  # never more than this

    def choose(self, rows: Sequence[int]) -> list[int]:
        """Tokens to draft for each of these slots."""

    def observe(self, rows: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """What was drafted and kept in the iteration just done."""

    def reset(self, rows: Sequence[int]) -> None:
        """These slots are free; what was learnt in them is forgotten."""


class Fixed:
    """Always g."""

    def __init__(self, g: int) -> None:
        integer("g", g, "an int >= 0", lambda g: g >= 0)
        self.most = g

    def choose(self, rows: Sequence[int]) -> list[int]:
        return [self.most] * len(rows)

    def observe(self, rows: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]) -> None: ...

    def reset(self, rows: Sequence[int]) -> None: ...

    def __repr__(self) -> str:
        return f"Fixed({self.most})"


class Heuristic:
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

    def choose(self, rows: Sequence[int]) -> list[int]:
        chosen = [self._g.setdefault(row, self.start) for row in rows]
        return [
            1 if g == 0 and self._rested[row] >= self.RETRY else g
            for row, g in zip(rows, chosen, strict=True)
        ]

    def observe(self, rows: Sequence[int], drafted: Sequence[int], accepted: Sequence[int]) -> None:
        for row, guessed, kept in zip(rows, drafted, accepted, strict=True):
            g = self._g[row]
            if guessed == 0:
                if g == 0:
                    self._rested[row] += 1
                continue
            self._g[row] = min(g + 2, self.most) if kept == guessed else max(g - 1, self.least)
            self._rested[row] = 0

    def reset(self, rows: Sequence[int]) -> None:
        for row in rows:
            self._g.pop(row, None)
            self._rested.pop(row, None)

    def __repr__(self) -> str:
        return f"Heuristic({self.start}" + (f", least={self.least})" if self.least else ")")
