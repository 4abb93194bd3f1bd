"""A synthetic pair of models for a sweep, and its prompts."""

from __future__ import annotations

import gc

from outpace.bench.engine import Case
from outpace.bench.engine import prompts as random_prompts
from outpace.bench.synthetic import PAIRS, pair
from outpace.cli.bench import parse_device
from outpace.decoder import Decoder

NUM_PROMPTS = 12  # default of --limit
ALPHA = 0.8  # default of --alpha
CONTEXT = 128  # default of --context, tokens


def refuse_with_pair(**flags: object) -> None:
    """Refuse flags that a synthetic pair has its own values for."""
    for name, value in flags.items():
        if value:
            raise ValueError(f"--{name}: given together with --pair, which has its own; leave one out")


def refuse_without_pair(**flags: object) -> None:
    """Refuse flags that only a synthetic pair has, without --pair."""
    for name, value in flags.items():
        if value is not None:
            raise ValueError(f"--{name}: it needs --pair, a synthetic pair of models")


def load_pair(
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
    if name not in PAIRS:
        raise ValueError(f"--pair: got {name!r}; there are {', '.join(PAIRS)}")
    torch_device, torch_dtype = parse_device(device, dtype or "bfloat16")
    models = pair(*PAIRS[name], alpha, device=torch_device, dtype=torch_dtype)
    decoder = Decoder(models.target, "lookup" if models.draft is None else models.draft, rule=rule)
    gc.freeze()
    gc.enable()
    ids = random_prompts(Case(name, alpha, 0, count, context), models)
    return {name.split("/")[1]: decoder}, ids.tolist()
