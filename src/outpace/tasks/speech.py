"""The runners for speech: Whisper through ``Transcriber``, and through Transformers."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch

from outpace.bench.data import Item
from outpace.decoder import Decoder
from outpace.engine.stats import Stats
from outpace.tasks.assisted import assistant_arguments, recorded, sampling_arguments
from outpace.tasks.audio import read
from outpace.tasks.runners import Generated, RunSettings, clear_caches
from outpace.tasks.transcribe import Transcriber, features_of


class OutpaceSpeechRunner:
    """A runner for a ``Transcriber``.

    Each file is decoded once, without fallback, as by the other runners.

    Args:
        decoder: Decoder with a Whisper model as target.
        processor: The target's feature extractor and tokenizer.
        settings: Settings that all runners share.
    """

    def __init__(self, decoder: Decoder, processor: Any, settings: RunSettings) -> None:
        self.transcriber, self.settings = Transcriber(decoder, processor), settings

    def generate(self, item: Item, seed: int) -> Generated:
        clear_caches(self.transcriber.decoder)
        self.transcriber.stats = Stats()
        assert item.audio is not None
        started_at = time.perf_counter()
        (transcript,) = self.transcriber(
            [item.audio],
            language=self.settings.language,
            fallback=False,
            temperature=self.settings.sampling.temperature,
            top_k=self.settings.sampling.top_k,
            top_p=self.settings.sampling.top_p,
            seed=seed,
        )
        if transcript.error is not None:
            raise ValueError(transcript.error)
        return Generated([transcript.text], [[]], self.transcriber.stats, time.perf_counter() - started_at)


class TransformersSpeechRunner:
    """A runner for Transformers' Whisper with an assistant model.

    Args:
        decoder: Decoder whose target and draft model are used.
        processor: The target's feature extractor and tokenizer.
        settings: Settings that all runners share.

    Raises:
        ValueError: The drafter is not a model.
    """

    synchronized = False  # as in `AssistedRunner`

    def __init__(self, decoder: Decoder, processor: Any, settings: RunSettings) -> None:
        self.model: Any = decoder.scorer.base
        self.processor, self.settings = processor, settings
        self.assistant = assistant_arguments(decoder)
        if "assistant_model" not in self.assistant:
            raise ValueError("Transformers' Whisper needs a draft model; other drafters do not work")

    def generate(self, item: Item, seed: int) -> Generated:
        extractor, stats = self.processor.feature_extractor, Stats()
        assert item.audio is not None
        started_at = time.perf_counter()
        samples = read(item.audio, extractor.sampling_rate)
        long = len(samples) / extractor.sampling_rate > extractor.chunk_length
        inputs = features_of(self.processor, [samples], long)
        language = {}
        if getattr(self.model.generation_config, "is_multilingual", True):
            language = {"language": self.settings.language, "task": "transcribe"}
        torch.manual_seed(seed)
        assistant_model = self.assistant["assistant_model"]
        # Transformers adapts the assistant's number of draft tokens in this config.
        config = copy.deepcopy(assistant_model.generation_config)
        try:
            with recorded(stats, self.synchronized):
                sequences = self.model.generate(
                    inputs.input_features.to(self.model.device, self.model.dtype),
                    attention_mask=inputs.attention_mask.to(self.model.device),
                    return_timestamps=long,
                    **language,
                    **self.assistant,
                    **sampling_arguments(self.settings.sampling),
                )
        finally:
            assistant_model.generation_config = config
        text = self.processor.tokenizer.decode(sequences[0], skip_special_tokens=True)
        stats.new_tokens = stats.accepted_tokens + stats.target_passes
        return Generated([text.strip()], [[]], stats, time.perf_counter() - started_at)
