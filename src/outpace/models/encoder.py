"""The encoder of encoder-decoder models. It runs once per source, which is its input."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outpace.checks.arguments import kind
from outpace.models.causal import fingerprint, refusal
from outpace.models.scorer import Scorer
from outpace.models.source import Source
from outpace.models.stack import FAMILIES

ENCODER_BATCH_TOKENS = 8192  # tokens or frames that go through an encoder at a time


class EncoderScorer(Scorer):
    """A scorer with an encoder.

    Attributes:
        own_encoder: The model's encoder.
        encoder: The encoder that runs: the model's own, or an equal one of another model.
    """

    has_encoder = True
    own_encoder: torch.nn.Module
    encoder: torch.nn.Module

    def _set_encoder(self, base: Any) -> None:
        """Use the encoder of a model."""
        self.own_encoder = self.encoder = base.get_encoder()
        self.takes_speech = base.config.model_type == "whisper"

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

    def share_encoder(self, other: EncoderScorer) -> bool:
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
        unique = {id(one.states): one for one in sources}.values()  # copies of a source share its states
        new = [
            one for one in unique if self.encoder not in one.states or one.states[self.encoder][0] != weights
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

    def num_unencoded(self, source: Source | None) -> int:
        return 0 if source is None or self.encoder in source.states else len(source)


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
