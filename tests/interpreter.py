"""Triton's interpreter without repeated work.

The interpreter replaces the functions of ``triton.language`` at each launch, and again at each call of a
nested function of the kernel. The second replacement changes nothing, and takes half of the tests' time.
"""

from __future__ import annotations

import functools
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@functools.cache
def languages(function: Any) -> list[Any]:
    """Return the modules of Triton's language that a function can see."""
    return [one for one in function.__globals__.values() if one is tl or one is tl.core]


def patch_language_once() -> None:
    """Let the interpreter skip modules of the language that are replaced already."""
    original = getattr(interpreter, "_patch_lang", None)
    if original is None or not hasattr(interpreter, "_LangPatchScope"):
        return  # another version of Triton

    def patch(function: Any) -> Any:
        if any(tl.core.is_builtin(one.load) for one in languages(function)):
            return original(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch
