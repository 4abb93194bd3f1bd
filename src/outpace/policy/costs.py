"""Cost model: the seconds of steps, measured while they run."""

from __future__ import annotations

import functools
import math

import numpy as np

from outpace.policy.acceptance import Array
from outpace.policy.base import Load

NEW = 0.1  # weight of a measurement, once there are many
AT_ONCE = 16  # tokens per sequence that one draft step reads, about
TOGETHER = 256  # tokens of all sequences that one draft step reads, while none was measured
LEAST = 0.05  # of the time of a pass, that is not due to its context, at least
RECENT = 4  # captures that the mean is over
TICK = 1e-9  # seconds; no clock measures less
PAST = 0.99  # factor on the weight of a number of draft steps after each later draft
MOST_ODD = 16  # consecutive outliers that count, at most
STILL = 0.25  # weight of a draft of no steps, which takes no time
WILD = 1.3  # times as long, or as short, as expected; outliers beyond that are clipped to it
FAR = 256  # tokens; after such a change of context, large differences are plausible
BEYOND = 0.2  # of a baseline pass, that a longer context may add by estimate; more must be measured
STALE = 384  # passes after which a measurement may no longer hold
SOME = 16  # first passes of each g, which all enter the regression on context
OF_MANY = 4  # of the later ones, one in 4 does: the regression takes time, too
LATELY = 0.8  # factor on the weight of earlier catching up after each later one
ODD = 2.0  # times as long as expected; longer catching up is clipped to it


class Slope:
    """Fraction by which a pass takes longer for each token of context, the same for all g.

    On a CPU, attention takes longer for more tokens, and so does everything else. On a GPU, neither does. The
    estimate is the regression of times on contexts, within each g.

    Attributes:
        value: Fraction of the time without context, per token.
    """

    FADE = 0.998  # factor on the weight of a measurement for each later one
    CALM = 1e4  # squared tokens; prior weight of a slope of 0
    MOST = 1024  # tokens from the mean, at most: no single pass may outweigh all others

    def __init__(self) -> None:
        self.value = 0.0
        # By g: count, mean context, mean seconds; then sums of products and squares of deviations from them
        self._means: dict[int, tuple[int, float, float]] = {}
        self._sums: dict[int, tuple[float, float]] = {}

    def add(self, g: int, context: float, seconds: float) -> None:
        """Add a measured pass.

        Args:
            g: Number of draft tokens.
            context: Tokens of the longest sequence.
            seconds: Duration of the pass.
        """
        count, mean_context, mean_seconds = self._means.get(g, (0, context, seconds))
        weight = max(1 / (count + 1), 1 - self.FADE)
        apart, longer = context - mean_context, seconds - mean_seconds
        self._means[g] = count + 1, mean_context + weight * apart, mean_seconds + weight * longer
        counts = (1 - weight) * min(1.0, self.MOST / max(abs(apart), 1.0)) ** 2
        self._sums = {one: (self.FADE * p, self.FADE * q) for one, (p, q) in self._sums.items()}
        products, squares = self._sums.get(g, (0.0, 0.0))
        self._sums[g] = products + counts * apart * longer, squares + counts * apart**2
        for _ in range(16):  # the times without context depend on the slope
            before, self.value = self.value, self._fit()
            if abs(self.value - before) <= 0.005 * before:
                break

    def _fit(self) -> float:
        """Return the fraction that fits all g best, each relative to its time without context."""
        products = squares = most = 0.0
        for g, (p, q) in self._sums.items():
            _, context, seconds = self._means[g]
            base = max(LEAST * seconds, self.without(seconds, context))
            products, squares, most = products + base * p, squares + base**2 * q, max(most, base)
        return max(0.0, products / (squares + self.CALM * most**2))

    def without(self, seconds: float, context: float) -> float:
        """Return the seconds that a pass would take without its context."""
        return seconds / (1 + self.value * context)

    def times(self, context: float) -> float:
        """Return the factor by which a context makes a pass longer."""
        return 1 + self.value * context


class Mean:
    """Running mean that forgets, and that outliers move little.

    It starts with the smaller of the first two values, because one of them may have been a warm-up.

    Attributes:
        count: Number of values.
        value: The mean.
        at: Mean context of the values, in tokens.
    """

    def __init__(self) -> None:
        self.count = 0
        self.value = math.inf
        self.at = 0.0
        self._last = math.inf, 0.0  # the last value, and its context
        self._odd = 0  # consecutive outliers above the expectation, or below (negative): many are believed
        # Side and value of an outlier after a change of context: the next value may confirm it
        self._held: tuple[int, float] | None = None

    @property
    def sure(self) -> bool:
        """True if there is more than one value."""
        return self.count > 1

    def begin_again(self) -> None:
        """Start again, because the values are old.

        The smaller of the last value and the next one then counts.
        """
        self.count, self._odd, self._held = min(self.count, 1), 0, None
        self.value, self.at = self._last

    def add(self, value: float, at: float = 0.0, slope: Slope | None = None) -> float | None:
        """Add a value, clipped if it is an outlier.

        Args:
            value: Measured seconds.
            at: Context of the measurement, in tokens.
            slope: Correction for the context. None: no correction.

        Returns:
            The value as it was counted, or None for an outlier that the next value must confirm.
        """
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
        # The more the context is estimated to add, the less certain the estimate is.
        longer = abs(expected / self.value - 1)
        weight = max(NEW, 1 / self.count, min(longer, 0.5))
        self.value += weight * (value - self.value)
        self.at += weight * (at - self.at)
        return value


class Costs:
    """Measured seconds of target passes, draft steps, catching up and captures.

    Batches of about the same size share their measurements.

    Args:
        most: Largest number of draft tokens.

    Attributes:
        making: Mean seconds of recent captures.
        made: Number of captures.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._passes: dict[int, dict[int, Mean]] = {}  # by batch size
        self._slopes: dict[int, Slope] = {}
        # Results of `_measured` and `_curve`, without context, by batch size and `sure`:
        self._seconds: dict[tuple[int, bool], dict[int, float]] = {}
        self._curves: dict[tuple[int, bool], Array] = {}
        self._noted: dict[int, int] = {}  # passes so far, by batch size
        self._last: dict[tuple[int, int], int] = {}  # number of the last pass, by batch size and g
        self._furthest: dict[int, float] = {}  # longest context of a baseline pass, by batch size
        self._drafts: dict[int, dict[int, Mean]] = {}  # by batch size, then number of draft steps
        self._drafted: dict[int, int] = {}  # number of drafts, by batch size
        self._last_draft: dict[tuple[int, int], int] = {}  # number of the last draft, by size and steps
        self._least: dict[int, float] = {}  # least seconds of a draft step, where none was timed by itself
        self._draft_lines: dict[int, tuple[float, float]] = {}  # results of `_closest`, by batch size
        self._waits: dict[int, Mean] = {}  # wait of the device for draft tokens, by batch size
        self._missed: dict[int, tuple[float, float]] = {}  # seconds and tokens of catching up, by batch size
        self.making = 0.0  # seconds
        self.made = 0

    def note(self, load: Load, g: int, seconds: float) -> None:
        """Record a target pass.

        Args:
            load: Size of the pass.
            g: Draft tokens per row. The pass is over g + 1 tokens per row.
            seconds: Duration of the pass.
        """
        size = size_of(load)
        slope = self._slopes.setdefault(size, Slope())
        mean = self._passes.setdefault(size, {}).setdefault(g, Mean())
        if self.since(load, g) > STALE:
            mean.begin_again()
        elif mean.count == 2:  # the smaller of the first two, which is no outlier
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
        """Record the seconds of a capture."""
        self.made += 1
        self.making += (seconds - self.making) / min(self.made, RECENT)

    def note_draft(self, load: Load, steps: int, seconds: float, catching_up: float) -> None:
        """Record the time of draft steps and of catching up.

        Args:
            load: Size of the pass, with the tokens that the draft had not read.
            steps: Number of draft steps.
            seconds: Duration of the draft steps. It includes catching up that was not timed by itself.
            catching_up: Duration of catching up, if that was timed by itself.
        """
        size, apart = size_of(load), catching_up > 0 or not load.unread
        drafts, few = self._drafts.setdefault(size, {}), load.unread <= AT_ONCE * load.batch
        reading = catching_up
        if steps and (apart or (few and not drafts)):
            drafts.setdefault(steps, Mean()).add(seconds)
            self._drafted[size] = self._last_draft[size, steps] = self._drafted.get(size, 0) + 1
            self._draft_lines.pop(size, None)
        elif steps and drafts:
            reading = max(0.0, seconds + self.wait(load) - float(self.drafts(load)[min(steps, self.most)]))
        elif steps:  # a lower bound: as if each unread token had taken a step
            least = seconds / (steps + load.unread / load.batch)
            self._least[size] = max(least, self._least.get(size, 0.0))
            self._draft_lines.pop(size, None)
            return
        if catching_up or not few:
            self._note_reading(load, reading)

    def note_wait(self, load: Load, seconds: float) -> None:
        """Record the seconds in which the device waited for draft tokens."""
        self._waits.setdefault(size_of(load), Mean()).add(seconds)

    def _note_reading(self, load: Load, seconds: float) -> None:
        """Record the time of catching up.

        All tokens count alike, because a few tokens alone say little.
        """
        size = size_of(load)
        total, tokens = self._missed.get(size, (0.0, 0.0))
        if tokens:
            seconds = min(seconds, ODD * max(self.missed(load), load.unread * self._at_first(load)))
        self._missed[size] = LATELY * total + seconds, LATELY * tokens + load.unread

    def known(self, load: Load) -> list[int]:
        """Return the values of g that were measured more than once with such a batch."""
        return list(self._measured(size_of(load), True))

    def since(self, load: Load, g: int) -> int:
        """Return the number of passes with such a batch since the last one with this g."""
        size = size_of(load)
        return self._noted.get(size, 0) - self._last.get((size, g), 0)

    def plain(self, load: Load) -> float | None:
        """Return the seconds of a baseline pass, or None if none was measured with such a batch."""
        size = size_of(load)
        measured = self._measured(size, True)
        # More tokens never take less.
        return min(measured.values()) * self._slopes[size].times(load.context) if 0 in measured else None

    def count(self, load: Load) -> int:
        """Return the number of passes measured with such a batch."""
        return self._noted.get(size_of(load), 0)

    def plainly(self, load: Load) -> int:
        """Return the number of baseline passes that the estimate for such a batch rests on.

        Passes from too long ago do not count.
        """
        return self._passes[size_of(load)][0].count

    def drafts(self, load: Load) -> Array:
        """Return the seconds of 0, 1, ... draft steps, with the wait for them.

        Returns:
            Seconds ``[most + 1]``. They are 0 while nothing is known.
        """
        start, step = self._draft_line(size_of(load))
        found: Array = start + self.wait(load) + step * np.arange(self.most + 1.0)
        found[0] = 0.0
        return found

    def wait(self, load: Load) -> float:
        """Return the seconds in which the device waits for draft tokens or after them; 0 if unknown."""
        known = self._waits.get(size_of(load))
        return 0.0 if known is None else known.value

    def step(self, load: Load) -> float:
        """Return the seconds of one more draft step."""
        return self._draft_line(size_of(load))[1]

    def _draft_line(self, size: int) -> tuple[float, float]:
        """Return the seconds to start a draft, and the seconds of each draft step.

        This is the line closest to the measurements. The first step takes longer than others, where another
        model used the caches meanwhile. How much longer is unknown while all drafts had the same number of
        steps.
        """
        if size not in self._draft_lines:
            self._draft_lines[size] = self._closest(size)
        return self._draft_lines[size]

    def _closest(self, size: int) -> tuple[float, float]:
        drafts = self._drafts.get(size, {})
        if not drafts:
            return 0.0, self._least.get(size, 0.0)
        sure = any(one.sure for one in drafts.values())  # a single value may have been a warm-up
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
        """Return the seconds of catching up on the unread tokens.

        They follow from the measured seconds per token, and at first from those of a draft step.
        """
        if not load.unread:
            return 0.0
        seconds, tokens = self._missed.get(size_of(load)) or (self._at_first(load), 1.0)
        return load.unread * seconds / tokens

    def _at_first(self, load: Load) -> float:
        """Return the seconds to read one token, as assumed before any measurement."""
        return self.step(load) / min(AT_ONCE * load.batch, TOGETHER)

    def passes(self, load: Load, sure: bool = True) -> Array:
        """Return the seconds of target passes, by g.

        Times between measured g lie on straight lines. Beyond the longest measured g, the last slope goes on.
        More tokens never take less. If only baseline passes were measured with such a batch, a smaller batch
        gives the shape.

        Args:
            load: Size of the pass.
            sure: True to ignore values that were measured only once.

        Returns:
            Seconds ``[most + 1]``.
        """
        size = size_of(load)
        if (size, sure) not in self._curves:
            self._curves[size, sure] = np.minimum.accumulate(self._curve(size, sure)[::-1])[::-1]
        found: Array = self._curves[size, sure] * self._slopes[size].times(load.context)
        return found

    def beyond(self, load: Load) -> bool:
        """Return whether all measured baseline passes had a much shorter context."""
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
        """Return the seconds by g, as they would be without any context."""
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
    """Return the size class of a batch.

    Batches that differ by less than a fifth are alike.
    """
    return _size(load.batch)


@functools.cache
def _size(batch: int) -> int:
    return round(4 * math.log2(batch))
