"""Any decoder-only model of the Transformers library as a ``Scorer``, unmodified.

Sequences of different lengths share one forward pass. It has explicit position ids, 4-D additive masks (one
per kind of layer), and a KV cache that writes at each row's own positions.

Rows with fewer new tokens are padded on the left, so the last column holds every row's last token. The
padding gets the positions *after* the row's new tokens. Its keys and values go to unused entries of the KV
cache, and the causal mask hides them.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from outpace.checks.arguments import kind
from outpace.models.attention import view_config
from outpace.models.contiguous import ContiguousCache, Span
from outpace.models.kv_cache import memory_free
from outpace.models.packed import packed_bytes, packed_forwards
from outpace.models.scorer import Scorer
from outpace.models.view import Forwards, view_of

# Tests compare these families with their own forward. Any other family is checked when it is loaded.
TESTED_FAMILIES = {
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"),
    *("gpt2", "gpt_neox", "phi", "phi3", "opt", "falcon"),
}


class CausalScorer(Scorer):
    """A Transformers causal language model, whose own forward runs over a contiguous KV cache.

    Args:
        model: The model.
    """

    cache: ContiguousCache

    def __init__(self, model: Any) -> None:
        self.model = model
        self.base = supported_model(model)
        config = self.base.config
        self.config = config
        self.vocab_size = self.base.get_output_embeddings().weight.shape[0]
        self.context = positions(config)
        self.device, _ = placement(self.base)
        self.dtype = self.base.dtype
        self._windows = windows(config)
        arguments = inspect.signature(self.base.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in arguments else {}
        self._grouped = bool(getattr(self.base, "_supports_attention_backend", False))
        self._one_token_needs_no_mask = set(self._windows.values()) == {None}
        self._prepare(config.num_hidden_layers, bytes_per_token(config, self.dtype))
        if config.model_type not in TESTED_FAMILIES:
            self._check()
            self.release()

    def _prepare(self, layers: int, token_bytes: int) -> None:
        """Set up an empty KV cache."""
        self.cache = ContiguousCache(layers, self.device, token_bytes)
        self._placed = placement(self.base)
        self._packed: Forwards = {}  # of linear layers with packed weights
        self._view: Any = None
        self._weights = self._fingerprint()

    def pack(self) -> None:
        """Pack the weights for forward passes over few tokens, if they are on a CPU.

        Raises:
            MemoryError: The packed weights do not fit into the free memory.
        """
        size = packed_bytes(self.base)
        free = memory_free(torch.device("cpu"))
        if size > free:
            raise MemoryError(
                f"pack: the packed weights take {size >> 20} MiB; {free >> 20} MiB of memory are free"
            )
        self._packed = packed_forwards(self.base)
        self._view = None

    def repack(self) -> None:
        if self._packed:
            self._packed = {}
            self.pack()

    def attach(self, model: Any) -> None:
        self.model, self.base, self._view = model, supported_model(model), None

    def detach(self) -> None:
        self.model = self.base = self._view = None

    @property
    def _runner(self) -> Any:
        """The model that forward passes go through: the user's, or a view of it with faster parts."""
        if self._view is None:
            grouped = self._grouped and self.config._attn_implementation == "sdpa"
            self._view = self.model
            if grouped or self._packed:
                self._view = view_of(self.model, self._packed, view_config(self.config, grouped))
        return self._view

    def _fingerprint(self) -> int:
        """Return a number that changes when weights or modules change. The KV cache is then stale."""
        return hash((fingerprint(self.base), getattr(self.config, "_attn_implementation", None)))

    def forget(self) -> None:
        """Discard cached prefixes, and the view of the modules."""
        self._view = None
        super().forget()

    # Forward passes

    @property
    def is_current(self) -> bool:
        return placement(self.base) == self._placed

    @property
    def layout(self) -> Hashable:
        return state_of(self.base.modules())[:2]

    def check_placed(self) -> None:
        """See ``Scorer.check_placed``; the model's own forward uses its weights where they are now."""
        if not self.is_current:
            raise self._moved()

    def check_weights(self) -> None:
        self.check_placed()
        weights = self._fingerprint()
        if weights != self._weights or has_adapters(self.base):  # switching adapters changes no weight
            self.forget()
            if weights != self._weights:
                self.repack()
            self._weights = weights
        if self.base.training:
            warnings.warn("model: it was in training mode; switched to evaluation mode", stacklevel=7)
            self.model.eval()

    @torch.inference_mode()
    def append(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        counts = [len(new) for new in tokens]
        longest = max(counts)
        lengths = [self.cache.length(slot) for slot in slots]
        ends = [length + count for length, count in zip(lengths, counts, strict=True)]
        self.cache.reserve(slots, [end + 1 for end in ends])
        first = self.cache.arrange(slots)
        padded, columns = [], []
        for length, end, new in zip(lengths, ends, tokens, strict=True):
            padded.append([0] * (longest - len(new)) + list(new))
            columns.append([*range(end, length + longest), *range(length, end)])
        at = torch.tensor(columns).clamp_(max=self.cache.capacity - 1)  # padding may overlap
        logits = self._forward(first, torch.tensor(padded), at, **self._last_only)
        for slot, new in zip(slots, tokens, strict=True):
            self.cache.commit(slot, len(new), new)
        return logits[:, -1]

    @torch.inference_mode()
    def score(self, slots: Sequence[int], tokens: Tensor, prefill: bool = False) -> Tensor:
        n = tokens.shape[1]
        lengths = [self.cache.length(slot) for slot in slots]
        self.cache.reserve(slots, [length + n for length in lengths])
        at = torch.tensor(lengths)[:, None] + torch.arange(n)
        return self._forward(self.cache.arrange(slots), tokens, at)

    def arrange(self, slots: int) -> None:
        self.cache.arrange_all(slots)

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """See ``Scorer.forward``; every slot has the row of its number."""
        capacity = self.cache.capacity
        last = capacity - 1  # no sequence has a token there
        positions = positions.where(positions >= 0, last).clamp(max=last)
        self.cache.span = Span(0, positions, capacity)
        masks = self._masks(positions, capacity)
        return self._run(ids, positions.clamp(max=self.context - 1), masks)

    def _forward(self, first: int, ids: Tensor, positions: Tensor, **last_only: Any) -> Tensor:
        """Return logits ``[R, n or 1, V]`` of tokens ``[R, n]`` at positions ``[R, n]``.

        Tokens and positions may be on any device.
        """
        positions, reach = self._place(first, positions)
        alone = ids.shape == (1, 1) and self._one_token_needs_no_mask
        # Past the context there is only padding, whose position does not matter but must exist.
        within = positions if reach <= self.context else positions.clamp(max=self.context - 1)
        masks = None if alone else self._masks(positions, reach)
        logits = self._run(ids.to(self.device), within, masks, **last_only)
        return logits if logits.device == self.device else logits.to(self.device)

    def _run(self, ids: Tensor, position_ids: Tensor, masks: Any, **last_only: Any) -> Tensor:
        out = self._runner(
            input_ids=ids,
            position_ids=position_ids,
            attention_mask=masks,
            past_key_values=self.cache.past_key_values,
            use_cache=True,
            **last_only,
        )
        logits: Tensor = out.logits
        return logits

    def _place(self, first: int, positions: Tensor) -> tuple[Tensor, int]:
        """Set the rows and positions of the KV cache that a forward pass writes.

        Returns:
            The positions on the device, and one past the last of them.
        """
        reach = int(positions.max()) + 1
        positions = positions.to(self.device, non_blocking=True)
        self.cache.span = Span(first, positions, reach)
        return positions, reach

    def _masks(self, positions: Tensor, reach: int) -> Tensor | dict[str, Tensor]:
        """Return additive attention masks ``[R, 1, n, reach]``: one, or one per kind of layer."""
        masks = {one: mask_of(positions, reach, one, self.dtype) for one in set(self._windows.values())}
        if list(self._windows) == [""]:
            return masks[self._windows[""]]
        return {kind: masks[window] for kind, window in self._windows.items()}

    def _check(self) -> None:
        """Raise ValueError if the logits of an untested family differ from those of its own forward."""
        n = min(300, self.context)  # longer than GPT-Neo's attention window of 256
        ids = (torch.arange(n) * 7 + 3) % self.vocab_size
        start = n - 20
        try:
            with torch.inference_mode():
                reference = self.model(input_ids=ids[None].to(self.device), use_cache=False).logits[0]
                self.prefill([0, 1], [ids[:start].tolist(), ids[:5].tolist()])
                self.score([0, 1], torch.zeros(2, 5, dtype=torch.int64, device=self.device))
                drafts = torch.stack((ids[start : start + 12], ids[5:17])).to(self.device)
                scored = self.score([0, 1], drafts)
        except Exception as error:
            why = f"cannot be scored with explicit positions, masks and KV cache ({error})"
            raise refusal(self.base, why) from error
        expected = torch.stack((reference[start : start + 12], reference[5:17]))
        worst = float((scored - expected).abs().max() / reference.abs().max())
        self.reset([0, 1])
        if not worst <= min(200 * torch.finfo(self.dtype).eps, 0.05):
            raise refusal(
                self.base, f"scores differently through a ragged cache (by {worst:.1e} of its largest logit)"
            )

    def describe(self) -> str:
        attention = getattr(self.config, "_attn_implementation", None)
        return (
            f"{type(self.base).__name__}, {self.dtype}, {self.device}, attention {attention}, "
            f"vocabulary {self.vocab_size}, context {self.context}, KV cache {self.cache.describe()}"
            + (", weights packed" if self._packed else "")
        )


def supported_model(candidate: Any) -> Any:
    """Return the Transformers model itself, without a PEFT wrapper, in evaluation mode.

    Raises:
        TypeError: The candidate is not a model of the Transformers library.
        ValueError: The model cannot be scored; the message says why.
    """
    model: Any = candidate
    if not isinstance(candidate, torch.nn.Module) or not hasattr(candidate, "config"):
        raise TypeError(
            f"model: got {kind(model)[:80]}; it must be a causal model of the Transformers library"
        )
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # inside PEFT
    if base is not model and model.active_peft_config.is_prompt_learning:
        raise refusal(base, "is wrapped by PEFT's prompt learning, which changes the positions of tokens")
    config = base.config
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise refusal(base, "is an encoder-decoder model; use `outpace.models.seq2seq`")
    if config.get_text_config() is not config or hasattr(config, "vision_config"):
        raise refusal(base, "is a vision-language model; load its language model alone")
    if getattr(config, "attention_chunk_size", None):
        raise refusal(base, "uses chunked attention, which is not supported")
    types = set(getattr(config, "layer_types", None) or ())
    recurrent = types - {"full_attention", "sliding_attention"}
    if getattr(base, "_is_stateful", False) or recurrent:
        what = f" ({', '.join(sorted(recurrent))})" if recurrent else ""
        raise refusal(
            base, f"has a recurrent state{what}, which cannot be rolled back after a rejected draft token"
        )
    if name in ("bloom", "mpt") or getattr(config, "alibi", False):
        raise refusal(base, "uses ALiBi, whose bias Transformers builds for rows of equal length only")
    if not hasattr(base, "generate") or base.get_output_embeddings() is None:
        raise refusal(base, "has no language-model head; load it with AutoModelForCausalLM")
    attention = getattr(config, "_attn_implementation", None)
    if attention not in ("sdpa", "eager"):
        softcap = getattr(config, "attn_logit_softcapping", None)
        instead = "eager" if softcap is not None else "sdpa"
        warnings.warn(
            f"model: its attention {attention} does not take 4-D masks; switched to {instead}", stacklevel=4
        )
        base.set_attn_implementation(instead)
    if base.training:
        warnings.warn("model: it was in training mode; switched to evaluation mode", stacklevel=4)
        model.eval()
    return base


def positions(config: Any) -> int:
    """Return the model's context: the maximum number of tokens of a sequence."""
    max_tokens = getattr(config, "max_position_embeddings", None) or 1 << 30
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Transformers picks the factors by the longest sequence of a forward pass. Up to the original context
        # they do not depend on it.
        name = "original_max_position_embeddings"
        max_tokens = min(
            max_tokens, *(int(limit or max_tokens) for limit in (rope.get(name), getattr(config, name, None)))
        )
        warnings.warn(
            f"model: its context is limited to {max_tokens} tokens; beyond them, longrope would depend on "
            "the other sequences of a batch",
            stacklevel=4,
        )
    return int(max_tokens)


def refusal(base: Any, why: str) -> ValueError:
    """Return an error that says why a model is refused."""
    return ValueError(f"model: {type(base).__name__} {why}")


def has_adapters(base: Any) -> bool:
    """Return whether a model has PEFT adapters, with or without a PEFT wrapper."""
    return hasattr(base, "peft_config") or bool(getattr(base, "_hf_peft_config_loaded", False))


def fingerprint(module: torch.nn.Module) -> int:
    """Return a number that changes when weights, modules or the forward of a module change."""
    return hash(state_of(module.modules())[1:])


def state_of(modules: Iterable[torch.nn.Module]) -> tuple[tuple[int, ...], ...]:
    """Return numbers by which changes of all modules of a model are noticed.

    This is checked for every request, so it reads PyTorch's dictionaries.

    Returns:
        Numbers that change if modules get hooks; if weights move, or modules or their forwards are replaced;
        and if weights change in place. PyTorch does not count changes of weights made in inference mode.
    """
    hooks, places, versions = list[int](), list[int](), list[int]()
    for module in modules:
        own = module.__dict__
        hooks.append(len(own["_forward_hooks"]) + len(own["_forward_pre_hooks"]))
        places += (id(own.get("forward")), *map(id, own["_modules"].values()))
        for one in own["_parameters"].values():
            if one is not None:
                places.append(one.data_ptr())
                versions.append(0 if one.is_inference() else one._version)
    return tuple(hooks), tuple(places), tuple(versions)


def windows(config: Any) -> dict[str, int | None]:
    """Return the attention window of each kind of layer in tokens, None for no window.

    If all layers are alike, the only key is ``""``. The configuration is read as in Transformers' own
    ``create_masks_for_generate``.
    """
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is not None:
        return {one: window if one == "sliding_attention" else None for one in set(types)}
    return {"": window}


def mask_of(positions: Tensor, reach: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return the additive attention mask ``[B, 1, n, reach]`` of queries at positions ``[B, n]``."""
    keys = torch.arange(reach, device=positions.device)
    at = positions[:, None, :, None]
    hidden = keys > at
    if window is not None:
        hidden |= keys <= at - window
    zeros = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return zeros.masked_fill_(hidden, torch.finfo(dtype).min)


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of the keys and values of one token in all layers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if config.model_type == "falcon" and not config.new_decoder_architecture:
        heads = 1 if config.multi_query else config.num_attention_heads
    d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * d * dtype.itemsize)


def placement(base: Any) -> tuple[torch.device, torch.dtype]:
    """Return the device where a model's embedding computes, and its dtype.

    Accelerate keeps offloaded weights elsewhere between forward passes.
    """
    embedding = base.get_input_embeddings()
    device, dtype = embedding.weight.device, embedding.weight.dtype
    hook_device = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    if device.type == "meta" and hook_device is not None:
        device = torch.device(hook_device)
    return device, dtype
