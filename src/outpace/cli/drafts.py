"""Several drafts of one target, as flags name them, and prompts that fit."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from outpace.bench.prompts import Asked
from outpace.cli.bench import bare
from outpace.cli.options import check_models, refuse_speech
from outpace.cli.show import note
from outpace.decode import Decoder, WithModel
from outpace.draft.base import Drafter
from outpace.draft.random import RandomDrafter
from outpace.length import Fixed
from outpace.models.hub import check_model, load_model
from outpace.models.seq2seq import Seq2SeqScorer, scorer_of
from outpace.pair import check_draft_name, load_drafter, through_text, worth_packing
from outpace.verify import check
from outpace.verify.rules import parse


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
    """A decoder without a draft, and one with each, all with the same target. They guess g tokens, or as many
    as their own policy says. Of paths the last part names them, unless two would have one name."""
    check.lenience(lenience, parse(rule))
    check_models(target, names)
    named = [name for name in names if name != "random"]
    for name in named:
        check_draft_name(name)
    options: dict[str, Any] = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    check_model(target, revision=revision, **options)
    refuse_speech(target, trust_remote_code=trust_remote_code, revision=revision)
    loaded = {name: load_drafter(name, tell=note, **options) for name in named}  # the target is larger
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
        decoders[shown] = Decoder(scorer, drafter, tokenizer, rule=rule, lenience=lenience, length=length)
    # What was made so far stays until the end: `main` had it not looked through for garbage, nor is it now.
    gc.freeze()
    gc.enable()
    return Decoder(scorer, None, tokenizer), decoders


def fitting(decoder: Decoder, prompts: list[Asked]) -> list[Asked]:
    """Prompts that leave room for an answer."""
    if isinstance(decoder.scorer, Seq2SeqScorer):
        return prompts
    room = decoder.scorer.context
    fit = [one for one in prompts if 0 < len(one.ids) < room]
    if len(fit) < len(prompts):
        note(f"{len(prompts) - len(fit)} of {len(prompts)} prompts do not fit a context of {room}: left out")
    if not fit:
        raise ValueError(f"prompts: not one of them fits a context of {room} tokens")
    return fit
