"""Speech to text with Whisper.

Windows, timestamps, silence and temperature fallback are Transformers' own. A ``Decoder`` decodes each
window, so texts are those of ``model.generate`` with the same settings.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

from outpace.checks.arguments import integer
from outpace.checks.errors import suggestion
from outpace.decoder import Decoder
from outpace.draft.model import ModelDrafter
from outpace.engine.stats import Stats
from outpace.integrations.transformers import generate
from outpace.loading import Name, check_draft_name, load_drafter
from outpace.models.hub import Say, check_model, load_model, load_processor, say
from outpace.tasks.audio import packages, read
from outpace.tasks.encoder_cache import EncoderCache
from outpace.tasks.subtitles import Segment
from outpace.verification.rules import parse

FALLBACK = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # temperatures, used in turn until a text looks right
# A text looks wrong if it repeats itself or the model finds it unlikely. These are Whisper's usual values.
FALLBACK_THRESHOLDS = {
    "compression_ratio_threshold": 1.35,
    "logprob_threshold": -1.0,
    "no_speech_threshold": 0.6,
}


@dataclass(frozen=True)
class Transcript:
    """The transcript of a file.

    Attributes:
        name: Name of the file.
        text: The whole text.
        segments: Its segments, if timestamps were requested or the file is longer than a window.
        language: Code of the language, as requested or detected.
        duration: Seconds of sound.
        error: Why there is no transcript; None otherwise.
    """

    name: str
    text: str = ""
    segments: list[Segment] = field(default_factory=list)
    language: str | None = None
    duration: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class Sound:
    """A file that could be read.

    Attributes:
        index: Index among the files of its batch.
        name: Name of the file.
        samples: Its samples, ``[n]``.
        duration: Seconds of sound.
    """

    index: int
    name: str
    samples: Tensor
    duration: float


def language_code(language: str) -> str:
    """Return Whisper's code of a language: "de" for "de" or "German".

    Raises:
        ValueError: It is neither a name nor a code that Whisper knows.
    """
    name = language.strip().lower()
    code: str = TO_LANGUAGE_CODE.get(name, name)
    if code not in TO_LANGUAGE_CODE.values():
        hint = suggestion(name, TO_LANGUAGE_CODE)
        raise ValueError(
            f"language: got {language!r}; it must be a name or a code such as german or de{hint}"
        )
    return code


def features_of(processor: Any, sounds: Sequence[Tensor], long: bool) -> Any:
    """Return the input of Whisper: ``input_features`` and ``attention_mask``.

    Args:
        processor: Whisper's feature extractor and tokenizer.
        sounds: Samples of each file, ``[n]``.
        long: Whether to encode all windows of a file, and not just one.
    """
    return processor.feature_extractor(
        [samples.numpy() for samples in sounds],
        sampling_rate=processor.feature_extractor.sampling_rate,
        return_tensors="pt",
        return_attention_mask=True,
        **({"truncation": False, "padding": "longest"} if long else {}),
    )


class Transcriber:
    """A transcriber of audio files, with a Whisper model and optionally a drafter.

    Args:
        decoder: Decoder with a Whisper model as target, and a draft model, another ``Drafter`` or none.
        processor: The target's feature extractor and tokenizer.

    Attributes:
        stats: Statistics of all calls together.
        seconds: Seconds of all calls together.

    Raises:
        ValueError: The target is not a Whisper model.
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
        trust_remote_code: bool = False,
        revision: str | None = None,
        tell: Say = say,
        **options: Any,
    ) -> Transcriber:
        """Load a transcriber by the names of its models.

        The draft may have a lower precision than the target: texts remain the target's. Settings that do not
        fit are refused before weights are loaded.

        Args:
            target: Name of a Whisper model, as ``outpace.load`` takes it.
            draft: Name of a draft, as ``outpace.load`` takes it; None decodes without speculation.
            device: Device of both models.
            dtype: Precision of both models.
            draft_dtype: Precision of the draft, if it is another.
            trust_remote_code: Whether to run Python code that comes with a model.
            revision: Revision of the target on the hub.
            tell: Called with lines about the progress.
            **options: Further options of ``Decoder``.

        Raises:
            ValueError: A name or setting does not fit.
        """
        packages()
        check_draft_name(draft)
        parse(options.get("rule", "token"))
        source: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
        check_model(target, device=device, dtype=dtype, **source)
        processor = load_processor(target, **source)
        if not hasattr(processor, "feature_extractor"):
            raise ValueError(f"target: {target} takes no speech; name a Whisper model")
        drafter = load_drafter(  # first, as the target is larger
            draft, device=device, dtype=draft_dtype or dtype, tell=tell, trust_remote_code=trust_remote_code
        )
        model, tokenizer = load_model(target, device=device, dtype=dtype, tell=tell, **source)
        if isinstance(drafter, ModelDrafter):
            drafter.check(model.get_output_embeddings().weight.shape[0], tokenizer)
        options.setdefault("pack", model.device.type == "cpu")
        return cls(Decoder(model, drafter, **options), processor)

    def __call__(
        self,
        files: Name | bytes | Sequence[Name | bytes],
        *,
        language: str | None = None,
        task: str = "transcribe",
        timestamps: bool = False,
        fallback: bool = True,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        batch_size: int = 8,
        seed: int | None = None,
        on_progress: Callable[[float], None] | None = None,
    ) -> Iterator[Transcript]:
        """Transcribe files, or their bytes, in their order.

        A file that fails has its error in its transcript; the others are still transcribed.

        Args:
            files: Paths or contents of audio files; a single one needs no list.
            language: Language such as "en" or "german". By default it is detected in each file's first
                window.
            task: "transcribe", or "translate" for a translation into English.
            timestamps: Whether to return segments for short files, too.
            fallback: Whether to retry at higher temperatures if a text repeats itself or is unlikely.
            temperature: Temperature of the only attempt without fallback; 0 is greedy.
            top_k: Number of likeliest tokens to sample from, without fallback; 0 is all.
            top_p: Probability mass of the tokens to sample from, without fallback.
            batch_size: Number of files to decode at once.
            seed: Seed of sampling.
            on_progress: Called from time to time with the seconds of sound done, of all files together.

        Returns:
            An iterator over the transcripts.

        Raises:
            ValueError: An argument does not fit the model or another argument.
        """
        if task not in ("transcribe", "translate"):
            raise ValueError(f'task: got {task!r}; it must be "transcribe" or "translate"')
        integer("batch_size", batch_size, "an int >= 1", lambda n: n >= 1)
        multilingual = getattr(self.model.generation_config, "is_multilingual", True)
        if language is not None:
            language = language_code(language)
        if not multilingual and (language not in (None, "en") or task == "translate"):
            raise ValueError("language: this model knows English alone, and does not translate")
        if fallback and temperature:
            raise ValueError(
                "temperature: with fallback it starts at 0; give fallback=False, or leave it out"
            )
        options: dict[str, Any] = {"temperature": FALLBACK, **FALLBACK_THRESHOLDS} if fallback else {}
        if temperature:
            options = {"temperature": temperature, "do_sample": True, "top_k": top_k, "top_p": top_p}
        if multilingual:
            options |= {"language": language, "task": task}
        if isinstance(files, str | os.PathLike | bytes):
            files = [files]
        return self._transcribe_all(
            files, {**options, "seed": seed}, timestamps, batch_size, on_progress or (lambda _: None)
        )

    def _transcribe_all(
        self,
        files: Sequence[Name | bytes],
        options: dict[str, Any],
        timestamps: bool,
        batch_size: int,
        on_progress: Callable[[float], None],
    ) -> Iterator[Transcript]:
        extractor = self.processor.feature_extractor
        done = 0.0
        encoders = list(dict.fromkeys(one.encoder for one in self.decoder.encoders()))
        encoder_cache = EncoderCache(encoders, 2 * batch_size)
        for first in range(0, len(files), batch_size):
            transcripts: dict[int, Transcript] = {}
            sounds: list[Sound] = []
            for index, file in enumerate(files[first : first + batch_size]):
                name = "sound" if isinstance(file, bytes) else str(file)
                try:
                    samples = read(file, extractor.sampling_rate)
                    sounds.append(Sound(index, name, samples, len(samples) / extractor.sampling_rate))
                except ValueError as error:
                    transcripts[index] = Transcript(name, error=str(error).removeprefix(f"{name}: "))
            for long in (False, True):  # a file that fits into a window needs no timestamps
                batch = [sound for sound in sounds if (sound.duration > extractor.chunk_length) is long]
                if batch:
                    batch_options = {**options, "return_timestamps": timestamps or long}
                    if long:
                        batch_options["monitor_progress"] = self._monitor(on_progress, done)
                    with encoder_cache.use():
                        found = self._transcribe_or_report(batch, batch_options, long)
                    done += sum(sound.duration for sound in batch)
                    on_progress(done)
                    transcripts |= dict(zip((sound.index for sound in batch), found, strict=True))
            yield from (transcripts[index] for index in sorted(transcripts))

    def _monitor(self, on_progress: Callable[[float], None], done: float) -> Callable[[Tensor], None]:
        """Return a callback for Transformers, which passes frames done and total frames, ``[files, 2]``."""
        extractor = self.processor.feature_extractor

        def monitor(frames: Tensor) -> None:
            on_progress(done + int(frames[:, 0].sum()) * extractor.hop_length / extractor.sampling_rate)

        return monitor

    def _transcribe_or_report(
        self, sounds: Sequence[Sound], options: dict[str, Any], long: bool
    ) -> list[Transcript]:
        """Transcribe a batch; if it fails, transcribe each of its files by itself."""
        try:
            return self._transcribe_batch(sounds, options, long)
        except (ValueError, RuntimeError) as error:  # unusable logits, or out of memory
            if len(sounds) > 1:
                return [self._transcribe_or_report([sound], options, long)[0] for sound in sounds]
            message = str(error).strip().split("\n")[0]
            return [Transcript(sounds[0].name, duration=sounds[0].duration, error=message)]

    def _transcribe_batch(
        self, sounds: Sequence[Sound], options: dict[str, Any], long: bool
    ) -> list[Transcript]:
        started_at = time.perf_counter()
        inputs = features_of(self.processor, [one.samples for one in sounds], long)
        features = inputs.input_features.to(self.model.device, self.model.dtype)
        languages: list[str | None] = [options.get("language", "en")] * len(sounds)
        if "language" in options:
            if options["language"] is None:
                languages = self._detect_languages(features)
            options = {**options, "language": languages}
        output = self.model.generate(
            features,
            attention_mask=inputs.attention_mask.to(self.model.device),
            return_segments=True,
            custom_generate=generate,
            decoder=self.decoder,
            stats=self.stats,
            **options,
        )
        texts = self.processor.tokenizer.batch_decode(output["sequences"], skip_special_tokens=True)
        self.seconds += time.perf_counter() - started_at
        return [
            Transcript(sound.name, text.strip(), self._segments(parts, options), language, sound.duration)
            for sound, text, parts, language in zip(sounds, texts, output["segments"], languages, strict=True)
        ]

    def _detect_languages(self, features: Tensor) -> list[str | None]:
        """Return the language of each file's first window."""
        frames = 2 * self.model.config.max_source_positions
        ids = self.model.detect_language(features[:, :, :frames])
        names = {token: name for name, token in self.model.generation_config.lang_to_id.items()}
        return [names[int(one)].strip("<|>") for one in ids]

    def _segments(self, parts: Sequence[dict[str, Any]], options: dict[str, Any]) -> list[Segment]:
        if not options["return_timestamps"]:
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
