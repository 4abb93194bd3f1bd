"""Every Python block of the documentation runs, and the site builds without a warning."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outpace
from outpace import Decoder, SamplingParams, loading
from outpace.tasks.transcribe import Transcriber
from tests.tasks.whisper import PROCESSOR, RATE, tiny_whisper
from tests.tiny import byte_tokenizer, greedy, tiny, tiny_seq2seq

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SPEECH = "guides/speech.md"  # names Whisper and a translation model of the hub
PAGES = sorted(
    str(page.relative_to(DOCS))
    for page in DOCS.rglob("*.md")
    if "```python" in page.read_text(encoding="utf-8")
)


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that pages use: a model, a smaller model and their tokenizer. The default model is tiny."""
    tokenizer = byte_tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = "<end>", "left"
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    model, small = tiny(vocab_size=272), tiny(seed=1, vocab_size=272)
    for each in (model, small):
        each.generation_config.pad_token_id = tokenizer.pad_token_id
    monkeypatch.setattr(loading, "load", lambda: Decoder(model, "lookup", tokenizer))
    short = {"samples": 200, "progress": False}
    original = outpace.audit
    monkeypatch.setattr(
        sys.modules["outpace.auditing.audit"],
        "audit",
        lambda *args, **options: original(*args, **{**options, **short}),
    )
    return {"model": model, "small": small, "tokenizer": tokenizer}


@pytest.mark.parametrize("page", [page for page in PAGES if page != SPEECH])
def test_the_blocks_of_a_page_run(page: str, names: dict[str, Any]) -> None:
    for block in blocks(page):
        exec(compile(block, page, "exec"), names)


def test_the_blocks_of_the_speech_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models replace those that the page names."""
    soundfile = pytest.importorskip(
        "soundfile", reason="soundfile is not installed: pip install 'outpace[tasks]'"
    )
    pytest.importorskip("soxr", reason="soxr is not installed: pip install 'outpace[tasks]'")
    signature = inspect.signature(Transcriber.load)

    def load_whisper(*names: str, num_draft_tokens: int, **options: Any) -> Transcriber:
        signature.bind(*names, **options)
        decoder = Decoder(tiny_whisper(), tiny_whisper(1), num_draft_tokens=num_draft_tokens)
        return Transcriber(decoder, PROCESSOR)

    def load_translator(target: str, draft: str) -> Decoder:
        return Decoder(tiny_seq2seq("marian", vocab_size=272), draft, byte_tokenizer())

    monkeypatch.setattr(Transcriber, "load", load_whisper)
    monkeypatch.setattr(loading, "load", load_translator)
    monkeypatch.chdir(tmp_path)
    for name in ("a.flac", "b.flac"):
        soundfile.write(name, 0.1 * np.random.default_rng(1).normal(size=RATE // 2), RATE)
    names: dict[str, Any] = {}
    for block in blocks(SPEECH):
        exec(compile(block, SPEECH, "exec"), names)
    assert names["transcript"].error is None
    assert names["transcriber"].stats.new_tokens > 0


def test_the_blocks_of_the_readme_run(names: dict[str, Any]) -> None:
    names["inputs"] = names["tokenizer"]("The lighthouse", return_tensors="pt")
    for block in blocks("../README.md"):
        exec(compile(block, "README.md", "exec"), names)


def test_the_example_drafter_is_exact_and_short(names: dict[str, Any]) -> None:
    names["model"] = tiny()
    for block in blocks("guides/add-a-drafter.md"):
        exec(block, names)
    decoder = names["decoder"]
    out = decoder.generate([5, 6, 7], temperature=0, max_new_tokens=30)
    assert out.token_ids == greedy(tiny(), [5, 6, 7], 30)
    sampled = decoder.generate([5, 6, 7], SamplingParams(temperature=2.0), n=20, seed=1, max_new_tokens=30)
    assert sum(out.stats.draft_tokens for out in sampled) > 0
    body = blocks("guides/add-a-drafter.md")[0].split("class ")[1].strip().splitlines()
    assert len([line for line in body if line.strip()]) <= 20


def test_the_transformers_page_gives_the_same_text_before_and_after(names: dict[str, Any]) -> None:
    for block in blocks("guides/transformers.md"):
        exec(block, names)
    before, after = names["before"][0].tolist(), names["after"][0].tolist()
    assert after[-len(before) :] == before
    assert names["after"].shape[1] - names["inputs"].input_ids.shape[1] == 40
    assert names["stats"].new_tokens == 40
    assert names["out"].stats.new_tokens == 80


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("myst_parser", reason="the site needs pip install 'outpace[docs]'")
    build = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", str(DOCS), str(tmp_path / "site")],
        capture_output=True,
        text=True,
    )
    assert build.returncode == 0, build.stderr[-4000:]
    page = (tmp_path / "site" / "reference" / "help.html").read_text(encoding="utf-8")
    assert "outpace bench alpha" in page
