"""Who guesses. A drafter is any object with `propose`, `commit` and `reset`: see `outpace.draft.base`."""

from __future__ import annotations

from typing import Any

import torch

from outpace.arguments import kind
from outpace.draft.base import Drafter


def drafter_of(drafter: Any) -> Drafter | None:
    """A drafter from what a user may name it by."""
    if drafter == "lookup":
        from outpace.draft.lookup import LookupDrafter

        return LookupDrafter()
    if isinstance(drafter, torch.nn.Module):
        from outpace.draft.model import ModelDrafter

        return ModelDrafter(drafter)
    if drafter is not None and not hasattr(drafter, "propose"):
        raise TypeError(f'drafter: got {kind(drafter)[:80]}; it must be a Drafter, a model, "lookup" or None')
    return drafter  # type: ignore[no-any-return]
