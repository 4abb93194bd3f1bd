"""Outpace: speculative decoding for Transformers models, with exactly the target's output distribution.

Heavy packages are imported only when a name that needs them is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from outpace.models.auto import silence_torchao

silence_torchao()  # before anything imports Transformers

__version__ = "0.1.0"

if TYPE_CHECKING:
    from outpace.auditing.audit import audit
    from outpace.decoder import Decoder
    from outpace.draft.base import Draft, Drafter
    from outpace.draft.lookup import LookupDrafter
    from outpace.draft.model import ModelDrafter
    from outpace.draft.ngram import NGramDrafter
    from outpace.draft.random import RandomDrafter
    from outpace.draft.text import TextDrafter
    from outpace.engine.sequence import Output, Step
    from outpace.engine.stats import Stats
    from outpace.integrations.transformers import generate
    from outpace.loading import load
    from outpace.models.source import Source
    from outpace.policy import DraftLengthPolicy, Fixed, Goodput, Heuristic
    from outpace.sampling import Prefix, SamplingParams
    from outpace.verification import Rule, Verdict, sigmoid, verify

_HOMES = {
    "Decoder": "outpace.decoder",
    "Draft": "outpace.draft.base",
    "DraftLengthPolicy": "outpace.policy",
    "Drafter": "outpace.draft.base",
    "Fixed": "outpace.policy",
    "Goodput": "outpace.policy",
    "Heuristic": "outpace.policy",
    "LookupDrafter": "outpace.draft.lookup",
    "ModelDrafter": "outpace.draft.model",
    "NGramDrafter": "outpace.draft.ngram",
    "Output": "outpace.engine.sequence",
    "Prefix": "outpace.sampling",
    "RandomDrafter": "outpace.draft.random",
    "Rule": "outpace.verification.rules",
    "SamplingParams": "outpace.sampling",
    "Source": "outpace.models.source",
    "Stats": "outpace.engine.stats",
    "Step": "outpace.engine.sequence",
    "TextDrafter": "outpace.draft.text",
    "Verdict": "outpace.verification.block",
    "audit": "outpace.auditing.audit",
    "generate": "outpace.integrations.transformers",
    "load": "outpace.loading",
    "sigmoid": "outpace.verification.rules",
    "verify": "outpace.verification",
}

__all__ = [
    "Decoder",
    "Draft",
    "DraftLengthPolicy",
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
    "SamplingParams",
    "Source",
    "Stats",
    "Step",
    "TextDrafter",
    "Verdict",
    "__version__",
    "audit",
    "generate",
    "load",
    "sigmoid",
    "verify",
]


_MODULES = ("integrations",)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"outpace.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    from outpace.checks.errors import suggestion

    raise AttributeError(f"outpace has no {name!r}{suggestion(name, (*_HOMES, *_MODULES))}")


def __dir__() -> list[str]:
    return __all__
