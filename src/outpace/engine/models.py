"""Checks of the models of a decoder: whether they fit each other, and whether CUDA graphs can run them."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.models.causal import has_adapters
from outpace.models.choice import why_not_fused
from outpace.models.encoder import EncoderScorer
from outpace.models.scorer import Scorer
from outpace.sampling import SamplingParams
from outpace.verification import Rule


def check_models(scorers: Sequence[Scorer]) -> None:
    """Share the encoder if target and draft model have the same one; reject models that do not fit.

    A draft model with an encoder needs a target with an encoder, which has an input for it.

    Args:
        scorers: The target, and the draft model if there is one.
    """
    target, *drafts = scorers
    if target in drafts:
        raise ValueError(
            "draft: got a drafter with the target's own scorer; it must have a scorer of its own, "
            "because each scorer has one KV cache; pass the draft model itself"
        )
    encoders = [one for one in scorers if isinstance(one, EncoderScorer)]
    if len(encoders) == 2:
        encoders[1].share_encoder(encoders[0])
    elif encoders and encoders[0] is not target:
        raise ValueError(
            "draft: got an encoder-decoder model; it must be a decoder-only model, as the target is"
        )


def why_no_graphs(scorers: Sequence[Scorer], rule: Rule, draft_sampling: SamplingParams | None) -> str | None:
    """Return the reason why models, rule or drafter cannot run in graphs, or None if they can.

    Args:
        scorers: The target, and the draft model if there is one.
        rule: The decoder's own rule.
        draft_sampling: The drafter's sampling parameters. None: the target's.
    """
    if rule.name == "rejection" or not rule.exact:
        return f"rule {rule} is for comparison only"
    if draft_sampling is not None and draft_sampling.processors:
        return "draft_sampling has processors"
    for scorer in scorers:
        if not scorer.captures:
            reason = why_not_fused(scorer.base) or "has changed since the last call"
            return f"{type(scorer.base).__name__} has an encoder and {reason}"
        if scorer.model is not scorer.base or has_adapters(scorer.base):
            return f"{type(scorer.base).__name__} has adapters, whose changes a graph cannot detect"
        if {parameter.device for parameter in scorer.base.parameters()} != {scorers[0].device}:
            return "the models' weights are on several devices"
    return None
