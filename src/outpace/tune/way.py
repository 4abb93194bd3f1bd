"""The setups that are compared, and the speed of each."""

from __future__ import annotations

from dataclasses import dataclass

from outpace.bench.runs import AUTO, PLAIN

NONE, LOOKUP, NGRAM = "none", "lookup", "ngram"
Interval = tuple[float, float]


@dataclass(frozen=True)
class Setting:
    """A setup: how to decode.

    Attributes:
        draft: Name of the draft; "none" is decoding without speculation.
        length: Number of draft tokens per step, or "auto".
        rule: Name of the verification rule.
        dtype: Precision of the models.
    """

    draft: str
    length: str
    rule: str
    dtype: str

    @property
    def plain(self) -> bool:
        """True for decoding without speculation."""
        return self.draft == NONE

    @property
    def effort(self) -> tuple[int, bool, bool]:
        """The effort that the setup takes, to be compared.

        First comes the kind of draft: none, prompt lookup, table, model. Then comes a number of draft tokens,
        which somebody has to choose, over "auto". Then comes another rule than the default.
        """
        kinds = (NONE, LOOKUP, NGRAM)
        kind = self.draft.partition(":")[0]
        return kinds.index(kind) if kind in kinds else len(kinds), self.length != AUTO, self.rule != "token"

    def __str__(self) -> str:
        if self.plain:
            return "plain decoding"
        return f"{self.draft}, g = {self.length}" + ("" if self.rule == "token" else f", rule {self.rule}")

    def among(self, first: Setting) -> str:
        """Return the setup in words, with its precision where that is not the first one's."""
        if self.dtype == first.dtype:
            return f"{self}"
        return f"{self} in {self.dtype}" if self.plain else f"{self}, in {self.dtype}"


def plainly(dtype: str) -> Setting:
    """Return the setup without speculation in a precision."""
    return Setting(NONE, PLAIN, "token", dtype)


@dataclass(frozen=True)
class Candidate:
    """A setup and its speed relative to decoding without speculation.

    Attributes:
        draft: Name of the draft.
        length: Number of draft tokens per step, or "auto".
        dtype: Precision of the models.
        rule: Name of the verification rule.
        batch: Number of sequences at a time.
        expected: Speed by acceptance and costs; None if unknown.
        interval: 95 % interval of ``verified`` where there is one, else of ``expected``.
        verified: Speed as measured with whole texts; None if it was not.
        why: Why it was chosen, or not.
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
