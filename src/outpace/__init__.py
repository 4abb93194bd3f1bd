"""Outpace: speculative decoding for Transformers models, with exactly the target's output distribution.

Nothing heavy is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from outpace.upstream import silence_torchao

silence_torchao()  # before anything imports Transformers

__version__ = "0.1.0"

if TYPE_CHECKING:
    from outpace.decode import Decoder
    from outpace.draft.base import Draft, Drafter
    from outpace.draft.lookup import LookupDrafter
    from outpace.draft.model import ModelDrafter
    from outpace.draft.ngram import NGramDrafter
    from outpace.draft.random import RandomDrafter
    from outpace.draft.text import TextDrafter
    from outpace.integrations.transformers import generate
    from outpace.length import Fixed, Goodput, Heuristic
    from outpace.models.source import Source
    from outpace.pair import load
    from outpace.rows import Output, Step
    from outpace.sampling import Prefix, Sampling
    from outpace.stats import Stats
    from outpace.verify import Rule, Verdict, sigmoid, verify

_HOMES = {
    "Decoder": "outpace.decode",
    "Draft": "outpace.draft.base",
    "Drafter": "outpace.draft.base",
    "Fixed": "outpace.length",
    "Goodput": "outpace.length",
    "Heuristic": "outpace.length",
    "LookupDrafter": "outpace.draft.lookup",
    "ModelDrafter": "outpace.draft.model",
    "NGramDrafter": "outpace.draft.ngram",
    "Output": "outpace.rows",
    "Prefix": "outpace.sampling",
    "RandomDrafter": "outpace.draft.random",
    "Rule": "outpace.verify.rules",
    "Sampling": "outpace.sampling",
    "Source": "outpace.models.source",
    "Stats": "outpace.stats",
    "Step": "outpace.rows",
    "TextDrafter": "outpace.draft.text",
    "Verdict": "outpace.verify.block",
    "generate": "outpace.integrations.transformers",
    "load": "outpace.pair",
    "sigmoid": "outpace.verify.rules",
}

__all__ = [
    "Decoder",
    "Draft",
    "Drafter",
    "Fixed",
    "Goodput",
    "Heuristic",
    "LookupDrafter",
    "ModelDrafter",
    "NGramDrafter",
    "Output",
    "Prefix",
    "RandomDrafter",
    "Rule",
    "Sampling",
    "Source",
    "Stats",
    "Step",
    "TextDrafter",
    "Verdict",
    "__version__",
    "generate",
    "load",
    "sigmoid",
    "verify",
]


_MODULES = ("audit", "integrations", "random", "sampling", "theory", "verify")  # the last can be called


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"outpace.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    from outpace.wording import suggestion

    raise AttributeError(f"outpace has no {name!r}{suggestion(name, (*_HOMES, *_MODULES))}")


def __dir__() -> list[str]:
    return __all__
