"""Exclusive use of objects that hold the state of sequences: a Decoder, its scorers and its drafter.

An owner is any object that stands for one call. ``dict.setdefault`` checks and claims in one operation, which
neither another thread nor Ctrl-C can interrupt. An owner that is created before a ``try`` block can always be
released after it.
"""

from __future__ import annotations

# By id of the claimed object, which is held, so that no other object gets its id; and its owner
_owners: dict[int, tuple[object, object]] = {}


def claim(part: object, owner: object) -> bool:
    """Claim a part for an owner; return whether the owner holds it, now or already."""
    return _owners.setdefault(id(part), (part, owner))[1] is owner


def release(owner: object) -> None:
    """Release everything that the owner has claimed."""
    for key in [key for key, (_, holder) in list(_owners.items()) if holder is owner]:
        del _owners[key]
