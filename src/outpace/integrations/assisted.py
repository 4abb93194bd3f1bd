"""Verification by outpace inside Transformers' assisted generation.

Example::

    outpace.integrations.transformers.patch()
    model.generate(**inputs, assistant_model=small, do_sample=True)

Transformers' generation loop, KV caches and draft models stay the same. Only its verification function is
replaced. On a GPU, two kernels verify all draft tokens. Transformers computes a softmax for each row instead.

There is one more difference, if a draft token is rejected where target and draft distributions are equal up
to rounding. There Transformers' function divides 0 by 0. This one samples the replacement token correctly.
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

from outpace.verification import verify

generation: Any = sys.modules[GenerationMixin.__module__]  # the module with Transformers' loop
_transformers_sampling = generation._speculative_sampling


def patch() -> None:
    """Make ``generate(assistant_model=...)`` verify by ``outpace.verify`` from now on."""
    generation._speculative_sampling = speculative_sampling


def unpatch() -> None:
    """Restore Transformers' own verification."""
    generation._speculative_sampling = _transformers_sampling


@contextmanager
def patched() -> Iterator[None]:
    """Apply ``patch`` inside a ``with`` block and restore the previous state afterwards."""
    previous = generation._speculative_sampling
    patch()
    try:
        yield
    finally:
        generation._speculative_sampling = previous


def speculative_sampling(
    candidate_input_ids: Tensor,
    candidate_logits: Tensor,
    candidate_length: int,
    new_logits: Tensor,
    is_done_candidate: bool = False,
    assistant_ensemble_weight: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Verify draft tokens in place of Transformers' function ``_speculative_sampling``.

    Some versions of Transformers do not pass ``is_done_candidate``. With ``assistant_ensemble_weight``, which
    is not exact, Transformers' own function is called.

    Returns:
        The new tokens ``[1, n + 1]``, and n, the number of accepted draft tokens.
    """
    if assistant_ensemble_weight is not None:
        options: dict[str, Any] = {"assistant_ensemble_weight": assistant_ensemble_weight}
        if "is_done_candidate" in inspect.signature(_transformers_sampling).parameters:
            options["is_done_candidate"] = is_done_candidate
        result: tuple[Tensor, Tensor] = _transformers_sampling(
            candidate_input_ids, candidate_logits, candidate_length, new_logits, **options
        )
        return result
    drafts = candidate_input_ids[:, -candidate_length:]
    verdict = verify(drafts, candidate_logits.to(new_logits.dtype), new_logits)
    num_accepted, unusable = torch.stack((verdict.accepted[0], verdict.bad[0])).tolist()
    if is_done_candidate and num_accepted == candidate_length:
        # The draft ends the sequence. Transformers' loop counts the last draft token as the bonus token.
        return drafts, verdict.accepted[0] - 1
    if unusable:
        raise ValueError(
            "the logits are unusable: the target, the assistant or a processor returned NaN, +inf, or -inf "
            "for all tokens; check weights, dtype and processors"
        )
    return torch.cat((drafts[:, :num_accepted], verdict.next_token[:, None]), dim=1), verdict.accepted[0]
