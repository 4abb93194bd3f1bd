"""Transcripts equal those of Transformers' Whisper with the same settings."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from outpace import Decoder, Fixed
from outpace.cli import app
from outpace.models.hub import cache_folder
from outpace.tasks import subtitles, transcribe
from outpace.tasks.audio import duration, read
from outpace.tasks.subtitles import Segment
from outpace.tasks.transcribe import Transcriber
from tests import tiers
from tests.tasks.whisper import ENGLISH, PROCESSOR, RATE, Words, tiny_whisper
from tests.tiny import byte_tokenizer, tiny

soundfile = pytest.importorskip(
    "soundfile", reason="soundfile is not installed: pip install 'outpace[tasks]'"
)
pytest.importorskip("soxr", reason="soxr is not installed: pip install 'outpace[tasks]'")

DURATIONS = 0.8, 2.3, 0.5, 3.1  # seconds
WHISPER = Path(os.environ.get("OUTPACE_WHISPER", cache_folder() / "whisper"))
SPEECH = Path(os.environ.get("OUTPACE_SPEECH", cache_folder() / "speech"))


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Write noise of different lengths: shorter and longer than a window of one second."""
    noise = np.random.default_rng(3)
    paths = []
    for i, seconds in enumerate(DURATIONS):
        sound = noise.normal(size=int(seconds * RATE)) * np.linspace(0.01, 0.3, int(seconds * RATE))
        paths.append(tmp_path / f"{i}.wav")
        soundfile.write(paths[-1], sound, RATE)
    return paths


def transformers_transcript(model: Any, path: Path, **options: Any) -> str:
    """Return the transcript of Transformers' own decoding."""
    sound = read(path, RATE)
    long = len(sound) > RATE
    inputs = PROCESSOR.feature_extractor(
        sound.numpy(), sampling_rate=RATE, return_tensors="pt", return_attention_mask=True,
        **({"truncation": False, "padding": "longest"} if long else {}),
    )  # fmt: skip
    options.setdefault("return_timestamps", long)
    ids = model.generate(inputs.input_features, attention_mask=inputs.attention_mask, **options)
    return Words().decode(ids[0]).strip()


@pytest.mark.parametrize(
    ("drafter", "timestamps"), tiers.each_value(["model", "lookup", None], [False, True])
)
def test_transcripts_equal_those_of_transformers(
    files: list[Path], drafter: str | None, timestamps: bool
) -> None:
    model = tiny_whisper()
    options: dict[str, Any] = {"language": "de", "task": "translate"}
    timed = {"return_timestamps": True} if timestamps else {}
    expected = [transformers_transcript(model, path, **options, **timed) for path in files]
    draft: Any = tiny_whisper(1) if drafter == "model" else drafter
    one = Transcriber(Decoder(model, draft, num_draft_tokens=Fixed(3) if draft else None), PROCESSOR)
    options |= {"timestamps": timestamps, "fallback": False}
    for batch_size in tiers.sized((4,), (1, 4)):
        found = list(one(files, **options, batch_size=batch_size))
        assert [transcript.text for transcript in found] == expected
        assert [bool(transcript.segments) for transcript in found] == [timestamps or d > 1 for d in DURATIONS]
    assert one.stats.new_tokens > 0
    assert [round(transcript.duration, 1) for transcript in found] == list(DURATIONS)


def test_progress_is_reported_within_long_files(files: list[Path]) -> None:
    one = Transcriber(Decoder(tiny_whisper()), PROCESSOR)
    progress: list[float] = []
    list(one(files, language="en", fallback=False, batch_size=2, on_progress=progress.append))
    assert progress == sorted(progress)
    assert len(progress) > len(files)  # windows report, too
    assert progress[-1] == pytest.approx(sum(DURATIONS), abs=0.01)
    assert sum(map(duration, files)) == pytest.approx(sum(DURATIONS), abs=0.01)
    assert duration("nothing.wav") == 0.0


def test_the_language_is_detected_per_file(files: list[Path]) -> None:
    one = Transcriber(Decoder(tiny_whisper()), PROCESSOR)
    found = list(one(files, fallback=False))
    assert {transcript.language for transcript in found} <= {"en", "de"}
    for transcript, path in zip(found, files, strict=True):
        assert transcript.text == transformers_transcript(tiny_whisper(), path, language=transcript.language)


def test_fallback_samples_repeatably_with_a_seed(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of random models look wrong at any temperature, so all of them are used."""
    monkeypatch.setattr(transcribe, "FALLBACK", tiers.sized((0.0, 0.8), transcribe.FALLBACK))
    one = Transcriber(Decoder(tiny_whisper(), tiny_whisper(1), num_draft_tokens=Fixed(3)), PROCESSOR)
    texts = [[found.text for found in one(files[:1], language="en", seed=seed)] for seed in (1, 1, 2)]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_each_model_encodes_a_window_once(files: list[Path]) -> None:
    """The language detection and the six temperatures share the encoder output."""
    target, draft = tiny_whisper(), tiny_whisper(1)
    encoded: list[list[bytes]] = [[], []]
    for model, windows in zip((target, draft), encoded, strict=True):
        model.get_encoder().conv1.register_forward_hook(
            lambda module, args, out, windows=windows: windows.extend(
                row.numpy().tobytes() for row in args[0]
            )
        )
    one = Transcriber(Decoder(target, draft, num_draft_tokens=Fixed(3)), PROCESSOR)
    assert all(found.error is None for found in one([files[0], files[2]], seed=1))
    for windows in encoded:
        assert len(windows) == len(set(windows)) >= 2
    assert set(encoded[0]) == set(encoded[1])
    assert "forward" not in target.get_encoder().__dict__


def test_an_unusable_file_has_an_error_and_the_others_are_transcribed(
    files: list[Path], tmp_path: Path
) -> None:
    broken, empty, missing = (tmp_path / name for name in ("broken.wav", "empty.wav", "missing.wav"))
    broken.write_bytes(b"RIFF nothing of the kind")
    soundfile.write(empty, np.zeros(0), RATE)
    silent = tmp_path / "silent.flac"
    soundfile.write(silent, np.zeros(RATE), RATE)
    one = Transcriber(Decoder(tiny_whisper()), PROCESSOR)
    found = list(one([broken, files[0], empty, missing, silent], language="en", fallback=False))
    assert [transcript.error is None for transcript in found] == [False, True, False, False, False]
    assert found[4].error == "holds nothing but silence"
    assert "cannot be read as sound" in str(found[0].error)
    assert found[2].error == "holds no sound"
    assert found[3].error == "no such file"
    raw = tmp_path / "a.raw"
    raw.write_bytes(bytes(100))
    assert "cannot be read as sound" in str(next(one(raw)).error)
    with pytest.raises(ValueError, match="task: got 'sing'"):
        one(files, task="sing")
    with torch.no_grad():  # unusable logits are an error of each file
        one.model.model.decoder.embed_tokens.weight[ENGLISH] = torch.nan
    found = list(one(files[:2], language="en", fallback=False))
    assert all("unusable" in str(transcript.error) for transcript in found)
    assert next(iter(one(files[:1], language="german", fallback=False))).language == "de"


def test_sound_is_mixed_and_resampled(tmp_path: Path) -> None:
    time = np.arange(22050) / 22050
    both = np.stack((np.sin(2 * np.pi * 440 * time), np.zeros_like(time)), axis=1)
    soundfile.write(tmp_path / "a.flac", both, 22050)
    sound = read(tmp_path / "a.flac", RATE)
    expected = 0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    assert len(sound) == RATE
    assert np.abs(sound.numpy() - expected)[200:-200].max() < 1e-3


def test_subtitles_follow_their_file_formats() -> None:
    some = [Segment(0.0, 2.5, " Hello"), Segment(3661.04, 3662.0, " <b> & so on ")]
    assert subtitles.srt(some) == (
        "1\n00:00:00,000 --> 00:00:02,500\nHello\n\n2\n01:01:01,040 --> 01:01:02,000\n<b> & so on\n\n"
    )
    assert subtitles.vtt(some) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nHello\n\n"
        "01:01:01.040 --> 01:01:02.000\n&lt;b&gt; &amp; so on\n\n"
    )
    assert json.loads(subtitles.as_json("a.wav", "é", "fr", 2.0, some))["segments"][0] == {
        "start": 0.0, "end": 2.5, "text": " Hello",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("draft", "options", "message"),
    [
        (None, {}, "takes no speech; name a Whisper model"),
        ("ngram:nothing", {}, "draft: nothing: no such file"),
        ("./nothing", {}, "./nothing: no such file or folder"),
        ("lokup", {}, 'lokup: no such file, folder or hub model; did you mean "lookup"?'),
        (None, {"rule": "coin"}, "rule: got 'coin'"),
        (None, {"dtype": "float31"}, "dtype: got 'float31'"),
        (None, {"device": "abacus"}, "device: got 'abacus'"),
    ],
)
def test_invalid_settings_are_refused_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draft: str | None, options: dict[str, Any], message: str
) -> None:
    tiny().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)

    def load(*arguments: Any, **options: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(transcribe, "load_model", load)
    with pytest.raises(ValueError, match=re.escape(message)):
        Transcriber.load(tmp_path, draft, **options)


def test_loaders_get_trust_remote_code_and_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    received: dict[str, dict[str, Any]] = {}

    def loader(name: str, found: Any) -> Any:
        return lambda *names, **options: received.update({name: options}) or found

    results = {
        "check_model": None,
        "load_processor": PROCESSOR,
        "load_drafter": None,
        "load_model": (tiny_whisper(), 0),
    }
    for name, found in results.items():
        monkeypatch.setattr(transcribe, name, loader(name, found))
    Transcriber.load("owner/name", trust_remote_code=True, revision="v2")
    assert [received[name]["trust_remote_code"] for name in results] == [True] * 4
    assert [received[name].get("revision") for name in results] == ["v2", "v2", None, "v2"]


def test_an_unknown_language_is_refused(files: list[Path]) -> None:
    one = Transcriber(Decoder(tiny_whisper()), PROCESSOR)
    with pytest.raises(ValueError, match=r"language: got 'germn'; .* did you mean \"german\"\?"):
        one(files, language="germn")
    assert transcribe.language_code("German") == transcribe.language_code("de") == "de"


def test_the_command_fails_without_a_traceback(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["transcribe", "x.wav", "-t", str(tmp_path)])
    assert done.exit_code != 0
    assert "Traceback" not in done.output


def test_the_command_writes_all_formats_and_exits_with_1_after_failures(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tiny model replaces the named one."""
    monkeypatch.setattr(
        Transcriber, "load", lambda *names, **options: Transcriber(Decoder(tiny_whisper()), PROCESSOR)
    )
    texts = [
        one.text
        for one in Transcriber(Decoder(tiny_whisper()), PROCESSOR)(files, language="en", fallback=False)
    ]
    command = ["transcribe", *map(str, files), "-l", "en", "--no-fallback"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0
    assert [line for line in done.stdout.splitlines() if not line.startswith("#")] == texts
    done = CliRunner().invoke(app, [*command, "--format", "json"])
    assert [json.loads(line)["file"] for line in done.stdout.splitlines()] == [str(path) for path in files]
    done = CliRunner().invoke(app, [*command, "nothere.wav", "--format", "srt", "-o", str(tmp_path / "out")])
    assert done.exit_code == 1
    assert "nothere.wav: no such file" in done.stderr
    assert "1 of 5 files failed" in done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [f"{i}.srt" for i in range(4)]
    assert "-->" in (tmp_path / "out" / "3.srt").read_text()
    for wrong in (["--format", "vtt"], [str(files[0]), "-o", str(tmp_path)]):
        assert isinstance(CliRunner().invoke(app, [*command, *wrong]).exception, ValueError)


@pytest.mark.skipif(
    not (WHISPER / "base").is_dir() or not SPEECH.is_dir(),
    reason=f"no Whisper in {WHISPER} ($OUTPACE_WHISPER), or no speech in {SPEECH} ($OUTPACE_SPEECH)",
)
def test_whisper_base_with_draft_tiny_transcribes_as_base_alone(tmp_path: Path) -> None:
    """With real weights, texts are the same one by one, in a batch, with a draft, and beyond 30 s."""
    files = sorted(SPEECH.glob("*.flac"))[:4]
    baseline = Transcriber.load(WHISPER / "base", dtype="float32")
    speculative = Transcriber.load(
        WHISPER / "base", WHISPER / "tiny", dtype="float32", num_draft_tokens=Fixed(4)
    )
    expected = [found.text for found in baseline(files, language="en", batch_size=1)]
    assert [found.text for found in speculative(files, language="en", batch_size=4)] == expected
    assert baseline.stats.target_passes > 2.5 * speculative.stats.target_passes
    long = tmp_path / "long.wav"
    soundfile.write(long, torch.cat([read(path, RATE) for path in files]).numpy(), RATE)
    (one,), (other,) = (list(transcriber([long], language="en")) for transcriber in (baseline, speculative))
    assert one == other
    assert one.duration > 30
    assert len(one.segments) > 2


def test_an_unwritable_transcript_file_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Transcriber, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    (tmp_path / "a.wav").write_bytes(b"")
    (tmp_path / "a.srt").mkdir()
    words = ["transcribe", str(tmp_path / "a.wav"), "--out", str(tmp_path), "--format", "srt"]
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, ValueError)
    assert str(done.exception) == f"--out: {tmp_path / 'a.srt'} is a folder"
