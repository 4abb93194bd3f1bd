"""What iterations take, as measured while they are run."""

from __future__ import annotations

import functools
import math

import numpy as np

from outpace.length.base import Load
from outpace.length.belief import Array

NEW = 0.1  # weight of a measurement, once there are some
AT_ONCE = 16  # tokens of a row that are read in a draft's step, about
TOGETHER = 256  # tokens of all rows that are, as long as nothing is known of it
LEAST = 0.05  # of what a pass takes, that is not due to its text
RECENT = 4  # lengths that were made ready, by which the next one is judged
TICK = 1e-9  # seconds: less is none of a clock
PAST = 0.99  # what is left of the weight of a number of steps after each draft of another
MOST_ODD = 16  # of those in a row, that count
STILL = 0.25  # weight of a draft of no steps, which takes nothing
WILD = 1.3  # times as long, or as short, as expected: more than that is an accident, and counts as that
FAR = 256  # tokens: after a text that much longer or shorter much may be expected
BEYOND = 0.2  # of a plain pass, that a longer text adds by what is thought: further, it is to be measured
STALE = 384  # passes after which what was measured may no longer hold
SOME = 16  # passes of a length that are all looked at for what a text adds to them,
OF_MANY = 4  # and of how many later ones one is: that takes time, too
LATELY = 0.8  # what is left of what reading took after another
ODD = 2.0  # times as long as expected: more of a reading is an accident


class Slope:
    """By what share of what they take without a text passes take longer for each token of it, all lengths
    alike: on a CPU attention takes longer for more tokens, as all does; on a GPU neither. The regression of
    times on contexts, within lengths."""

    FADE = 0.998  # what is left of a measurement's weight after another
    CALM = 1e4  # squared tokens apart, of measurements that would show none
    MOST = 1024  # tokens apart that count as such: a single one is not to outweigh all others

    def __init__(self) -> None:
        self.value = 0.0
        # By g: how many, mean context, mean seconds; and sums of products and squares of what is off them
        self._means: dict[int, tuple[int, float, float]] = {}
        self._sums: dict[int, tuple[float, float]] = {}

    def add(self, g: int, context: float, seconds: float) -> None:
        count, mean_context, mean_seconds = self._means.get(g, (0, context, seconds))
        weight = max(1 / (count + 1), 1 - self.FADE)
        apart, longer = context - mean_context, seconds - mean_seconds
        self._means[g] = count + 1, mean_context + weight * apart, mean_seconds + weight * longer
        counts = (1 - weight) * min(1.0, self.MOST / max(abs(apart), 1.0)) ** 2
        self._sums = {one: (self.FADE * p, self.FADE * q) for one, (p, q) in self._sums.items()}
        products, squares = self._sums.get(g, (0.0, 0.0))
        self._sums[g] = products + counts * apart * longer, squares + counts * apart**2
        for _ in range(16):  # what they would take without a text depends on it
            before, self.value = self.value, self._fit()
            if abs(self.value - before) <= 0.005 * before:
                break

    def _fit(self) -> float:
        """The share with which all lengths fit best, each by what it takes without a text."""
        products = squares = most = 0.0
        for g, (p, q) in self._sums.items():
            _, context, seconds = self._means[g]
            base = max(LEAST * seconds, self.without(seconds, context))
            products, squares, most = products + base * p, squares + base**2 * q, max(most, base)
        return max(0.0, products / (squares + self.CALM * most**2))

    def without(self, seconds: float, context: float) -> float:
        """What took so long after so many tokens, without them."""
        return seconds / (1 + self.value * context)

    def times(self, context: float) -> float:
        """As long as without any, after so many tokens."""
        return 1 + self.value * context


class Mean:
    """A running mean that forgets, and that accidents move little: it begins with the less of the first two,
    of which one may have been a warm-up.

    at  the mean of where that was: tokens of the texts
    """

    def __init__(self) -> None:
        self.count = 0
        self.value = math.inf
        self.at = 0.0
        self._last = math.inf, 0.0  # the last value, and where that was
        self._odd = 0  # values in a row that were far above what was expected, or below: many are no accident
        # The last value and its side, if it was odd and after another text: the next may confirm it
        self._held: tuple[int, float] | None = None

    @property
    def sure(self) -> bool:
        return self.count > 1

    def begin_again(self) -> None:
        """It was long ago: of what came last and what comes next, the less."""
        self.count, self._odd, self._held = min(self.count, 1), 0, None
        self.value, self.at = self._last

    def add(self, value: float, at: float = 0.0, slope: Slope | None = None) -> float | None:
        """Returns what was made of the value, which may have been an accident; None if nothing yet."""
        value = max(value, TICK)
        self._last = value, at
        expected = self.value if slope is None else slope.without(self.value, self.at) * slope.times(at)
        self.count += 1
        if self.count <= 2:
            if value < expected:
                self.value, self.at = value, at
            return value
        side = int(value > expected * WILD) - int(value < expected / WILD)
        far = abs(at - self.at) > FAR
        if far and side:
            held, self._held = self._held, (side, value)
            if held is None or held[0] != side:
                return None
            self.value, self.at, self.count = min(held[1], value), at, 3
            self._odd, self._held = 0, None
            return self.value
        self._held = None
        wild = WILD ** (1 + (self._odd * side > 0) * min(abs(self._odd), MOST_ODD))
        self._odd = self._odd + side if self._odd * side > 0 else side
        value = min(max(value, expected / wild), expected * wild)
        # The more the text is thought to add, the less is known of it.
        longer = abs(expected / self.value - 1)
        weight = max(NEW, 1 / self.count, min(longer, 0.5))
        self.value += weight * (value - self.value)
        self.at += weight * (at - self.at)
        return value


class Costs:
    """Seconds of the target's passes over g + 1 tokens a row, of draft steps, of catching up after a rest,
    and of making lengths ready, for batches that are about as large."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._passes: dict[int, dict[int, Mean]] = {}  # by size of the batch
        self._slopes: dict[int, Slope] = {}
        # What follows from them, without any text, by size of the batch and whether they have to be sure:
        self._seconds: dict[tuple[int, bool], dict[int, float]] = {}
        self._curves: dict[tuple[int, bool], Array] = {}
        self._noted: dict[int, int] = {}  # passes so far, by size of the batch
        self._last: dict[tuple[int, int], int] = {}  # the last of each size and g
        self._furthest: dict[int, float] = {}  # tokens of the longest text that a plain one was after
        self._drafts: dict[int, dict[int, Mean]] = {}  # by size of the batch, then number of steps
        self._drafted: dict[int, int] = {}  # how many there were, by size
        self._last_draft: dict[tuple[int, int], int] = {}  # the last of each size and number of steps
        self._least: dict[int, float] = {}  # of a step, where none was timed by itself
        self._draft_lines: dict[int, tuple[float, float]] = {}  # what follows from them, by size of the batch
        self._waits: dict[int, Mean] = {}  # of a device that waits for guesses, by size of the batch
        self._missed: dict[int, tuple[float, float]] = {}  # seconds and tokens that were read belatedly
        self.making = 0.0  # of making a length ready, about
        self.made = 0  # how many were

    def note(self, load: Load, g: int, seconds: float) -> None:
        """Of a pass."""
        size = size_of(load)
        slope = self._slopes.setdefault(size, Slope())
        mean = self._passes.setdefault(size, {}).setdefault(g, Mean())
        if self.since(load, g) > STALE:
            mean.begin_again()
        elif mean.count == 2:  # of the first two, the one that was no accident
            slope.add(g, mean.at, mean.value)
        usual = mean.add(seconds, load.context, slope)
        if mean.count > 2 and usual is not None and (mean.count < SOME or mean.count % OF_MANY == 0):
            slope.add(g, load.context, usual)
        if g == 0 and usual is not None:
            self._furthest[size] = max(self._furthest.get(size, 0.0), load.context)
        self._seconds.clear()
        self._curves.clear()
        self._noted[size] = self._last[size, g] = self._noted.get(size, 0) + 1

    def note_making(self, seconds: float) -> None:
        """Of making passes of some length ready."""
        self.made += 1
        self.making += (seconds - self.making) / min(self.made, RECENT)

    def note_draft(self, load: Load, steps: int, seconds: float, catching_up: float) -> None:
        """Of so many steps, and of reading what the draft had not read before, whether that was timed by
        itself or is part of the steps."""
        size, apart = size_of(load), catching_up > 0 or not load.unread
        drafts, few = self._drafts.setdefault(size, {}), load.unread <= AT_ONCE * load.batch
        reading = catching_up
        if steps and (apart or (few and not drafts)):
            drafts.setdefault(steps, Mean()).add(seconds)
            self._drafted[size] = self._last_draft[size, steps] = self._drafted.get(size, 0) + 1
            self._draft_lines.pop(size, None)
        elif steps and drafts:
            reading = max(0.0, seconds + self.wait(load) - float(self.drafts(load)[min(steps, self.most)]))
        elif steps:  # at least so much, as if each token had taken a step
            least = seconds / (steps + load.unread / load.batch)
            self._least[size] = max(least, self._least.get(size, 0.0))
            self._draft_lines.pop(size, None)
            return
        if catching_up or not few:
            self._note_reading(load, reading)

    def note_wait(self, load: Load, seconds: float) -> None:
        """Of a device, before guesses."""
        self._waits.setdefault(size_of(load), Mean()).add(seconds)

    def _note_reading(self, load: Load, seconds: float) -> None:
        """Of what was missed: tokens count alike, as of few it is hard to tell."""
        size = size_of(load)
        total, tokens = self._missed.get(size, (0.0, 0.0))
        if tokens:
            seconds = min(seconds, ODD * max(self.missed(load), load.unread * self._at_first(load)))
        self._missed[size] = LATELY * total + seconds, LATELY * tokens + load.unread

    def known(self, load: Load) -> list[int]:
        """The g that were measured with such a batch, more than once."""
        return list(self._measured(size_of(load), True))

    def since(self, load: Load, g: int) -> int:
        """Passes with such a batch since the last with so many guesses."""
        size = size_of(load)
        return self._noted.get(size, 0) - self._last.get((size, g), 0)

    def plain(self, load: Load) -> float | None:
        """Of a pass without guesses; None if it was measured with no such batch."""
        size = size_of(load)
        measured = self._measured(size, True)
        # More tokens never take less.
        return min(measured.values()) * self._slopes[size].times(load.context) if 0 in measured else None

    def count(self, load: Load) -> int:
        """How many passes were measured with such a batch."""
        return self._noted.get(size_of(load), 0)

    def plainly(self, load: Load) -> int:
        """Passes of such a batch without guesses that are known, none of them from too long ago."""
        return self._passes[size_of(load)][0].count

    def drafts(self, load: Load) -> Array:
        """`[most + 1]`: of so many steps of a drafter, and of waiting for them; 0 while nothing is known."""
        start, step = self._draft_line(size_of(load))
        found: Array = start + self.wait(load) + step * np.arange(self.most + 1.0)
        found[0] = 0.0
        return found

    def wait(self, load: Load) -> float:
        """Of a device that waits for guesses, or after them; 0 while nothing is known."""
        known = self._waits.get(size_of(load))
        return 0.0 if known is None else known.value

    def step(self, load: Load) -> float:
        """Of another step of a drafter."""
        return self._draft_line(size_of(load))[1]

    def _draft_line(self, size: int) -> tuple[float, float]:
        """Of beginning with steps, and of each: the line that is closest to what was measured. The first step
        takes longer than others, where caches were another's meanwhile; how much longer is not known as long
        as there always were as many."""
        if size not in self._draft_lines:
            self._draft_lines[size] = self._closest(size)
        return self._draft_lines[size]

    def _closest(self, size: int) -> tuple[float, float]:
        drafts = self._drafts.get(size, {})
        if not drafts:
            return 0.0, self._least.get(size, 0.0)
        sure = any(one.sure for one in drafts.values())  # otherwise it may have been a warm-up
        weight, steps, seconds, squares, products = STILL, 0.0, 0.0, 0.0, 0.0
        for n, one in drafts.items():
            if one.sure or not sure:
                faded = PAST ** (self._drafted[size] - self._last_draft[size, n])
                each = faded * min(one.count, 1 / NEW)
                weight, steps, seconds = weight + each, steps + each * n, seconds + each * one.value
                squares, products = squares + each * n * n, products + each * n * one.value
        steps, seconds = steps / weight, seconds / weight
        step = (products - weight * steps * seconds) / (squares - weight * steps**2)
        if 0 <= step * steps <= seconds:
            return seconds - step * steps, step
        return 0.0, seconds / steps

    def missed(self, load: Load) -> float:
        """Of reading what was not read, by what a token took; at first by what a step takes."""
        if not load.unread:
            return 0.0
        seconds, tokens = self._missed.get(size_of(load)) or (self._at_first(load), 1.0)
        return load.unread * seconds / tokens

    def _at_first(self, load: Load) -> float:
        """Of reading a token, as long as nothing is known of it."""
        return self.step(load) / min(AT_ONCE * load.batch, TOGETHER)

    def passes(self, load: Load, sure: bool = True) -> Array:
        """`[most + 1]`, by g: as measured, on straight lines between, and on from there by the last slope;
        more tokens never take less. Where only a plain pass was measured with such a batch, a smaller one
        gives the shape. sure: what was measured once does not count."""
        size = size_of(load)
        if (size, sure) not in self._curves:
            self._curves[size, sure] = np.minimum.accumulate(self._curve(size, sure)[::-1])[::-1]
        found: Array = self._curves[size, sure] * self._slopes[size].times(load.context)
        return found

    def beyond(self, load: Load) -> bool:
        """Whether plain passes were measured after much shorter texts alone."""
        slope, furthest = self._slopes[size_of(load)], self._furthest.get(size_of(load), 0.0)
        return slope.times(load.context) > (1 + BEYOND) * slope.times(furthest)

    def _curve(self, size: int, sure: bool) -> Array:
        measured = self._measured(size, sure)
        if list(measured) != [0]:
            return self._line(measured)
        smaller = [one for one in sorted(self._passes) if one < size and len(self._measured(one, True)) > 1]
        smaller = [one for one in smaller if 0 in self._measured(one, True)]
        shape = self._line(self._measured(smaller[-1], True)) if smaller else np.ones(self.most + 1)
        found: Array = np.maximum(shape / shape[0], 1.0) * measured[0]
        return found

    def _measured(self, size: int, sure: bool) -> dict[int, float]:
        """Seconds by g, as they would be without any text before."""
        if (size, sure) not in self._seconds:
            self._seconds[size, sure] = {
                g: self._slopes[size].without(one.value, one.at)
                for g, one in sorted(self._passes.get(size, {}).items())
                if one.sure or not sure
            }
        return self._seconds[size, sure]

    def _line(self, measured: dict[int, float]) -> Array:
        known, seconds = list(measured), list(measured.values())
        found: Array = np.interp(np.arange(self.most + 1), known, seconds)
        if len(known) > 1 and known[-1] < self.most:
            slope = max(0.0, (seconds[-1] - seconds[-2]) / (known[-1] - known[-2]))
            found[known[-1] :] = seconds[-1] + slope * np.arange(self.most + 1 - known[-1])
        return found


def size_of(load: Load) -> int:
    """Batches that differ by less than a fifth are alike."""
    return _size(load.batch)


@functools.cache
def _size(batch: int) -> int:
    return round(4 * math.log2(batch))
