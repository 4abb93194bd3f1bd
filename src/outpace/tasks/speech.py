"""The sides of a comparison that hear: Whisper by us, and by Transformers."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch

from outpace.decode import Decoder
from outpace.stats import Stats
from outpace.tasks.audio import read
from outpace.tasks.items import Item
from outpace.tasks.sides import Wanted, Written, forget
from outpace.tasks.theirs import assistant, drawing, watched
from outpace.tasks.transcribe import Transcriber, features_of


class OursHearing:
    """A Transcriber. A file is decoded once, without fallback, so that all sides do the same."""

    def __init__(self, decoder: Decoder, processor: Any, wanted: Wanted) -> None:
        self.transcriber, self.wanted = Transcriber(decoder, processor), wanted

    def write(self, item: Item, seed: int) -> Written:
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
        return Written([found.text], [[]], self.transcriber.stats, time.perf_counter() - begun)


class TheirsHearing:
    """Transformers' Whisper with an assistant."""

    waits = False  # as in `Theirs`

    def __init__(self, decoder: Decoder, processor: Any, wanted: Wanted) -> None:
        self.model: Any = decoder.scorer.base
        self.processor, self.wanted = processor, wanted
        self.assistant = assistant(decoder)
        if "assistant_model" not in self.assistant:
            raise ValueError("Transformers' Whisper takes no drafts but those of a model")

    def write(self, item: Item, seed: int) -> Written:
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
        before = copy.deepcopy(helper.generation_config)  # where it learns how far to guess
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
        stats.new_tokens = stats.accepted + stats.target_calls
        return Written([text.strip()], [[]], stats, time.perf_counter() - begun)
