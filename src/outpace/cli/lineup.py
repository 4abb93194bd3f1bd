"""A synthetic pair of models for a sweep, and its prompts."""

from __future__ import annotations

import gc

from outpace.bench import synthetic as pairs
from outpace.bench.engine import Case
from outpace.bench.engine import prompts as at_random
from outpace.cli.bench import where
from outpace.decoder import Decoder

SYNTHETIC = 12  # prompts of a synthetic pair, unless another number is named
ALPHA, CONTEXT = 0.8, 128  # acceptance rate of a synthetic pair, and tokens of its prompts


def refuse_with_pair(**given: object) -> None:
    """Refuse flags that a synthetic pair has its own values for."""
    for name, value in given.items():
        if value:
            raise ValueError(f"--{name}: given together with --pair, which has its own")


def refuse_without_pair(**given: object) -> None:
    """Refuse flags of a synthetic pair without --pair."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"--{name}: it is of a synthetic pair, and no --pair was given")


def synthetic(
    name: str, alpha: float, rule: str, device: str | None, dtype: str | None, count: int, context: int
) -> tuple[dict[str, Decoder], list[list[int]]]:
    """Return the decoder of a synthetic pair, by name, and random prompts.

    Args:
        name: Name of the pair.
        alpha: Acceptance rate that the pair is made for.
        rule: Verification rule.
        device: Device of the models; None takes a GPU if there is one.
        dtype: Precision of the models; None is bfloat16.
        count: Number of prompts.
        context: Tokens of each prompt.

    Raises:
        ValueError: There is no such pair.
    """
    if name not in pairs.PAIRS:
        raise ValueError(f"--pair: got {name!r}; there are {', '.join(pairs.PAIRS)}")
    place, kind = where(device or "auto", dtype or "bfloat16")
    made = pairs.pair(*pairs.PAIRS[name], alpha, device=place, dtype=kind)
    decoder = Decoder(made.target, "lookup" if made.draft is None else made.draft, rule=rule)
    gc.freeze()
    gc.enable()
    ids = at_random(Case(name, alpha, 0, count, context), made)
    return {name.split("/")[1]: decoder}, ids.tolist()
