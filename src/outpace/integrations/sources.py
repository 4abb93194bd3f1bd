"""What Transformers' `generate` knows of an encoder's input, as a source for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.logits_process import WhisperNoSpeechDetection

from outpace.models.causal import fingerprint
from outpace.models.seq2seq import Seq2SeqScorer
from outpace.models.source import Source


@dataclass(frozen=True)
class Encoded:
    """What an encoder was given for a row, and what it made of it."""

    given: Tensor  # ids `[S]`, or features `[bins, frames]`
    states: Tensor  # `[S, D]`

    def source(self, start: Sequence[int], scorer: Seq2SeqScorer) -> Source:
        if self.given.is_floating_point():
            source = Source(features=self.given, start=start)
        else:
            source = Source(self.given.tolist(), start=start)
        source.states[scorer.encoder] = fingerprint(scorer.encoder), self.states
        return source


def encoded(model: Any, inputs: Tensor | None, model_kwargs: dict[str, Any], rows: int) -> list[Encoded]:
    """Of each row; nothing for a model without an encoder."""
    if not model.config.is_encoder_decoder:
        return []
    outputs, mask = model_kwargs.get("encoder_outputs"), model_kwargs.get("attention_mask")
    if outputs is None or inputs is None or (not inputs.is_floating_point() and int(inputs.min()) < 0):
        raise ValueError(
            "encoder_outputs: outpace needs what the encoder read, not only what came of it; pass the inputs"
        )
    states = outputs[0]
    each = rows // inputs.shape[0]  # texts of one input
    found = []
    for row in range(rows):
        given = inputs[row // each]
        if inputs.is_floating_point():
            found.append(Encoded(given, states[row]))
        else:
            real = torch.ones_like(given).bool() if mask is None else mask[row].bool()
            found.append(Encoded(given[real], states[row][real.to(states.device)]))
    return found


def listen(
    model: Any, processors: Sequence[Any], input_ids: Tensor, rows: Sequence[Encoded]
) -> Sequence[Any]:
    """Let Whisper's detector of silence, which asks the model about all rows at once, do so now; the other
    processors. It would run the encoder again, and is shown what came of that."""
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
