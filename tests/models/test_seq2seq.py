"""Encoder-decoder models score ragged rows as their own forward does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import outpace
from outpace import Decoder, Fixed, Goodput, SamplingParams
from outpace.draft.base import State
from outpace.models.causal import fingerprint
from outpace.models.seq2seq import Seq2SeqScorer
from outpace.models.source import Source
from outpace.policy import Load, StepOutcome
from tests import tiers
from tests.tiny import SEQ2SEQ, V, greedy_of, sources, tiny, tiny_seq2seq

LENGTHS = 7, 3, 12


def transformers_logits(model: Any, source: Any, tokens: list[int]) -> torch.Tensor:
    """Return the logits of one forward pass of the Transformers model."""
    ids = torch.tensor([tokens])
    inputs = (
        {"input_features": source[None]}
        if isinstance(source, torch.Tensor)
        else {"input_ids": torch.tensor([source])}
    )
    with torch.inference_mode():
        logits: torch.Tensor = model(**inputs, decoder_input_ids=ids, use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_ragged_rows_score_as_the_transformers_model(family: str) -> None:
    model = tiny_seq2seq(family).double()
    scorer = Seq2SeqScorer(model)
    inputs = [one.double() if isinstance(one, torch.Tensor) else one for one in sources(family, *LENGTHS)]
    encoder_inputs = [scorer.source(one) for one in inputs]
    texts = [[1, *range(10, 10 + n)] for n in (0, 4, 9)]
    scorer.cache.prepare(3, 40)
    first = scorer.prefill([0, 1, 2], texts, encoder_inputs)
    new = torch.randint(V, (3, 5), generator=torch.Generator().manual_seed(1))
    scorer.score([0, 1, 2], new.flip(0))  # is rejected
    found = scorer.score([0, 1, 2], new)
    for row in range(3):
        expected = transformers_logits(model, inputs[row], [*texts[row], *new[row].tolist()])
        assert torch.allclose(first[row], expected[len(texts[row]) - 1], atol=1e-10)
        assert torch.allclose(found[row], expected[len(texts[row]) :], atol=1e-10)
    # One sequence leaves, another one takes its slot, and the slots are scored in another order.
    for slot, count in enumerate([2, 0, 5]):
        scorer.cache.commit(slot, count)
    scorer.reset([1])
    other = sources(family, 20)[0]
    other = other.double() if isinstance(other, torch.Tensor) else other
    scorer.prefill([1], [[1, 5]], [scorer.source(other)])
    found = scorer.score([2, 1, 0], new)
    texts_by_row = {0: [*texts[0], *new[0, :2].tolist()], 1: [1, 5], 2: [*texts[2], *new[2].tolist()]}
    for i, row in enumerate((2, 1, 0)):
        source = other if row == 1 else inputs[row]
        expected = transformers_logits(model, source, [*texts_by_row[row], *new[i].tolist()])
        assert torch.allclose(found[i], expected[len(texts_by_row[row]) :], atol=1e-10)


def test_a_longer_source_in_fewer_slots_is_scored_after_the_kv_cache_was_trimmed() -> None:
    model = tiny_seq2seq("t5")
    scorer = Seq2SeqScorer(model)
    short, long = sources("t5", 3, 12)
    scorer.prefill([0, 1, 2], [[1]] * 3, [scorer.source(short)] * 3)
    scorer.reset([0, 1, 2], [()] * 3)
    scorer.cache.max_bytes = scorer.cache.nbytes
    scorer.cache.trim()
    assert scorer.cache.nbytes == 0
    logits = scorer.prefill([0], [[1, 2]], [scorer.source(long)])
    torch.testing.assert_close(logits[0], transformers_logits(model, long, [1, 2])[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "drafter"),
    tiers.each_value(SEQ2SEQ, ["model", "self", "lookup", "random", "causal", None]),
)
def test_greedy_texts_equal_transformers(family: str, drafter: str | None) -> None:
    model = tiny_seq2seq(family)
    drafters: dict[str | None, Any] = {
        "model": tiny_seq2seq(family, seed=1),
        "self": model,
        "random": outpace.RandomDrafter(V),
        "causal": tiny(),
        "lookup": "lookup",
    }
    prompts = sources(family, *LENGTHS)
    expected = [greedy_of(model, prompt, 30) for prompt in prompts]
    decoder = Decoder(model, drafters.get(drafter), num_draft_tokens=Fixed(4))
    for batch_size in (None, 2):
        outs = decoder.generate(prompts, temperature=0, max_new_tokens=30, batch_size=batch_size)
        assert [out.token_ids for out in outs] == expected
    if drafter == "self":
        assert sum(out.stats.accepted_tokens for out in outs) == sum(out.stats.draft_tokens for out in outs)
    assert all(out.stats.encode_seconds > 0 for out in outs)


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_the_encoder_of_a_draft_model_runs_once_per_source_and_only_if_it_drafts(family: str) -> None:
    draft, calls = tiny_seq2seq(family, seed=1), list[int]()
    decoder = Decoder(tiny_seq2seq(family), draft, num_draft_tokens=Fixed(3))
    draft.get_encoder().register_forward_hook(lambda *_: calls.append(1))
    first = sources(family, *LENGTHS)[0]
    greedy: dict[str, Any] = {"temperature": 0, "max_new_tokens": 12}
    without = decoder.generate([first], num_draft_tokens=0, **greedy)
    assert not calls
    drafted = decoder.generate([first], num_draft_tokens=3, **greedy)
    assert len(calls) == 1
    assert drafted[0].token_ids == without[0].token_ids


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_draft_model_whose_encoder_never_pays_encodes_few_sources(alpha: float) -> None:
    """Every draft token may be accepted: the texts are too short to repay the encoder."""
    policy, encodes, seconds = Goodput(), 0, 0.0
    for _ in range(20):
        policy.reset([0])
        unread, remaining = 1500, 30
        while remaining > 0:
            load = Load(1, catch_up_tokens=unread, remaining_draft_tokens=(remaining - 1,))
            (g,) = policy.choose([0], load=load)
            encode, accepted = 20.0 * (g > 0 and unread >= 1500), int(alpha * g)
            encodes += encode > 0
            spent = 1.0 + 0.4 * g + encode
            done = StepOutcome([0], [g], [accepted], g, load, spent)
            policy.observe(done)
            seconds, remaining, unread = seconds + spent, remaining - accepted - 1, 0 if g else unread + 1
    assert encodes <= 2
    assert seconds <= 1.02 * 20 * 30 + 40


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_match_gives_the_text_of_decoding_without_speculation(family: str) -> None:
    model, prompts = tiny_seq2seq(family), sources(family, *LENGTHS)
    sampling = SamplingParams(temperature=0.9, top_p=0.9)
    baseline, drafted = (
        Decoder(model, drafter, rule="match").generate(prompts, sampling, seed=[1, 2, 3], max_new_tokens=25)
        for drafter in (None, tiny_seq2seq(family, seed=1))
    )
    assert [out.token_ids for out in drafted] == [out.token_ids for out in baseline]


def test_an_encoder_shared_by_target_and_draft_runs_once_per_source() -> None:
    target, draft = tiny_seq2seq("whisper"), tiny_seq2seq("whisper", seed=1, decoder_layers=1)
    draft.get_encoder().load_state_dict(target.get_encoder().state_dict())
    prompts = sources("whisper", *LENGTHS)
    expected = [greedy_of(target, one, 12) for one in prompts]
    calls: list[int] = []
    for model in (target, draft):
        model.get_encoder().register_forward_hook(lambda module, inputs, out: calls.append(len(inputs[0])))
    decoder = Decoder(target, draft, num_draft_tokens=Fixed(3))
    outs = decoder.generate(prompts, temperature=0, max_new_tokens=12, n=2)
    assert sum(calls) == 3  # three sources, for two samples each, and for both models
    assert [out.token_ids for out in outs[::2]] == expected
    calls.clear()
    other = Decoder(target, tiny_seq2seq("whisper", seed=1), num_draft_tokens=Fixed(3))
    other.drafter.scorer.encoder.register_forward_hook(  # type: ignore[union-attr]
        lambda module, inputs, out: calls.append(-len(inputs[0]))
    )
    other.generate(prompts[0], temperature=0, max_new_tokens=12)
    assert sorted(calls) == [-1, 1]


def test_prompt_lookup_copies_from_the_encoder_input() -> None:
    model = tiny_seq2seq("t5")
    source = Seq2SeqScorer(model).source(Source([20, 21, 22, 50, 51, 52], start=[1, 21, 22]))
    state = State([0], [[1, 21, 22]], [3], [SamplingParams()], torch.tensor([0]), [3], V, torch.device("cpu"))
    proposal = outpace.LookupDrafter().propose(replace(state, sources=[source]), 3)
    assert proposal.tokens.tolist() == [[50, 51, 52]]
    assert outpace.LookupDrafter().propose(state, 3).lengths == [0]
    marian = tiny_seq2seq("marian", share_encoder_decoder_embeddings=False, decoder_vocab_size=V)
    assert not Seq2SeqScorer(marian).source(source.ids).copyable  # two vocabularies


def test_wrong_prompts_and_models_raise_errors_that_say_why() -> None:
    decoder = Decoder(tiny_seq2seq("bart"))
    for prompt, error, message in (
        ([], ValueError, "empty"),
        ([V], ValueError, f"must be in 0..{V - 1}"),
        (list(range(2, 60)) * 3, ValueError, "encoder takes at most 128"),
        (torch.randn(8, 40), TypeError, "must be token ids"),
        ("text", ValueError, "no tokenizer"),
        (3.5, TypeError, "must be a string"),
    ):
        with pytest.raises(error, match=message):
            decoder.generate(prompt, max_new_tokens=2)  # type: ignore[arg-type]
    speech_decoder = Decoder(tiny_seq2seq("whisper"))
    with pytest.raises(ValueError, match=r"it must be \[8, 40\]"):
        speech_decoder.generate(torch.randn(8, 30), max_new_tokens=2)
    with pytest.raises(TypeError, match="features of speech"):
        speech_decoder.generate([1, 2, 3], max_new_tokens=2)
    with pytest.raises(ValueError, match="got neither; pass exactly one"):
        Source()
    with pytest.raises(ValueError, match="draft: got an encoder-decoder model; it must be a decoder-only"):
        Decoder(tiny(), tiny_seq2seq("t5"))
    with pytest.raises(ValueError, match="not among t5, mt5"):
        Decoder(tiny_seq2seq_of_another_family())


def tiny_seq2seq_of_another_family() -> Any:
    import transformers

    config = transformers.PegasusConfig(
        vocab_size=V, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16,
    )  # fmt: skip
    return transformers.PegasusForConditionalGeneration(config).eval()


def test_nan_encoder_states_do_not_affect_later_sequences() -> None:
    model = tiny_seq2seq("t5")
    encoder, inputs = model.get_encoder(), sources("t5", 40, 40, 3, 2)
    first = Source(inputs[0])
    first.states[encoder] = fingerprint(encoder), torch.full((40, 32), torch.nan)
    with pytest.warns(UserWarning, match="prompt 0"):
        outs = Decoder(model, "lookup").generate(
            [first, *inputs[1:]], temperature=0, max_new_tokens=4, batch_size=2
        )
    assert outs[0].finish_reason == "error"
    assert [out.token_ids for out in outs[1:]] == [greedy_of(model, one, 4) for one in inputs[1:]]


@pytest.mark.parametrize("what", ["encoder", "module"])
def test_changed_weights_invalidate_encoder_states(what: str) -> None:
    model = tiny_seq2seq("bart")
    decoder, source = Decoder(model, "lookup"), Source(sources("bart", 9)[0])
    decoder.generate(source, temperature=0, max_new_tokens=5)
    with torch.no_grad():
        if what == "encoder":
            for parameter in model.get_encoder().layers.parameters():
                parameter.mul_(1.5)
        else:
            old = model.get_decoder().layers[0].fc1
            model.get_decoder().layers[0].fc1 = torch.nn.Linear(old.in_features, old.out_features)
    found = decoder.generate(source, temperature=0, max_new_tokens=20)
    assert found.token_ids == greedy_of(model, source.ids, 20)
    assert source.start is None  # the caller's object is not changed


def test_drafts_with_other_encoder_inputs_are_refused_or_truncated() -> None:
    with pytest.raises(ValueError, match="with encoder input of token ids; it must take 8 bins"):
        Decoder(tiny_seq2seq("whisper"), tiny_seq2seq("t5"))
    with pytest.raises(ValueError, match="4 bins of 40 frames; it must take 8 bins"):
        Decoder(tiny_seq2seq("whisper"), tiny_seq2seq("whisper", num_mel_bins=4))
    target = tiny_seq2seq("bart")
    draft = tiny_seq2seq("bart", seed=1, max_position_embeddings=16, vocab_size=V - 20)
    prompt = sources("bart", 40)[0]
    out = Decoder(target, draft, num_draft_tokens=Fixed(3)).generate(prompt, temperature=0, max_new_tokens=25)
    assert out.token_ids == greedy_of(target, prompt, 25)


def test_prefill_works_without_reserving_the_kv_cache() -> None:
    model = tiny_seq2seq("t5").double()
    scorer = Seq2SeqScorer(model)
    inputs = sources("t5", 5, 30, 8)
    texts = {0: [1, 2, 3], 2: [1, *range(2, 50), *range(2, 50)], 5: [1, 7]}
    for (row, text), source in zip(texts.items(), inputs, strict=True):
        logits = scorer.prefill([row], [text], [scorer.source(source)])
        assert torch.allclose(logits[0], transformers_logits(model, source, text)[-1], atol=1e-10)
    new = torch.tensor([[4], [4], [4]])
    found = scorer.score(list(texts), new)
    for i, text in enumerate(texts.values()):
        assert torch.allclose(found[i, 0], transformers_logits(model, inputs[i], [*text, 4])[-1], atol=1e-10)


def test_encoder_decoder_models_with_hooks_run_without_the_graph_executor() -> None:
    model = tiny_seq2seq("t5")
    model.get_decoder().register_forward_hook(lambda *_: None)
    decoder = Decoder(model, engine=True)
    assert "because T5ForConditionalGeneration has an encoder and has hooks" in decoder.describe()
    out = decoder.generate([5, 6, 7], temperature=0, max_new_tokens=5)
    assert out.token_ids == greedy_of(decoder.scorer.base, [5, 6, 7], 5)
