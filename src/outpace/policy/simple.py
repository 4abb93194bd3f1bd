"""Draft-length policies that measure no time: ``Fixed`` and ``Heuristic``."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.checks.arguments import integer
from outpace.policy.base import DraftLengthPolicy, Load, StepOutcome


class Fixed(DraftLengthPolicy):
    """Policy with a fixed number of draft tokens.

    Args:
        g: Number of draft tokens per step. 0 decodes without speculation.
    """

    def __init__(self, g: int) -> None:
        integer("g", g, "an int >= 0", lambda g: g >= 0)
        self.max_draft_tokens = g

    def choose(
        self, slots: Sequence[int], *, load: Load | None = None, proposed: Sequence[int] | None = None
    ) -> list[int]:
        return [self.max_draft_tokens] * len(slots)

    def __repr__(self) -> str:
        return f"Fixed({self.max_draft_tokens})"


class Heuristic(DraftLengthPolicy):
    """Policy that drafts two tokens more after a full acceptance and one fewer after a rejection.

    This is the rule of Transformers, applied to each sequence by itself. Unlike in Transformers, the number
    may fall to 0, which is decoding without speculation. After 4 steps at 0, a probe of one draft token shows
    whether draft tokens are accepted again.

    Args:
        start: Number of draft tokens in the first step of a sequence.
        max_draft_tokens: Largest number of draft tokens.
        least: Smallest number of draft tokens. A value above 0 suits drafters that propose nothing when they
            are unlikely to be right, such as prompt lookup.
    """

    PROBE_INTERVAL = 4  # steps at 0 before one token is drafted

    def __init__(self, start: int = 5, max_draft_tokens: int = 20, least: int = 0) -> None:
        integer("start", start, "an int >= 1", lambda g: g >= 1)
        integer("max_draft_tokens", max_draft_tokens, f"an int >= start = {start}", lambda g: g >= start)
        integer("least", least, f"an int in 0..{start}", lambda g: 0 <= g <= start)
        self.start, self.max_draft_tokens, self.least = start, max_draft_tokens, least
        self._g: dict[int, int] = {}  # number of draft tokens, by slot
        self._steps_at_zero: dict[int, int] = {}  # by slot

    def choose(
        self, slots: Sequence[int], *, load: Load | None = None, proposed: Sequence[int] | None = None
    ) -> list[int]:
        chosen = [self._g.setdefault(slot, self.start) for slot in slots]
        return [
            1 if g == 0 and self._steps_at_zero[slot] >= self.PROBE_INTERVAL else g
            for slot, g in zip(slots, chosen, strict=True)
        ]

    def observe(self, done: StepOutcome) -> None:
        for slot, drafted, accepted in zip(done.slots, done.drafted, done.accepted, strict=True):
            g = self._g.setdefault(slot, self.start)
            if drafted == 0:
                if g == 0:
                    self._steps_at_zero[slot] = self._steps_at_zero.get(slot, 0) + 1
                continue
            self._g[slot] = (
                min(g + 2, self.max_draft_tokens) if accepted == drafted else max(g - 1, self.least)
            )
            self._steps_at_zero[slot] = 0

    def reset(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._g.pop(slot, None)
            self._steps_at_zero.pop(slot, None)

    def __repr__(self) -> str:
        return f"Heuristic({self.start}" + (f", least={self.least})" if self.least else ")")
