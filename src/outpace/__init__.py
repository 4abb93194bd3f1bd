"""Outpace: speculative decoding for Transformers models, with exactly the target's output distribution.

Nothing heavy is imported before it is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from outpace.sampling import Prefix, Sampling
    from outpace.verify import Rule, Verdict, sigmoid, verify

_HOMES = {
    "Prefix": "outpace.sampling",
    "Rule": "outpace.verify.rules",
    "Sampling": "outpace.sampling",
    "Verdict": "outpace.verify.block",
    "sigmoid": "outpace.verify.rules",
}

__all__ = ["Prefix", "Rule", "Sampling", "Verdict", "__version__", "sigmoid", "verify"]


def __getattr__(name: str) -> Any:
    if name in ("random", "sampling", "verify"):  # the last is a package that can be called
        return importlib.import_module(f"outpace.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'outpace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
