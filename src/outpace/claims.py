"""Exclusive use of what holds the state of sequences: a Decoder, its scorers and its drafter.

An owner is any object that stands for one call. `dict.setdefault` claims in one step, so neither a thread nor
Ctrl-C can come between looking and taking; an owner made before its `try` can always be released after it.
"""

from __future__ import annotations

_owners: dict[int, object] = {}  # by id of what is claimed


def claim(part: object, owner: object) -> bool:
    """Return whether the owner has the part to itself, now or already."""
    return _owners.setdefault(id(part), owner) is owner


def release(owner: object) -> None:
    """Give back all that the owner has claimed."""
    for key in [key for key, one in list(_owners.items()) if one is owner]:
        del _owners[key]
