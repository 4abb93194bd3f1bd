"""Names of drafts, checked without an import of PyTorch, so that errors are raised at once."""

from __future__ import annotations

import os
from pathlib import Path

from outpace.checks.errors import suggestion
from outpace.models.hub import Name, check_hub, check_name

DRAFTS = "lookup", "none", "ngram"  # names that are not models


def names_model(draft: Name) -> bool:
    """Return whether a draft names a model."""
    text = os.fspath(draft)
    return text not in ("lookup", "none") and not text.startswith("ngram:")


def table_path(draft: Name) -> Path:
    """Return the file of a draft named ``ngram:FILE``."""
    return Path(os.fspath(draft).removeprefix("ngram:")).expanduser()


def check_draft_exists(draft: Name) -> None:
    """Check that a draft exists, as far as this machine can tell.

    A name close to one of ``DRAFTS`` is looked for on the hub as well, because it is likely to be misspelt.

    Raises:
        ValueError: There is no such draft, or its n-gram file is missing.
    """
    if draft in ("lookup", "none"):
        return
    if not names_model(draft):
        path = table_path(draft)
        if not path.is_file():
            raise ValueError(f"draft: {path}: no such file; save one with NGramDrafter.save")
        return
    if draft == "ngram" and not Path(draft).exists():
        raise ValueError("draft: ngram needs a file, ngram:FILE, which NGramDrafter.save writes")
    text = os.fspath(draft)
    word, colon, rest = text.partition(":")
    meant = suggestion(word.lower(), ["ngram"] if colon else DRAFTS)
    if not meant or Path(draft).expanduser().exists():
        check_name(draft)
        return
    if colon:
        meant = meant.replace('"ngram"', f'"ngram:{rest}"')
    try:
        check_name(draft)
        check_hub(text)
    except (ValueError, OSError):
        raise ValueError(f"draft: {text}: no such file, folder or hub model{meant}") from None
