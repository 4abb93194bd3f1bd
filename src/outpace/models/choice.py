"""The choice of a model's scorer."""

from __future__ import annotations

from typing import Any

from outpace.models.causal import CausalScorer, has_adapters
from outpace.models.fused import activation_of, why_not
from outpace.models.fused_scorer import FusedScorer
from outpace.models.fused_seq2seq import FusedSeq2SeqScorer
from outpace.models.fused_stack import activation_of as stack_activation_of
from outpace.models.fused_stack import why_not as why_not_stack
from outpace.models.rearranged import has_kernels, kind_of
from outpace.models.scorer import Scorer
from outpace.models.seq2seq import Seq2SeqScorer


def scorer_of(model: Any, fused: bool = False) -> Scorer:
    """Return a scorer of a model.

    Args:
        model: A model, or a scorer. A scorer of the right kind is returned as it is.
        fused: Whether to fuse the model, if it can be.
    """
    scorer = model if isinstance(model, Scorer) else None
    if isinstance(scorer, FusedScorer) and scorer.is_current:
        return scorer
    model = model if scorer is None else scorer.model
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    wanted: type[Scorer] = Seq2SeqScorer if encodes else CausalScorer
    if fused and why_not_fused(model) is None:
        wanted = FusedSeq2SeqScorer if encodes else FusedScorer
    if scorer is not None and scorer.is_current and (isinstance(scorer, wanted) or not fused):
        return scorer
    new = wanted(model)  # type: ignore[call-arg]
    for cache in new.caches:
        cache.max_bytes = None if scorer is None else scorer.cache.max_bytes
    return new


def why_not_fused(model: Any) -> str | None:
    """Return the reason why forward passes of a model are not fused on its device, or None if they are."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if base is not model or has_adapters(base):
        return "has adapters"
    encodes = getattr(base.config, "is_encoder_decoder", False)
    reason = why_not_stack(base) if encodes else why_not(base)
    if reason is None:
        embedding = base.get_input_embeddings().weight
        if embedding.device.type != "cpu":
            activation = stack_activation_of(base) if encodes else activation_of(base)
            if not kind_of(activation):
                return f"has an activation without kernels ({type(activation).__name__})"
            if not has_kernels(embedding.device, embedding.dtype):
                return f"has no kernels for {embedding.dtype} on this device"
    return reason
