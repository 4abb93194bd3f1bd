"""Tiny GGUF files of the Qwen 2 architecture, with random weights and a byte-level tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tokenizers

CHAT = "{% for m in messages %}<|turn|>{{ m['content'] }}{% endfor %}"
HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2


def write_gguf(path: Path, seed: int = 0, quantization: str = "Q8_0", scale: float = 0.3) -> Path:
    """Write a model whose matrices have this standard deviation, and whose texts end with id 261."""
    gguf = pytest.importorskip("gguf")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "ab", "bc", "cd", "de", "<|turn|>", "<|end|>"]
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 2) + [3, 3])
    writer.add_token_merges(["a b", "b c", "c d", "d e"])
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template(CHAT)
    random, kind = np.random.default_rng(seed), gguf.GGMLQuantizationType[quantization]

    def add(name: str, *shape: int) -> None:
        if len(shape) == 1:
            writer.add_tensor(name, random.standard_normal(shape, dtype=np.float32) + 1)
        else:
            weights = random.standard_normal(shape, dtype=np.float32) * np.float32(scale)
            writer.add_tensor(name, gguf.quants.quantize(weights, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        for name in ("attn_norm", "ffn_norm"):
            add(f"{block}.{name}.weight", HIDDEN)
        for name, out in (
            ("q", HIDDEN),
            ("k", HIDDEN * KV_HEADS // HEADS),
            ("v", HIDDEN * KV_HEADS // HEADS),
        ):
            add(f"{block}.attn_{name}.weight", out, HIDDEN)
            add(f"{block}.attn_{name}.bias", out)
        add(f"{block}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"{block}.ffn_gate.weight", INNER, HIDDEN)
        add(f"{block}.ffn_up.weight", INNER, HIDDEN)
        add(f"{block}.ffn_down.weight", HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
