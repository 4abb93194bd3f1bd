"""Known faults of other implementations, planted to show that an audit finds them.

``outpace audit`` prints the docstring of a planted fault as part of a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from outpace.decoder import Decoder
from outpace.draft.base import Draft, Drafter
from outpace.engine.eager import EagerExecutor
from outpace.engine.executor import Outcome
from outpace.engine.logprobs import adjusted_logits
from outpace.engine.sequence import SequenceState
from outpace.models.causal import CausalScorer
from outpace.models.scorer import Scorer
from outpace.sampling import Errors
from outpace.verification import Rule, Verdict
from outpace.verification.block import Block

STALE_POSITIONS = 2  # positions ahead that tokens see


class AcceptAll(EagerExecutor):
    """Every draft token is accepted."""

    def verify(
        self, sequences: Sequence[SequenceState], draft: Draft, logits: Tensor, errors: Errors | None = None
    ) -> Verdict:
        verdict = super().verify(sequences, draft, logits, errors)
        return replace(verdict, accepted=_lengths(sequences, draft, logits))


class Resample(EagerExecutor):
    """After a rejection the next token is sampled from p, which may bring the rejected one back."""

    def __init__(self, scorer: Scorer, drafter: Drafter | None, rule: Rule, lenience: float) -> None:
        super().__init__(scorer, drafter, rule, lenience)
        self.generator = torch.Generator(scorer.device).manual_seed(0)

    def verify(
        self, sequences: Sequence[SequenceState], draft: Draft, logits: Tensor, errors: Errors | None = None
    ) -> Verdict:
        verdict = super().verify(sequences, draft, logits, errors)
        scores = adjusted_logits(sequences, draft, logits)
        at = scores[torch.arange(len(sequences), device=logits.device), verdict.accepted]
        rejected = verdict.accepted < _lengths(sequences, draft, logits)
        sampled = torch.multinomial(at.softmax(-1), 1, generator=self.generator)[:, 0]
        return replace(verdict, next_token=torch.where(rejected, sampled, verdict.next_token))


class Rollback(EagerExecutor):
    """The KV cache keeps one token too many after a rejection."""

    def __init__(self, scorer: Scorer, drafter: Drafter | None, rule: Rule, lenience: float) -> None:
        super().__init__(scorer, drafter, rule, lenience)
        self.num_drafted: dict[int, int] = {}  # by slot: draft tokens of the last step

    def verdicts(self, sequences: Sequence[SequenceState], draft: Draft, logits: Tensor) -> Outcome:
        outcome = super().verdicts(sequences, draft, logits)
        self.num_drafted |= {slot: len(tokens) for slot, tokens in outcome.drafts.items()}
        return outcome

    def commit(self, sequence: SequenceState, g: int, accepted: int) -> None:
        super().commit(sequence, g, accepted + (accepted < self.num_drafted[sequence.slot]))


class Stale(EagerExecutor):
    """Tokens see two positions ahead, where rejected draft tokens lie."""

    def __init__(self, scorer: Scorer, drafter: Drafter | None, rule: Rule, lenience: float) -> None:
        stale = StaleScorer(scorer.model)
        stale.ahead = STALE_POSITIONS
        super().__init__(stale, drafter, rule, lenience)


class StaleScorer(CausalScorer):
    """A scorer whose attention masks are wrong.

    The executor has such a scorer of its own, since a fused model builds no masks.

    Attributes:
        ahead: Number of later positions that tokens see.
    """

    ahead = 0

    def _masks(self, positions: Tensor, reach: int) -> Tensor | dict[str, Tensor]:
        return super()._masks(positions + self.ahead, reach)


class Noise(EagerExecutor):
    """All sequences of a batch are sampled with the noise of its first."""

    def block(self, sequences: Sequence[SequenceState], draft: Draft, logits: Tensor) -> Block:
        return replace(super().block(sequences, draft, logits), seeds=sequences[0].seed)


class Reuse(EagerExecutor):
    """Every step is sampled with the noise of the first."""

    def block(self, sequences: Sequence[SequenceState], draft: Draft, logits: Tensor) -> Block:
        return replace(super().block(sequences, draft, logits), starts=0)


class Mislabel(EagerExecutor):
    """The drafter states a distribution that its tokens are not sampled from."""

    def verify(
        self, sequences: Sequence[SequenceState], draft: Draft, logits: Tensor, errors: Errors | None = None
    ) -> Verdict:
        if draft.logits is not None:
            stated_logits = 2 * draft.logits  # a lower temperature
        else:  # the draft has probability 1; half of it is spread over the vocabulary
            V = logits.shape[-1]
            stated_logits = torch.full((*draft.tokens.shape, V), -math.log(V), device=logits.device)
            stated_logits.scatter_(2, draft.tokens[..., None], 0.0)
        stated = replace(draft, logits=stated_logits, precomputed=None)
        return super().verify(sequences, stated, logits, errors)


FAULTS: dict[str, type[EagerExecutor]] = {
    "accept-all": AcceptAll,
    "resample": Resample,
    "rollback": Rollback,
    "stale": Stale,
    "noise": Noise,
    "reuse": Reuse,
    "mislabel": Mislabel,
}


@contextmanager
def planted(decoder: Decoder, fault: str) -> Iterator[None]:
    """Plant a fault, by its name in ``FAULTS``, inside a ``with`` block.

    The decoder then runs without the graph executor.
    """
    if fault not in FAULTS:
        raise ValueError(f"plant: got {fault!r}; known are {', '.join(FAULTS)}")
    executor = decoder.executor
    decoder.executor = FAULTS[fault](decoder.scorer, decoder.drafter, decoder.rule, decoder.lenience)
    try:
        yield
    finally:
        decoder.executor = executor
        decoder.forget()


def _lengths(sequences: Sequence[SequenceState], draft: Draft, logits: Tensor) -> Tensor:
    """Return the number of draft tokens of each sequence ``[R]``."""
    return torch.tensor(draft.lengths or [draft.tokens.shape[1]] * len(sequences), device=logits.device)
