"""Cost model: the seconds of steps, measured while they run."""

from __future__ import annotations

import functools
import math

import numpy as np

from outpace.policy.acceptance import Array
from outpace.policy.base import Load

MIN_WEIGHT = 0.1  # weight of a measurement in its mean, once there are many
# Tokens that a catch-up is assumed to process in the time of one draft step, until it is measured:
TOKENS_PER_DRAFT_STEP = 16  # tokens per sequence
MAX_TOKENS_PER_DRAFT_STEP = 256  # tokens of all sequences together, at most
MIN_BASE_FRACTION = 0.05  # smallest fraction of a pass's time that is not due to its context
RECENT_CAPTURES = 4  # captures that the mean is over
MIN_SECONDS = 1e-9  # seconds; shorter measurements count as this
DRAFT_DECAY = 0.99  # factor on the weight of a number of draft steps after each later draft
MAX_OUTLIER_RUN = 16  # consecutive outliers that widen the bound, at most
ZERO_STEPS_WEIGHT = 0.25  # measurements; weight of the prior that a draft of 0 steps takes 0 seconds
OUTLIER_FACTOR = 1.3  # times longer or shorter than expected; measurements beyond this are clipped
FAR_CONTEXT = 256  # tokens; after such a change of context, large differences are plausible
MAX_EXTRAPOLATION = 0.2  # fraction that a longer context may add to a baseline pass without a measurement
STALE_AFTER = 384  # passes after which a measurement may no longer hold
DENSE_PASSES = 16  # first passes of each g, which all enter the regression on context
REGRESSION_INTERVAL = 4  # passes; later, one pass in 4 enters the regression, to save time
CATCH_UP_DECAY = 0.8  # factor on the weight of a catch-up after each later one
CATCH_UP_OUTLIER_FACTOR = 2.0  # times as long as expected; a longer catch-up is clipped to this


class ContextSlope:
    """Fraction by which a forward pass takes longer for each token of context.

    The fraction is assumed to be the same for every number of draft tokens g. On a CPU, more tokens in a pass
    make attention and all other operations slower alike. On a GPU, they make neither slower. The estimate is
    the regression of seconds on context, within each g.

    Attributes:
        value: Added seconds per token of context, as a fraction of the seconds without context.
    """

    DECAY = 0.998  # factor on the weight of a measurement for each later one
    PRIOR_WEIGHT = 1e4  # squared tokens; prior weight of a slope of 0
    MAX_DEVIATION = 1024  # tokens from the mean context; limits the weight of a single pass

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
        weight = max(1 / (count + 1), 1 - self.DECAY)
        more_context, more_seconds = context - mean_context, seconds - mean_seconds
        self._means[g] = count + 1, mean_context + weight * more_context, mean_seconds + weight * more_seconds
        pass_weight = (1 - weight) * min(1.0, self.MAX_DEVIATION / max(abs(more_context), 1.0)) ** 2
        self._sums = {
            each: (self.DECAY * product, self.DECAY * square)
            for each, (product, square) in self._sums.items()
        }
        products, squares = self._sums.get(g, (0.0, 0.0))
        self._sums[g] = (
            products + pass_weight * more_context * more_seconds,
            squares + pass_weight * more_context**2,
        )
        for _ in range(16):  # repeated, because the times without context depend on the slope
            before, self.value = self.value, self._fit()
            if abs(self.value - before) <= 0.005 * before:
                break

    def _fit(self) -> float:
        """Return the fraction that fits the passes of all g best, relative to their time without context."""
        products = squares = max_base = 0.0
        for g, (product, square) in self._sums.items():
            _, context, seconds = self._means[g]
            base = max(MIN_BASE_FRACTION * seconds, self.without_context(seconds, context))
            products, squares = products + base * product, squares + base**2 * square
            max_base = max(max_base, base)
        return max(0.0, products / (squares + self.PRIOR_WEIGHT * max_base**2))

    def without_context(self, seconds: float, context: float) -> float:
        """Return the seconds that a pass would take without its context."""
        return seconds / (1 + self.value * context)

    def factor(self, context: float) -> float:
        """Return the factor by which a context makes a pass longer."""
        return 1 + self.value * context


class RobustMean:
    """Running mean that forgets, and that outliers move little.

    It starts with the smaller of the first two values, because one of them may have been a warm-up.

    Attributes:
        count: Number of values.
        value: The mean.
        context: Mean context of the values, in tokens.
    """

    def __init__(self) -> None:
        self.count = 0
        self.value = math.inf
        self.context = 0.0
        self._last = math.inf, 0.0  # the last value, and its context
        # Consecutive outliers above the expectation, or below (negative). A long run counts as a change.
        self._outlier_run = 0
        # Direction and value of an outlier after a change of context: the next value may confirm it
        self._unconfirmed: tuple[int, float] | None = None

    @property
    def confirmed(self) -> bool:
        """True if there is more than one value."""
        return self.count > 1

    def restart(self) -> None:
        """Start again, because the values are old.

        The smaller of the last value and the next one then counts.
        """
        self.count, self._outlier_run, self._unconfirmed = min(self.count, 1), 0, None
        self.value, self.context = self._last

    def add(self, value: float, context: float = 0.0, slope: ContextSlope | None = None) -> float | None:
        """Add a value, clipped if it is an outlier.

        Args:
            value: Measured seconds.
            context: Context of the measurement, in tokens.
            slope: Correction for the context. None: no correction.

        Returns:
            The value as it was counted, or None for an outlier that the next value must confirm.
        """
        value = max(value, MIN_SECONDS)
        self._last = value, context
        expected = (
            self.value
            if slope is None
            else slope.without_context(self.value, self.context) * slope.factor(context)
        )
        self.count += 1
        if self.count <= 2:
            if value < expected:
                self.value, self.context = value, context
            return value
        direction = int(value > expected * OUTLIER_FACTOR) - int(value < expected / OUTLIER_FACTOR)
        far = abs(context - self.context) > FAR_CONTEXT
        if far and direction:
            unconfirmed, self._unconfirmed = self._unconfirmed, (direction, value)
            if unconfirmed is None or unconfirmed[0] != direction:
                return None
            self.value, self.context, self.count = min(unconfirmed[1], value), context, 3
            self._outlier_run, self._unconfirmed = 0, None
            return self.value
        self._unconfirmed = None
        same_direction = self._outlier_run * direction > 0
        bound = OUTLIER_FACTOR ** (1 + same_direction * min(abs(self._outlier_run), MAX_OUTLIER_RUN))
        self._outlier_run = self._outlier_run + direction if same_direction else direction
        value = min(max(value, expected / bound), expected * bound)
        # The more the context is estimated to add, the less certain the estimate is.
        context_effect = abs(expected / self.value - 1)
        weight = max(MIN_WEIGHT, 1 / self.count, min(context_effect, 0.5))
        self.value += weight * (value - self.value)
        self.context += weight * (context - self.context)
        return value


class Costs:
    """Measured seconds of target forward passes, draft steps, catch-ups and captures.

    Batches of similar size share their measurements. ``size_class`` groups them.

    Args:
        max_draft_tokens: Largest number of draft tokens.

    Attributes:
        capture_seconds: Mean seconds of recent captures.
        captures: Number of captures.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        self.max_draft_tokens = max_draft_tokens
        self._passes: dict[int, dict[int, RobustMean]] = {}  # by batch size, then g
        self._slopes: dict[int, ContextSlope] = {}  # by batch size
        # Results of `_measured` and `_curve`, without context, by batch size and `confirmed_only`:
        self._seconds: dict[tuple[int, bool], dict[int, float]] = {}
        self._curves: dict[tuple[int, bool], Array] = {}
        self._pass_counts: dict[int, int] = {}  # passes so far, by batch size
        self._last_pass: dict[tuple[int, int], int] = {}  # number of the last pass, by batch size and g
        self._longest_context: dict[int, float] = {}  # of baseline passes, in tokens, by batch size
        self._drafts: dict[int, dict[int, RobustMean]] = {}  # by batch size, then number of draft steps
        self._draft_counts: dict[int, int] = {}  # number of drafts, by batch size
        self._last_draft: dict[tuple[int, int], int] = {}  # number of the last draft, by size and steps
        # Lower bound of the seconds of a draft step, by batch size, where no step was timed by itself
        self._min_step_seconds: dict[int, float] = {}
        self._draft_lines: dict[int, tuple[float, float]] = {}  # results of `_fit_draft_line`, by batch size
        self._idle: dict[int, RobustMean] = {}  # seconds in which the device is idle, by batch size
        self._catch_up: dict[int, tuple[float, float]] = {}  # seconds and tokens, by batch size
        self.capture_seconds = 0.0
        self.captures = 0

    def record_pass(self, load: Load, g: int, seconds: float) -> None:
        """Record a forward pass of the target.

        Args:
            load: Size of the pass.
            g: Number of draft tokens per sequence. The pass is over g + 1 tokens per sequence.
            seconds: Duration of the pass.
        """
        size = size_class(load)
        slope = self._slopes.setdefault(size, ContextSlope())
        mean = self._passes.setdefault(size, {}).setdefault(g, RobustMean())
        if self.passes_since(load, g) > STALE_AFTER:
            mean.restart()
        elif mean.count == 2:  # the smaller of the first two, which is no outlier
            slope.add(g, mean.context, mean.value)
        counted = mean.add(seconds, load.context, slope)
        in_regression = mean.count < DENSE_PASSES or mean.count % REGRESSION_INTERVAL == 0
        if mean.count > 2 and counted is not None and in_regression:
            slope.add(g, load.context, counted)
        if g == 0 and counted is not None:
            self._longest_context[size] = max(self._longest_context.get(size, 0.0), load.context)
        self._seconds.clear()
        self._curves.clear()
        self._pass_counts[size] = self._last_pass[size, g] = self._pass_counts.get(size, 0) + 1

    def record_capture(self, seconds: float) -> None:
        """Record the seconds of a capture."""
        self.captures += 1
        self.capture_seconds += (seconds - self.capture_seconds) / min(self.captures, RECENT_CAPTURES)

    def record_draft(self, load: Load, steps: int, seconds: float, catch_up_seconds: float) -> None:
        """Record the time of draft steps and of a catch-up.

        Args:
            load: Size of the pass. Its ``catch_up_tokens`` are the tokens of the catch-up.
            steps: Number of draft steps.
            seconds: Duration of the draft steps. It includes a catch-up that was not timed by itself.
            catch_up_seconds: Duration of the catch-up. 0 if it was not timed by itself.
        """
        size, separate = size_class(load), catch_up_seconds > 0 or not load.catch_up_tokens
        drafts = self._drafts.setdefault(size, {})
        few_tokens = load.catch_up_tokens <= TOKENS_PER_DRAFT_STEP * load.batch
        estimated = catch_up_seconds
        if steps and (separate or (few_tokens and not drafts)):
            drafts.setdefault(steps, RobustMean()).add(seconds)
            self._draft_counts[size] = self._last_draft[size, steps] = self._draft_counts.get(size, 0) + 1
            self._draft_lines.pop(size, None)
        elif steps and drafts:
            drafting = float(self.draft_seconds(load)[min(steps, self.max_draft_tokens)])
            estimated = max(0.0, seconds + self.idle_seconds(load) - drafting)
        elif steps:  # a lower bound: as if each token of the catch-up had taken a draft step
            bound = seconds / (steps + load.catch_up_tokens / load.batch)
            self._min_step_seconds[size] = max(bound, self._min_step_seconds.get(size, 0.0))
            self._draft_lines.pop(size, None)
            return
        if catch_up_seconds or not few_tokens:
            self._record_catch_up(load, estimated)

    def record_idle(self, load: Load, seconds: float) -> None:
        """Record the seconds in which the device waited for the host to draft."""
        self._idle.setdefault(size_class(load), RobustMean()).add(seconds)

    def _record_catch_up(self, load: Load, seconds: float) -> None:
        """Record the time of a catch-up.

        The weight of a measurement is its number of tokens, because few tokens give a noisy estimate.
        """
        size = size_class(load)
        total, tokens = self._catch_up.get(size, (0.0, 0.0))
        if tokens:
            expected = max(
                self.catch_up_seconds(load), load.catch_up_tokens * self._initial_token_seconds(load)
            )
            seconds = min(seconds, CATCH_UP_OUTLIER_FACTOR * expected)
        self._catch_up[size] = (
            CATCH_UP_DECAY * total + seconds,
            CATCH_UP_DECAY * tokens + load.catch_up_tokens,
        )

    def measured(self, load: Load) -> list[int]:
        """Return the numbers of draft tokens that were measured more than once with such a batch."""
        return list(self._measured(size_class(load), True))

    def passes_since(self, load: Load, g: int) -> int:
        """Return the number of passes with such a batch since the last one with this g."""
        size = size_class(load)
        return self._pass_counts.get(size, 0) - self._last_pass.get((size, g), 0)

    def baseline_seconds(self, load: Load) -> float | None:
        """Return the seconds of a baseline pass, or None if none was measured with such a batch."""
        size = size_class(load)
        measured = self._measured(size, True)
        # A pass with draft tokens never takes less time than a baseline pass, so any faster one is a bound.
        return min(measured.values()) * self._slopes[size].factor(load.context) if 0 in measured else None

    def pass_count(self, load: Load) -> int:
        """Return the number of passes measured with such a batch."""
        return self._pass_counts.get(size_class(load), 0)

    def baseline_count(self, load: Load) -> int:
        """Return the number of baseline passes in the estimate for such a batch.

        After a long time without a baseline pass, the count starts again.
        """
        return self._passes[size_class(load)][0].count

    def draft_seconds(self, load: Load) -> Array:
        """Return the seconds of 0, 1, ... draft steps, including the idle time of the device.

        Returns:
            Seconds ``[max_draft_tokens + 1]``. They are 0 while nothing is known.
        """
        start, step = self._draft_line(size_class(load))
        seconds: Array = start + self.idle_seconds(load) + step * np.arange(self.max_draft_tokens + 1.0)
        seconds[0] = 0.0
        return seconds

    def idle_seconds(self, load: Load) -> float:
        """Return the seconds in which the device waits for the host to draft; 0 if unknown."""
        mean = self._idle.get(size_class(load))
        return 0.0 if mean is None else mean.value

    def draft_step_seconds(self, load: Load) -> float:
        """Return the seconds of one more draft step."""
        return self._draft_line(size_class(load))[1]

    def _draft_line(self, size: int) -> tuple[float, float]:
        """Return the seconds to start a draft, and the seconds of each draft step.

        This is the least-squares line through the measurements. The first step of a draft may take longer
        than the others, for example because the target used the CPU's caches before. The two numbers are
        uncertain while all drafts have the same number of steps.
        """
        if size not in self._draft_lines:
            self._draft_lines[size] = self._fit_draft_line(size)
        return self._draft_lines[size]

    def _fit_draft_line(self, size: int) -> tuple[float, float]:
        drafts = self._drafts.get(size, {})
        if not drafts:
            return 0.0, self._min_step_seconds.get(size, 0.0)
        confirmed = any(mean.confirmed for mean in drafts.values())  # a single value may have been a warm-up
        weight, steps, seconds, squares, products = ZERO_STEPS_WEIGHT, 0.0, 0.0, 0.0, 0.0
        for n, mean in drafts.items():
            if mean.confirmed or not confirmed:
                decay = DRAFT_DECAY ** (self._draft_counts[size] - self._last_draft[size, n])
                each = decay * min(mean.count, 1 / MIN_WEIGHT)
                weight, steps, seconds = weight + each, steps + each * n, seconds + each * mean.value
                squares, products = squares + each * n * n, products + each * n * mean.value
        steps, seconds = steps / weight, seconds / weight
        step = (products - weight * steps * seconds) / (squares - weight * steps**2)
        if 0 <= step * steps <= seconds:
            return seconds - step * steps, step
        return 0.0, seconds / steps

    def catch_up_seconds(self, load: Load) -> float:
        """Return the expected seconds of the catch-up on ``load.catch_up_tokens``.

        They follow from the measured seconds per token. Before any measurement, they follow from the seconds
        of a draft step.
        """
        if not load.catch_up_tokens:
            return 0.0
        seconds, tokens = self._catch_up.get(size_class(load)) or (self._initial_token_seconds(load), 1.0)
        return load.catch_up_tokens * seconds / tokens

    def _initial_token_seconds(self, load: Load) -> float:
        """Return the catch-up seconds per token that are assumed before any measurement."""
        tokens = min(TOKENS_PER_DRAFT_STEP * load.batch, MAX_TOKENS_PER_DRAFT_STEP)
        return self.draft_step_seconds(load) / tokens

    def pass_seconds(self, load: Load, confirmed_only: bool = True) -> Array:
        """Return the expected seconds of target forward passes, by number of draft tokens g.

        Between measured g they are interpolated linearly, and beyond the largest measured g extrapolated.
        They never decrease with g. If only baseline passes were measured with such a batch, the ratios to the
        baseline are those of a smaller batch.

        Args:
            load: Size of the pass.
            confirmed_only: True to ignore values that were measured only once.

        Returns:
            Seconds ``[max_draft_tokens + 1]``.
        """
        size = size_class(load)
        if (size, confirmed_only) not in self._curves:
            curve = self._curve(size, confirmed_only)
            self._curves[size, confirmed_only] = np.minimum.accumulate(curve[::-1])[::-1]
        seconds: Array = self._curves[size, confirmed_only] * self._slopes[size].factor(load.context)
        return seconds

    def context_unmeasured(self, load: Load) -> bool:
        """Return whether this context is much longer than that of any measured baseline pass."""
        slope, longest = self._slopes[size_class(load)], self._longest_context.get(size_class(load), 0.0)
        return slope.factor(load.context) > (1 + MAX_EXTRAPOLATION) * slope.factor(longest)

    def _curve(self, size: int, confirmed_only: bool) -> Array:
        measured = self._measured(size, confirmed_only)
        if list(measured) != [0]:
            return self._interpolate(measured)
        smaller = [
            each for each in sorted(self._passes) if each < size and len(self._measured(each, True)) > 1
        ]
        smaller = [each for each in smaller if 0 in self._measured(each, True)]
        shape = (
            self._interpolate(self._measured(smaller[-1], True))
            if smaller
            else np.ones(self.max_draft_tokens + 1)
        )
        curve: Array = np.maximum(shape / shape[0], 1.0) * measured[0]
        return curve

    def _measured(self, size: int, confirmed_only: bool) -> dict[int, float]:
        """Return the seconds by g, as they would be without any context."""
        if (size, confirmed_only) not in self._seconds:
            self._seconds[size, confirmed_only] = {
                g: self._slopes[size].without_context(mean.value, mean.context)
                for g, mean in sorted(self._passes.get(size, {}).items())
                if mean.confirmed or not confirmed_only
            }
        return self._seconds[size, confirmed_only]

    def _interpolate(self, measured: dict[int, float]) -> Array:
        known, seconds = list(measured), list(measured.values())
        curve: Array = np.interp(np.arange(self.max_draft_tokens + 1), known, seconds)
        if len(known) > 1 and known[-1] < self.max_draft_tokens:
            slope = max(0.0, (seconds[-1] - seconds[-2]) / (known[-1] - known[-2]))
            curve[known[-1] :] = seconds[-1] + slope * np.arange(self.max_draft_tokens + 1 - known[-1])
        return curve


def size_class(load: Load) -> int:
    """Return the size class of a batch.

    There are four classes per doubling of the batch size, so each covers a range of about 19 %.
    """
    return _size_class(load.batch)


@functools.cache
def _size_class(batch: int) -> int:
    return round(4 * math.log2(batch))
