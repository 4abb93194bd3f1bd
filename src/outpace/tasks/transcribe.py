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
from outpace.tasks.memory import Memory
from outpace.tasks.subtitles import Segment
from outpace.verification.rules import parse

FALLBACK = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # temperatures, tried in turn while a text looks wrong
# A text looks wrong if it repeats itself or the model finds it unlikely. Whisper's usual values.
WRONG = {"compression_ratio_threshold": 1.35, "logprob_threshold": -1.0, "no_speech_threshold": 0.6}


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
        place: Index among the files of a call.
        name: Name of the file.
        samples: Its samples, ``[n]``.
        duration: Seconds of sound.
    """

    place: int
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
        known = suggestion(name, TO_LANGUAGE_CODE)
        raise ValueError(
            f"language: got {language!r}; it must be a name or a code such as german or de{known}"
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
            draft: Name of a draft, as ``outpace.load`` takes it; None drafts nothing.
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
        heard: Callable[[float], None] | None = None,
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
            heard: Called from time to time with the seconds of sound that are done, of all files together.

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
                "temperature: with fallback it begins at 0; give fallback=False, or leave it out"
            )
        options: dict[str, Any] = {"temperature": FALLBACK, **WRONG} if fallback else {}
        if temperature:
            options = {"temperature": temperature, "do_sample": True, "top_k": top_k, "top_p": top_p}
        if multilingual:
            options |= {"language": language, "task": task}
        if isinstance(files, str | os.PathLike | bytes):
            files = [files]
        return self._all(files, {**options, "seed": seed}, timestamps, batch_size, heard or (lambda _: None))

    def _all(
        self,
        files: Sequence[Name | bytes],
        options: dict[str, Any],
        timestamps: bool,
        batch_size: int,
        heard: Callable[[float], None],
    ) -> Iterator[Transcript]:
        hearing = self.processor.feature_extractor
        done = 0.0
        encoders = list(dict.fromkeys(one.encoder for one in self.decoder.encoders()))
        memory = Memory(encoders, 2 * batch_size)
        for first in range(0, len(files), batch_size):
            found: dict[int, Transcript] = {}
            sounds: list[Sound] = []
            for place, file in enumerate(files[first : first + batch_size]):
                name = "sound" if isinstance(file, bytes) else str(file)
                try:
                    samples = read(file, hearing.sampling_rate)
                    sounds.append(Sound(place, name, samples, len(samples) / hearing.sampling_rate))
                except ValueError as error:
                    found[place] = Transcript(name, error=str(error).removeprefix(f"{name}: "))
            for long in (False, True):  # a file that fits into a window needs no timestamps
                some = [one for one in sounds if (one.duration > hearing.chunk_length) is long]
                if some:
                    own = {**options, "return_timestamps": timestamps or long}
                    if long:
                        own["monitor_progress"] = self._monitor(heard, done)
                    with memory.use():
                        texts = self._tried(some, own, long)
                    done += sum(one.duration for one in some)
                    heard(done)
                    found |= dict(zip((one.place for one in some), texts, strict=True))
            yield from (found[place] for place in sorted(found))

    def _monitor(self, heard: Callable[[float], None], done: float) -> Callable[[Tensor], None]:
        """Return a callback for Transformers, which passes frames done and frames in all, ``[files, 2]``."""
        hearing = self.processor.feature_extractor

        def monitor(frames: Tensor) -> None:
            heard(done + int(frames[:, 0].sum()) * hearing.hop_length / hearing.sampling_rate)

        return monitor

    def _tried(self, sounds: Sequence[Sound], options: dict[str, Any], long: bool) -> list[Transcript]:
        """Transcribe a batch; if it fails, transcribe each of its files by itself."""
        try:
            return self._transcribed(sounds, options, long)
        except (ValueError, RuntimeError) as error:  # unusable logits, or no memory
            if len(sounds) > 1:
                return [self._tried([one], options, long)[0] for one in sounds]
            said = str(error).strip().split("\n")[0]
            return [Transcript(sounds[0].name, duration=sounds[0].duration, error=said)]

    def _transcribed(self, sounds: Sequence[Sound], options: dict[str, Any], long: bool) -> list[Transcript]:
        begun = time.perf_counter()
        inputs = features_of(self.processor, [one.samples for one in sounds], long)
        features = inputs.input_features.to(self.model.device, self.model.dtype)
        languages: list[str | None] = [options.get("language", "en")] * len(sounds)
        if "language" in options:
            if options["language"] is None:
                languages = self._detected(features)
            options = {**options, "language": languages}
        found = self.model.generate(
            features,
            attention_mask=inputs.attention_mask.to(self.model.device),
            return_segments=True,
            custom_generate=generate,
            decoder=self.decoder,
            stats=self.stats,
            **options,
        )
        texts = self.processor.tokenizer.batch_decode(found["sequences"], skip_special_tokens=True)
        self.seconds += time.perf_counter() - begun
        return [
            Transcript(one.name, text.strip(), self._segments(parts, options), said, one.duration)
            for one, text, parts, said in zip(sounds, texts, found["segments"], languages, strict=True)
        ]

    def _detected(self, features: Tensor) -> list[str | None]:
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
