"""Encoder inputs of Transformers' ``generate``, as one ``Source`` per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import WhisperNoSpeechDetection

from outpace.models.causal import fingerprint
from outpace.models.encoder import EncoderScorer
from outpace.models.source import Source


@dataclass(frozen=True)
class Encoded:
    """The encoder's input of one sequence, and its output."""

    inputs: Tensor  # ids `[S]`, or features `[bins, frames]`
    states: Tensor  # `[S, D]`

    def source(self, start: Sequence[int], scorer: EncoderScorer) -> Source:
        """Return a ``Source`` with this input, this output and the decoder's first tokens."""
        if self.inputs.is_floating_point():
            source = Source(features=self.inputs, start=start)
        else:
            source = Source(self.inputs.tolist(), start=start)
        source.states[scorer.encoder] = fingerprint(scorer.encoder), self.states
        return source


def encoded(model: Any, inputs: Tensor | None, model_kwargs: dict[str, Any], rows: int) -> list[Encoded]:
    """Return the encoder's input and output of each sequence; empty for a model without an encoder."""
    if not model.config.is_encoder_decoder:
        return []
    outputs, mask = model_kwargs.get("encoder_outputs"), model_kwargs.get("attention_mask")
    if outputs is None or inputs is None or (not inputs.is_floating_point() and int(inputs.min()) < 0):
        raise ValueError(
            "encoder_outputs: got the encoder's outputs without its inputs; pass input_ids or input_features "
            "instead"
        )
    states = outputs[0]
    per_input = rows // inputs.shape[0]  # sequences per input
    encoder_inputs = []
    for row in range(rows):
        row_inputs = inputs[row // per_input]
        if inputs.is_floating_point():
            encoder_inputs.append(Encoded(row_inputs, states[row]))
        else:
            real = torch.ones_like(row_inputs).bool() if mask is None else mask[row].bool()
            encoder_inputs.append(Encoded(row_inputs[real], states[row][real.to(states.device)]))
    return encoder_inputs


def detect_silence(
    model: Any, processors: Sequence[Any], input_ids: Tensor, rows: Sequence[Encoded]
) -> Sequence[Any]:
    """Run Whisper's detector of silence and return the other processors.

    The detector runs the model on all sequences at once, so it runs before decoding. It gets the encoder's
    output, so that the encoder does not run again.
    """
    if not rows:
        return processors
    for one in processors:
        if isinstance(one, WhisperNoSpeechDetection):
            states = torch.stack([row.states for row in rows])
            inputs = {"encoder_outputs": (states,), "decoder_input_ids": input_ids}
            prepared = one.inputs or {}
            for name in ("decoder_attention_mask", "decoder_position_ids"):
                if prepared.get(name) is not None and len(prepared[name]) == len(input_ids):
                    inputs[name] = prepared[name]
            with torch.inference_mode():
                if one.start_of_trans_offset > 1:
                    one.inputs = inputs
                    one(input_ids, None)
                    one.inputs = prepared
                else:
                    one(input_ids, model(**inputs).logits[:, -1])
    return [one for one in processors if not isinstance(one, WhisperNoSpeechDetection)]
