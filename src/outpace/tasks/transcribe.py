"""Speech to text with Whisper.

Windows, timestamps, silence and temperature fallback are Transformers' own; what decodes a window is ours, so
that texts are those of `model.generate` with the same settings.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from outpace.decode import Decoder
from outpace.integrations.transformers import generate
from outpace.models.hub import Say, load_model, load_processor, say
from outpace.pair import Name, load_drafter
from outpace.stats import Stats
from outpace.tasks.audio import read
from outpace.tasks.subtitles import Segment

FALLBACK = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # temperatures, in turn while a text looks wrong
# When it does: what repeats itself, what the model finds unlikely. The usual values of Whisper.
WRONG = {"compression_ratio_threshold": 1.35, "logprob_threshold": -1.0, "no_speech_threshold": 0.6}


@dataclass(frozen=True)
class Transcript:
    """What was said in a file.

    name      of the file
    text      all of it
    segments  its parts, where timestamps were asked for or the file is longer than a window
    language  as it was given or detected
    duration  seconds of sound
    error     why there is nothing; None otherwise
    """

    name: str
    text: str = ""
    segments: list[Segment] = field(default_factory=list)
    language: str | None = None
    duration: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class Sound:
    """A file that could be read."""

    place: int
    name: str
    samples: Tensor
    duration: float


class Transcriber:
    """Whisper models that transcribe files.

    decoder    with a Whisper model as target, and another, a Drafter or nobody to draft
    processor  the target's feature extractor and tokenizer

    `stats` and `seconds` add up what happened in all calls.
    """

    def __init__(self, decoder: Decoder, processor: Any) -> None:
        self.decoder, self.processor = decoder, processor
        self.model: Any = decoder.scorer.base
        if self.model.config.model_type != "whisper":
            raise ValueError(f"target: {type(self.model).__name__} is no Whisper model, which is needed here")
        self.stats, self.seconds = Stats(), 0.0

    @classmethod
    def load(
        cls,
        target: Name,
        draft: Name | None = None,
        *,
        device: str | None = None,
        dtype: Any = None,
        draft_dtype: Any = None,
        tell: Say = say,
        **options: Any,
    ) -> Transcriber:
        """By names, as `outpace.load` takes them; options are those of `Decoder`. A draft may be less
        precise than its target: texts stay the target's."""
        model, _ = load_model(target, device=device, dtype=dtype, tell=tell)
        drafter = load_drafter(draft, device=device, dtype=draft_dtype or dtype, tell=tell)
        options.setdefault("pack", model.device.type == "cpu")
        return cls(Decoder(model, drafter, **options), load_processor(target))

    def __call__(
        self,
        files: Sequence[str | os.PathLike[str]],
        *,
        language: str | None = None,
        task: str = "transcribe",
        timestamps: bool = False,
        fallback: bool = True,
        batch_size: int = 8,
        seed: int | None = None,
        done: Callable[[float], None] = lambda seconds: None,
    ) -> Iterator[Transcript]:
        """Transcripts of files in their order; one that fails says why, and the others go on.

        language    such as "en" or "german"; by default it is detected, in each file's first window
        task        "transcribe", or "translate", into English
        timestamps  give segments for short files, too
        fallback    try higher temperatures where a text repeats itself or is unlikely
        batch_size  so many files at once
        done        called with seconds of sound when they are transcribed
        """
        if task not in ("transcribe", "translate"):
            raise ValueError(f'task: got {task!r}; it must be "transcribe" or "translate"')
        multilingual = getattr(self.model.generation_config, "is_multilingual", True)
        if not multilingual and (language not in (None, "en", "english") or task == "translate"):
            raise ValueError("language: this model knows English alone, and does not translate")
        rate, window = (
            getattr(self.processor.feature_extractor, name) for name in ("sampling_rate", "chunk_length")
        )
        for first in range(0, len(files), batch_size):
            found: dict[int, Transcript] = {}
            sounds: list[Sound] = []
            for place, path in enumerate(files[first : first + batch_size]):
                try:
                    samples = read(path, rate)
                    sounds.append(Sound(place, str(path), samples, len(samples) / rate))
                except ValueError as error:
                    found[place] = Transcript(str(path), error=str(error).removeprefix(f"{path}: "))
            for long in (False, True):  # what fits into a window needs no timestamps
                some = [one for one in sounds if (one.duration > window) is long]
                if some:
                    texts = self._transcribed(
                        some, language, task, timestamps, long, fallback, multilingual, seed
                    )
                    found |= dict(zip((one.place for one in some), texts, strict=True))
                    done(sum(one.duration for one in some))
            yield from (found[place] for place in sorted(found))

    def _transcribed(
        self,
        sounds: Sequence[Sound],
        language: str | None,
        task: str,
        timestamps: bool,
        long: bool,
        fallback: bool,
        multilingual: bool,
        seed: int | None,
    ) -> list[Transcript]:
        begun = time.perf_counter()
        inputs = self.processor.feature_extractor(
            [one.samples.numpy() for one in sounds],
            sampling_rate=self.processor.feature_extractor.sampling_rate,
            return_tensors="pt",
            return_attention_mask=True,
            **({"truncation": False, "padding": "longest"} if long else {}),
        )
        features = inputs.input_features.to(self.model.device, self.model.dtype)
        options: dict[str, Any] = {"temperature": FALLBACK, **WRONG} if fallback else {}
        languages: list[str | None] = [language] * len(sounds)
        if multilingual:
            languages = [language] * len(sounds) if language else self._detected(features)
            options |= {"language": languages, "task": task}
        found = self.model.generate(
            features,
            attention_mask=inputs.attention_mask.to(self.model.device),
            return_timestamps=timestamps or long,
            return_segments=True,
            custom_generate=generate,
            decoder=self.decoder,
            stats=self.stats,
            seed=seed,
            **options,
        )
        texts = self.processor.tokenizer.batch_decode(found["sequences"], skip_special_tokens=True)
        self.seconds += time.perf_counter() - begun
        return [
            Transcript(one.name, text.strip(), self._segments(parts, timestamps or long), said, one.duration)
            for one, text, parts, said in zip(sounds, texts, found["segments"], languages, strict=True)
        ]

    def _detected(self, features: Tensor) -> list[str | None]:
        """The language of each file's first window."""
        frames = 2 * self.model.config.max_source_positions
        ids = self.model.detect_language(features[:, :, :frames])
        names = {token: name for name, token in self.model.generation_config.lang_to_id.items()}
        return [names[int(one)].strip("<|>") for one in ids]

    def _segments(self, parts: Sequence[dict[str, Any]], wanted: bool) -> list[Segment]:
        if not wanted:
            return []
        decode = self.processor.tokenizer.decode
        return [
            Segment(
                round(float(one["start"]), 2),
                round(float(one["end"]), 2),
                decode(one["tokens"], skip_special_tokens=True),
            )
            for one in parts
        ]
