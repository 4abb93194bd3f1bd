"""Conversion of a user's ``draft`` argument to a ``Drafter``."""

from __future__ import annotations

from typing import Any

import torch

from outpace.checks.arguments import kind
from outpace.checks.errors import suggestion
from outpace.draft.base import Drafter

METHODS = ("propose", "commit", "reset")  # that every drafter has
FITS = 'it must be a Drafter, a model, "lookup" or None'


def resolve_drafter(drafter: Any) -> Drafter | None:
    """Return the drafter that a user named, passed as a model, or wrote.

    Raises:
        TypeError: The argument is none of these.
    """
    if drafter is None:
        return None
    if isinstance(drafter, str):
        if drafter != "lookup":
            hint = suggestion(drafter, ["lookup"]) or "; outpace.load takes a model's name"
            raise TypeError(f"draft: got {kind(drafter)[:80]}; {FITS}{hint}")
        from outpace.draft.lookup import LookupDrafter

        return LookupDrafter()
    if isinstance(drafter, type):
        raise TypeError(f"draft: got the class {drafter.__name__}; {FITS}")
    missing = [name for name in METHODS if not callable(getattr(drafter, name, None))]
    if isinstance(drafter, torch.nn.Module) and "propose" in missing:
        from outpace.draft.model import ModelDrafter

        return ModelDrafter(drafter)
    if "propose" in missing:
        raise TypeError(f"draft: got {kind(drafter)[:80]}; {FITS}")
    if missing:
        raise TypeError(
            f"draft: {type(drafter).__name__} has no method {missing[0]}; derive it from outpace.Drafter, "
            "whose commit and reset do nothing (docs/guides/add-a-drafter.md)"
        )
    return drafter  # type: ignore[no-any-return]
