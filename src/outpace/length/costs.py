"""What iterations take, as measured while they are run."""

from __future__ import annotations

import math

import numpy as np

from outpace.length.base import Load
from outpace.length.belief import Array

NEW = 0.1  # weight of a measurement, once there are some
SHORT = 256  # tokens of a text that passes take no notice of
AT_ONCE = 16  # tokens that are read in a draft's step, as long as nothing is known of it
TICK = 1e-9  # seconds: less is none of a clock
WILD = 2.0  # times as long, or as short, as expected: more than that is an accident


class Mean:
    """A running mean that forgets, and that accidents move little: it begins with the less of the first two,
    of which one may have been a warm-up."""

    def __init__(self) -> None:
        self.count = 0
        self.value = math.inf

    @property
    def sure(self) -> bool:
        return self.count > 1

    def add(self, value: float) -> None:
        value = max(value, TICK)
        self.count += 1
        if self.count <= 2:
            self.value = min(self.value, value)
        else:
            usual = min(max(value, self.value / WILD), self.value * WILD)
            self.value += max(NEW, 1 / self.count) * (usual - self.value)


Kind = tuple[int, int]  # loads that are alike: numbers of their batch and of their context


class Costs:
    """Seconds of the target's passes over g + 1 tokens a row, of draft steps, and of catching up after a
    rest, for loads that are about alike."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._passes: dict[Kind, dict[int, Mean]] = {}
        self._curves: dict[tuple[Kind, bool], Array] = {}  # what follows from them
        self._noted = 0  # passes so far
        self._last: dict[tuple[int, int], int] = {}  # the last of each size of the batch and g
        self._steps: dict[int, Mean] = {}  # by size of the batch
        self._missed = Mean()  # of reading a token that was not read

    def note(self, load: Load, g: int, seconds: float) -> None:
        """Of a pass."""
        self._passes.setdefault(_kind(load), {}).setdefault(g, Mean()).add(seconds)
        self._curves.clear()
        self._noted += 1
        self._last[_kind(load)[0], g] = self._noted

    def note_draft(self, load: Load, steps: int, seconds: float, catching_up: float) -> None:
        """Of so many steps, and of reading what the draft had not read before, whether that was timed by
        itself or is part of the steps."""
        step = self._steps.setdefault(_kind(load)[0], Mean())
        if steps and (not load.unread or not step.count):
            step.add(seconds / steps)
        elif steps:
            catching_up += max(0.0, seconds - steps * step.value)
        if catching_up:
            self._missed.add(catching_up / load.unread)

    def known(self, load: Load) -> list[int]:
        """The g that were measured with such a batch, more than once."""
        return self._lengths(_kind(load)[0])

    def _lengths(self, size: int, sure: bool = True) -> list[int]:
        return sorted({g for kind in self._passes if kind[0] == size for g in self._measured(kind, sure)})

    def since(self, load: Load, g: int) -> int:
        """Passes since the last with so many guesses and such a batch."""
        return self._noted - self._last.get((_kind(load)[0], g), 0)

    def plain(self, load: Load) -> float | None:
        """Of a pass without guesses; None if it was measured with no such batch."""
        known = self._near(_kind(load), True)
        return float(self.passes(load)[0]) if known else None

    def plains(self, load: Load) -> int:
        """How often that was measured."""
        size, _ = _kind(load)
        return sum(
            passes[0].count for kind, passes in self._passes.items() if kind[0] == size and 0 in passes
        )

    def step(self, load: Load) -> float:
        """Of a drafter's step; 0 while it is not known."""
        found = self._steps.get(_kind(load)[0])
        return found.value if found is not None and found.count else 0.0

    def missed(self, load: Load) -> float:
        """Of reading what was not read, by what a token took; at first by what a step takes."""
        return load.unread * (self._missed.value if self._missed.count else self.step(load) / AT_ONCE)

    def passes(self, load: Load, sure: bool = True) -> Array:
        """`[most + 1]`, by g: as measured, on straight lines between, and on from there by the last slope;
        more tokens never take less. What was measured elsewhere gives the shape where little was measured
        here: after shorter or longer texts, all that is measured here bends it; of smaller batches, a plain
        pass sets the scale. sure: what was measured once does not count."""
        key = _kind(load), sure
        if key not in self._curves:
            self._curves[key] = np.minimum.accumulate(self._curve(*key)[::-1])[::-1]
        return self._curves[key]

    def _curve(self, kind: Kind, sure: bool) -> Array:
        shape = self._line(self._near(kind, sure)[0], sure)
        if self._lengths(kind[0], sure) == [0]:
            smaller = [one for one in self._passes if one[0] < kind[0] and len(self._measured(one)) > 1]
            smaller = [one for one in smaller if 0 in self._measured(one)]
            if smaller:
                other = self._line(min(smaller, key=lambda one: _distance(one, kind)), True)
                shape = other * (shape[0] / other[0])
        here = self._measured(kind, sure)
        if not here:
            return shape
        bends = [seconds / shape[g] for g, seconds in here.items()]
        bent: Array = np.interp(np.arange(self.most + 1), list(here), bends)
        return shape * bent

    def _measured(self, kind: Kind, sure: bool = True) -> dict[int, float]:
        """Seconds by g."""
        found = sorted(self._passes.get(kind, {}).items())
        return {g: mean.value for g, mean in found if mean.sure or not sure}

    def _near(self, kind: Kind, sure: bool) -> list[Kind]:
        """Those with batches of this size of which a plain pass is known: those with the most lengths first,
        then the nearest."""
        some = (one for one in self._passes if one[0] == kind[0] and 0 in self._measured(one))
        return sorted(some, key=lambda one: (-len(self._measured(one, sure)), _distance(one, kind)))

    def _line(self, kind: Kind, sure: bool) -> Array:
        measured = self._measured(kind, sure)
        known, seconds = list(measured), list(measured.values())
        found: Array = np.interp(np.arange(self.most + 1), known, seconds)
        if len(known) > 1 and known[-1] < self.most:
            slope = max(0.0, (seconds[-1] - seconds[-2]) / (known[-1] - known[-2]))
            found[known[-1] :] = seconds[-1] + slope * np.arange(self.most + 1 - known[-1])
        return found


def _kind(load: Load) -> Kind:
    """Batches that differ by less than a fifth are alike, and contexts by less than two thirds; short ones
    all are."""
    return round(4 * math.log2(load.batch)), round(math.log2(max(SHORT, load.context)))


def _distance(one: Kind, other: Kind) -> tuple[int, int]:
    return abs(one[0] - other[0]), abs(one[1] - other[1])
