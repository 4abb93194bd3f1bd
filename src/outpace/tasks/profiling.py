"""A decoder that measures its distance from the target's distribution, and times its sampling step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outpace.bench.distance import effects
from outpace.decoder import Decoder
from outpace.draft.base import Draft, Drafter
from outpace.engine.eager import EagerExecutor
from outpace.engine.logprobs import adjusted_logits
from outpace.engine.sequence import SequenceState
from outpace.sampling import Errors, warp
from outpace.verification import Verdict


class ProfilingDecoder(Decoder):
    """A decoder that measures every sampling step; all values are sums since ``reset``.

    It has no graph executor, since the parts of a captured graph cannot be timed. The arguments are those of
    ``Decoder``, without ``engine``.

    Attributes:
        positions: Number of token positions.
        distance: Total variation between the distribution of the token that the rule returns and the
            target's, summed over ``positions``.
        known: Whether all drafts came with the logits that they were sampled from.
        seconds: Seconds of the sampling steps, with the device synchronized before and after each.
        passes: Number of sampling steps.
    """

    def __init__(
        self, target: Any, draft: Drafter | None = None, tokenizer: Any = None, **options: Any
    ) -> None:
        super().__init__(target, draft, tokenizer, engine=False, **options)
        self.executor = ProfilingExecutor(self)
        self.reset()

    def reset(self) -> None:
        """Reset all sums."""
        self.positions, self.distance, self.known = 0, 0.0, True
        self.seconds, self.passes = 0.0, 0


class ProfilingExecutor(EagerExecutor):
    """An eager executor that adds its measurements to a decoder's sums."""

    def __init__(self, sums: ProfilingDecoder) -> None:
        super().__init__(sums.scorer, sums.drafter, sums.rule, sums.lenience)
        self.sums = sums

    def verify(
        self,
        sequences: Sequence[SequenceState],
        draft: Draft,
        logits: Tensor,
        errors: Errors | None = None,
    ) -> Verdict:
        synchronize(logits.device)
        started_at = time.perf_counter()
        verdict = super().verify(sequences, draft, logits, errors)
        synchronize(logits.device)
        self.sums.seconds += time.perf_counter() - started_at
        self.sums.passes += 1
        g = draft.tokens.shape[1]
        if not g:
            self.sums.positions += len(sequences)  # without a draft, tokens are the target's own
        elif draft.logits is None:
            self.sums.known = False
        elif not all(one.sampling.greedy for one in sequences):
            self._measure_distance(sequences, draft, draft.logits, logits, verdict)
        return verdict

    def _measure_distance(
        self,
        sequences: Sequence[SequenceState],
        draft: Draft,
        draft_logits: Tensor,
        logits: Tensor,
        verdict: Verdict,
    ) -> None:
        target = adjusted_logits(sequences, draft, logits)
        if draft.precomputed is not None and draft.precomputed.sampling is not None:
            draft_logits = warp(draft_logits.float(), draft.precomputed.sampling)
        for row, length in enumerate(draft.lengths or [draft_logits.shape[1]] * len(sequences)):
            verified = min(int(verdict.accepted[row]) + 1, length)
            _, distances, _ = effects(target[row, :verified], draft_logits[row, :verified], self.rule)
            self.sums.positions += verified
            self.sums.distance += float(distances.sum())
            if int(verdict.accepted[row]) == length:  # the bonus token counts as well
                last = target[row, length : length + 1]
                self.sums.positions += 1
                self.sums.distance += float(effects(last, last, self.rule)[2])


def synchronize(device: torch.device) -> None:
    """Wait until a CUDA device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
