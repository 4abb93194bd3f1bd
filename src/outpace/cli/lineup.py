"""Who takes part in a sweep, and what is written about."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from outpace.bench import synthetic as pairs
from outpace.bench.engine import Case
from outpace.bench.engine import prompts as at_random
from outpace.bench.prompts import asked
from outpace.cli.bench import where
from outpace.cli.drafts import fitting
from outpace.cli.options import open_decoder
from outpace.cli.show import note
from outpace.decode import Decoder, WithModel
from outpace.pair import check_draft_name, load_drafter, through_text, worth_packing

SYNTHETIC = 12  # prompts of a synthetic pair, unless another number is named


def refuse_with_pair(**given: object) -> None:
    for name, value in given.items():
        if value:
            raise ValueError(f"--{name}: given together with --pair, which has its own")


def named(
    target: str | None,
    drafts: Sequence[str],
    rule: str,
    device: str | None,
    dtype: str | None,
    source: tuple[Sequence[str], str | None, int | None, int],
) -> tuple[dict[str, Decoder], list[list[int]]]:
    """Decoders by the names of drafts, all with one target, and prompts."""
    for name in drafts:
        if name == "none":
            raise ValueError("--draft: none is plain decoding, which is always there as g = 0")
        check_draft_name(name)
    decoder = open_decoder(target, drafts[0], device, dtype, rule, 1.0, None)
    found = {drafts[0]: decoder}
    for name in drafts[1:]:
        drafter = load_drafter(name, device=device, dtype=dtype, tell=note)
        drafter = through_text(drafter, decoder.tokenizer, name, note)
        if isinstance(drafter, WithModel) and worth_packing(drafter.scorer.base):
            drafter.scorer.pack()
        found[name] = Decoder(decoder.scorer, drafter, decoder.tokenizer, rule=rule)
    texts, data, limit, every = source
    prompts = fitting(decoder, asked(decoder.tokenizer, texts, data, limit, every))
    return found, [one.ids for one in prompts]


def synthetic(
    name: str, alpha: float, rule: str, device: str | None, dtype: str | None, count: int, context: int
) -> tuple[dict[str, Decoder], list[list[int]]]:
    """A decoder of a pair, and prompts at random."""
    if name not in pairs.PAIRS:
        raise ValueError(f"--pair: got {name!r}; there are {', '.join(pairs.PAIRS)}")
    place, kind = where(device or "auto", dtype or "bfloat16")
    made = pairs.pair(*pairs.PAIRS[name], alpha, device=place, dtype=kind)
    decoder = Decoder(made.target, "lookup" if made.draft is None else made.draft, rule=rule)
    gc.freeze()
    gc.enable()
    ids = at_random(Case(name, alpha, 0, count, context), made)
    return {name.split("/")[1]: decoder}, ids.tolist()
