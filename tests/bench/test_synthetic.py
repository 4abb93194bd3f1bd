"""Synthetic pairs have the requested acceptance rate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import outpace
from outpace.bench import synthetic
from tests import tiers

TARGET: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 500,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
TOLERANCES = [(torch.float32, 1e-3), (torch.bfloat16, 0.01)]
DRAFT = {**TARGET, "hidden_size": 96, "head_dim": 24, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("family", "alpha"), tiers.each_value(["llama", "mistral", "qwen2", "qwen3", "gemma"], [0.6, 0.9])
)
def test_pair_has_the_requested_acceptance_rate(family: str, alpha: float) -> None:
    shapes = [{**shape, "model_type": family} for shape in (TARGET, DRAFT)]
    for dtype, tolerance in tiers.sized(TOLERANCES[:1], TOLERANCES):
        made = synthetic.pair(shapes[0], shapes[1], alpha, dtype=dtype)
        assert made.alpha == pytest.approx(alpha, abs=tolerance)


def test_generated_texts_have_the_requested_acceptance_rate() -> None:
    made = synthetic.pair(TARGET, DRAFT, 0.8, dtype=torch.float32)
    decoder = outpace.Decoder(made.target, made.draft, num_draft_tokens=outpace.Fixed(1))
    outs = decoder.generate(
        [[i] for i in range(8)], outpace.SamplingParams(), seed=list(range(8)), max_new_tokens=300
    )
    seen = sum((out.stats for out in outs), outpace.Stats())
    # 8 sequences of about 170 draft tokens, a standard error of 0.011
    assert seen.acceptance_rate == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize("family", ["t5", "marian", "whisper"])
def test_decoders_of_encoder_decoder_models_have_the_requested_acceptance_rate(family: str) -> None:
    shape: dict[str, Any] = {
        "model_type": family, "vocab_size": 600, "d_model": 128, "d_kv": 32, "num_heads": 4, "d_ff": 64,
        "num_layers": 1, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8,
        "max_source_positions": 20, "tie_word_embeddings": False, "decoder_start_token_id": 1,
        "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
    }  # fmt: skip
    codes = synthetic.Codes.random(600, 0)
    ids = codes.contexts()[:, None]
    inputs: dict[str, Any] = {"input_ids": torch.full((len(ids), 3), 5)}
    if family == "whisper":
        inputs = {"input_features": torch.randn(len(ids), 8, 40)}
    logits = []
    for sigma in (0.0, synthetic.noise_for(codes, 0.75)):
        model = synthetic.bigram(shape, codes, sigma, dtype=torch.float32)
        with torch.inference_mode():
            logits.append(model(**inputs, decoder_input_ids=ids, use_cache=False).logits[:, -1])
    assert synthetic.overlap(*logits) == pytest.approx(0.75, abs=0.02)


def test_texts_of_a_target_for_prompt_lookup_repeat() -> None:
    made = synthetic.pair(TARGET, synthetic.LOOKUP, 0.8, dtype=torch.float32)
    assert made.draft is None
    assert made.alpha == pytest.approx(0.8, abs=1e-3)
    decoder = outpace.Decoder(made.target, "lookup", num_draft_tokens=outpace.Fixed(4))
    outs = decoder.generate([[i] for i in range(8)], outpace.SamplingParams(), seed=1, max_new_tokens=300)
    seen = sum((out.stats for out in outs), outpace.Stats())
    tokens = [token for out in outs for token in out.token_ids]
    assert sum(token < made.words for token in tokens) > 0.95 * len(tokens)
    assert seen.tokens_per_pass > 2


@pytest.mark.full
def test_noise_for_a_known_acceptance_rate_is_found() -> None:
    """For 32000 tokens, the value was measured separately."""
    codes = synthetic.Codes.random(32000, 0)
    assert synthetic.noise_for(codes, 0.83) == pytest.approx(0.1, abs=0.005)


def test_models_of_a_named_pair_have_the_same_vocabulary_size() -> None:
    for target, draft in synthetic.PAIRS.values():
        if draft == synthetic.LOOKUP:
            continue
        assert synthetic.SHAPES[target]["vocab_size"] == synthetic.SHAPES[draft]["vocab_size"]


def test_wrong_arguments_are_refused_with_their_name() -> None:
    with pytest.raises(ValueError, match="vocabulary has another size"):
        synthetic.pair(TARGET, {**DRAFT, "vocab_size": 501}, 0.8)
    with pytest.raises(ValueError, match=r"alpha: got 0\.01"):
        synthetic.pair(TARGET, DRAFT, 0.01)
    with pytest.raises(ValueError, match="hidden_size is 32"):
        synthetic.pair({**TARGET, "hidden_size": 32}, DRAFT, 0.8)
