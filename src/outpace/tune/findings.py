"""Everything known about the setups at any moment of a tuning, and the choice that follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from outpace.bench.estimate import Floats, estimate
from outpace.tune.decision import Choice, Seen, choose, verdict
from outpace.tune.race import Record
from outpace.tune.replay import Speed
from outpace.tune.way import Candidate, Setting, plainly

PAYS = 1.02  # expected speed that a draft must reach
UNMEASURED = "no whole text was measured yet"


class Findings:
    """All measurements so far, and the choice.

    Args:
        first: The setup without speculation, which the others are compared with.

    Attributes:
        first: The setup without speculation.
        known: All setups.
        beta: Acceptance probability at the tokens of texts, by draft.
        expected: Speeds that follow from acceptance and costs.
        dropped: Why some setups cannot pay. They are not measured with whole texts.
        untried: Why some setups could not be measured.
        ended: Why no whole text was measured, where none was.
        record: Measurements with whole texts.
        crowds: The chosen setup with larger batches.
        choice: The choice so far.
    """

    def __init__(self, first: Setting) -> None:
        self.first = first
        self.known = [first]
        self.beta: dict[str, list[Floats]] = {}
        self.expected: dict[Setting, Speed] = {}
        self.dropped: dict[Setting, str] = {}
        self.untried: dict[Setting, str] = {}
        self.ended = UNMEASURED
        self.record = Record()
        self.crowds: list[Candidate] = []
        self.choice = Choice(first, {})

    def add(self, *ways: Setting) -> None:
        """Add setups that are not known yet."""
        self.known += [way for way in ways if way not in self.known]

    def expect(self, way: Setting, speed: Speed, least: float, hope: Speed) -> None:
        """Note the expected speed of a setup, and drop it if it cannot pay.

        Args:
            way: The setup.
            speed: Its expected speed, with an interval.
            least: Speed that it must reach to be worth measuring.
            hope: Speed at best. The setup is dropped if the upper end of its interval is below ``least``.
        """
        self.add(way)
        self.expected[way] = speed
        if hope[1] is not None and hope[1][1] < least:
            self.dropped[way] = "cannot pay, by its acceptance rate and its cost"

    def promising(self) -> list[Setting]:
        """Return the setups left to measure, the most promising first."""
        out = {self.first, *self.dropped, *self.untried}
        left = [way for way in self.known if way not in out]
        return sorted(left, key=lambda way: -self.expected.get(way, (1.0, None))[0])

    def decide(self) -> None:
        """Choose a setup from the measurements so far."""
        self.choice = choose(self.record.rates, self.record.yardsticks, self.first)

    def seen(self) -> dict[Setting, Seen]:
        """Return the measured speed of each setup that has one."""
        return {way: found for way in self.known if (found := self.record.seen(way)) is not None}

    def candidates(self) -> list[Candidate]:
        """Return all setups with their speeds, larger batches last."""
        return [self._candidate(way) for way in self.known] + self.crowds

    def chosen(self) -> Candidate:
        """Return the chosen setup with its speed."""
        return self._candidate(self.choice.way)

    def nearest(self) -> int | None:
        """Return the chosen num_draft_tokens as a number, for libraries without a draft-length policy.

        Returns:
            The number, or that of the fastest fixed setup of the same draft; None if none was found to pay.
        """
        way = self.choice.way
        if way.length.isdecimal():
            return int(way.length)
        speeds = {one: speed for one, (speed, _) in self.expected.items()}
        speeds |= {one: seen.speed for one, seen in self.seen().items()}
        alone = speeds.get(plainly(way.dtype), 1.0)
        pays = {
            int(one.length): speed
            for one, speed in speeds.items()
            if (one.draft, one.dtype) == (way.draft, way.dtype) and one.length.isdecimal() and speed > alone
        }
        return max(pays, key=pays.__getitem__, default=None)

    def most_rows(self) -> int | None:
        """Return the largest batch size up to which the chosen setup is expected to pay.

        Returns:
            The batch size; None if the choice is no speculation, or if no larger batch was measured.
        """
        if self.choice.way.plain or not self.crowds:
            return None
        most = 1
        for one in self.crowds:
            if one.expected is None or one.expected <= PAYS:
                break
            most = one.batch
        return most

    def verdict(self) -> str:
        """Return the result in a sentence."""
        seen, unknown = self.seen(), self.unknown()
        if unknown is not None:
            return f"Whether it pays is not known: {unknown}."
        if seen:
            return verdict(self.choice, seen, self.first)
        if not self.dropped:
            return "Do not speculate: no draft was named."
        which = "no draft that could be looked at" if self.untried else "no draft"
        return f"Do not speculate: {which} can pay, by acceptance rates and costs."

    def unknown(self) -> str | None:
        """Return why no choice is possible, not even that of no speculation; None if one is."""
        hopes = self.promising()
        if self.seen() or not (hopes or (self.untried and not self.dropped)):
            return None
        if self.record.rounds:
            return "all texts ended before anything could be timed"
        if not hopes:
            return next(f"{way.draft}: {why}" for way, why in self.untried.items())
        told = next(((way, self.expected[way][0]) for way in hopes if way in self.expected), None)
        if told is None:
            return self.ended
        way, speed = told
        return f"{self.ended}; {way.among(self.first)} is expected to be {speed:.2f} times as fast"

    def content(self) -> Mapping[str, Any]:
        """Return everything for the results file."""
        return {
            "rounds": self.record.rounds,
            "drafts": [self._alpha(name) for name in self.beta],
            "candidates": [asdict(one) for one in self.candidates()],
            "chosen": asdict(self.chosen()) if self.unknown() is None else None,
            "max_batch": self.most_rows(),
            "verdict": self.verdict(),
        }

    def _candidate(self, way: Setting) -> Candidate:
        expected, interval = self.expected.get(way, (None, None))
        seen = self.record.seen(way)
        reasons = (self.choice.why, self.record.dropped, self.dropped, self.untried)
        why = next((some[way] for some in reasons if way in some), "")
        if way == self.first:
            expected, why = 1.0, "what the others are compared with"
        verified = None
        if seen is not None:
            verified, interval = seen.speed, seen.interval
        return Candidate(way.draft, way.length, way.dtype, way.rule, 1, expected, interval, verified, why)

    def _alpha(self, name: str) -> Mapping[str, Any]:
        found, tokens = estimate(self.beta[name]), sum(map(len, self.beta[name]))
        if found is None:
            return {"draft": name, "alpha": None, "interval": None, "coverage": 0.0}
        return {
            "draft": name,
            "alpha": found.mean,
            "interval": found.interval,
            "coverage": found.count / tokens,
        }
