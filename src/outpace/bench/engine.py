"""Throughput of model pairs: Transformers, the engine without speculation, and speculative decoding.

Prompts are not counted. Pairs are synthetic (``synthetic``): real shapes, a chosen acceptance rate, every
layer computed. Two more figures are computed, not measured. The floor is the time to read all weights and
caches at the bandwidth of a large copy. The prediction is that of Leviathan et al. 2023, Theorem 3.8. It uses
the engine's throughput without speculation and the time of a draft's forward pass.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outpace.bench import theory
from outpace.bench.kernel import bandwidth, timed
from outpace.bench.synthetic import PAIRS, Pair, pair
from outpace.engine.graph import Engine, State
from outpace.models.fused import FusedModel
from outpace.sampling import SamplingParams

ALPHAS = (0.6, 0.8, 0.9)
DRAFTS = (1, 3, 5, 8)
BATCHES = (1, 8, 32, 64)
CONTEXTS = (128, 4096)
NEW = 128  # about how many new tokens the engine generates per text
WARM = 3  # warm-up steps
TEXTS = 12  # least number of texts, in turn or together: tokens per step differ much
TOKENS = 32  # new tokens per text of Transformers
COPIES = (2, 3)  # min_ngram and max_ngram of prompt lookup
ASSISTED_BATCH = 1  # Transformers' assisted generation takes no more sequences
PLAIN = SamplingParams()


@dataclass(frozen=True)
class Case:
    """A case to measure: g draft tokens per step, B sequences after a context."""

    name: str
    alpha: float
    g: int
    B: int
    context: int
    # Whether Transformers' static cache is timed, too, which compiles for every size
    static: bool = field(default=True, compare=False)


@dataclass(frozen=True)
class Phases:
    """Milliseconds of the parts of a step; the rest of it is verification and the update."""

    draft: float  # all g draft tokens
    target: float


@dataclass(frozen=True)
class Throughput:
    """Result of one method in one case."""

    side: str
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
        return self.side, self.name, self.alpha, self.g, self.B, self.context


def chosen(full: bool = False) -> list[Case]:
    """Return a selection of cases with every pair and column, or all cases."""
    if full:
        return [
            Case(name, alpha, g, B, context)
            for name in PAIRS
            for alpha in ALPHAS
            for context in CONTEXTS
            for B in BATCHES
            for g in DRAFTS
        ]
    first, *others = PAIRS
    cases = [Case(first, 0.8, g, 1, 128) for g in DRAFTS]
    cases += [Case(first, 0.8, g, B, 128, static=False) for B in BATCHES[1:] for g in DRAFTS[:2]]
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
    done = {one.key: one for one in known}
    rate = bandwidth(device)
    made: tuple[tuple[str, float], Pair] | None = None
    for case in cases:
        for side, own in SIDES.items():
            g = case.g if own.drafts else 0
            alpha = case.alpha if own.drafts else 0.0
            key = (side, case.name, alpha, g, case.B, case.context)
            if key not in done and own.fits(case):
                if made is None or made[0] != (case.name, case.alpha):
                    made = None  # its memory first
                    made = (case.name, case.alpha), make(case.name, case.alpha, device=device, dtype=dtype)
                plain = done.get(("outpace plain", case.name, 0.0, 0, case.B, case.context))
                done[key] = Throughput(
                    side, case.name, alpha, g, case.B, case.context, **own.measure(made[1], case, rate, plain)
                )
            if key in done:
                yield done[key]


@dataclass(frozen=True)
class Contender:
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


def prompts(case: Case, made: Pair) -> Tensor:
    """Return random texts ``[B, context]``."""
    noise = torch.Generator().manual_seed(7)
    return torch.randint(made.words, (case.B, case.context), generator=noise).to(made.target.device)


def by_transformers(made: Pair, case: Case, **options: Any) -> dict[str, Any]:
    """Measure Transformers' own ``generate``, with sampling."""
    ids = prompts(case, made)

    def seconds(tokens: int) -> float:
        begun = time.perf_counter()
        made.target.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0,
            max_new_tokens=tokens, min_new_tokens=tokens, **options,
        )  # fmt: skip
        if ids.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    # Warm-up of libraries and of compiled code, which is for caches of this size
    seconds(TOKENS if "cache_implementation" in options else WARM)
    # Without prefill, which every method runs once
    taken = max(seconds(TOKENS) - seconds(1), 1e-9)
    return {"tokens_per_second": round((TOKENS - 1) * case.B / taken, 1)}


def transformers_assisted(made: Pair, case: Case) -> dict[str, Any]:
    """Measure Transformers' assisted generation with g draft tokens at every step, whatever was accepted."""
    if made.draft is None:
        return by_transformers(made, case, prompt_lookup_num_tokens=case.g)
    config = made.draft.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = case.g, "constant"
    config.assistant_confidence_threshold = 0.0
    return by_transformers(made, case, assistant_model=made.draft)


def ours(made: Pair, case: Case, rate: float, plain: Throughput | None, g: int) -> dict[str, Any]:
    """Measure the engine; the result of each step is read one step late, as a decoder does."""
    target = FusedModel(made.target)
    draft = FusedModel(made.draft) if g and made.draft is not None else None
    # As many steps as bring all methods' texts to the same length: attention costs more in longer ones
    iterations = round(NEW / theory.expected_tokens(made.alpha if draft is not None else 0.0, g))
    room = case.context + (WARM + iterations + 2) * (g + 1)
    copies = COPIES if g and draft is None else None
    engine = Engine(target, draft, case.B, -(-room // 256) * 256, copies=copies)
    texts = prompts(case, made).tolist()
    runs = [written(engine, g, texts, seed, iterations) for seed in range(-(-TEXTS // case.B) if g else 1)]
    won, iterations = sum(run.tokens for run in runs), len(runs) * iterations
    taken, idle = sum(run.seconds for run in runs), [run.idle for run in runs if run.idle is not None]
    parts = phases(engine, g)
    length = case.context + won / case.B / len(runs) / 2
    moved = sum(
        one.nbytes + case.B * length * 2 * one.kv_heads * one.head_dim * len(one.layers) * one.dtype.itemsize
        for one in [target, *[draft] * g]
        if one is not None
    )
    speed = won / taken
    predicted = None
    if draft is not None and plain is not None and plain.milliseconds:
        predicted = theory.speedup(made.alpha, g, parts.draft / g / plain.milliseconds)
        predicted = round(plain.tokens_per_second * predicted, 1)
    return {
        "tokens_per_second": round(speed, 1),
        "tokens_per_iteration": round(won / case.B / iterations, 3),
        "milliseconds": round(1e3 * taken / iterations, 3),
        "draft_milliseconds": round(parts.draft, 3),
        "target_milliseconds": round(parts.target, 3),
        "idle": round(sum(idle) / len(idle), 4) if idle else None,
        "floor_milliseconds": round(1e3 * moved / rate, 3),
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


def written(engine: Engine, g: int, texts: Sequence[list[int]], seed: int, iterations: int) -> TimedRun:
    """Prefill the engine with texts, and run some steps."""
    engine.begin_all(0, texts, range(seed * len(texts), (seed + 1) * len(texts)))
    for _ in range(WARM):
        engine.start(g, PLAIN).read()
    won, last, marks = 0, None, list[Any]()
    begun = time.perf_counter()
    for _ in range(iterations):
        marks.append(mark(engine.target.device))
        pending = engine.start(g, PLAIN)
        marks.append(mark(engine.target.device))
        won += 0 if last is None else sum(last.read().accepted) + len(texts)
        last = pending
    assert last is not None
    won += sum(last.read().accepted) + len(texts)
    taken, idle = time.perf_counter() - begun, None
    if marks[0] is not None:
        marks[-1].synchronize()
        waits = sum(one.elapsed_time(two) for one, two in zip(marks[1::2], marks[2::2], strict=False))
        idle = waits / marks[0].elapsed_time(marks[-1])
    return TimedRun(won, taken, idle)


def mark(device: torch.device) -> torch.Event | None:
    """Return an event that the GPU records when it gets here; None without a GPU."""
    if device.type != "cuda":
        return None
    event = torch.Event("cuda", enable_timing=True)
    event.record()
    return event


def phases(engine: Engine, g: int, rows: int | None = None) -> Phases:
    """Time the parts of a step, each by itself, of the first rows or of all.

    On CUDA, each part is timed as a graph.
    """
    rows = engine.rows if rows is None else rows
    tokens = torch.zeros(rows, g + 1, dtype=torch.int64, device=engine.target.device)
    places = engine.lengths[:rows, None] + torch.arange(-2, g, device=tokens.device)
    state = State.of(engine, rows)
    draft = alone(lambda: engine._propose(g, PLAIN, state, places), tokens.device) if g else 0.0
    target = alone(lambda: engine.target.logits(tokens, places[:, 1:], engine.target_cache), tokens.device)
    return Phases(draft / 1e3, target / 1e3)


def alone(part: Callable[[], Any], device: torch.device) -> float:
    """Return the microseconds of a part by itself."""
    if device.type != "cuda":
        return timed(part, device, 3)
    for _ in range(2):
        part()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        kept = part()
    taken = timed(graph.replay, device, 20)
    del kept
    return taken


SIDES = {
    "outpace plain": Contender(lambda made, case, rate, plain: ours(made, case, rate, plain, 0), False),
    "outpace": Contender(lambda made, case, rate, plain: ours(made, case, rate, plain, case.g), True),
    "transformers": Contender(lambda made, case, rate, plain: by_transformers(made, case), False),
    "transformers assisted": Contender(
        lambda made, case, rate, plain: transformers_assisted(made, case),
        True,
        lambda case: case.B <= ASSISTED_BATCH,
    ),
    "transformers static": Contender(
        lambda made, case, rate, plain: by_transformers(made, case, cache_implementation="static"),
        False,
        lambda case: case.static,
    ),
}
