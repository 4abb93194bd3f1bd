"""What iterations take, as measured while they are run."""

from __future__ import annotations

import math

import numpy as np

from outpace.length.base import Load
from outpace.length.belief import Array

NEW = 0.1  # weight of a measurement, once there are some
SHORT = 256  # tokens of a text that passes take no notice of
WILD = 2.0  # times as long, or as short, as expected: more than that is an accident


class Mean:
    """A running mean that forgets, and that accidents move little."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._count = 0

    def add(self, value: float) -> None:
        self._count += 1
        if self.value is None:
            self.value = value
        else:
            usual = min(max(value, self.value / WILD), self.value * WILD)
            self.value += max(NEW, 1 / self._count) * (usual - self.value)


Kind = tuple[int, int]  # loads that are alike: numbers of their batch and of their context


class Costs:
    """Seconds of the target's passes over g + 1 tokens a row, of draft steps, and of catching up after a
    rest, for loads that are about alike."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._passes: dict[Kind, dict[int, Mean]] = {}
        self._curves: dict[Kind, Array] = {}  # what follows from them
        self._warm: set[tuple[int, int]] = set()  # sizes of batches and g that were run
        self._steps: dict[int, Mean] = {}  # by size of the batch
        self._missed = Mean()  # of catching up, over the root of the tokens

    def note(self, load: Load, g: int, seconds: float) -> None:
        """Of a pass. The first one of its kind is a warm-up, and not counted."""
        size, context = _kind(load)
        if (size, g) in self._warm:
            self._passes.setdefault((size, context), {}).setdefault(g, Mean()).add(seconds)
            self._curves.clear()
        self._warm.add((size, g))

    def note_draft(self, load: Load, steps: int, seconds: float, catching_up: float, missed: int) -> None:
        """Of so many steps, and of catching up before with so many tokens, whether it was timed by itself or
        is part of the steps."""
        step = self._steps.setdefault(_kind(load)[0], Mean())
        if not missed and steps:
            step.add(seconds / steps)
        if missed and steps and step.value is not None:
            catching_up += max(0.0, seconds - steps * step.value)
        if missed and catching_up:
            self._missed.add(catching_up / math.sqrt(missed * load.batch))

    def known(self, load: Load) -> list[int]:
        """The g that were measured with such a batch, 0 among them."""
        return self._lengths(_kind(load)[0])

    def _lengths(self, size: int) -> list[int]:
        return sorted({g for kind, passes in self._passes.items() if kind[0] == size for g in passes})

    def plain(self, load: Load) -> float | None:
        """Of a pass without guesses; None if it was measured with no such batch."""
        kind = _kind(load)
        return float(self.passes(load)[0]) if kind in self._curves or self._near(kind) else None

    def step(self, load: Load) -> float:
        """Of a drafter's step; 0 while it is not known."""
        found = self._steps.get(_kind(load)[0])
        return 0.0 if found is None or found.value is None else found.value

    def missed(self, load: Load, tokens: int) -> float:
        """Of catching up with so many tokens a row: by what it took last, between what it is on a GPU, where
        tokens more cost nothing, and on a CPU, where they do."""
        return (self._missed.value or 0.0) * math.sqrt(tokens * load.batch)

    def passes(self, load: Load) -> Array:
        """`[most + 1]`, by g: as measured, on straight lines between, and on from there by the last slope.
        What was measured elsewhere gives the shape where little was measured here: after shorter or longer
        texts, all that is measured here bends it; of other batches, a plain pass sets the scale."""
        kind = _kind(load)
        if kind not in self._curves:
            self._curves[kind] = self._curve(kind)
        return self._curves[kind]

    def _curve(self, kind: Kind) -> Array:
        shape = self._line(self._near(kind)[0])
        if self._lengths(kind[0]) == [0]:
            others = [one for one, passes in self._passes.items() if 0 in passes and len(passes) > 1]
            if others:
                other = self._line(min(others, key=lambda one: _distance(one, kind)))
                shape = other * (shape[0] / other[0])
        here = self._passes.get(kind, {})
        known = sorted(here)
        if not known:
            return shape
        bent: Array = np.interp(
            np.arange(self.most + 1), known, [(here[g].value or 0.0) / shape[g] for g in known]
        )
        return shape * bent

    def _near(self, kind: Kind) -> list[Kind]:
        """Those with batches of this size of which a plain pass is known: those with the most lengths first,
        then the nearest."""
        some = (one for one, passes in self._passes.items() if one[0] == kind[0] and 0 in passes)
        return sorted(some, key=lambda one: (-len(self._passes[one]), _distance(one, kind)))

    def _line(self, kind: Kind) -> Array:
        passes = self._passes[kind]
        known = sorted(passes)
        seconds = np.array([passes[g].value for g in known], dtype=float)
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
