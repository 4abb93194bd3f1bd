"""Arguments for others are theirs."""

from __future__ import annotations

import ast
import json
import shlex
from typing import Any

import pytest
from transformers import GenerationConfig

from outpace.tune.elsewhere import transformers, vllm

EVERY = [
    ("lookup", "auto", "token"),
    ("lookup", "3", "token"),
    ("org/small", "5", "block"),
    ("ngram:a b.safetensors", "auto", "token"),
    ("none", "0", "token"),
]


@pytest.mark.parametrize(("draft", "length", "rule"), EVERY)
def test_transformers_calls_are_python_with_arguments_it_knows(draft: str, length: str, rule: str) -> None:
    tree = ast.parse(transformers(draft, length, rule, 5))
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
            assert given <= {"custom_generate", "draft", "length", "rule"}
        else:
            assert given - {"assistant_model"} <= set(known)


def test_lookup_and_models_have_their_names_in_transformers() -> None:
    found = transformers("lookup", "auto", "token", 4)
    assert "prompt_lookup_num_tokens=4, max_matching_ngram_size=3" in found
    assert 'custom_generate=outpace.generate, draft="lookup")' in found
    found = transformers("org/small", "5", "block", 5)
    assert 'draft=small, length=5, rule="block")' in found
    assert 'assistant_model=small, num_assistant_tokens=5, num_assistant_tokens_schedule="constant"' in found
    assert "has no n-gram tables" in transformers("ngram:t", "4", "token", 4)


def settings(command: str) -> Any:
    words = shlex.split(command, comments=True)
    return json.loads(words[words.index("--speculative-config") + 1])


def test_vllm_has_a_command() -> None:
    assert settings(vllm("org/big", "org/small", "5", "bfloat16", 5)) == {
        "method": "draft_model", "model": "org/small", "num_speculative_tokens": 5,
    }  # fmt: skip
    assert settings(vllm("org/big", "lookup", "auto", "bfloat16", 4)) == {
        "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
    }  # fmt: skip
    for draft in ("none", "ngram:t"):
        words = shlex.split(vllm("a b", draft, "auto", "float32", 4), comments=True)
        assert words == ["vllm", "serve", "a b", "--dtype", "float32"]
