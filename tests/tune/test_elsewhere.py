"""Arguments for others are theirs."""

from __future__ import annotations

import ast
import json
import shlex
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import outpace
from outpace.tune.elsewhere import Models, transformers, vllm
from tests.tiny import tiny

EVERY = [
    ("lookup", "auto", "token"),
    ("lookup", "3", "token"),
    ("org/small", "5", "block"),
    ("ngram:a b.safetensors", "auto", "token"),
    ("none", "0", "token"),
]


PAIR = Models("org/big", "bfloat16")


@pytest.mark.parametrize("models", [PAIR, Models("org/big", "float32", encoder=True, other=True)])
@pytest.mark.parametrize(("draft", "length", "rule"), EVERY)
def test_transformers_calls_are_python_with_arguments_it_knows(
    models: Models, draft: str, length: str, rule: str
) -> None:
    tree = ast.parse(transformers(models, draft, length, rule, 5))
    calls = [
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.Call) and ast.unparse(one.func) == "model.generate"
    ]
    assert calls
    known = GenerationConfig().to_dict()
    for call in calls:
        given = {one.arg for one in call.keywords if one.arg is not None}
        if "custom_generate" in given:
            assert given <= {"custom_generate", "draft", "num_draft_tokens", "rule"}
        else:
            assert given - {"assistant_model", "tokenizer", "assistant_tokenizer"} <= set(known)


def test_what_is_printed_guesses_as_far_as_it_says() -> None:
    """Run as it stands, inside Transformers: its own assisted generation takes lengths from the draft."""
    target, seen = tiny(), []

    class Counted(type(tiny(seed=1))):  # type: ignore[misc]
        def generate(self, *positional: Any, **given: Any) -> Any:
            seen.append(given["max_new_tokens"])
            return super().generate(*positional, **given)

    small = tiny(seed=1)
    small.__class__ = Counted
    models = {"org/big": target, "org/small": small}
    names = {
        "outpace": outpace,
        "inputs": {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 20},
        "AutoModelForCausalLM": SimpleNamespace(from_pretrained=lambda name, dtype: models[name]),
    }
    exec(transformers(PAIR, "org/small", "3", "token", 3), names)
    assert set(seen[:4]) == {3}
    exec(transformers(PAIR, "lookup", "auto", "token", 3), names)


def test_lookup_and_models_have_their_names_in_transformers() -> None:
    found = transformers(PAIR, "lookup", "auto", "token", 4)
    assert "prompt_lookup_num_tokens=4, max_matching_ngram_size=3" in found
    assert "draft=outpace.LookupDrafter(min_ngram=1), num_draft_tokens=outpace.Goodput())" in found
    found = transformers(PAIR, "org/small", "5", "block", 5)
    assert 'draft=small, num_draft_tokens=5, rule="block")' in found
    assert "small.generation_config.num_assistant_tokens = 5" in found
    assert "assistant_model=small)" in found
    other = transformers(Models("org/big", "float32", encoder=True, other=True), "org/small", "5", "token", 5)
    assert "AutoModelForSeq2SeqLM" in other
    assert "assistant_tokenizer=theirs" in other
    on_gpu = transformers(Models("org/big", "bfloat16", "cuda:1"), "org/small", "5", "token", 5)
    for name in ("big", "small"):
        assert f'from_pretrained("org/{name}", dtype="bfloat16").to("cuda:1")' in on_gpu
    assert "has no n-gram tables" in transformers(PAIR, "ngram:t", "4", "token", 4)
    assert transformers(PAIR, "none", "0", "token", None).splitlines() == [
        'model = AutoModelForCausalLM.from_pretrained("org/big", dtype="bfloat16")',
        "model.generate(**inputs)  # nothing more",
    ]


def test_gguf_files_are_loaded_as_such() -> None:
    found = transformers(Models("org/big", "float32", other=True), "/models/small.gguf", "5", "token", 5)
    place = '"/models", gguf_file="small.gguf"'
    assert f'small = AutoModelForCausalLM.from_pretrained({place}, dtype="float32")' in found
    assert f"theirs = AutoTokenizer.from_pretrained({place})" in found


@pytest.mark.parametrize("draft", ["lookup", "org/small"])
def test_what_was_found_not_to_pay_is_not_recommended(draft: str) -> None:
    own, *further = transformers(PAIR, draft, "auto", "token", None).splitlines()[-2:]
    assert "custom_generate=outpace.generate" in own
    assert further == [
        "# not by its own assisted generation: it has no policy that goes by the clock, and no fixed length "
        "was found to pay"
    ]
    command = vllm(PAIR, draft, "auto", None)
    assert shlex.split(command, comments=True) == ["vllm", "serve", "org/big", "--dtype", "bfloat16"]
    assert "no fixed length was found to pay" in command


def settings(command: str) -> Any:
    words = shlex.split(command, comments=True)
    return json.loads(words[words.index("--speculative-config") + 1])


def test_vllm_has_a_command() -> None:
    assert settings(vllm(PAIR, "org/small", "5", 5)) == {
        "method": "draft_model", "model": "org/small", "num_speculative_tokens": 5,
    }  # fmt: skip
    assert settings(vllm(PAIR, "lookup", "auto", 4)) == {
        "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
    }  # fmt: skip
    for draft in ("none", "ngram:t"):
        words = shlex.split(vllm(Models("a b", "float32"), draft, "auto", 4), comments=True)
        assert words == ["vllm", "serve", "a b", "--dtype", "float32"]
    assert vllm(Models("t5", "float32", encoder=True), "lookup", "auto", 4).startswith("# it does not")
