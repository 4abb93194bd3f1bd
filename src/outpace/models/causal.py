"""Any decoder-only model of the Transformers library as a ``Scorer``, unmodified.

Sequences of different lengths share one forward pass. It has explicit position ids, 4-D additive masks (one
per kind of layer), and a KV cache that writes at each row's own positions.

Rows with fewer new tokens are padded on the left, so the last column holds every row's last token. The
padding gets the positions *after* the row's new tokens. Its keys and values go to unused entries of the KV
cache, and the causal mask hides them.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outpace.checks.arguments import kind
from outpace.models.attention import view_config
from outpace.models.cache import RaggedCache, Span
from outpace.models.packed import Packed, packed_bytes
from outpace.models.source import Source
from outpace.models.view import view_of

log = logging.getLogger("outpace")

PREBUILT_TOKENS = 32  # forward passes over at most this many tokens use prebuilt masks
CHUNK = 512  # prompt tokens per forward pass
MIN_COPIED_PREFIX = 16  # tokens; computing a shorter prefix is as fast as copying it from another row

# Tests compare these families with their own forward. Any other family is checked when it is loaded.
TESTED_FAMILIES = {
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"),
    *("gpt2", "gpt_neox", "phi", "phi3", "opt", "falcon"),
}


Masks = dict[int | None, Tensor]
"""Attention masks by the sliding window of the layers in tokens; None: no window."""


class CausalScorer:
    """A Transformers causal language model and a ragged KV cache."""

    def __init__(self, model: Any) -> None:
        self.model: Any = model
        self.base: Any = supported_model(model)
        config = self.base.config
        self.config = config
        self.vocab_size: int = self.base.get_output_embeddings().weight.shape[0]
        self.context: int = positions(config)
        self.device: torch.device = execution_device(self.base.get_input_embeddings())
        self.dtype: torch.dtype = self.base.dtype
        self._windows = windows(config)
        arguments = inspect.signature(self.base.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in arguments else {}
        self._grouped = bool(getattr(self.base, "_supports_attention_backend", False))
        self._one_token_needs_no_mask = set(self._windows.values()) == {None}
        self._prepare(config.num_hidden_layers)
        if config.model_type not in TESTED_FAMILIES:
            self._check()

    def _prepare(self, layers: int) -> None:
        """Set up an empty KV cache."""
        self.layers = layers
        self.cache = self._new_cache()
        self._position_ids = torch.arange(0)[None]  # 0, 1, 2, ... to the cache's end
        self._prebuilt_masks: Masks | None = None  # of PREBUILT_TOKENS tokens at the cache's end
        self._order: list[int] = []  # the slot that each row of the cache belongs to
        self._lengths: dict[int, int] = {}  # committed tokens of each slot
        self._cached_tokens: dict[int, list[int]] = {}  # first tokens in a slot's cache
        self._packed: Packed | None = None
        self._view: Any = None
        self._weights = self._fingerprint()

    def _new_cache(self) -> RaggedCache:
        return RaggedCache(self.layers)

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
        self._packed = Packed(self.base)
        self._view = None

    def repack(self) -> None:
        """Pack the weights again if they were packed, since they may have changed."""
        if self._packed is not None:
            self._packed = None
            self.pack()

    def attach(self, model: Any) -> None:
        """Attach the model of this scorer again, after ``detach``."""
        self.model, self.base, self._view = model, supported_model(model), None

    def detach(self) -> None:
        """Drop all references to the model, so that it can be freed."""
        self.model = self.base = self._view = None

    @property
    def _runner(self) -> Any:
        """The model that forward passes go through: the user's, or a view of it with faster parts."""
        if self._view is None:
            grouped = self._grouped and self.config._attn_implementation == "sdpa"
            forwards = {} if self._packed is None else self._packed.forwards
            self._view = self.model
            if grouped or forwards:
                self._view = view_of(self.model, forwards, view_config(self.config, grouped))
        return self._view

    def _fingerprint(self) -> int:
        """Return a number that changes when weights or modules change. The KV cache is then stale."""
        return hash((fingerprint(self.base), getattr(self.config, "_attn_implementation", None)))

    @property
    def generation_config(self) -> Any:
        """The model's generation config, or None."""
        return getattr(self.base, "generation_config", None)

    @property
    def end_of_text(self) -> frozenset[int]:
        """Token ids with which the model ends a text."""
        ends = getattr(self.generation_config, "eos_token_id", None)
        if ends is None:
            ends = getattr(self.config, "eos_token_id", None)
        return frozenset(() if ends is None else (ends,) if isinstance(ends, int) else ends)

    def forget(self) -> None:
        """Discard the cached tokens of all slots, and the view of the modules."""
        self._view = None
        self._cached_tokens = {slot: [] for slot in self._cached_tokens}

    # KV cache

    def length(self, row: int) -> int:
        """See ``Scorer.length``."""
        return self._lengths[row]

    def commit(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """See ``Scorer.commit``."""
        for row, count in zip(rows, counts, strict=True):
            self._lengths[row] += count

    def truncate(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """See ``Scorer.truncate``."""
        for row, length in zip(rows, lengths, strict=True):
            self._lengths[row] = min(length, self._lengths[row])
            del self._cached_tokens[row][length:]

    def reset(self, rows: Sequence[int], texts: Sequence[Sequence[int]] | None = None) -> None:
        """See ``Scorer.reset``."""
        for i, row in enumerate(rows):
            if row not in self._lengths:
                continue
            length = self._lengths[row]
            if texts is None:
                self.cache.clear(self._order.index(row))
                self._cached_tokens[row] = []
            else:
                self._cached_tokens[row] = list(texts[i][:length])
            self._lengths[row] = 0

    def reserve(self, rows: int, tokens: int) -> None:
        """See ``Scorer.reserve``.

        Raises:
            MemoryError: The KV cache does not fit into the free memory.
        """
        size = self.cache.size(rows, tokens)
        if size == (self.cache.rows, self.cache.capacity):
            return
        if not any(self._lengths.values()):  # no slot is in use: start again with the needed size
            self.cache = self._new_cache()
            self._order, self._lengths, self._cached_tokens = [], {}, {}
            size = self.cache.size(rows, tokens)
        nbytes = size[0] * size[1] * self.bytes_per_token
        free = memory_free(self.device)
        description = f"{size[0]} rows of {size[1]} tokens in {nbytes / 2**20:.0f} MiB on {self.device}"
        if nbytes - self.cache.nbytes() > free:
            raise MemoryError(
                f"the KV cache needs {description}; {free / 2**20:.0f} MiB are free: pass a smaller "
                "batch_size or max_new_tokens"
            )
        log.info("KV cache of %s: %s", type(self.base).__name__, description)
        self.cache.reserve(*size)
        self._position_ids = torch.arange(size[1], device=self.device)[None]
        self._prebuilt_masks = None
        for slot in range(len(self._order), size[0]):
            self._order.append(slot)
            self._lengths[slot], self._cached_tokens[slot] = 0, []

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token in all layers.

        They are measured once the KV cache is allocated, and computed from the configuration before.
        """
        if self.cache.nbytes():
            return self.cache.nbytes() // (self.cache.rows * self.cache.capacity)
        config = self.config
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        if config.model_type == "falcon" and not config.new_decoder_architecture:
            heads = 1 if config.multi_query else config.num_attention_heads
        d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * config.num_hidden_layers * heads * d * self.dtype.itemsize)

    # Forward passes

    def _check_weights(self) -> None:
        """Discard cached tokens if the weights have changed, before they are reused."""
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
    def prefill(
        self,
        rows: Sequence[int],
        prompts: Sequence[Sequence[int]],
        sources: Sequence[Source | None] = (),
    ) -> Tensor:
        """See ``Scorer.prefill``."""
        self._check_weights()
        self._ensure_capacity(rows, max(map(len, prompts)))
        first: dict[tuple[int, ...], int] = {}  # by prompt, the index of the row that computes it
        owners = [first.setdefault(tuple(prompt), i) for i, prompt in enumerate(prompts)]
        unique = sorted(set(owners))
        for i in unique:
            self._reuse(rows[i], prompts[i])
        unique_rows = [rows[i] for i in unique]
        logits = self.append(unique_rows, [prompts[i][self._lengths[rows[i]] :] for i in unique])
        for i, owner in enumerate(owners):
            if i != owner:
                source, target = self._order.index(rows[owner]), self._order.index(rows[i])
                self.cache.copy(source, target, len(prompts[i]))
                self._lengths[rows[i]] = len(prompts[i])
            self._cached_tokens[rows[i]] = list(prompts[i])
        return logits if len(unique) == len(rows) else logits[[unique.index(owner) for owner in owners]]

    def _reuse(self, row: int, prompt: Sequence[int]) -> None:
        """Reuse a cached prefix of the prompt from this row or another, but not the prompt's last token."""
        cached = common_prefix_length(self._cached_tokens[row], prompt, len(prompt) - 1)
        best, shared = longest_shared_prefix(self._cached_tokens, prompt)
        if best is not None and shared >= cached + MIN_COPIED_PREFIX:
            self.cache.copy(self._order.index(best), self._order.index(row), shared)
            cached = shared
        self._lengths[row] = cached
        self._cached_tokens[row] = list(prompt[:cached])

    @torch.inference_mode()
    def append(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """See ``Scorer.append``."""
        counts = [len(row) for row in tokens]
        longest = max(counts)
        self._ensure_capacity(
            rows, max(self._lengths[row] + len(new) for row, new in zip(rows, tokens, strict=True)) + 1
        )
        first = self._arrange(rows)
        padded, columns = [], []
        for row, new, count in zip(rows, tokens, counts, strict=True):
            length, padding = self._lengths[row], longest - count
            padded.append([0] * padding + list(new))
            columns.append([*range(length + count, length + longest), *range(length, length + count)])
        ids = torch.tensor(padded)
        positions = torch.tensor(columns).clamp_(max=self.cache.capacity - 1)  # padding may overlap
        common_length = self._common_length(rows) if min(counts) == longest else None
        for left in range(0, longest, CHUNK):
            part = slice(left, left + CHUNK)
            start = None if common_length is None else common_length + left
            logits = self._forward(first, ids[:, part], positions[:, part], start, **self._last_only)
        self.commit(rows, counts)
        return logits[:, -1]

    @torch.inference_mode()
    def score(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
        """See ``Scorer.score``."""
        n = tokens.shape[1]
        self._ensure_capacity(rows, max(self._lengths[row] for row in rows) + n)
        first = self._arrange(rows)
        common_length = self._common_length(rows)
        if common_length is not None:
            positions = self._position_ids[:, common_length : common_length + n]
            positions = positions if len(rows) == 1 else positions.expand(len(rows), n)
        else:
            positions = torch.tensor([[self._lengths[row]] for row in rows]) + torch.arange(n)
        return self._forward(first, tokens, positions, common_length)

    def _forward(
        self, first: int, ids: Tensor, positions: Tensor, start: int | None, **last_only: Any
    ) -> Tensor:
        """Return logits ``[R, n or 1, V]`` of tokens ``[R, n]`` at positions ``[R, n]``.

        Tokens and positions may be on any device.
        """
        positions, reach = self._place(first, positions, start)
        alone = ids.shape == (1, 1) and self._one_token_needs_no_mask
        out = self._runner(
            input_ids=ids.to(self.device),
            # Past the context there is only padding, whose position does not matter but must exist.
            position_ids=positions if reach <= self.context else positions.clamp(max=self.context - 1),
            attention_mask=None if alone else self._masks(positions, start, reach),
            past_key_values=self.cache,
            use_cache=True,
            **last_only,
        )
        logits: Tensor = out.logits
        return logits if logits.device == self.device else logits.to(self.device)

    def _place(self, first: int, positions: Tensor, start: int | None) -> tuple[Tensor, int]:
        """Set the rows and positions of the KV cache that a forward pass writes.

        Returns:
            The positions on the device, and one past the last of them.
        """
        reach = int(positions.max()) + 1 if start is None else start + positions.shape[1]
        positions = positions.to(self.device, non_blocking=True)
        self.cache.span = Span(first, positions, start, reach)
        return positions, reach

    def _masks(self, positions: Tensor, start: int | None, reach: int) -> Tensor | dict[str, Tensor]:
        """Return additive attention masks ``[R, 1, n, reach]`` of the new tokens, per kind of layer."""
        (R, n), T = positions.shape, self.cache.capacity
        if start is None or n > PREBUILT_TOKENS:
            masks = self._new_masks(positions, reach)
        else:
            # A mask depends on distances alone, so one mask serves every start.
            if self._prebuilt_masks is None:
                self._prebuilt_masks = self._new_masks(
                    torch.arange(T, T + PREBUILT_TOKENS, device=self.device)[None], T + PREBUILT_TOKENS
                )
            part = slice(T - start, T - start + reach)
            masks = {
                window: mask[..., :n, part].expand(R, -1, -1, -1).clone(memory_format=torch.contiguous_format)
                for window, mask in self._prebuilt_masks.items()
            }
        if list(self._windows) == [""]:
            return masks[self._windows[""]]
        return {layer: masks[window] for layer, window in self._windows.items()}

    def _new_masks(self, positions: Tensor, reach: int) -> Masks:
        keys = torch.arange(reach, device=positions.device)
        at = positions[:, None, :, None]
        masks: Masks = {}
        for window in set(self._windows.values()):
            hidden = keys > at
            if window is not None:
                hidden |= keys <= at - window
            zeros = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
            masks[window] = zeros.masked_fill_(hidden, torch.finfo(self.dtype).min)
        return masks

    def _ensure_capacity(self, rows: Sequence[int], tokens: int) -> None:
        if max(rows) >= self.cache.rows or tokens > self.cache.capacity:
            self.reserve(max(rows) + 1, tokens)

    def _common_length(self, rows: Sequence[int]) -> int | None:
        """Return the length of all rows if they have the same, else None."""
        lengths = {self._lengths[row] for row in rows}
        return lengths.pop() if len(lengths) == 1 else None

    def _arrange(self, rows: Sequence[int]) -> int:
        """Move these rows side by side in the KV cache, behind the others in use; return the first index.

        No row moves if the last call had the same rows.
        """
        first = sum(length > 0 for length in self._lengths.values()) - sum(self._lengths[r] > 0 for r in rows)
        for i, row in enumerate(rows, first):
            if self._order[i] != row:
                j = self._order.index(row)
                both = (row, self._order[i])
                self._swap(i, j, max(max(self._lengths[s], len(self._cached_tokens[s])) for s in both))
                self._order[i], self._order[j] = self._order[j], self._order[i]
        return first

    def _swap(self, one: int, other: int, length: int) -> None:
        """Swap the first tokens of two rows of the KV cache."""
        self.cache.swap(one, other, length)

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
        """See ``Scorer.describe``."""
        attention = getattr(self.config, "_attn_implementation", None)
        return (
            f"{type(self.base).__name__}, {self.dtype}, {self.device}, attention {attention}, "
            f"vocabulary {self.vocab_size}, context {self.context}, "
            f"cache {self.bytes_per_token / 1024:.1f} KiB a token"
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
    weights = tuple((p.data_ptr(), version(p)) for p in module.parameters())
    modules = tuple((id(one), id(one.__dict__.get("forward"))) for one in module.modules())
    return hash((weights, modules))


def version(parameter: Tensor) -> int:
    """Return a number that grows when a parameter is changed in place.

    It is always 0 for a parameter made in inference mode, because PyTorch does not count its changes.
    """
    return 0 if parameter.is_inference() else parameter._version


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


def common_prefix_length(one: Sequence[int], other: Sequence[int], limit: int) -> int:
    """Return the length of the common prefix of two token sequences, at most ``limit``."""
    limit = min(len(one), len(other), limit)
    if list(one[:limit]) == list(other[:limit]):
        return max(limit, 0)
    return next(i for i in range(limit) if one[i] != other[i])


def longest_shared_prefix(cached: Mapping[int, Sequence[int]], text: Sequence[int]) -> tuple[int | None, int]:
    """Return the row that shares the longest prefix with a text, and the length of the prefix.

    The last token of the text does not count. The row is None if no row shares ``MIN_COPIED_PREFIX`` tokens.
    """
    if len(text) <= MIN_COPIED_PREFIX:
        return None, 0
    head = list(text[:MIN_COPIED_PREFIX])
    rows = [row for row, one in cached.items() if list(one[:MIN_COPIED_PREFIX]) == head]
    found = [common_prefix_length(cached[row], text, len(text) - 1) for row in rows]
    longest = max(found, default=0)
    return (rows[found.index(longest)], longest) if found else (None, 0)


def execution_device(embedding: Any) -> torch.device:
    """Return the device where an embedding computes.

    Accelerate keeps offloaded weights elsewhere between forward passes.
    """
    weight_device: torch.device = embedding.weight.device
    hook_device = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    return (
        torch.device(hook_device)
        if weight_device.type == "meta" and hook_device is not None
        else weight_device
    )


def memory_free(device: torch.device) -> int:
    """Return the bytes of free memory on a device; unknown memory counts as unlimited."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = Path("/proc/meminfo")
    if device.type == "cpu" and meminfo.exists():
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    return 1 << 62
