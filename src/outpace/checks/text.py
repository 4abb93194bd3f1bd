"""Text that is not whole: characters that UTF-8 cannot write, and bytes that are no character yet."""

from __future__ import annotations

BROKEN = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer writes for bytes that are no character yet


def check_text(name: str, text: str) -> None:
    """Raise if a string cannot be written in UTF-8; the errors of tokenizers differ."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"{text[error.start]!r} at {error.start}, which is no character"
        raise ValueError(f"{name}: got {got}; it must be text in UTF-8") from None
