"""The runners for speech: Whisper through ``Transcriber``, and through Transformers."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch

from outpace.bench.data import Item
from outpace.decoder import Decoder
from outpace.engine.stats import Stats
from outpace.tasks.assisted import assistant, drawing, watched
from outpace.tasks.audio import read
from outpace.tasks.runners import Generated, RunSettings, forget
from outpace.tasks.transcribe import Transcriber, features_of


class OutpaceSpeechRunner:
    """A runner for a ``Transcriber``.

    A file is decoded once, without fallback, so that all runners do the same.

    Args:
        decoder: Decoder with a Whisper model as target.
        processor: The target's feature extractor and tokenizer.
        wanted: Settings that all runners share.
    """

    def __init__(self, decoder: Decoder, processor: Any, wanted: RunSettings) -> None:
        self.transcriber, self.wanted = Transcriber(decoder, processor), wanted

    def write(self, item: Item, seed: int) -> Generated:
        """See ``Side.write``."""
        forget(self.transcriber.decoder)
        self.transcriber.stats = Stats()
        assert item.audio is not None
        begun = time.perf_counter()
        (found,) = self.transcriber(
            [item.audio],
            language=self.wanted.language,
            fallback=False,
            temperature=self.wanted.sampling.temperature,
            top_k=self.wanted.sampling.top_k,
            top_p=self.wanted.sampling.top_p,
            seed=seed,
        )
        if found.error is not None:
            raise ValueError(found.error)
        return Generated([found.text], [[]], self.transcriber.stats, time.perf_counter() - begun)


class TransformersSpeechRunner:
    """A runner for Transformers' Whisper with an assistant model.

    Args:
        decoder: Decoder whose target and draft model are used.
        processor: The target's feature extractor and tokenizer.
        wanted: Settings that all runners share.

    Raises:
        ValueError: The drafter is not a model.
    """

    waits = False  # as in `AssistedRunner`

    def __init__(self, decoder: Decoder, processor: Any, wanted: RunSettings) -> None:
        self.model: Any = decoder.scorer.base
        self.processor, self.wanted = processor, wanted
        self.assistant = assistant(decoder)
        if "assistant_model" not in self.assistant:
            raise ValueError("Transformers' Whisper takes no drafts but those of a model")

    def write(self, item: Item, seed: int) -> Generated:
        """See ``Side.write``."""
        hearing, stats = self.processor.feature_extractor, Stats()
        assert item.audio is not None
        begun = time.perf_counter()
        samples = read(item.audio, hearing.sampling_rate)
        long = len(samples) / hearing.sampling_rate > hearing.chunk_length
        inputs = features_of(self.processor, [samples], long)
        language = {}
        if getattr(self.model.generation_config, "is_multilingual", True):
            language = {"language": self.wanted.language, "task": "transcribe"}
        torch.manual_seed(seed)
        helper = self.assistant["assistant_model"]
        before = copy.deepcopy(helper.generation_config)  # where the assistant adapts its draft length
        try:
            with watched(stats, self.waits):
                found = self.model.generate(
                    inputs.input_features.to(self.model.device, self.model.dtype),
                    attention_mask=inputs.attention_mask.to(self.model.device),
                    return_timestamps=long,
                    **language,
                    **self.assistant,
                    **drawing(self.wanted.sampling),
                )
        finally:
            helper.generation_config = before
        text = self.processor.tokenizer.decode(found[0], skip_special_tokens=True)
        stats.new_tokens = stats.accepted_tokens + stats.target_passes
        return Generated([text.strip()], [[]], stats, time.perf_counter() - begun)
