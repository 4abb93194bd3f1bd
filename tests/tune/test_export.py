"""Settings for Transformers and vLLM have the names that these libraries know."""

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
from outpace.tune.export import Models, transformers, vllm
from tests.tiny import tiny

CANDIDATES = [
    ("lookup", "auto", "token"),
    ("lookup", "3", "token"),
    ("org/small", "5", "block"),
    ("ngram:a b.safetensors", "auto", "token"),
    ("none", "0", "token"),
]


PAIR = Models("org/big", "bfloat16")


@pytest.mark.parametrize(
    "models", [PAIR, Models("org/big", "float32", has_encoder=True, other_tokenizer=True)]
)
@pytest.mark.parametrize(("draft", "num_draft_tokens", "rule"), CANDIDATES)
def test_transformers_code_is_python_with_arguments_that_generate_knows(
    models: Models, draft: str, num_draft_tokens: str, rule: str
) -> None:
    tree = ast.parse(transformers(models, draft, num_draft_tokens, rule, 5))
    calls = [
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.Call) and ast.unparse(one.func) == "model.generate"
    ]
    assert calls
    known = GenerationConfig().to_dict()
    for call in calls:
        names = {one.arg for one in call.keywords if one.arg is not None}
        if "custom_generate" in names:
            assert names <= {"custom_generate", "draft", "num_draft_tokens", "rule"}
        else:
            assert names - {"assistant_model", "tokenizer", "assistant_tokenizer"} <= set(known)


def test_printed_code_runs_and_drafts_the_number_of_tokens_that_it_states() -> None:
    """Assisted generation takes the number from the draft model's generation config."""
    target, requested = tiny(), []

    class CountingModel(type(tiny(seed=1))):  # type: ignore[misc]
        def generate(self, *positional: Any, **keywords: Any) -> Any:
            requested.append(keywords["max_new_tokens"])
            return super().generate(*positional, **keywords)

    small = tiny(seed=1)
    small.__class__ = CountingModel
    models = {"org/big": target, "org/small": small}
    names = {
        "outpace": outpace,
        "inputs": {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 20},
        "AutoModelForCausalLM": SimpleNamespace(from_pretrained=lambda name, dtype: models[name]),
    }
    exec(transformers(PAIR, "org/small", "3", "token", 3), names)
    assert set(requested[:4]) == {3}
    exec(transformers(PAIR, "lookup", "auto", "token", 3), names)


def test_prompt_lookup_and_draft_models_become_transformers_arguments() -> None:
    found = transformers(PAIR, "lookup", "auto", "token", 4)
    assert "prompt_lookup_num_tokens=4, max_matching_ngram_size=3" in found
    assert "draft=outpace.LookupDrafter(), num_draft_tokens=outpace.Goodput())" in found
    found = transformers(PAIR, "org/small", "5", "block", 5)
    assert 'draft=small, num_draft_tokens=5, rule="block")' in found
    assert "small.generation_config.num_assistant_tokens = 5" in found
    assert "assistant_model=small)" in found
    other = transformers(
        Models("org/big", "float32", has_encoder=True, other_tokenizer=True), "org/small", "5", "token", 5
    )
    assert "AutoModelForSeq2SeqLM" in other
    assert "assistant_tokenizer=draft_tokenizer" in other
    on_gpu = transformers(Models("org/big", "bfloat16", "cuda:1"), "org/small", "5", "token", 5)
    for name in ("big", "small"):
        assert f'from_pretrained("org/{name}", dtype="bfloat16").to("cuda:1")' in on_gpu
    assert "has no n-gram tables" in transformers(PAIR, "ngram:t", "4", "token", 4)
    assert transformers(PAIR, "none", "0", "token", None).splitlines() == [
        'model = AutoModelForCausalLM.from_pretrained("org/big", dtype="bfloat16")',
        "model.generate(**inputs)  # nothing more",
    ]


def test_a_gguf_draft_is_loaded_by_folder_and_file_name() -> None:
    found = transformers(
        Models("org/big", "float32", other_tokenizer=True), "/models/small.gguf", "5", "token", 5
    )
    arguments = '"/models", gguf_file="small.gguf"'
    assert f'small = AutoModelForCausalLM.from_pretrained({arguments}, dtype="float32")' in found
    assert f"draft_tokenizer = AutoTokenizer.from_pretrained({arguments})" in found


@pytest.mark.parametrize("draft", ["lookup", "org/small"])
def test_without_a_paying_fixed_number_only_outpace_speculates(draft: str) -> None:
    own, *further = transformers(PAIR, draft, "auto", "token", None).splitlines()[-2:]
    assert "custom_generate=outpace.generate" in own
    assert further == [
        "# not with its own assisted generation: it has no policy based on measured times, and no fixed "
        "num_draft_tokens was found to pay"
    ]
    command = vllm(PAIR, draft, "auto", None)
    assert shlex.split(command, comments=True) == ["vllm", "serve", "org/big", "--dtype", "bfloat16"]
    assert "no fixed num_draft_tokens was found to pay" in command


def speculative_config(command: str) -> Any:
    words = shlex.split(command, comments=True)
    return json.loads(words[words.index("--speculative-config") + 1])


def test_vllm_commands_have_the_speculative_config() -> None:
    assert speculative_config(vllm(PAIR, "org/small", "5", 5)) == {
        "method": "draft_model", "model": "org/small", "num_speculative_tokens": 5,
    }  # fmt: skip
    assert speculative_config(vllm(PAIR, "lookup", "auto", 4)) == {
        "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
    }  # fmt: skip
    for draft in ("none", "ngram:t"):
        words = shlex.split(vllm(Models("a b", "float32"), draft, "auto", 4), comments=True)
        assert words == ["vllm", "serve", "a b", "--dtype", "float32"]
    assert vllm(Models("t5", "float32", has_encoder=True), "lookup", "auto", 4).startswith("# vLLM does not")
