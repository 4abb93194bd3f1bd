"""Outpace inside other libraries.

Each module here is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "transformers":
        return importlib.import_module("outpace.integrations.transformers")
    from outpace.checks.errors import suggestion

    raise AttributeError(f"outpace.integrations has no {name!r}{suggestion(name, ['transformers'])}")
