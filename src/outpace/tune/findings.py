"""What is known of all ways, at any moment of a tuning, and which one that speaks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from outpace.bench.estimate import Floats, estimate
from outpace.tune.decision import Choice, Seen, choose, verdict
from outpace.tune.race import Record
from outpace.tune.replay import Speed
from outpace.tune.way import Candidate, Way, plainly

PAYS = 1.02  # what a draft must promise


class Findings:
    """The first way is plain decoding, which the others are compared with.

    known     all ways
    beta      acceptance at the tokens of texts, by draft
    expected  speeds by acceptance and costs
    dropped   why some were not measured with whole texts
    record    what whole texts came to
    crowds    the choice with more rows at a time
    """

    def __init__(self, first: Way) -> None:
        self.first = first
        self.known = [first]
        self.beta: dict[str, list[Floats]] = {}
        self.expected: dict[Way, Speed] = {}
        self.dropped: dict[Way, str] = {}
        self.record = Record()
        self.crowds: list[Candidate] = []
        self.choice = Choice(first, {})

    def add(self, *ways: Way) -> None:
        self.known += [way for way in ways if way not in self.known]

    def expect(self, way: Way, speed: Speed, least: float, hope: Speed) -> None:
        """Less than the least, even if the upper end of what may be hoped for was true, is not worth being
        measured."""
        self.add(way)
        self.expected[way] = speed
        if hope[1] is not None and hope[1][1] < least:
            self.dropped[way] = "cannot pay, by how often its guesses are right and what they cost"

    def promising(self) -> list[Way]:
        """What is left to be measured, the best first."""
        left = [way for way in self.known if way not in self.dropped and way != self.first]
        return sorted(left, key=lambda way: -self.expected.get(way, (1.0, None))[0])

    def decide(self) -> None:
        self.choice = choose(self.record.rates, self.record.yardsticks, self.first)

    def seen(self) -> dict[Way, Seen]:
        return {way: found for way in self.known if (found := self.record.seen(way)) is not None}

    def candidates(self) -> list[Candidate]:
        return [self._candidate(way) for way in self.known] + self.crowds

    def chosen(self) -> Candidate:
        return self._candidate(self.choice.way)

    def nearest(self) -> int | None:
        """The choice's length as a number, for those who know no policy; None if none was found to pay."""
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
        """Rows at a time up to which the choice is expected to pay; None if it is plain decoding."""
        if self.choice.way.plain:
            return None
        most = 1
        for one in self.crowds:
            if one.expected is None or one.expected <= PAYS:
                break
            most = one.batch
        return most

    def verdict(self) -> str:
        return verdict(self.choice, self.seen(), self._unmeasured())

    def content(self) -> Mapping[str, Any]:
        """To be written down."""
        return {
            "rounds": self.record.rounds,
            "drafts": [self._alpha(name) for name in self.beta],
            "candidates": [asdict(one) for one in self.candidates()],
            "chosen": asdict(self.chosen()),
            "max_batch": self.most_rows(),
            "verdict": self.verdict(),
        }

    def _unmeasured(self) -> str:
        """Why no whole text was."""
        if len(self.known) == 1:
            return "no draft was named"
        if self.record.rounds:
            return "all texts ended before anything could be timed"
        hopes = [way for way in self.promising() if not way.plain]
        if not hopes:
            return "no draft can pay, by how often guesses are right and what they cost"
        told = self.expected.get(hopes[0])
        hope = "" if told is None else f"; {hopes[0]} is expected to be {told[0]:.2f} times as fast"
        return f"there was no time to measure whole texts{hope}"

    def _candidate(self, way: Way) -> Candidate:
        expected, interval = self.expected.get(way, (None, None))
        seen = self.record.seen(way)
        why = self.choice.why.get(way) or self.record.dropped.get(way) or self.dropped.get(way, "")
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
