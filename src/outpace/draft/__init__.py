"""Who guesses. A drafter is any object with `propose`, `commit` and `reset`: see `outpace.draft.base`."""

from __future__ import annotations

from typing import Any

import torch

from outpace.arguments import kind
from outpace.draft.base import Drafter
from outpace.wording import suggestion

METHODS = ("propose", "commit", "reset")  # of a drafter
FITS = 'it must be a Drafter, a model, "lookup" or None'


def drafter_of(drafter: Any) -> Drafter | None:
    """Return the drafter that a user named, gave as a model, or wrote."""
    if drafter is None:
        return None
    if isinstance(drafter, str):
        if drafter != "lookup":
            instead = suggestion(drafter, ["lookup"]) or "; outpace.load takes a model's name"
            raise TypeError(f"drafter: got {kind(drafter)[:80]}; {FITS}{instead}")
        from outpace.draft.lookup import LookupDrafter

        return LookupDrafter()
    if isinstance(drafter, type):
        raise TypeError(f"drafter: got the class {drafter.__name__}; {FITS}")
    lacks = [name for name in METHODS if not callable(getattr(drafter, name, None))]
    if isinstance(drafter, torch.nn.Module) and "propose" in lacks:
        from outpace.draft.model import ModelDrafter

        return ModelDrafter(drafter)
    if "propose" in lacks:
        raise TypeError(f"drafter: got {kind(drafter)[:80]}; {FITS}")
    if lacks:
        raise TypeError(
            f"drafter: {type(drafter).__name__} has no method {lacks[0]}; derive it from outpace.Drafter, "
            "whose commit and reset do nothing (docs/drafters.md)"
        )
    return drafter  # type: ignore[no-any-return]
