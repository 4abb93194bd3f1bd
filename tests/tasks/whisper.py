"""A tiny Whisper with windows of one second, and a processor whose words are numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import transformers

from tests.tiny import tiny_seq2seq

RATE = 16000
END, START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, PREVIOUS, SILENCE, UNTIMED = range(60, 69)
MOST = 24  # tokens of a text with its prompt
V = UNTIMED + 1 + 51  # the timestamps are 51 tokens, one per 20 ms


def tiny_whisper(seed: int = 0, **changes: Any) -> Any:
    """Return a tiny Whisper with windows of one second."""
    config = {
        "vocab_size": V, "max_source_positions": 50, "decoder_start_token_id": START,
        "pad_token_id": END, "eos_token_id": END, "max_target_positions": MOST,
    }  # fmt: skip
    model = tiny_seq2seq("whisper", seed, **config | changes)
    fields = {
        "is_multilingual": True,
        "lang_to_id": {"<|en|>": ENGLISH, "<|de|>": GERMAN},
        "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
        "no_timestamps_token_id": UNTIMED,
        "prev_sot_token_id": PREVIOUS,
        "suppress_tokens": [3, 4, START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE, PREVIOUS, SILENCE],
        "begin_suppress_tokens": [7, END],
        "max_initial_timestamp_index": 25,
        "eos_token_id": END,
        "pad_token_id": END,
        "decoder_start_token_id": START,
        "max_length": MOST,
        "return_timestamps": False,
    }
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    return model


class Words:
    """A tokenizer whose words are numbers."""

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "".join(f" {int(one)}" for one in ids if int(one) < END)

    def batch_decode(self, rows: Any, skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(row) for row in rows]


PROCESSOR = SimpleNamespace(
    feature_extractor=transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1), tokenizer=Words()
)
