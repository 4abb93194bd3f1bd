"""What the pages show runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from outpace import Sampling
from outpace.audit import audit
from tests.tiny import byte_tokenizer, greedy, tiny

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_drafter_of_the_page_drafts_and_is_exact() -> None:
    names: dict[str, Any] = {"model": tiny()}
    for block in blocks("drafters.md"):
        exec(block, names)
    decoder = names["decoder"]
    out = decoder.generate([5, 6, 7], temperature=0, max_new_tokens=30)
    assert out.tokens == greedy(tiny(), [5, 6, 7], 30)
    sampled = decoder.generate([5, 6, 7], Sampling(temperature=2.0), n=20, seed=1, max_new_tokens=30)
    assert sum(one.stats.drafted for one in sampled) > 0
    report = audit(decoder, [[5, 6, 7]], samples=1000, progress=False)
    assert report.passed, str(report)


def test_the_drafter_of_the_page_is_as_short_as_it_says() -> None:
    body = blocks("drafters.md")[0].split("class ")[1].strip().splitlines()
    assert len([line for line in body if line.strip()]) <= 20


def test_the_decoder_page_runs() -> None:
    names: dict[str, Any] = {
        "model": tiny(vocab_size=272),
        "small": tiny(seed=1, vocab_size=272),
        "tokenizer": byte_tokenizer(),
    }
    names["tokenizer"].pad_token = "<end>"
    names["tokenizer"].chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    first, second, *_ = blocks("decoder.md")
    exec(first, names)
    assert names["out"].finish_reason == "length"
    assert len(names["out"].tokens) == 64
    exec(second, names)
    assert [len(out.tokens) for out in names["outs"]] == [64, 64]


def test_the_transformers_page_runs_and_after_is_before() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.pad_token, tokenizer.padding_side = "<end>", "left"
    names: dict[str, Any] = {
        "model": tiny(vocab_size=272),
        "small": tiny(seed=1, vocab_size=272),
        "tokenizer": tokenizer,
    }
    for model in (names["model"], names["small"]):
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    for block in blocks("transformers.md"):
        exec(block, names)
    alone, first = names["before"][0].tolist(), names["after"][0].tolist()
    assert first[-len(alone) :] == alone
    assert names["after"].shape[1] - names["inputs"].input_ids.shape[1] == 40
    assert names["stats"].new_tokens == 40
    assert names["out"].stats.new_tokens == 80
