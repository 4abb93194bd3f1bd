"""Costs of the parts of a step with each draft, as far as there was time to measure them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from outpace.bench import cost
from outpace.bench.prediction import any_sequence, target_ms
from outpace.decoder import Decoder
from outpace.sampling import SamplingParams

PASS_SIZES = (
    (1, 2, 3, 5, 9, 17),
    (1, 3, 9),
    (1, 5),
)  # tokens of the forward passes to time: the first list that there is time for
VERIFIED = (0, 1, 4)  # numbers of draft tokens that verification is timed with, besides the maximum
HEADROOM = max(cost.DRAFTING_TOKENS, *cost.PASS_SIZES)  # tokens of a context that timing needs


@dataclass
class DecoderSet:
    """The decoders of a target in one precision.

    Attributes:
        dtype: Precision of the models.
        baseline: Decoder without speculation.
        by_draft: Decoder with each draft, by the draft's name.
    """

    dtype: str
    baseline: Decoder
    by_draft: dict[str, Decoder] = field(default_factory=dict)

    @property
    def context(self) -> int:
        """Tokens of context before a forward pass that is timed."""
        drafters = [decoder.drafter for decoder in self.by_draft.values()]
        scorers = [self.baseline.scorer, *(one.scorer for one in drafters if one is not None)]
        return min(cost.CONTEXT, min(one.context for one in scorers if one is not None) - HEADROOM)

    def reserve(self, tokens: int) -> None:
        """Reserve the KV cache of a whole sequence at once, unless it grows without moving.

        A cache that grows drops the prompt. The next decoder would have to prefill it again.

        Args:
            tokens: Tokens of the sequence, the prompt included.
        """
        if not self.baseline.uses_graphs:
            for decoder in self.by_draft.values():
                max_tokens = min(tokens, self.baseline.scorer.context)
                capacity = max_tokens + decoder.policy.max_draft_tokens + 1
                self.baseline.scorer.cache.prepare(1, capacity)
                if decoder.drafter is not None and decoder.drafter.scorer is not None:
                    decoder.drafter.scorer.cache.prepare(1, capacity)


class StepCosts:
    """Measured costs, by precision and batch size.

    Args:
        sampling: Sampling parameters that verification is timed with.

    Attributes:
        passes: Timed forward passes of the target, by precision and batch size.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self.passes: dict[tuple[str, int], list[cost.Pass]] = {}
        self._verification: dict[tuple[str, int], list[cost.Verification]] = {}
        self._drafting: dict[tuple[str, str, int], cost.Drafting] = {}

    def time_target(
        self, decoders: DecoderSet, B: int, seconds_left: float, sizes: tuple[int, ...] | None = None
    ) -> None:
        """Time forward passes of the target, and verification.

        Args:
            decoders: Decoders in one precision.
            B: Number of sequences of a forward pass.
            seconds_left: Approximate time limit. With little time, few sizes are measured.
            sizes: Tokens of each sequence in a forward pass. By default they follow from ``seconds_left``.
        """
        if sizes is None:
            (one,) = cost.curve(decoders.baseline, (1,), (B,), decoders.context)
            # A pass takes no longer than its tokens one after the other; each is timed several times.
            bounds = [sum(some) * (cost.ROUNDS + 1) * one.ms / 1e3 for some in PASS_SIZES]
            fit = (some for some, seconds in zip(PASS_SIZES, bounds, strict=True) if seconds < seconds_left)
            sizes = next(fit, PASS_SIZES[-1])
        self.passes[decoders.dtype, B] = cost.curve(decoders.baseline, sizes, (B,), decoders.context)
        decoders.baseline.release()
        self.time_verification(decoders, B)

    def time_verification(self, decoders: DecoderSet, B: int) -> None:
        """Time verification of several numbers of draft tokens, sampled or chosen as each drafter does."""
        max_tokens = max(one.n for one in self.passes[decoders.dtype, B])
        num_draft_tokens = sorted({g for g in (*VERIFIED, max_tokens - 1) if g < max_tokens})
        kinds = sorted(
            {cost.drafts_are_sampled(decoder, self._sampling) for decoder in decoders.by_draft.values()}
        )
        self._verification[decoders.dtype, B] = [
            one
            for sampled in kinds
            for one in cost.verification(decoders.baseline, num_draft_tokens, (B,), self._sampling, sampled)
        ]

    def time_drafting(self, decoders: DecoderSet, name: str, B: int = 1) -> None:
        """Time the draft steps of one draft."""
        decoder = decoders.by_draft[name]
        self._drafting[decoders.dtype, name, B] = cost.drafting(decoder, B, decoders.context)
        decoder.release()

    def relative_draft_time(self, dtype: str) -> float:
        """Return the total time of one draft step of every draft, relative to a target pass over a token."""
        ms = sum(one.step for (kind, _, B), one in self._drafting.items() if (kind, B) == (dtype, 1))
        return ms / 1e3 / self.baseline_seconds(dtype)

    def is_timed(self, dtype: str, name: str, B: int = 1) -> bool:
        """Return whether both the target and a draft were timed with this batch size."""
        return (dtype, B) in self.passes and (dtype, name, B) in self._drafting

    def baseline_seconds(self, dtype: str, B: int = 1) -> float:
        """Return the seconds of the target's forward pass over one token."""
        return min(one.ms for one in self.passes[dtype, B] if one.n == 1) / 1e3

    def upper_bound(self, dtype: str, sizes: Sequence[int]) -> float:
        """Return an upper bound of the total seconds of forward passes over these numbers of tokens.

        A forward pass takes no longer than one over more tokens, or than shorter ones one after the other.
        """
        timed = self.passes[dtype, 1]
        return sum(min(one.ms * max(1, math.ceil(n / one.n)) for one in timed) for n in sizes) / 1e3

    def step_seconds(self, decoders: DecoderSet, name: str, alpha: float, B: int = 1) -> list[float]:
        """Return the seconds of a step with g = 0, 1, ... draft tokens.

        Args:
            decoders: Decoders in one precision.
            name: Name of the draft.
            alpha: Acceptance rate. It gives the chance that the step before accepted all draft tokens.
            B: Number of sequences of a step.
        """
        sampled = cost.drafts_are_sampled(decoders.by_draft[name], self._sampling)
        verification = [one for one in self._verification[decoders.dtype, B] if one.sampled == sampled]
        ms = target_ms(B, self.passes[decoders.dtype, B], verification)
        g = np.arange(len(ms))
        ms = ms + self._drafting[decoders.dtype, name, B].milliseconds(g, any_sequence(alpha**g, B))
        return [float(one) / 1e3 for one in ms]

    def content(self) -> Mapping[str, Any]:
        """Return all costs, for the results file."""
        steps = [
            {
                "dtype": dtype,
                "draft": name,
                "B": B,
                "ms": one.step,
                "start_ms": one.start,
                "behind_ms": one.behind,
            }
            for (dtype, name, B), one in self._drafting.items()
        ]
        passes = [{"dtype": dtype, **asdict(one)} for (dtype, _), some in self.passes.items() for one in some]
        return {"passes": passes, "steps": steps}
