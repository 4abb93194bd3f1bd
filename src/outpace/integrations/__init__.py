"""Outpace inside other libraries; each of the modules here is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "transformers":
        return importlib.import_module("outpace.integrations.transformers")
    from outpace.wording import suggestion

    raise AttributeError(f"outpace.integrations has no {name!r}{suggestion(name, ['transformers'])}")
