"""The encoder cache serves one thread and does not affect others."""

from __future__ import annotations

import threading
from typing import Any

import torch

from outpace.tasks.encoder_cache import EncoderCache
from tests.tiny import tiny_seq2seq


def test_the_cache_serves_only_the_thread_that_uses_it() -> None:
    encoder: Any = tiny_seq2seq("whisper").get_encoder()
    calls = []
    encoder.conv1.register_forward_hook(lambda *_: calls.append(1))
    bins, frames = encoder.config.num_mel_bins, 2 * encoder.config.max_source_positions
    sound = torch.randn(1, bins, frames)
    cache = EncoderCache([encoder], 4)
    with torch.inference_mode(), cache.use():
        states = encoder(sound).last_hidden_state
        assert len(calls) == 1
        torch.testing.assert_close(encoder(input_features=sound).last_hidden_state, states)
        assert len(calls) == 1
        thread = threading.Thread(target=lambda: encoder(input_features=sound, return_dict=True))
        thread.start()
        thread.join()
        assert len(calls) == 2
    assert "forward" not in encoder.__dict__
