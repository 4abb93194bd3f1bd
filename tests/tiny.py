"""Tiny random models of every supported family: a few layers, untied heads, so that greedy texts vary."""

from __future__ import annotations

from typing import Any

import tokenizers
import torch
import transformers
from transformers import GenerationMixin

V = 61
COMMON: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,
    "num_hidden_layers": 2,
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


SHARED: dict[str, Any] = {
    "vocab_size": V,
    "d_model": 32,
    "decoder_start_token_id": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LAYERS: dict[str, Any] = {
    **SHARED,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
DISTANCES: dict[str, Any] = {
    **SHARED,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
SEQ2SEQ: dict[str, dict[str, Any]] = {
    "t5": DISTANCES,
    "mt5": {**DISTANCES, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "bart": {**LAYERS, "max_position_embeddings": 128, "forced_eos_token_id": None, "scale_embedding": True},
    "marian": {
        **LAYERS,
        "activation_function": "swish",
        "max_position_embeddings": 128,
        "forced_eos_token_id": None,
        "scale_embedding": True,
    },
    "whisper": {
        **LAYERS,
        "num_mel_bins": 8,
        "max_source_positions": 20,
        "max_target_positions": 128,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
}


def tiny_seq2seq(family: str = "t5", seed: int = 0, **changes: Any) -> Any:
    """An encoder-decoder model with random weights, in float32 and evaluation mode."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, **{**SEQ2SEQ[family], **changes})
    auto = (
        transformers.AutoModelForSeq2SeqLM if family != "whisper" else transformers.AutoModelForSpeechSeq2Seq
    )
    model = auto.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
        if hasattr(model, "final_logits_bias"):
            model.final_logits_bias.normal_()
    for name in ("bos_token_id", "eos_token_id", "forced_eos_token_id", "forced_bos_token_id"):
        setattr(model.generation_config, name, None)
    return model.float().eval()


def sources(family: str, *lengths: int) -> list[Any]:
    """Return encoder inputs of a family: texts of these lengths in tokens, or speech of a fixed length."""
    noise = torch.Generator().manual_seed(sum(lengths))
    if family == "whisper":
        return [torch.randn(8, 40, generator=noise) for _ in lengths]
    return [torch.randint(2, V, (n,), generator=noise).tolist() for n in lengths]


def greedy_of(model: Any, source: Any, tokens: int) -> list[int]:
    """Return the greedy tokens that Transformers itself generates for a source."""
    if isinstance(source, torch.Tensor):
        inputs = {"input_features": source[None]}
        start = torch.tensor([[model.config.decoder_start_token_id]])
        out = GenerationMixin.generate(
            model, **inputs, decoder_input_ids=start, max_new_tokens=tokens, do_sample=False
        )
    else:
        ids = torch.tensor([source])
        out = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
        )
    return list(out[0, 1:].tolist())


def greedy(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """Return the greedy tokens that Transformers itself generates."""
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


def trained_tokenizer(kind: str, text: str, size: int = 300) -> Any:
    """A tokenizer of its own kind, "bytes" as GPT-2's or "pieces" as Llama 2's, with words of a text."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=kind == "pieces"))
    if kind == "bytes":
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = tokenizers.decoders.ByteLevel()
        special = ["<|end|>", "<|turn|>"]
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    else:
        inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        decoders = tokenizers.decoders
        inner.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        special = ["</s>", "<s>", "<|turn|>", *(f"<0x{byte:02X}>" for byte in range(256))]
        alphabet = ["a"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator([text], trainer)
    named = {"eos_token": special[0], "additional_special_tokens": ["<|turn|>"]}
    if kind == "bytes":
        return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **named)
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", **named)


def letter_tokenizer(*tokens: str) -> Any:
    """These tokens, in the order of their ids; those of two letters are merged from their halves."""
    merges = [(token[0], token[1]) for token in tokens if len(token) == 2]
    model = tokenizers.models.BPE({token: id for id, token in enumerate(tokens)}, merges)
    inner = tokenizers.Tokenizer(model)
    inner.decoder = tokenizers.decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner)


def trained(ids: list[int], vocab_size: int, seed: int = 0, steps: int = 150, **changes: Any) -> Any:
    """A tiny model that knows a text by heart."""
    model = tiny(seed=seed, vocab_size=vocab_size, num_hidden_layers=2, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.2)  # learns sooner
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    text = torch.tensor(ids)
    span = min(64, len(ids) - 1)
    starts = torch.randint(len(ids) - span, (steps, 4), generator=torch.Generator().manual_seed(seed))
    for start in starts.tolist():
        batch = torch.stack([text[at : at + span] for at in start])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model
