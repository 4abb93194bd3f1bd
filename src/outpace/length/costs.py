"""What iterations take, as measured while they are run."""

from __future__ import annotations

import math

import numpy as np

from outpace.length.belief import Array

NEW = 0.1  # weight of a measurement, once there are some
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


class Costs:
    """Seconds of the target's passes over g + 1 tokens a row, of draft steps, and of catching up after a
    rest, for batches of about the same size."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._passes: dict[int, dict[int, Mean]] = {}  # by size of the batch, then by g
        self._steps: dict[int, Mean] = {}
        self._missed = Mean()  # of catching up, over the root of the tokens

    def note(self, batch: int, g: int, seconds: float) -> None:
        """Of a pass. The first one of its kind is a warm-up, and not counted."""
        passes = self._passes.setdefault(_size(batch), {})
        if g in passes:
            passes[g].add(seconds)
        else:
            passes[g] = Mean()

    def note_draft(self, batch: int, steps: int, seconds: float, catching_up: float, missed: int) -> None:
        """Of so many steps, and of catching up before with so many tokens, whether it was timed by itself or
        is part of the steps."""
        step = self._steps.setdefault(_size(batch), Mean())
        if not missed and steps:
            step.add(seconds / steps)
        if missed and steps and step.value is not None:
            catching_up += max(0.0, seconds - steps * step.value)
        if missed and catching_up:
            self._missed.add(catching_up / math.sqrt(missed * batch))

    def known(self, batch: int) -> list[int]:
        """The g that were measured."""
        passes = self._passes.get(_size(batch), {})
        return sorted(g for g, mean in passes.items() if mean.value is not None)

    def plain(self, batch: int) -> float | None:
        """Of a pass without guesses; None if it was not measured."""
        mean = self._passes.get(_size(batch), {}).get(0)
        return None if mean is None else mean.value

    def step(self, batch: int) -> float:
        """Of a drafter's step; 0 while it is not known."""
        found = self._steps.get(_size(batch))
        return 0.0 if found is None or found.value is None else found.value

    def missed(self, batch: int, tokens: int) -> float:
        """Of catching up with so many tokens a row: by what it took last, between what it is on a GPU, where
        tokens more cost nothing, and on a CPU, where they do."""
        return (self._missed.value or 0.0) * math.sqrt(tokens * batch)

    def passes(self, batch: int) -> Array:
        """`[most + 1]`, by g: as measured, on straight lines between, and on from there by the last slope.
        What was measured for another batch gives the shape where this one has nothing but a plain pass."""
        known = self.known(batch)
        if known == [0]:
            others = [size for size in self._passes if len(self.known(_batch(size))) > 1]
            if others:
                near = min(others, key=lambda size: abs(size - _size(batch)))
                shape = self.passes(_batch(near))
                scaled: Array = shape * ((self.plain(batch) or 0.0) / shape[0])
                return scaled
        seconds = np.array([self._passes[_size(batch)][g].value for g in known], dtype=float)
        found: Array = np.interp(np.arange(self.most + 1), known, seconds)
        if len(known) > 1 and known[-1] < self.most:
            slope = max(0.0, (seconds[-1] - seconds[-2]) / (known[-1] - known[-2]))
            found[known[-1] :] = seconds[-1] + slope * np.arange(self.most + 1 - known[-1])
        return found


def _size(batch: int) -> int:
    """Batches that differ by less than a fifth are one: the number of one of them."""
    return round(4 * math.log2(batch))


def _batch(size: int) -> int:
    """The one that gives its size its number."""
    return round(2 ** (size / 4))
