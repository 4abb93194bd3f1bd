"""Cost of the parts of a decode step: the target's forward pass, drafting, verification.

A target's forward pass is over n tokens of B sequences. Times are medians, in milliseconds, of rounds in
which every size has its turn. So a slow phase of the machine slows them all. If a decoder has a graph
executor, the parts of its steps are timed, on CUDA as graphs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from outpace.bench.engine import Phases, phases, prefilled
from outpace.bench.kernel import Inputs, in_graph
from outpace.checks.arguments import on_device
from outpace.decoder import Decoder
from outpace.draft.base import State
from outpace.draft.lookup import LookupDrafter
from outpace.draft.model import ModelDrafter
from outpace.draft.text import TextDrafter
from outpace.engine.graph import GraphExecutor
from outpace.engine.stats import Clock
from outpace.models.scorer import Scorer
from outpace.models.source import Source
from outpace.sampling import SamplingParams
from outpace.verification import verify_block
from outpace.verification.block import Block

PASS_SIZES = (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17)
BATCHES = (1, 4, 8)
CONTEXT = 128
ROUNDS = 5
STEPS = 4  # draft tokens over which the time of one is averaged
DRAFTING_TOKENS = STEPS + 4 * (ROUNDS + 1)  # tokens of a sequence that `drafting` uses

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Pass:
    """Time of the target's forward pass over n tokens of each of B sequences."""

    B: int
    n: int
    ms: float


@dataclass(frozen=True)
class Verification:
    """Time to verify g draft tokens of each of B sequences.

    Attributes:
        B: Number of sequences.
        g: Number of draft tokens; 0 samples one token without speculation.
        ms: Milliseconds.
        sampled: Whether draft tokens were sampled from a distribution, or chosen.
    """

    B: int
    g: int
    ms: float
    sampled: bool


@dataclass(frozen=True)
class Drafting:
    """Time of a drafter per sequence, in milliseconds.

    Attributes:
        step: Time per draft token, with ``STEPS`` of them.
        start: The part of the first draft token's time that no other has.
        behind: Extra time of a model's first draft token after a step that accepted all draft tokens. The
            last of them is not in the model's KV cache yet.
    """

    step: float
    start: float = 0.0
    behind: float = 0.0

    def milliseconds(self, g: npt.ArrayLike, all_accepted: npt.ArrayLike = 0.0) -> npt.NDArray[np.float64]:
        """Return the milliseconds of g draft tokens.

        Args:
            g: Number of draft tokens.
            all_accepted: How often the step before accepted all its draft tokens.
        """
        each = self.step - self.start / STEPS
        first = self.start + self.behind * np.asarray(all_accepted)
        return np.asarray(g) * each + np.where(np.asarray(g) > 0, first, 0.0)


@torch.inference_mode()
def curve(
    decoder: Decoder,
    sizes: Sequence[int] = PASS_SIZES,
    batches: Sequence[int] = BATCHES,
    context: int = CONTEXT,
) -> list[Pass]:
    """Time forward passes of the target.

    Args:
        decoder: Decoder with the target.
        sizes: Tokens per forward pass.
        batches: Numbers of sequences.
        context: Tokens before the forward pass; for an encoder-decoder model, tokens of the encoder.
    """
    scorer, found = decoder.scorer, list[Pass]()
    for B in sorted(set(batches), reverse=True):  # a KV cache that grows moves
        with _graph_executor(decoder, B, context, max(sizes)) as executor:
            if executor is not None:
                found += [Pass(B, n, round(phases(executor, n - 1, B).target, 4)) for n in sizes]
                continue
        with _prefilled(scorer, B, context, max(sizes)) as rows:
            ids = torch.zeros(B, max(sizes), dtype=torch.int64, device=scorer.device)
            runs = {n: partial(scorer.score, rows, ids[:, :n]) for n in sizes}
            found += [Pass(B, n, ms) for n, ms in medians(runs, scorer.device).items()]
    return [one for B in batches for one in found if one.B == B]


@torch.inference_mode()
def drafting(decoder: Decoder, B: int = 1, context: int = CONTEXT) -> Drafting:
    """Time the decoder's drafter.

    In a graph, the first draft token of a model is assumed to cost the same as the others.

    Raises:
        ValueError: The decoder has no drafter.
    """
    drafter = decoder.drafter
    if drafter is None:
        raise ValueError("decoder: it has no drafter to time")
    with _graph_executor(decoder, B, context, STEPS + 1) as executor:
        if executor is not None and executor.draft_scorer is not None:
            return Drafting(round(phases(executor, STEPS, B).draft / STEPS, 4))
    rows, device = list(range(B)), decoder.scorer.device
    texts, sources = _random_texts(decoder.scorer, B, context, DRAFTING_TOKENS)
    if drafter.scorer is not None:
        check_context(drafter.scorer, len(texts[0]), DRAFTING_TOKENS, "the draft's ")
        drafter.scorer.encode_sources(rows, sources, len(texts[0]))
    nothing, seeds = torch.zeros(B, dtype=torch.int64), on_device(rows, torch.int64, device)
    state = State(
        rows, texts, [len(text) for text in texts], [SamplingParams()] * B, seeds, [STEPS] * B,
        decoder.scorer.vocab_size, device, sources=sources,
    )  # fmt: skip

    def propose(g: int, unread: int) -> None:
        for text in texts:
            text += text[:unread]
        drafter.propose(state, g)
        drafter.commit(nothing, nothing)

    try:
        sizes = [(1, 1), (STEPS, 1), *([(1, 2)] if isinstance(drafter, ModelDrafter) else [])]
        ms = medians({size: partial(propose, *size) for size in sizes}, device)
        first = min(ms[1, 1], ms[STEPS, 1])
        each = (ms[STEPS, 1] - first) / (STEPS - 1)
        behind = max(0.0, ms.get((1, 2), 0.0) - ms[1, 1])
        return Drafting(round(ms[STEPS, 1] / STEPS, 4), round(max(0.0, first - each), 4), round(behind, 4))
    finally:
        drafter.reset(rows)


def graph_phases(decoder: Decoder, g: int, context: int = CONTEXT) -> Phases | None:
    """Return the draft and target times of steps of one sequence, if a step is one graph; else None.

    Parts of a graph cannot be timed separately, so each part is timed by itself.
    """
    with _graph_executor(decoder, 1, context, g + 1) as executor:
        return phases(executor, g, 1) if executor is not None and executor.drafts else None


@torch.inference_mode()
def verification(
    decoder: Decoder,
    draft_lengths: Sequence[int],
    batches: Sequence[int] = BATCHES,
    sampling: SamplingParams | None = None,
    sampled: bool = True,
) -> list[Verification]:
    """Time the decoder's rule on random logits like its target's.

    Penalties and bias are not included.

    Args:
        decoder: Decoder with the rule.
        draft_lengths: Numbers of draft tokens.
        batches: Numbers of sequences.
        sampling: Sampling of the sequences.
        sampled: Whether draft tokens are sampled from a distribution, or chosen.
    """
    scorer = decoder.scorer
    shape = (sampling or SamplingParams()).shape

    def verify(inputs: Inputs) -> Any:
        alone = len(inputs.tokens) == 1 and not inputs.tokens.is_cuda  # as in a decoder
        seed, position = (0, 0) if alone else (inputs.seed, inputs.position)
        draft = inputs.draft if sampled and inputs.tokens.shape[1] else None
        block = Block(inputs.tokens, draft, inputs.target, None, seed, position)
        return verify_block(block, decoder.rule, decoder.lenience, [shape])

    found = []
    for B in batches:
        inputs = {
            g: Inputs.random(B, g, scorer.vocab_size, scorer.device, scorer.dtype) for g in draft_lengths
        }
        times = medians({g: partial(verify, one) for g, one in inputs.items()}, scorer.device)
        if scorer.device.type == "cuda":
            graphs = {g: in_graph(verify, [one] * 20) for g, one in inputs.items()}
            times |= {g: microseconds / 1e3 for g, microseconds in graphs.items() if microseconds is not None}
        found += [Verification(B, g, round(ms, 4), sampled) for g, ms in times.items()]
    return found


def drafts_are_sampled(decoder: Decoder, sampling: SamplingParams) -> bool:
    """Return whether draft tokens come from a distribution that verification has to read."""
    return not (isinstance(decoder.drafter, LookupDrafter | TextDrafter) or sampling.greedy)


def medians(
    runs: Mapping[Key, Callable[[], Any]], device: torch.device, rounds: int = ROUNDS
) -> dict[Key, float]:
    """Return the median milliseconds of each run. Runs take turns, and the first round is not counted."""
    milliseconds: dict[Key, list[float]] = {key: [] for key in runs}
    for _ in range(rounds + 1):
        for key, run in runs.items():
            started_at = now(device)
            run()
            milliseconds[key].append(1e3 * (now(device) - started_at))
    return {key: round(statistics.median(each[1:]), 4) for key, each in milliseconds.items()}


def now(device: torch.device) -> float:
    """Return the time in seconds, after all work of the device so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _random_texts(
    scorer: Scorer, B: int, context: int, more: int
) -> tuple[list[list[int]], list[Source | None]]:
    """Return random texts, and their sources if there is an encoder; ``more`` tokens fit after them."""
    V = min(scorer.vocab_size, scorer.base.get_input_embeddings().weight.shape[0])
    texts = torch.randint(V, (B, context), generator=torch.Generator().manual_seed(0)).tolist()
    if scorer.has_encoder:
        sources = [scorer.source(text) for text in texts]
        texts = [list(one.start or []) for one in sources]
        check_context(scorer, len(texts[0]), more)
        return texts, list(sources)
    check_context(scorer, context, more)
    return texts, [None] * B


def check_context(scorer: Scorer, context: int, more: int, owner: str = "the model's ") -> None:
    """Raise if a text of ``context`` tokens and ``more`` new ones does not fit a model's context."""
    if context < 1 or context + more > scorer.context:
        raise ValueError(
            f"context: got {context}; with {more} tokens more it must fit {owner}context of {scorer.context}"
        )


@contextmanager
def _prefilled(scorer: Scorer, B: int, context: int, most: int) -> Iterator[list[int]]:
    """Yield slots of a scorer that are prefilled with random texts."""
    texts, sources = _random_texts(scorer, B, context, most)
    rows = list(range(B))
    scorer.cache.prepare(B, len(texts[0]) + most + 1)
    scorer.encode_sources(rows, sources, len(texts[0]))
    scorer.prefill(rows, texts, sources)
    try:
        yield rows
    finally:
        scorer.reset(rows)


@contextmanager
def _graph_executor(decoder: Decoder, B: int, context: int, most: int) -> Iterator[GraphExecutor | None]:
    """Yield the decoder's graph executor, with random texts in its first slots; None if it has none.

    Args:
        decoder: The decoder.
        B: Number of texts.
        context: Tokens of each text.
        most: The most tokens of a forward pass after the texts.
    """
    executor = decoder.executor
    if not isinstance(executor, GraphExecutor):
        yield None
        return
    texts, _ = _random_texts(decoder.scorer, B, context, most)
    rows = decoder.requests(texts, SamplingParams(), max_new_tokens=1, seed=0)
    with prefilled(executor, rows, context + most + 1):
        # A step without draft tokens writes the texts to the device.
        outcome = executor.start({row.slot: row for row in rows}, 0, None, Clock()).read()
        for row in rows:
            executor.commit(row, 0, outcome.accepted[row.slot])
        yield executor
