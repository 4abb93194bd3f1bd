"""The sampling step as Wagner et al. 2024 time it: Transformers, the exact rule and sigmoids.

Methods, one sequence each (B = 1), on synthetic logits:

- ``transformers``: the function that its assisted generation calls once per step.
- ``exact``: ``outpace.verify`` with rule token. As in the decoder, its verdict stays on the device.
- ``drop-in``: the same with Transformers' outputs, for which the host waits. ``patch()`` installs it.
- ``sigmoid``: ``outpace.verify`` with rule sigmoid and the paper's scale, ±10³ for speech and ±10⁴ for text.

*eager* is the time from Python. *graph* is the time inside a CUDA graph, which cannot capture methods that
wait for the device. *device* is the time that the GPU itself was busy, by PyTorch's profiler.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from outpace.bench import kernel
from outpace.bench.distance import Quality, positions, quality
from outpace.bench.kernel import Inputs, Method
from outpace.bench.vocabulary import VOCABULARIES, Vocabulary
from outpace.integrations.assisted import speculative_sampling
from outpace.verification.rules import Rule, parse, sigmoid

DRAFT_LENGTHS = tuple(range(1, 21))
ROUNDS = 20  # rounds of timing from Python; each of the four methods is first in five of them
PROFILED = 40  # calls under the profiler
SYNCHRONOUS = ("transformers", "drop-in")  # methods that wait for the device


@dataclass(frozen=True)
class Time:
    """Microseconds per step, and percentages saved.

    Values are None where there is nothing to time or to compare with.
    """

    microseconds: float | None
    saved: float | None  # against Transformers
    saved_on_exact: float | None  # by sigmoid


@dataclass(frozen=True)
class StepTiming:
    """Result of one method at one size."""

    vocabulary: str
    V: int
    g: int
    method: str
    rule: str
    eager: Time
    graph: Time  # saved against Transformers from Python, which cannot be captured
    device: Time
    gigabytes_per_second: float | None  # of the logits that have to be read, in device time
    peak_bytes: int | None
    quality: Quality


@dataclass(frozen=True)
class Bounds:
    """Extremes of one method at one vocabulary over all g.

    They are the longest times, the least saved, the most saved on exact, and the most memory.
    """

    vocabulary: str
    method: str
    eager: Time
    graph: Time
    device: Time
    peak_bytes: float | None
    quality: Quality


def methods(vocabulary: Vocabulary) -> dict[str, tuple[Method, Rule]]:
    """Return the call of each method, and the rule that it follows."""
    exact, approximate = parse("token"), sigmoid(-vocabulary.scale, vocabulary.scale)
    return {
        "transformers": (kernel.transformers_verify, exact),
        "exact": (partial(kernel.outpace_verify, rule=exact), exact),
        "drop-in": (drop_in, exact),
        "sigmoid": (partial(kernel.outpace_verify, rule=approximate), approximate),
    }


def drop_in(inputs: Inputs) -> Any:
    """Call the function that ``patch()`` installs in Transformers."""
    return speculative_sampling(inputs.tokens, inputs.draft, inputs.tokens.shape[1], inputs.target)


def measure(
    device: torch.device,
    dtype: torch.dtype,
    vocabularies: Sequence[Vocabulary] = VOCABULARIES,
    draft_lengths: Sequence[int] = DRAFT_LENGTHS,
) -> Iterator[StepTiming]:
    """Measure all methods at all sizes."""
    for vocabulary in vocabularies:
        V, known_methods = vocabulary.V, methods(vocabulary)
        inputs = positions(V, device, dtype)
        qualities = {name: quality(inputs, rule) for name, (_, rule) in known_methods.items()}
        for g in draft_lengths:
            sets = kernel.rotated(1, g, V, device, dtype)
            times = timed({name: call for name, (call, _) in known_methods.items()}, sets)
            for name, (call, rule) in known_methods.items():
                eager, graph, busy = (one[name] for one in times)
                rate = sets[0].nbytes / busy.microseconds / 1e3 if busy.microseconds else None
                yield StepTiming(
                    vocabulary.name,
                    V,
                    g,
                    name,
                    str(rule),
                    eager,
                    graph,
                    busy,
                    None if rate is None else round(rate, 1),
                    kernel.peak(call, sets[0]) if device.type == "cuda" else None,
                    qualities[name],
                )


def timed(calls: Mapping[str, Method], sets: Sequence[Inputs]) -> list[dict[str, Time]]:
    """Return the times of each method from Python, in a graph, and on the device."""
    cuda = sets[0].draft.is_cuda
    eager, graph, device = from_python(calls, sets), empty_lists(calls), empty_lists(calls)
    for name, call in calls.items():
        captured = kernel.in_graph(call, sets) if cuda and name not in SYNCHRONOUS else None
        graph[name] += [] if captured is None else [captured]
        device[name] += [device_busy(call, sets)] if cuda else []
    reference = (eager["transformers"], eager["transformers"], device["transformers"])
    return [compared(*pair) for pair in zip((eager, graph, device), reference, strict=True)]


def empty_lists(calls: Mapping[str, Method]) -> dict[str, list[float]]:
    """Return an empty list per method."""
    return {name: [] for name in calls}


def from_python(calls: Mapping[str, Method], sets: Sequence[Inputs]) -> dict[str, list[float]]:
    """Return microseconds per call of each method, round by round.

    In each round the methods follow one another, and another one is first.
    """
    count, names, microseconds = kernel.calls_per_timing(sets), list(calls), empty_lists(calls)
    runs = {name: partial(kernel.call_in_turn, call, sets, count) for name, call in calls.items()}
    for run in runs.values():
        run()
    for i in range(ROUNDS):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            microseconds[name].append(kernel.wall(runs[name], sets[0].draft.device, 1) / count)
    return microseconds


def device_busy(call: Method, sets: Sequence[Inputs]) -> float:
    """Return the microseconds that a GPU works in a call: kernels, copies and fills, without gaps."""
    kernel.call_in_turn(call, sets, 1)
    torch.cuda.synchronize()
    # `acc_events` only stops a warning about further cycles, of which there are none.
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        kernel.call_in_turn(call, sets, PROFILED)
        torch.cuda.synchronize()
    work = [event.device_time_total for event in seen.events() or () if event.device_type.name == "CUDA"]
    if not work:
        raise RuntimeError("PyTorch's profiler saw no work on the GPU; another profiler may hold it")
    return round(float(sum(work)) / PROFILED, 2)


def compared(times: Mapping[str, list[float]], transformers: list[float]) -> dict[str, Time]:
    """Return the median time of each method, with percentages saved.

    Args:
        times: Times of each method.
        transformers: Times of Transformers' function, which the others are compared with.
    """
    found = {}
    for name, measured in times.items():
        saved = None if name == "transformers" else percent_saved(measured, transformers)
        on_exact = percent_saved(measured, times["exact"]) if name == "sigmoid" else None
        found[name] = Time(round(statistics.median(measured), 2) if measured else None, saved, on_exact)
    return found


def percent_saved(measured: list[float], reference: list[float]) -> float | None:
    """Return the percentage saved, as the median of rounds.

    A processor's speed changes over time, but hardly within a round. A time that was measured once is
    compared with every round of the other.
    """
    if not measured or not reference:
        return None
    rounds = max(len(measured), len(reference))
    pairs = zip(measured * (rounds // len(measured)), reference * (rounds // len(reference)), strict=True)
    return round(100 * (1 - statistics.median(a / b for a, b in pairs)), 1)


def bounds(figures: Iterable[StepTiming]) -> list[Bounds]:
    """Return the extremes over all g; each is the one that is least favourable to the exact rule."""
    groups: dict[tuple[str, str], list[StepTiming]] = {}
    for one in figures:
        groups.setdefault((one.vocabulary, one.method), []).append(one)
    found = []
    for (vocabulary, method), some in groups.items():
        eager = worst([one.eager for one in some])
        graph = worst([one.graph for one in some])
        device = worst([one.device for one in some])
        memory = extreme(max, (one.peak_bytes for one in some))
        found.append(Bounds(vocabulary, method, eager, graph, device, memory, some[0].quality))
    return found


def worst(times: Sequence[Time]) -> Time:
    """Return the longest time, the least saved, and the most saved on exact."""
    return Time(
        extreme(max, (one.microseconds for one in times)),
        extreme(min, (one.saved for one in times)),
        extreme(max, (one.saved_on_exact for one in times)),
    )


def extreme(pick: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    """Return the largest or the smallest of the values that are not None."""
    known = [one for one in values if one is not None]
    return pick(known) if known else None
