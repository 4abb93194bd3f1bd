"""Decoders of one target with several drafters, and prompts that fit its context."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from outpace.bench.prompts import Prompt
from outpace.cli.bench import bare
from outpace.cli.models import check_models, refuse_speech
from outpace.cli.show import note
from outpace.decoder import Decoder
from outpace.draft.base import Drafter
from outpace.draft.random import RandomDrafter
from outpace.loading import bridge_tokenizers, check_draft_name, load_drafter, worth_packing
from outpace.models.choice import scorer_of
from outpace.models.hub import check_model, load_model
from outpace.policy import Fixed
from outpace.verification import check
from outpace.verification.rules import parse


def load_decoders(
    target: str | None,
    names: Sequence[str],
    device: str | None,
    dtype: str | None,
    *,
    rule: str = "token",
    lenience: float = 1.0,
    num_draft_tokens: int | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> tuple[Decoder, dict[str, Decoder]]:
    """Load a target and several drafts. Return a decoder without speculation, and one decoder per draft.

    All decoders share the target. The key of a draft is the last part of its path, or the whole path if two
    drafts would have the same key.

    Args:
        target: Name of the target.
        names: Names of the drafts.
        device: Device of all models.
        dtype: Precision of all models.
        rule: Verification rule.
        lenience: Lenience of the rule.
        num_draft_tokens: Draft tokens per step. None is the decoder's default policy.
        trust_remote_code: Whether to run Python code that comes with a model.
        revision: Revision of the target on the hub.
    """
    check.lenience(lenience, parse(rule))
    check_models(target, names)
    named = [name for name in names if name != "random"]
    for name in named:
        check_draft_name(name)
    options: dict[str, Any] = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    check_model(target, revision=revision, **options)
    refuse_speech(target, trust_remote_code=trust_remote_code, revision=revision)
    loaded = {name: load_drafter(name, tell=note, **options) for name in named}  # before the larger target
    model, tokenizer = load_model(target, tell=note, revision=revision, **options)
    scorer, pack = scorer_of(model), worth_packing(model)
    if pack:
        scorer.pack()
    decoders: dict[str, Decoder] = {}
    for name in names:
        drafter: Drafter | None
        if name == "random":
            drafter = RandomDrafter(scorer.vocab_size)
        else:
            drafter = bridge_tokenizers(loaded[name], tokenizer, name, note)
        if pack and drafter is not None and drafter.scorer is not None:
            drafter.scorer.pack()
        key = name if bare(name) in decoders else bare(name)
        policy = None if num_draft_tokens is None else Fixed(num_draft_tokens)
        decoders[key] = Decoder(
            scorer, drafter, tokenizer, rule=rule, lenience=lenience, num_draft_tokens=policy
        )
    # All objects so far live until the process ends, so the garbage collector need not scan them.
    gc.freeze()
    gc.enable()
    return Decoder(scorer, None, tokenizer), decoders


def select_fitting(decoder: Decoder, prompts: list[Prompt]) -> list[Prompt]:
    """Return the prompts that fit the target's context with at least one new token.

    Raises:
        ValueError: No prompt fits.
    """
    if decoder.scorer.has_encoder:
        return prompts
    context = decoder.scorer.context
    fit = [one for one in prompts if 0 < len(one.ids) < context]
    if len(fit) < len(prompts):
        note(
            f"{len(prompts) - len(fit)} of {len(prompts)} prompts do not fit a context of {context}: left out"
        )
    if not fit:
        raise ValueError(f"prompts: not one of them fits a context of {context} tokens")
    return fit
