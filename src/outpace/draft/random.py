"""Random drafter: for tests, and as a lower bound for other drafters."""

from __future__ import annotations

import torch

from outpace.checks.arguments import integer
from outpace.draft.base import Draft, Drafter, DraftSampler, State


class RandomDrafter(Drafter):
    """Drafter that samples all tokens with equal probability.

    The draft's sampling parameters are applied afterwards.

    Args:
        vocab_size: Vocabulary size V.
    """

    def __init__(self, vocab_size: int) -> None:
        integer("vocab_size", vocab_size, "an int >= 1", lambda V: V >= 1)
        self.vocab_size = vocab_size

    def propose(self, state: State, g: int) -> Draft:
        sampler = DraftSampler(state, g)
        uniform = torch.zeros(len(state.slots), self.vocab_size, device=state.device)
        for _ in range(g):
            sampler.sample_next(uniform)
        return sampler.draft()
