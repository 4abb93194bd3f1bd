"""The choice of a setup from measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outpace.bench.spread import Rate, faster
from outpace.checks.errors import too_few
from outpace.tune.way import Interval, Setting

LEAST = 4  # prompts that it takes to call a result sure
CLOSE = 0.03  # a setup is as fast as the fastest if it is not surely slower, and by no more than this share

Rates = Mapping[tuple[int, int], Rate]
"""Tokens and seconds, by prompt and by the number of its earlier rounds."""


@dataclass(frozen=True)
class Seen:
    """The measured speed of one setup relative to another.

    Attributes:
        speed: Ratio of their throughputs.
        interval: 95 % interval of ``speed``; None for a single prompt.
        prompts: Number of prompts that both were measured with.
    """

    speed: float
    interval: Interval | None
    prompts: int

    @property
    def surely_faster(self) -> bool:
        """True if there are enough prompts, and the whole interval lies above 1."""
        return self.prompts >= LEAST and self.interval is not None and self.interval[0] > 1

    @property
    def surely_slower(self) -> bool:
        """True if there are enough prompts, and the whole interval lies below 1."""
        return self.prompts >= LEAST and self.interval is not None and self.interval[1] < 1

    def __str__(self) -> str:
        between = "" if self.interval is None else " ({:.2f} to {:.2f})".format(*self.interval)
        return f"{self.speed:.2f}{between}"


@dataclass(frozen=True)
class Choice:
    """The chosen setup, with reasons.

    Attributes:
        way: The chosen setup.
        why: Why each measured setup was chosen, or not.
    """

    way: Setting
    why: Mapping[Setting, str]


def compare(ours: Rates, theirs: Rates) -> Seen | None:
    """Compare two setups in pairs, where both were measured; None if they never were.

    A prompt of several rounds counts once.
    """
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


def choose(rates: Mapping[Setting, Rates], yardsticks: Mapping[Setting, Rates], plain: Setting) -> Choice:
    """Choose the fastest setup that is surely faster than decoding without speculation.

    Of setups that are about as fast as the fastest, the simplest is chosen.

    Args:
        rates: Measured rates of each setup.
        yardsticks: Rates without speculation in the same rounds, for each setup.
        plain: The setup without speculation, which is chosen if no other is surely faster.
    """
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


def verdict(choice: Choice, seen: Mapping[Setting, Seen], first: Setting) -> str:
    """Return the result in a sentence.

    Args:
        choice: The chosen setup.
        seen: Measured speeds of all setups.
        first: The setup that the others were compared with.
    """
    way = choice.way
    if way in seen:
        found = f"{seen[way]} times as fast as plain decoding"
        prompts = f"measured with {seen[way].prompts} prompts"
        if way.plain:
            return f"Do not speculate, but compute in {way.dtype}: {found}, {prompts}."
        return f"Draft with {way.among(first)}: {found}, {prompts}."
    best = max(seen, key=lambda one: seen[one].speed)
    few = seen[best].prompts < LEAST
    known = (
        f"the best that was measured, {best.among(first)}, is {seen[best]} times as fast as plain decoding"
    )
    if few:
        return f"Do not speculate yet: {known}, and {too_few(seen[best].prompts, 'prompt')} to be sure."
    return f"Do not speculate: {known}, which is not surely faster."


def better_half(
    ways: Sequence[Setting], rates: Mapping[Setting, Rates], yardsticks: Mapping[Setting, Rates]
) -> list[Setting]:
    """Return the faster half of the setups so far, in their order; unmeasured ones are not in it."""
    pairs = {way: compare(rates.get(way, {}), yardsticks.get(way, {})) for way in ways}
    seen = {way: found.speed for way, found in pairs.items() if found is not None}
    kept = sorted(seen, key=lambda way: -seen[way])[: (len(ways) + 1) // 2]
    return [way for way in ways if way in kept]


def _fastest(ways: Sequence[Setting], rates: Mapping[Setting, Rates]) -> Setting:
    """Return the fastest setup, by comparison in pairs.

    Setups that were dropped had fewer prompts, perhaps easier ones.
    """
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
