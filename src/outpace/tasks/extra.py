"""Packages that only some tasks need."""

from __future__ import annotations

import importlib
from typing import Any


def needed(package: str, extra: str) -> Any:
    """A package, or an error that names what to install."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"this needs {package}: pip install 'outpace[{extra}]'") from error
