"""Decoders for several drafts of one target, and prompts that fit its context."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from outpace.bench.prompts import Asked
from outpace.cli.bench import bare
from outpace.cli.options import check_models, refuse_speech
from outpace.cli.show import note
from outpace.decoder import Decoder, WithModel
from outpace.draft.base import Drafter
from outpace.draft.random import RandomDrafter
from outpace.loading import check_draft_name, load_drafter, through_text, worth_packing
from outpace.models.hub import check_model, load_model
from outpace.models.seq2seq import Seq2SeqScorer, scorer_of
from outpace.policy import Fixed
from outpace.verification import check
from outpace.verification.rules import parse


def line_up(
    target: str | None,
    names: Sequence[str],
    device: str | None,
    dtype: str | None,
    *,
    rule: str = "token",
    lenience: float = 1.0,
    g: int | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
) -> tuple[Decoder, dict[str, Decoder]]:
    """Load a target and several drafts; return a decoder without a draft, and one with each.

    All decoders share the target. A draft is named by the last part of its path, unless two would have one
    name.

    Args:
        target: Name of the target.
        names: Names of the drafts.
        device: Device of all models.
        dtype: Precision of all models.
        rule: Verification rule.
        lenience: Lenience of the rule.
        g: Number of draft tokens per step; None leaves it to the decoder's default policy.
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
            drafter = through_text(loaded[name], tokenizer, name, note)
        if pack and isinstance(drafter, WithModel):
            drafter.scorer.pack()
        shown = name if bare(name) in decoders else bare(name)
        length = None if g is None else Fixed(g)
        decoders[shown] = Decoder(
            scorer, drafter, tokenizer, rule=rule, lenience=lenience, num_draft_tokens=length
        )
    # All objects so far last until the end: freeze them, so that the garbage collector never scans them.
    gc.freeze()
    gc.enable()
    return Decoder(scorer, None, tokenizer), decoders


def fitting(decoder: Decoder, prompts: list[Asked]) -> list[Asked]:
    """Return the prompts that fit the target's context with at least one new token.

    Raises:
        ValueError: No prompt fits.
    """
    if isinstance(decoder.scorer, Seq2SeqScorer):
        return prompts
    room = decoder.scorer.context
    fit = [one for one in prompts if 0 < len(one.ids) < room]
    if len(fit) < len(prompts):
        note(f"{len(prompts) - len(fit)} of {len(prompts)} prompts do not fit a context of {room}: left out")
    if not fit:
        raise ValueError(f"prompts: not one of them fits a context of {room} tokens")
    return fit
