"""Every family scores through the ragged KV cache as its own forward does."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers

import outpace
from outpace.models import scorer as scoring
from outpace.models.causal import CausalScorer, bytes_per_token
from tests import tiers
from tests.tiny import FAMILIES, V, greedy, tiny

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 12, 40, 41, 42], [30]]


@pytest.mark.parametrize(("family", "attention"), tiers.each_value(FAMILIES, ["sdpa", "eager"]))
def test_greedy_text_equals_transformers_alone_and_in_a_ragged_batch(family: str, attention: str) -> None:
    if (family, attention) == ("gemma2", "sdpa"):
        pytest.skip("Gemma 2 caps attention scores, which sdpa cannot")
    model = tiny(family)
    model.set_attn_implementation(attention)
    expected = [greedy(model, prompt, 20) for prompt in PROMPTS]
    assert len({token for text in expected for token in text}) > 5, "texts must vary to mean anything"
    drafts = [tiny(family, seed=1), None, model, outpace.RandomDrafter(V)]
    for draft in tiers.sized(drafts[:2], drafts):
        decoder = outpace.Decoder(model, draft, num_draft_tokens=outpace.Fixed(4))
        batch = decoder.generate(PROMPTS, temperature=0, max_new_tokens=20)
        assert [out.token_ids for out in batch] == expected
        if draft is None or draft is model:
            alone = [decoder.generate(prompt, temperature=0, max_new_tokens=20) for prompt in PROMPTS]
            assert [out.token_ids for out in alone] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_ragged_rows_equal_those_of_a_single_forward_pass(family: str) -> None:
    model = tiny(family)
    scorer = CausalScorer(model)
    texts = torch.randint(V, (3, 30))
    with torch.inference_mode():
        reference = model(input_ids=texts, use_cache=False).logits

    def same(logits: torch.Tensor, expected: torch.Tensor) -> None:
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)

    starts = [9, 17, 1]
    first = scorer.prefill([0, 1, 2], [texts[row, :start].tolist() for row, start in enumerate(starts)])
    same(first, reference[[0, 1, 2], [8, 16, 0]])
    scorer.score([0, 1, 2], torch.randint(V, (3, 6)))  # draft tokens that are all rejected
    drafts = torch.stack([texts[row, start : start + 6] for row, start in enumerate(starts)])
    scored = scorer.score([0, 1, 2], drafts)
    for row, start in enumerate(starts):
        same(scored[row], reference[row, start : start + 6])
    for slot, count in enumerate([2, 0, 5]):
        scorer.cache.commit(slot, count)
    some = scorer.score([2, 0], torch.stack((texts[2, 6:8], texts[0, 11:13])))  # reordered, one left out
    same(some[0], reference[2, 6:8])
    same(some[1], reference[0, 11:13])
    same(
        scorer.append([1, 0], [texts[1, 17:18].tolist(), texts[0, 11:15].tolist()]),
        reference[[1, 0], [17, 14]],
    )


def test_long_prompts_are_prefilled_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = tiny("mistral"), torch.randint(V, (1, 100))
    with torch.inference_mode():
        reference = model(input_ids=text, use_cache=False).logits[0, [99, 40]]
    monkeypatch.setattr(scoring, "CHUNK", 7)
    prompts = [text[0].tolist(), text[0, :41].tolist()]
    torch.testing.assert_close(CausalScorer(model).prefill([0, 1], prompts), reference, atol=1e-4, rtol=1e-4)


def passes(model: Any) -> list[int]:
    """Record the tokens per row of every forward pass from now on."""
    seen: list[int] = []
    model.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return seen


def test_a_prompt_that_continues_the_last_text_reuses_its_kv_cache() -> None:
    model = tiny()
    decoder = outpace.Decoder(model, num_draft_tokens=0)
    first = decoder.generate(PROMPTS[1], temperature=0, max_new_tokens=10)
    seen = passes(model)
    longer = [*PROMPTS[1], *first.token_ids, 3, 3]
    again = decoder.generate(longer, temperature=0, max_new_tokens=5)
    assert seen[0] == 3  # the last token of the first answer was never scored; two are new
    assert again.token_ids == greedy(model, longer, 5)


def test_turns_of_a_growing_chat_reuse_the_kv_cache() -> None:
    model, tokens = tiny(), torch.randint(V, (90,)).tolist()
    decoder = outpace.Decoder(model, num_draft_tokens=0)
    seen = passes(model)
    for end in (20, 45, 70, 90):
        out = decoder.generate(tokens[:end], temperature=0, max_new_tokens=3, ignore_eos=True)
        assert out.token_ids == greedy(tiny(), tokens[:end], 3)
    assert [count for count in seen if count > 1] == [20, 25, 25, 20]


def test_samples_of_one_prompt_share_its_prefill() -> None:
    model = tiny()
    decoder = outpace.Decoder(model, num_draft_tokens=0)
    seen: list[torch.Size] = []
    hook = lambda _, __, kwargs: seen.append(kwargs["input_ids"].shape)  # noqa: E731
    model.register_forward_pre_hook(hook, with_kwargs=True)
    texts = decoder.generate(PROMPTS[1], n=5, max_new_tokens=3, seed=1, temperature=1.0)
    assert seen == [(1, len(PROMPTS[1])), (5, 1), (5, 1)]
    assert len({tuple(out.token_ids) for out in texts}) > 1


@pytest.mark.parametrize("engine", [False, True])
def test_prompts_of_one_call_share_the_prefill_of_a_long_common_prefix(
    monkeypatch: pytest.MonkeyPatch, engine: bool
) -> None:
    monkeypatch.setattr(scoring, "MIN_AWAITED_PREFIX", 20)
    model, common = tiny(), torch.randint(V, (40,)).tolist()
    prompts = [[*common, 1, 2], [9, 8, 7], [*common, 3], [*common, 4, 5, *range(6, 30)], common[:30]]
    expected = [greedy(model, prompt, 8) for prompt in prompts]
    decoder = outpace.Decoder(model, num_draft_tokens=0, engine=engine)
    scorer, counts = decoder.scorer, list[int]()
    original = scorer.append

    def append(slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        counts.extend(map(len, tokens))
        return original(slots, tokens)

    monkeypatch.setattr(scorer, "append", append)
    outs = decoder.generate(prompts, temperature=0, max_new_tokens=8)
    assert [out.token_ids for out in outs] == expected
    # The graph executor leaves the last token of each prompt to the first step.
    assert sorted(counts) == ([2, 25, 41] if engine else [1, 1, 3, 26, 42])


def test_a_prompt_waits_no_longer_than_until_the_common_prefix_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scoring, "MIN_AWAITED_PREFIX", 20)
    monkeypatch.setattr(scoring, "CHUNK", 40)
    scorer, common = CausalScorer(tiny()), torch.randint(V, (40,)).tolist()
    prompts = [[*common, *range(40)], [*common, 50], [*common[:10], 51, 52]]
    prefill = scoring.Prefill(scorer, [0, 1, 2], prompts)
    assert not prefill.advance()
    assert scorer.cache.length(0) == 40
    while not prefill.advance():
        pass
    with torch.inference_mode():
        expected = [scorer.model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
    torch.testing.assert_close(prefill.logits(), torch.stack(expected), atol=1e-4, rtol=1e-4)


def test_changed_weights_invalidate_the_kv_cache() -> None:
    model = tiny()
    decoder = outpace.Decoder(model, num_draft_tokens=0)
    before = decoder.generate(PROMPTS[1], temperature=0, max_new_tokens=20)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-1)
    after = decoder.generate(PROMPTS[1], temperature=0, max_new_tokens=20)
    assert after.token_ids == greedy(model, PROMPTS[1], 20) != before.token_ids


def test_a_row_copies_a_shared_prefix_from_another_row() -> None:
    scorer, shared = CausalScorer(tiny()), torch.randint(V, (40,)).tolist()
    scorer.prefill([0], [[*shared, 1, 2]])
    seen = passes(scorer.model)
    logits = scorer.prefill([1], [[*shared, 7, 8, 9]])
    assert seen == [3]
    with torch.inference_mode():
        reference = tiny()(input_ids=torch.tensor([[*shared, 7, 8, 9]])).logits[:, -1]
    torch.testing.assert_close(logits, reference, atol=1e-4, rtol=1e-4)


def test_the_kv_cache_logs_its_size_and_refuses_too_much_memory(caplog: pytest.LogCaptureFixture) -> None:
    scorer = CausalScorer(tiny())
    with caplog.at_level("INFO", "outpace"):
        scorer.cache.prepare(300, 100)
    scorer.prefill([0], [[1, 2]])
    assert scorer.cache.nbytes == 300 * 128 * scorer.cache.bytes_per_token
    assert f"300 rows of 128 tokens in {scorer.cache.nbytes / 2**20:.0f} MiB" in caplog.text
    with pytest.raises(MemoryError, match="MiB are allowed: pass a smaller batch_size"):
        scorer.cache.prepare(10**9, 10**6)


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_per_token_equal_the_allocated_kv_cache(family: str) -> None:
    scorer = CausalScorer(tiny(family))
    scorer.prefill([0, 1], [[1, 2], [3]])
    assert scorer.cache.nbytes == 2 * 64 * bytes_per_token(scorer.config, scorer.dtype)


@pytest.mark.parametrize(
    ("family", "config", "why"),
    [
        ("bloom", {"n_layer": 1, "n_head": 2, "hidden_size": 8}, "BloomForCausalLM uses ALiBi"),
        ("falcon", {"alibi": True}, "FalconForCausalLM uses ALiBi"),
        ("mamba", {"num_hidden_layers": 1, "hidden_size": 8}, "has a recurrent state"),
    ],
)
def test_models_that_cannot_score_ragged_rows_are_refused(
    family: str, config: dict[str, Any], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        CausalScorer(tiny(family, **config))


def test_encoder_decoders_vision_models_and_headless_models_are_refused() -> None:
    t5 = transformers.T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder model"):
        CausalScorer(transformers.T5ForConditionalGeneration(t5))
    with pytest.raises(ValueError, match="LlamaModel has no language-model head"):
        CausalScorer(tiny().model)
    text = transformers.Gemma3TextConfig(**{**FAMILIES["gemma3_text"], "num_hidden_layers": 1})
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.Gemma3Config(text_config=text.to_dict(), vision_config=vision)
    with pytest.raises(ValueError, match="is a vision-language model; load its language model alone"):
        CausalScorer(transformers.Gemma3ForConditionalGeneration(config))
    with pytest.raises(TypeError, match="model: got str 'gpt2'"):
        CausalScorer("gpt2")


def test_an_untested_family_is_checked_when_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("stablelm")
    decoder = outpace.Decoder(model, model, num_draft_tokens=3)
    text = decoder.generate(PROMPTS[0], temperature=0, max_new_tokens=20)
    assert text.token_ids == greedy(model, PROMPTS[0], 20)
    original = CausalScorer._masks
    monkeypatch.setattr(CausalScorer, "_masks", lambda self, at, reach: original(self, at + 1, reach))
    with pytest.raises(ValueError, match="scores differently through a ragged cache"):
        CausalScorer(model)


def test_flex_attention_is_switched_to_sdpa_with_a_warning() -> None:
    model = tiny()
    model.set_attn_implementation("flex_attention")
    with pytest.warns(UserWarning, match="flex_attention does not take 4-D masks; switched to sdpa"):
        scorer = CausalScorer(model)
    assert "attention sdpa" in scorer.describe()


def test_training_mode_is_switched_off_with_a_warning() -> None:
    model = tiny("gpt2").train()
    with pytest.warns(UserWarning, match="training mode"):
        CausalScorer(model)
    assert not model.training


def test_a_supported_model_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outpace.Decoder(tiny(), tiny(seed=1)).generate([1, 2], max_new_tokens=4)


def test_peft_models_score_with_their_adapter() -> None:
    peft = pytest.importorskip("peft")
    lora = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    torch.manual_seed(3)
    model = peft.get_peft_model(tiny(), peft.LoraConfig(task_type="CAUSAL_LM", **lora)).eval()
    expected = greedy(model, PROMPTS[1], 20)
    assert expected != greedy(tiny(), PROMPTS[1], 20)
    decoder = outpace.Decoder(model, tiny(), num_draft_tokens=3)
    assert decoder.generate(PROMPTS[1], temperature=0, max_new_tokens=20).token_ids == expected
    with model.disable_adapter():  # no weight changes, and the cached tokens must still be invalidated
        without_adapter = decoder.generate(PROMPTS[1], temperature=0, max_new_tokens=20)
    assert without_adapter.token_ids == greedy(tiny(), PROMPTS[1], 20)
    learned = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match="PEFT's prompt learning"):
        CausalScorer(peft.get_peft_model(tiny(), learned))


def test_models_with_a_device_map_score_as_before() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny("gemma2")
    expected = greedy(model, PROMPTS[1], 20)
    placed = accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    decoder = outpace.Decoder(placed, placed, num_draft_tokens=3)
    assert decoder.generate(PROMPTS[1], temperature=0, max_new_tokens=20).token_ids == expected


def test_quantized_models_score_as_before() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = tiny(hidden_size=64, intermediate_size=128)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    expected = greedy(model, PROMPTS[1], 20)
    decoder = outpace.Decoder(model, model, num_draft_tokens=3)
    assert decoder.generate(PROMPTS[1], temperature=0, max_new_tokens=20).token_ids == expected


def test_sixteen_bit_texts_differ_at_most_at_near_ties() -> None:
    model = tiny().bfloat16()
    decoder = outpace.Decoder(model, model, num_draft_tokens=3)
    report = outpace.audit(decoder, PROMPTS, samples=0, progress=False)
    assert report.passed, str(report)


def test_longrope_context_ends_where_factors_would_depend_on_the_batch() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 40,
        "short_factor": [1.0] * 4,
        "long_factor": [3.0] * 4,
    }
    model = tiny("phi3", rope_parameters=rope, original_max_position_embeddings=40, sliding_window=None)
    with pytest.warns(UserWarning, match="its context is limited to 40 tokens"):
        scorer = CausalScorer(model)
    assert scorer.context == 40


def test_families_with_an_unknown_attention_window_are_refused() -> None:
    neo: dict[str, Any] = {"num_layers": 2, "attention_types": [[["local"], 2]], "window_size": 32}
    model = tiny("gpt_neo", **neo, max_position_embeddings=400)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ValueError, match="GPTNeoForCausalLM scores differently"):
            CausalScorer(model.to(dtype))


def test_the_kv_cache_shrinks_when_no_slot_is_in_use() -> None:
    scorer = CausalScorer(tiny())
    scorer.prefill(list(range(8)), [[1, 2]] * 8)
    scorer.reset(range(8), [[1, 2]] * 8)
    scorer.prefill([0], [[1] * 100])
    assert scorer.cache.nbytes == 128 * scorer.cache.bytes_per_token


def test_padding_does_not_grow_the_kv_cache() -> None:
    scorer, long = CausalScorer(tiny()), torch.randint(V, (100,)).tolist()
    scorer.cache.prepare(2, 127)
    scorer.prefill([0], [long])
    scorer.reset([0], [long])
    logits = scorer.prefill([0, 1], [[*long, 3], long[::-1]])
    assert scorer.cache.capacity == 128
    with torch.inference_mode():
        reference = tiny()(input_ids=torch.tensor([[*long, 3]])).logits[:, -1]
    torch.testing.assert_close(logits[:1], reference, atol=1e-4, rtol=1e-4)


def test_switched_transformers_adapters_invalidate_the_kv_cache() -> None:
    peft = pytest.importorskip("peft")
    model = tiny()
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        lora = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
        model.add_adapter(peft.LoraConfig(task_type="CAUSAL_LM", **lora), name)
    model.set_adapter("a")
    decoder = outpace.Decoder(model.eval(), num_draft_tokens=0)
    decoder.generate(PROMPTS[1], temperature=0, max_new_tokens=20)
    model.set_adapter("b")
    out = decoder.generate(PROMPTS[1], temperature=0, max_new_tokens=20)
    assert out.token_ids == greedy(model, PROMPTS[1], 20)
