"""An encoder-decoder model of the Transformers library as a ``Scorer``.

The encoder runs once per source, the input of the encoder. The keys and values of cross-attention are also
computed once. From then on a sequence is scored as in ``outpace.models.causal``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outpace.checks.arguments import kind
from outpace.models.causal import CausalScorer, fingerprint, mask_of, placement, refusal
from outpace.models.contiguous import grown
from outpace.models.source import Source
from outpace.models.stack import FAMILIES, Stack

ENCODER_BATCH_TOKENS = 8192  # tokens or frames that go through an encoder at a time


class Seq2SeqScorer(CausalScorer):
    """T5, mT5, BART, Marian or Whisper, with ragged KV caches for self-attention and cross-attention."""

    _sources: dict[int, int]  # length of each slot's source
    _cross_cache: list[tuple[Tensor, Tensor]]  # sources' keys and values per layer, `[rows, heads, S, d]`

    def __init__(self, model: Any) -> None:
        base = supported_model(model)
        self.model = self.base = base
        self.config = base.config
        self.own_encoder: torch.nn.Module = base.get_encoder()
        self.encoder = self.own_encoder  # or an equal encoder of another model
        self.has_encoder, self.takes_speech = True, self.config.model_type == "whisper"
        self._grouped = False  # the stack has its own attention
        self.stack = Stack(base)
        self.vocab_size = base.get_output_embeddings().weight.shape[0]
        self.context = self.stack.context
        self.device, self.dtype = placement(base)
        self._windows: dict[str, int | None] = {"": None}
        self._last_only = {"last_only": True}
        attention = self.stack.layers[0].self_attention
        token_bytes = 2 * len(self.stack.layers) * attention.heads * attention.d * self.dtype.itemsize
        self._prepare(len(self.stack.layers), token_bytes)
        self.cache.on_swap = self._swap_sources
        self.release()

    # Sources

    def source(self, prompt: Any) -> Source:
        source = copy.copy(prompt) if isinstance(prompt, Source) else self._parse(prompt)
        if self.takes_speech != (source.features is not None):
            kinds = ("features of speech [bins, frames]", "token ids")
            expected_kind, got = kinds if self.takes_speech else kinds[::-1]
            raise TypeError(f"prompt: got {got}; for {type(self.base).__name__} it must be {expected_kind}")
        if source.features is not None:
            expected = self.config.num_mel_bins, 2 * self.config.max_source_positions
            if tuple(source.features.shape) != expected:
                shape = list(source.features.shape)
                raise ValueError(f"features: got shape {shape}; it must be {list(expected)}")
        if source.ids is not None:
            self._check_ids(source.ids)
            if getattr(self.config, "share_encoder_decoder_embeddings", True):
                source.copyable = source.ids
        if source.start is None:
            source.start = self.start
        return source

    @staticmethod
    def _parse(prompt: Any) -> Source:
        if isinstance(prompt, Tensor) and prompt.is_floating_point():
            return Source(features=prompt)
        values = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if not isinstance(values, list | tuple) or not all(isinstance(one, int) for one in values):
            raise TypeError(
                f"prompt: got {kind(prompt)[:80]}; it must be a string, token ids, features of speech, a "
                "Source, or a list of those"
            )
        return Source(values)

    def _check_ids(self, ids: list[int]) -> None:
        if not ids:
            raise ValueError("prompt: it is empty; the encoder needs at least one token")
        max_tokens = getattr(self.config, "max_position_embeddings", None) or len(ids)
        if len(ids) > max_tokens:
            raise ValueError(f"prompt: got {len(ids)} tokens; the encoder takes at most {max_tokens}")
        V = self.base.get_input_embeddings().weight.shape[0]
        if min(ids) < 0 or max(ids) >= V:
            raise ValueError(f"prompt: got ids {min(ids)}..{max(ids)}; they must be in 0..{V - 1}")

    @property
    def start(self) -> list[int]:
        """First tokens of the decoder, from the model's configuration."""
        tokens = []
        for name in ("decoder_start_token_id", "forced_bos_token_id"):
            values = (getattr(one, name, None) for one in (self.generation_config, self.config))
            tokens.append(next((value for value in values if value is not None), None))
        if tokens[0] is None:
            raise ValueError("start: missing; the model has no decoder_start_token_id; pass Source(start=)")
        return [token for token in tokens if token is not None]

    def share_encoder(self, other: Seq2SeqScorer) -> bool:
        """Use another model's encoder, and its cached states, if both encoders are equal.

        Returns:
            Whether the encoder is shared.

        Raises:
            ValueError: The two models take different kinds of sources.
        """
        if self.takes_speech != other.takes_speech or self._bins != other._bins:
            raise ValueError(
                f"draft: got {type(self.base).__name__} with encoder input of {self._bins or 'token ids'}; "
                f"it must take {other._bins or 'token ids'}, as the target {type(other.base).__name__} does"
            )
        self.encoder = other.encoder if same_encoder(self.own_encoder, other.encoder) else self.own_encoder
        return self.encoder is other.encoder

    @property
    def _bins(self) -> str:
        """Shape of the speech features that the model takes; empty for a text model."""
        if not self.takes_speech:
            return ""
        return f"{self.config.num_mel_bins} bins of {2 * self.config.max_source_positions} frames"

    @torch.inference_mode()
    def encode(self, sources: Sequence[Source]) -> None:
        """Run the encoder on sources that it has not encoded yet."""
        weights = fingerprint(self.encoder)
        new = [
            one
            for one in dict.fromkeys(sources)
            if self.encoder not in one.states or one.states[self.encoder][0] != weights
        ]
        new.sort(key=len)  # sources of similar length need little padding
        while new:
            count = max(1, min(len(new), ENCODER_BATCH_TOKENS // len(new[-1])))
            if self.takes_speech and self.device.type == "cpu":
                count = 1  # one window keeps all cores busy, and more do not fit the CPU's caches
            some, new = new[:count], new[count:]
            for source, states in zip(some, self._encoded(some), strict=True):
                source.states[self.encoder] = weights, states

    def _encoded(self, sources: Sequence[Source]) -> list[Tensor]:
        """Return the states ``[S, D]`` of each source."""
        if self.takes_speech:
            features = torch.stack([one.features for one in sources if one.features is not None])
            return list(self.encoder(features.to(self.device, self.dtype)).last_hidden_state)
        # A source too long for the draft model is cut off, which gives a worse draft and no error.
        max_tokens = getattr(self.config, "max_position_embeddings", None)
        last = self.base.get_input_embeddings().weight.shape[0] - 1
        texts = [
            [min(token, last) for token in one.ids[:max_tokens]] for one in sources if one.ids is not None
        ]
        longest = max(map(len, texts))
        ids = torch.tensor([[*text, *[text[-1]] * (longest - len(text))] for text in texts])
        mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
        out = self.encoder(
            input_ids=ids.to(self.device),
            attention_mask=None if bool(mask.all()) else mask.to(self.device),
        )
        return [states[: len(text)] for states, text in zip(out.last_hidden_state, texts, strict=True)]

    @torch.inference_mode()
    def encode_sources(self, slots: Sequence[int], sources: Sequence[Source | None], tokens: int) -> None:
        """See ``Scorer.encode_sources``; keys and values for cross-attention are cached as well."""
        self.check_weights()
        unique = [one for one in dict.fromkeys(sources) if one is not None]  # slots may share a source
        self.encode(unique)
        states = [source.states[self.encoder][1] for source in unique]
        longest = max(one.shape[0] for one in states)
        self.cache.prepare(max(slots) + 1, tokens)
        self._ensure_cross_capacity(longest)
        for slot in slots:
            self.cache.open(slot, ())
        self.cache.arrange(slots)
        rows = [self.cache.row(slot) for slot in slots]
        source_index = [unique.index(source) for source in sources if source is not None]
        padded = torch.nn.utils.rnn.pad_sequence(states, batch_first=True).to(self.device)
        for layer, tables in zip(self.stack.layers, self._cross_cache, strict=True):
            for table, new in zip(tables, layer.cross.keys_values(padded), strict=True):
                table[rows, :, :longest] = new if len(unique) == len(rows) else new[source_index]
                table[rows, :, longest:] = 0  # a masked NaN is still NaN after the softmax
        self._sources |= {slot: states[i].shape[0] for slot, i in zip(slots, source_index, strict=True)}

    def num_unencoded(self, source: Source | None) -> int:
        return 0 if source is None or self.encoder in source.states else len(source)

    def _ensure_cross_capacity(self, tokens: int) -> None:
        rows, _, length, _ = self._cross_cache[0][0].shape
        if self.cache.rows > rows or tokens > length:
            size = max(self.cache.rows, rows), max(tokens, length)
            self._cross_cache = [(grown(k, *size), grown(v, *size)) for k, v in self._cross_cache]

    # Forward passes

    def open(self, slot: int, prompt: Sequence[int], source: Source | None) -> int:
        """See ``Scorer.open``; every sequence needs a source."""
        if source is None:
            raise ValueError(f"sources: got None; {type(self.base).__name__} needs one for each sequence")
        if slot not in self._sources:
            self.encode_sources([slot], [source], len(prompt))
        return 0

    def forget(self) -> None:
        super().forget()
        self.stack = Stack(self._runner)  # adapters add and remove modules

    def pack(self) -> None:
        super().pack()
        self.stack = Stack(self._runner)

    def reset(self, slots: Sequence[int], texts: Sequence[Sequence[int]] | None = None) -> None:
        """Free slots. No later prompt reuses their cached tokens, which depend on the source."""
        super().reset(slots, None if texts is None else [()] * len(slots))
        for slot in slots:
            self._sources.pop(slot, None)

    def release(self) -> None:
        super().release()
        self._sources, self._cross_cache = {}, []
        for layer in self.stack.layers:
            empty = torch.zeros(0, layer.cross.heads, 0, layer.cross.d, dtype=self.dtype, device=self.device)
            self._cross_cache.append((empty, empty))

    def _swap_sources(self, one: int, other: int) -> None:
        """Swap the rows of two sources."""
        for tables in self._cross_cache:
            for table in tables:
                table[[one, other]] = table[[other, one]]

    def _forward(self, first: int, ids: Tensor, positions: Tensor, **last_only: Any) -> Tensor:
        positions, reach = self._place(first, positions)
        rows = slice(first, first + len(ids))
        x = self.stack.embedded(ids.to(self.device), positions.clamp(max=self.context - 1))
        mask = self._mask(positions, reach)
        source_mask, source_tokens = self._source_mask(rows)
        caches = zip(self.cache.past_key_values.layers, self._cross_cache, strict=True)
        for layer, (cache, tables) in zip(self.stack.layers, caches, strict=True):
            keys, values = (table[rows, :, :source_tokens] for table in tables)
            x = layer(x, cache.update, mask, (keys, values), source_mask)
        return self.stack.logits(x[:, -1:] if last_only else x)

    def _mask(self, positions: Tensor, reach: int) -> Tensor | None:
        """Return the additive self-attention mask with T5's bias, ``[R, heads or 1, n, reach]``."""
        bias = self.stack.bias(positions, reach)
        if positions.shape == (1, 1):
            return bias  # a single token attends to everything
        mask = mask_of(positions, reach, None, self.dtype)
        return mask if bias is None else mask + bias

    def _source_mask(self, rows: slice) -> tuple[Tensor | None, int]:
        """Return the additive cross-attention mask of these rows, and the length of their longest source."""
        lengths = [self._sources[slot] for slot in self.cache.slots_of(rows)]
        longest = max(lengths)
        if min(lengths) == longest:
            return None, longest
        last = torch.tensor(lengths, device=self.device)[:, None] - 1
        return mask_of(last, longest, None, self.dtype), longest


def supported_model(model: Any) -> Any:
    """Return the model, in evaluation mode.

    Raises:
        ValueError: The model cannot be scored; the message says why.
    """
    name = model.config.model_type
    if name not in FAMILIES:
        raise refusal(model, f"is an encoder-decoder model of a family not among {', '.join(FAMILIES)}")
    if hasattr(model, "get_base_model"):
        raise refusal(model, "is wrapped by PEFT; merge its adapters first")
    if model.get_output_embeddings() is None:
        raise refusal(model, "has no language-model head; load it with AutoModelForSeq2SeqLM")
    if model.training:
        warnings.warn("model: it was in training mode; switched to evaluation mode", stacklevel=4)
        model.eval()
    return model


SHAPING = (  # settings that, besides the weights, determine an encoder's output
    *("model_type", "encoder_attention_heads", "num_heads", "scale_embedding", "activation_function"),
    *("feed_forward_proj", "relative_attention_num_buckets", "relative_attention_max_distance"),
)


def same_encoder(one: Any, other: Any) -> bool:
    """Return whether two encoders have equal weights and settings."""
    if any(getattr(one.config, name, None) != getattr(other.config, name, None) for name in SHAPING):
        return False
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(
        a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and bool((a == b).all())
        for a, b in zip(first.values(), second.values(), strict=True)
    )
