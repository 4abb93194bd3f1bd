"""Throughput of model pairs: Transformers, the engine without speculation, and speculative decoding.

Prompts are not counted. Pairs are synthetic (``synthetic``): real shapes, a chosen acceptance rate, every
layer computed. Two more figures are computed, not measured. The floor is the time to read all weights and
caches at the bandwidth of a large copy. The prediction is that of Leviathan et al. 2023, Theorem 3.8. It uses
the engine's throughput without speculation and the time of a draft's forward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outpace.bench import theory
from outpace.bench.kernel import bandwidth, timed
from outpace.bench.synthetic import PAIRS, Pair, pair
from outpace.decoder import Decoder
from outpace.draft.base import Drafter
from outpace.draft.lookup import LookupDrafter
from outpace.draft.model import ModelDrafter
from outpace.engine.buckets import StepKey
from outpace.engine.executor import Outcome
from outpace.engine.graph import GraphExecutor
from outpace.engine.needs import Needs
from outpace.engine.sequence import SequenceState
from outpace.engine.stats import Clock
from outpace.models.fused_scorer import fused_model
from outpace.policy import Fixed
from outpace.sampling import SamplingParams

ALPHAS = (0.6, 0.8, 0.9)
DRAFT_LENGTHS = (1, 3, 5, 8)
BATCHES = (1, 8, 32, 64)
CONTEXTS = (128, 4096)
ENGINE_TOKENS = 128  # about how many new tokens the engine generates per text
WARM_UP_STEPS = 3
MIN_TEXTS = 12  # fewest texts that tokens per step are averaged over
TRANSFORMERS_TOKENS = 32  # new tokens per text of Transformers
ASSISTED_BATCH = 1  # most sequences of Transformers' assisted generation
DEFAULT_SAMPLING = SamplingParams()
BASELINE = "outpace baseline"  # name of the method that the others are compared with


@dataclass(frozen=True)
class Case:
    """A case to measure: g draft tokens per step, B sequences after a context."""

    name: str
    alpha: float
    g: int
    B: int
    context: int
    # Whether to time Transformers' static cache, too; it compiles for every size
    static: bool = field(default=True, compare=False)


@dataclass(frozen=True)
class Phases:
    """Milliseconds of the parts of a step; the rest of it is verification and the update."""

    draft: float  # all g draft tokens
    target: float


@dataclass(frozen=True)
class Throughput:
    """Result of one method in one case."""

    method: str
    name: str
    alpha: float
    g: int
    B: int
    context: int
    tokens_per_second: float
    tokens_per_iteration: float | None = None
    milliseconds: float | None = None  # of a step
    draft_milliseconds: float | None = None  # of all g draft tokens
    target_milliseconds: float | None = None
    idle: float | None = None  # fraction of the time between the end of one step and the launch of the next
    floor_milliseconds: float | None = None
    predicted: float | None = None  # tokens per second

    @property
    def key(self) -> tuple[str, str, float, int, int, int]:
        """Method and case, which identify a figure."""
        return self.method, self.name, self.alpha, self.g, self.B, self.context


def select_cases(full: bool = False) -> list[Case]:
    """Return a selection of cases with every pair and column, or all cases."""
    if full:
        return [
            Case(name, alpha, g, B, context)
            for name in PAIRS
            for alpha in ALPHAS
            for context in CONTEXTS
            for B in BATCHES
            for g in DRAFT_LENGTHS
        ]
    first, *others = PAIRS
    cases = [Case(first, 0.8, g, 1, 128) for g in DRAFT_LENGTHS]
    cases += [Case(first, 0.8, g, B, 128, static=False) for B in BATCHES[1:] for g in DRAFT_LENGTHS[:2]]
    cases += [Case(first, 0.8, 5, 1, CONTEXTS[1], static=False)]
    cases += [Case(first, alpha, 5, 1, 128) for alpha in (0.6, 0.9)]
    return cases + [Case(name, 0.8, 5, 1, 128) for name in others]


def measure(
    device: torch.device,
    dtype: torch.dtype,
    cases: Sequence[Case],
    known: Sequence[Throughput] = (),
    pairs: Callable[..., Pair] | None = None,
) -> Iterator[Throughput]:
    """Measure all methods in all cases.

    Figures that do not depend on g, or that are known already, are not measured again.

    Args:
        device: Device of the models.
        dtype: Dtype of the models.
        cases: Cases to measure.
        known: Figures of earlier measurements.
        pairs: Makes a pair from a name and an acceptance rate; by default one of ``PAIRS``.

    Yields:
        The figure of each method in each case.
    """
    make = pairs or (lambda name, alpha, **options: pair(*PAIRS[name], alpha, **options))
    measured = {one.key: one for one in known}
    bytes_per_second = bandwidth(device)
    models: tuple[tuple[str, float], Pair] | None = None
    for case in cases:
        for name, method in METHODS.items():
            g = case.g if method.drafts else 0
            alpha = case.alpha if method.drafts else 0.0
            key = (name, case.name, alpha, g, case.B, case.context)
            if key not in measured and method.fits(case):
                if models is None or models[0] != (case.name, case.alpha):
                    models = None  # frees its memory first
                    models = (case.name, case.alpha), make(case.name, case.alpha, device=device, dtype=dtype)
                baseline = measured.get((BASELINE, case.name, 0.0, 0, case.B, case.context))
                measured[key] = Throughput(
                    name,
                    case.name,
                    alpha,
                    g,
                    case.B,
                    case.context,
                    **method.measure(models[1], case, bytes_per_second, baseline),
                )
            if key in measured:
                yield measured[key]


@dataclass(frozen=True)
class Method:
    """A method to measure.

    Attributes:
        measure: Returns fields of a ``Throughput``. It takes the pair, the case, the bandwidth, and the
            throughput without speculation.
        drafts: Whether the method is speculative, so that its figure depends on g and α.
        fits: Returns whether the method supports a case.
    """

    measure: Callable[[Pair, Case, float, Throughput | None], dict[str, Any]]
    drafts: bool
    fits: Callable[[Case], bool] = lambda case: True


def prompts(case: Case, models: Pair) -> Tensor:
    """Return random texts ``[B, context]``."""
    noise = torch.Generator().manual_seed(7)
    return torch.randint(models.words, (case.B, case.context), generator=noise).to(models.target.device)


def measure_transformers(models: Pair, case: Case, **options: Any) -> dict[str, Any]:
    """Measure Transformers' own ``generate``, with sampling."""
    ids = prompts(case, models)

    def seconds(tokens: int) -> float:
        started_at = time.perf_counter()
        models.target.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0,
            max_new_tokens=tokens, min_new_tokens=tokens, **options,
        )  # fmt: skip
        if ids.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - started_at

    # Warm-up of libraries, and of code compiled for caches of this size
    seconds(TRANSFORMERS_TOKENS if "cache_implementation" in options else WARM_UP_STEPS)
    # Without the prefill
    total_seconds = max(seconds(TRANSFORMERS_TOKENS) - seconds(1), 1e-9)
    return {"tokens_per_second": round((TRANSFORMERS_TOKENS - 1) * case.B / total_seconds, 1)}


def measure_assisted(models: Pair, case: Case) -> dict[str, Any]:
    """Measure Transformers' assisted generation with a fixed number of g draft tokens per step."""
    if models.draft is None:
        return measure_transformers(models, case, prompt_lookup_num_tokens=case.g)
    config = models.draft.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = case.g, "constant"
    config.assistant_confidence_threshold = 0.0
    return measure_transformers(models, case, assistant_model=models.draft)


def measure_engine(
    models: Pair, case: Case, bytes_per_second: float, baseline: Throughput | None, g: int
) -> dict[str, Any]:
    """Measure the graph executor; the result of each step is read one step late, as a decoder does."""
    drafter: Drafter | None = None
    if g:
        drafter = LookupDrafter() if models.draft is None else ModelDrafter(models.draft)
    decoder = Decoder(models.target, drafter, rule="token", num_draft_tokens=Fixed(g), engine=True)
    executor = decoder.executor
    if not isinstance(executor, GraphExecutor):
        raise ValueError(f"models: the graph executor cannot run them\n{decoder.describe()}")
    draft_scorer = None if drafter is None else drafter.scorer
    # The number of steps gives all texts the same length, since attention costs more in longer ones.
    alpha = 0.0 if draft_scorer is None else models.alpha
    iterations = round(ENGINE_TOKENS / theory.expected_tokens(alpha, g))
    capacity = case.context + (WARM_UP_STEPS + iterations + 2) * (g + 1)
    texts, runs = prompts(case, models).tolist(), list[TimedRun]()
    seeds = range(-(-MIN_TEXTS // case.B) if g else 1)
    try:
        for seed in seeds:
            first = seed * case.B
            rows = decoder.requests(texts, DEFAULT_SAMPLING, seed=list(range(first, first + case.B)))
            with prefilled(executor, rows, capacity):
                runs.append(run_steps(executor, g, rows, iterations))
                if seed == seeds[-1]:
                    parts = phases(executor, g, case.B)
    finally:
        decoder.release()
    new_tokens, iterations = sum(run.tokens for run in runs), len(runs) * iterations
    total_seconds, idle = sum(run.seconds for run in runs), [run.idle for run in runs if run.idle is not None]
    length = case.context + new_tokens / case.B / len(runs) / 2
    bytes_read = sum(
        fused_model(one.base).nbytes + case.B * length * one.cache.bytes_per_token
        for one in [decoder.scorer, *[draft_scorer] * g]
        if one is not None
    )
    tokens_per_second = new_tokens / total_seconds
    predicted = None
    if draft_scorer is not None and baseline is not None and baseline.milliseconds:
        predicted = theory.speedup(models.alpha, g, parts.draft / g / baseline.milliseconds)
        predicted = round(baseline.tokens_per_second * predicted, 1)
    return {
        "tokens_per_second": round(tokens_per_second, 1),
        "tokens_per_iteration": round(new_tokens / case.B / iterations, 3),
        "milliseconds": round(1e3 * total_seconds / iterations, 3),
        "draft_milliseconds": round(parts.draft, 3),
        "target_milliseconds": round(parts.target, 3),
        "idle": round(sum(idle) / len(idle), 4) if idle else None,
        "floor_milliseconds": round(1e3 * bytes_read / bytes_per_second, 3),
        "predicted": predicted,
    }


@dataclass(frozen=True)
class TimedRun:
    """Result of some steps of an engine.

    Attributes:
        tokens: New tokens of all texts.
        seconds: Duration.
        idle: Fraction of the time between the end of a step and the launch of the next; None without a GPU.
    """

    tokens: int
    seconds: float
    idle: float | None


@contextmanager
def prefilled(executor: GraphExecutor, rows: Sequence[SequenceState], tokens: int) -> Iterator[None]:
    """Prefill sequences in the first slots of an executor, and free the slots at the end.

    Args:
        executor: The executor, without sequences.
        rows: The sequences.
        tokens: The most tokens that a sequence reaches.
    """
    for slot, row in enumerate(rows):
        row.slot = slot
    try:
        executor.prepare(len(rows), tokens)
        prefilling = executor.prefill(rows, Clock())
        while not prefilling.advance():
            pass
        yield
    finally:
        for row in rows:
            executor.release(row, keep=False)


def run_steps(executor: GraphExecutor, g: int, rows: Sequence[SequenceState], iterations: int) -> TimedRun:
    """Run some steps of prefilled sequences. Their tokens stay on the device."""
    active = {row.slot: row for row in rows}

    def commit(outcome: Outcome) -> int:
        """Commit a step; return the number of new tokens."""
        for row in rows:
            executor.commit(row, g, outcome.accepted[row.slot])
        return sum(outcome.accepted[row.slot] + 1 for row in rows)

    for _ in range(WARM_UP_STEPS):
        commit(executor.start(active, g, None, Clock()).read())
    new_tokens, last, events = 0, None, list[Any]()
    started_at = time.perf_counter()
    for _ in range(iterations):
        events.append(record_event(executor.target.device))
        pending = executor.start(active, g, None, Clock())
        events.append(record_event(executor.target.device))
        new_tokens += 0 if last is None else commit(last.read())
        last = pending
    assert last is not None
    new_tokens += commit(last.read())
    total_seconds, idle = time.perf_counter() - started_at, None
    if events[0] is not None:
        events[-1].synchronize()
        waits = sum(one.elapsed_time(two) for one, two in zip(events[1::2], events[2::2], strict=False))
        idle = waits / events[0].elapsed_time(events[-1])
    return TimedRun(new_tokens, total_seconds, idle)


def record_event(device: torch.device) -> torch.Event | None:
    """Return an event that the GPU records when it gets here; None without a GPU."""
    if device.type != "cuda":
        return None
    event = torch.Event("cuda", enable_timing=True)
    event.record()
    return event


@torch.inference_mode()
def phases(executor: GraphExecutor, g: int, slots: int) -> Phases:
    """Time the parts of a step of the first slots, each by itself.

    The slots must have sequences that have taken part in a step. On CUDA, each part is timed as a graph.
    """
    state = executor.state(StepKey(g, slots, Needs(match=g == 0, rule=g > 0), None))
    tokens = torch.zeros(slots, g + 1, dtype=torch.int64, device=executor.target.device)
    draft = time_alone(lambda: executor.propose(state, g), tokens.device) if g else 0.0
    target = time_alone(lambda: executor.target.forward(tokens, state.positions[:, 1:]), tokens.device)
    return Phases(draft / 1e3, target / 1e3)


def time_alone(part: Callable[[], Any], device: torch.device) -> float:
    """Return the microseconds of a part by itself."""
    if device.type != "cuda":
        return timed(part, device, 3)
    for _ in range(2):
        part()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        outputs = part()
    microseconds = timed(graph.replay, device, 20)
    del outputs
    return microseconds


METHODS = {
    BASELINE: Method(
        lambda models, case, rate, baseline: measure_engine(models, case, rate, baseline, 0), False
    ),
    "outpace": Method(
        lambda models, case, rate, baseline: measure_engine(models, case, rate, baseline, case.g), True
    ),
    "transformers": Method(lambda models, case, rate, baseline: measure_transformers(models, case), False),
    "transformers assisted": Method(
        lambda models, case, rate, baseline: measure_assisted(models, case),
        True,
        lambda case: case.B <= ASSISTED_BATCH,
    ),
    "transformers static": Method(
        lambda models, case, rate, baseline: measure_transformers(
            models, case, cache_implementation="static"
        ),
        False,
        lambda case: case.static,
    ),
}
