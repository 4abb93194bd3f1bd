"""Transformers' assisted generation with our verifier: its loop, its caches, its drafts; our sampling step.

    outpace.integrations.transformers.patch()
    model.generate(**inputs, assistant_model=small, do_sample=True)

One call of two kernels on a GPU takes the place of Transformers' function, which softmaxes every row, and the
rejected draft is corrected where target and draft agree up to rounding too.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from outpace.verify import verify

generation: Any = sys.modules[GenerationMixin.__module__]  # where its loop looks the function up
_theirs = generation._speculative_sampling


def patch() -> None:
    """From now on `generate(assistant_model=...)` verifies by `outpace.verify`."""
    generation._speculative_sampling = speculative_sampling


def unpatch() -> None:
    """Transformers as it was."""
    generation._speculative_sampling = _theirs


@contextmanager
def patched() -> Iterator[None]:
    """`patch` for a while; afterwards as before."""
    before = generation._speculative_sampling
    patch()
    try:
        yield
    finally:
        generation._speculative_sampling = before


def speculative_sampling(
    candidate_input_ids: Tensor,
    candidate_logits: Tensor,
    candidate_length: int,
    new_logits: Tensor,
    is_done_candidate: bool = False,
    assistant_ensemble_weight: float | None = None,
) -> tuple[Tensor, Tensor]:
    """What Transformers' function of that name gives: the tokens won `[1, n + 1]`, and n.

    Versions differ in whether `is_done_candidate` is there. With an ensemble weight, which is not exact,
    theirs decides.
    """
    if assistant_ensemble_weight is not None:
        options: dict[str, Any] = {"assistant_ensemble_weight": assistant_ensemble_weight}
        if "is_done_candidate" in inspect.signature(_theirs).parameters:
            options["is_done_candidate"] = is_done_candidate
        won: tuple[Tensor, Tensor] = _theirs(
            candidate_input_ids, candidate_logits, candidate_length, new_logits, **options
        )
        return won
    drafts = candidate_input_ids[:, -candidate_length:]
    verdict = verify(drafts, candidate_logits.to(new_logits.dtype), new_logits)
    kept, unusable = torch.stack((verdict.accepted[0], verdict.bad[0])).tolist()
    if unusable:
        raise ValueError("the logits are unusable: the target, the assistant or a processor left NaN or +inf")
    if is_done_candidate and kept == candidate_length:
        # The drafts end the text: the last of them is what their loop takes for the token after the others.
        return drafts, verdict.accepted[0] - 1
    return torch.cat((drafts[:, :kept], verdict.next_token[:, None]), dim=1), verdict.accepted[0]
