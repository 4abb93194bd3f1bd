"""Ways to write that are compared, and what is known of each."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.bench.runs import AUTO, PLAIN

NONE, LOOKUP, NGRAM = "none", "lookup", "ngram"
Interval = tuple[float, float]


@dataclass(frozen=True)
class Way:
    """Who guesses, how far (a number, or "auto"), how that is judged, and in which precision."""

    draft: str
    length: str
    rule: str
    dtype: str

    @property
    def plain(self) -> bool:
        return self.draft == NONE

    @property
    def effort(self) -> tuple[int, bool, bool]:
        """What it takes: nothing, a copy, a table, a model; a number that somebody has to choose; another
        rule than the usual one."""
        kinds = (NONE, LOOKUP, NGRAM)
        kind = self.draft.partition(":")[0]
        return kinds.index(kind) if kind in kinds else len(kinds), self.length != AUTO, self.rule != "token"

    def __str__(self) -> str:
        if self.plain:
            return "plain decoding"
        return f"{self.draft}, g = {self.length}" + ("" if self.rule == "token" else f", rule {self.rule}")

    def among(self, first: Way) -> str:
        """With its precision, where that is not the first one's."""
        if self.dtype == first.dtype:
            return f"{self}"
        return f"{self} in {self.dtype}" if self.plain else f"{self}, in {self.dtype}"


def plainly(dtype: str) -> Way:
    return Way(NONE, PLAIN, "token", dtype)


@dataclass(frozen=True)
class Candidate:
    """A way and its speed over plain decoding.

    expected  by acceptance and costs; verified, as measured with whole texts; None where it was not
    interval  of verified where there is one, else of expected: it holds it in 95 of 100 cases
    batch     rows at a time
    why       it was chosen, or not
    """

    draft: str
    length: str
    dtype: str
    rule: str
    batch: int = 1
    expected: float | None = None
    interval: Interval | None = None
    verified: float | None = None
    why: str = ""
