"""Numbers of things, in words."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """1 prompt, 2 prompts."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def too_few(number: int, noun: str) -> str:
    return f"{counted(number, noun)} {'is' if number == 1 else 'are'} too few"
