"""A synthetic pair that takes part in a sweep, and what it writes about."""

from __future__ import annotations

import gc

from outpace.bench import synthetic as pairs
from outpace.bench.engine import Case
from outpace.bench.engine import prompts as at_random
from outpace.cli.bench import where
from outpace.decode import Decoder

SYNTHETIC = 12  # prompts of a synthetic pair, unless another number is named
ALPHA, CONTEXT = 0.8, 128  # what it is made for, and tokens of such a prompt


def refuse_with_pair(**given: object) -> None:
    for name, value in given.items():
        if value:
            raise ValueError(f"--{name}: given together with --pair, which has its own")


def refuse_without_pair(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"--{name}: it is of a synthetic pair, and no --pair was given")


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
