"""Which way to take, of what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outpace.bench.spread import Rate, faster
from outpace.tune.way import Interval, Way
from outpace.wording import too_few

LEAST = 4  # prompts without which nothing is called sure
CLOSE = 0.03  # as fast as the fastest, if no difference was shown, and none larger than this was seen

Rates = Mapping[tuple[int, int], Rate]
"""Tokens and seconds, by prompt and by how often it had come before."""


@dataclass(frozen=True)
class Seen:
    """How much faster one way is than another, with so many prompts."""

    speed: float
    interval: Interval | None
    prompts: int

    @property
    def surely_faster(self) -> bool:
        return self.prompts >= LEAST and self.interval is not None and self.interval[0] > 1

    @property
    def surely_slower(self) -> bool:
        return self.prompts >= LEAST and self.interval is not None and self.interval[1] < 1

    def __str__(self) -> str:
        between = "" if self.interval is None else " ({:.2f} to {:.2f})".format(*self.interval)
        return f"{self.speed:.2f}{between}"


@dataclass(frozen=True)
class Choice:
    """The way to take, and of each that was measured, why it is that one or not."""

    way: Way
    why: Mapping[Way, str]


def compare(ours: Rates, theirs: Rates) -> Seen | None:
    """Where both were measured, in pairs; None if nowhere. A prompt that came several times counts once."""
    both = sorted(set(ours) & set(theirs))
    if not both:
        return None
    prompts = list(dict.fromkeys(prompt for prompt, _ in both))
    mine, others = (
        [_total([rates[turn] for turn in both if turn[0] == prompt]) for prompt in prompts]
        for rates in (ours, theirs)
    )
    speed, interval = faster(mine, others)
    return Seen(speed, interval, len(prompts))


def choose(rates: Mapping[Way, Rates], yardsticks: Mapping[Way, Rates], plain: Way) -> Choice:
    """The fastest, if it is surely faster than plain decoding; of others that are as fast, the simplest."""
    seen = {way: found for way in rates if (found := compare(rates[way], yardsticks[way])) is not None}
    sure = [way for way, found in seen.items() if found.surely_faster]
    why = {way: _unsure(found) for way, found in seen.items() if way not in sure}
    if not sure:
        return Choice(plain, why)
    first = _fastest(sure, rates)
    alike = [first, *(way for way in sure if way != first and _as_fast(rates[way], rates[first]))]
    chosen = min(alike, key=lambda way: (way.effort, -seen[way].speed))
    fastest, taken = first.among(plain), chosen.among(plain)
    for way in sure:
        behind = compare(rates[way], rates[chosen])
        if way == chosen:
            simpler = ", and simpler" if way.effort < first.effort else ""
            reason = "the fastest" if way == first else f"as fast as {fastest}{simpler}"
        elif way in alike:
            simpler = ", which is simpler" if chosen.effort < way.effort else ""
            reason = f"no faster to speak of than {taken}{simpler}"
        elif behind is not None and behind.surely_slower:
            reason = f"slower than {taken}"
        else:
            reason = f"not as fast as {taken}, as far as was seen"
        why[way] = reason
    return Choice(chosen, why)


def verdict(choice: Choice, seen: Mapping[Way, Seen], first: Way) -> str:
    """In a sentence, of what was measured; the first way is what they were compared with."""
    way = choice.way
    if way in seen:
        found = f"{seen[way]} times as fast as plain decoding"
        prompts = f"measured with {seen[way].prompts} prompts"
        if way.plain:
            return f"Do not speculate, but compute in {way.dtype}: {found}, {prompts}."
        return f"Guess with {way.among(first)}: {found}, {prompts}."
    best = max(seen, key=lambda one: seen[one].speed)
    few = seen[best].prompts < LEAST
    known = (
        f"the best that was measured, {best.among(first)}, is {seen[best]} times as fast as plain decoding"
    )
    if few:
        return f"Do not speculate yet: {known}, and {too_few(seen[best].prompts, 'prompt')} to be sure."
    return f"Do not speculate: {known}, which is not surely faster."


def better_half(
    ways: Sequence[Way], rates: Mapping[Way, Rates], yardsticks: Mapping[Way, Rates]
) -> list[Way]:
    """Those that are faster so far, in their order; what was not measured is not among them."""
    pairs = {way: compare(rates.get(way, {}), yardsticks.get(way, {})) for way in ways}
    seen = {way: found.speed for way, found in pairs.items() if found is not None}
    kept = sorted(seen, key=lambda way: -seen[way])[: (len(ways) + 1) // 2]
    return [way for way in ways if way in kept]


def _fastest(ways: Sequence[Way], rates: Mapping[Way, Rates]) -> Way:
    """By pairs: those that dropped out had fewer prompts, perhaps easier ones."""
    first = ways[0]
    for way in ways[1:]:
        found = compare(rates[way], rates[first])
        if found is not None and found.speed > 1:
            first = way
    return first


def _as_fast(ours: Rates, theirs: Rates) -> bool:
    found = compare(ours, theirs)
    return found is not None and not found.surely_slower and found.speed >= 1 - CLOSE


def _unsure(found: Seen) -> str:
    if found.surely_slower:
        return "slower than plain decoding"
    if found.prompts < LEAST:
        return f"{too_few(found.prompts, 'prompt')} to be sure"
    return "not surely faster than plain decoding"


def _total(rates: Sequence[Rate]) -> Rate:
    return sum(tokens for tokens, _ in rates), sum(seconds for _, seconds in rates)
