"""Tiny random models of every supported family: a few layers, untied heads, so that greedy texts vary."""

from __future__ import annotations

from typing import Any

import tokenizers
import torch
import transformers

V = 61
COMMON: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED: dict[str, Any] = {**COMMON, "intermediate_size": 64, "num_key_value_heads": 2}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 7},
    "qwen2": {**GROUPED, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3": {
        **GROUPED,
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "gemma": {**GROUPED, "head_dim": 16},
    "gemma2": {**GROUPED, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16},
    "gemma3_text": {**GROUPED, "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16},
    "gpt2": {**COMMON},
    "gpt_neox": {**COMMON, "intermediate_size": 64},
    "phi": {**COMMON, "intermediate_size": 64},
    "phi3": {**GROUPED, "sliding_window": 7},
    "opt": {**COMMON, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "falcon": {**COMMON, "alibi": False, "new_decoder_architecture": False, "multi_query": True},
}


def tiny(family: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A causal model with random weights, in float32 and evaluation mode."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **{**FAMILIES.get(family, GROUPED), **changes})
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=changes.get("attention")
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)  # the usual 0.02 makes every text the same token again and again
    model.generation_config.pad_token_id = 0
    return model.float().eval()


def greedy(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """What Transformers itself generates."""
    ids = torch.tensor([prompt])
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
    )
    return list(out[0, len(prompt) :].tolist())


def byte_tokenizer() -> Any:
    """Every byte is a token, and a few pairs are: characters and words cross token borders."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate([*alphabet, "ab", "bc", "cd", "de"])}
    merges = [("a", "b"), ("b", "c"), ("c", "d"), ("d", "e")]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")
