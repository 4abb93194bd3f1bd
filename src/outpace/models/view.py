"""Views of models: the same parameters, with an attention function and linear layers of their own.

Forward passes of a scorer go through a view, so the model itself never changes. Other threads may run it at
the same time: with a forward pass of their own, with ``generate``, or with a second scorer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import Module

Forwards = Mapping[Module, Callable[[Tensor], Tensor]]
"""A forward of its own for some modules."""


def view_of(model: Module, forwards: Forwards, config: Any = None) -> Module:
    """Return a copy of a module tree that shares parameters, buffers and hooks with the original.

    Args:
        model: The module to copy. It is only read.
        forwards: Replacement of ``forward`` per module. A module that already has a forward of its own, such
            as a hook of accelerate, keeps it.
        config: Configuration that replaces the model's in every copied module. None keeps the model's.
    """
    return _copied(model, {}, forwards, getattr(model, "config", None), config)


def _copied(
    module: Module,
    copies: dict[Module, Module],
    forwards: Forwards,
    replaced: Any,
    config: Any,
) -> Module:
    # Not a recursive closure: its reference cycle would keep the model until the garbage collector runs.
    if module in copies:
        return copies[module]
    # Not `copy.copy`, which uses the pickle protocol: wrappers such as PyTorch's compiler override it.
    copies[module] = new = object.__new__(type(module))
    attributes = module.__dict__.copy()
    attributes["_buffers"] = attributes["_buffers"].copy()  # rotary embeddings may replace theirs
    attributes["_modules"] = {
        name: None if child is None else _copied(child, copies, forwards, replaced, config)
        for name, child in attributes["_modules"].items()
    }
    if config is not None and attributes.get("config") is replaced:
        attributes["config"] = config
    if module in forwards:
        attributes.setdefault("forward", forwards[module])
    new.__dict__.update(attributes)
    return new
