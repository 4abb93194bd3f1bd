"""α is the overlap of the models' distributions at every token, for every kind of draft."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import outpace
from outpace import Decoder, Fixed, RandomDrafter, SamplingParams
from outpace.bench import alpha, cost, synthetic, theory
from outpace.bench.blocks import Blocks, count_accepted, divide_phases, trace
from outpace.bench.engine import Phases
from outpace.bench.estimate import autocorrelation, estimate
from outpace.bench.prompts import Prompt
from outpace.draft.base import Draft, State
from outpace.sampling import Prefix, adjust
from tests.bench.test_synthetic import DRAFT, TARGET
from tests.tiny import V, greedy, sources, tiny, tiny_seq2seq

PROMPTS = [
    *(Prompt([5, 6, 7], "a"), Prompt([9], "b"), Prompt([3, 3, 4, 3, 3], "a")),
    *(Prompt([8, 1], "c"), Prompt([8, 2], "c")),
]
LENIENCE = (1.0, 0.5, 0.1)


def measured(drafter: Any, sampling: SamplingParams, tokens: int = 12) -> tuple[list[Any], list[Any]]:
    """Return texts of a tiny target, and β of a drafter at their tokens."""
    model = tiny()
    baseline, decoder = Decoder(model), Decoder(model, drafter)
    texts = alpha.target_texts(baseline, PROMPTS, sampling, tokens, range(len(PROMPTS)))
    return texts, alpha.acceptance_along(decoder, texts, sampling, LENIENCE, "it")


def distributions(model: Any, text: alpha.TargetText, sampling: SamplingParams) -> np.ndarray[Any, Any]:
    """Return the distribution of each new token `[tokens, V]`, by a forward pass over the whole text."""
    ids = torch.tensor([[*text.start, *text.token_ids]])
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[:, len(text.start) - 1 : -1].double()
    prefix = Prefix(torch.tensor([text.start]), None, torch.tensor([len(text.start)]))
    adjusted = adjust(logits, sampling, prefix, torch.tensor([text.token_ids]))
    return np.asarray(adjusted[0].softmax(-1))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_k=9),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(repetition_penalty=1.5, presence_penalty=0.5),
    ],
    ids=["unadjusted", "top-k", "top-p", "penalties"],
)
def test_beta_of_two_models_is_the_overlap_of_their_distributions_at_every_token(
    sampling: SamplingParams,
) -> None:
    draft_model = tiny("qwen2", seed=1)
    texts, found = measured(draft_model, sampling)
    for text, beta in zip(texts, found, strict=True):
        p, q = (distributions(model, text, sampling) for model in (tiny(), draft_model))
        for lenience in LENIENCE:
            np.testing.assert_allclose(beta[lenience], theory.acceptance(p, q, lenience), atol=2e-5)
        np.testing.assert_allclose(1 - beta[1.0], theory.divergence(p, q), atol=2e-5)


def test_greedy_beta_is_whether_the_draft_token_is_the_argmax_or_within_lenience_of_it() -> None:
    draft_model = tiny("qwen2", seed=3)
    texts, found = measured(draft_model, SamplingParams(temperature=0), tokens=30)
    for text, beta in zip(texts, found, strict=True):
        assert text.token_ids == greedy(tiny(), text.start, 30)
        p, q = (distributions(model, text, SamplingParams()) for model in (tiny(), draft_model))
        proposal = q.argmax(-1)
        assert beta[1.0].tolist() == (proposal == text.token_ids).tolist()
        at = p[np.arange(len(p)), proposal]
        for lenience in LENIENCE[1:]:
            assert beta[lenience].tolist() == (at >= lenience * p.max(-1)).tolist()
    each = [np.concatenate([one[lenience] for one in found]).mean() for lenience in LENIENCE]
    assert 0 < each[0] < each[-1] < 1


def test_prompt_lookup_has_beta_only_where_it_found_a_match() -> None:
    sampling = SamplingParams(temperature=0.3)
    texts, found = measured("lookup", sampling, tokens=30)
    without_draft = 0
    for text, beta in zip(texts, found, strict=True):
        p = distributions(tiny(), text, sampling)
        for i, value in enumerate(beta[1.0]):
            proposal = lookup_token([*text.start, *text.token_ids[:i]])
            without_draft += proposal is None
            if proposal is None:
                assert np.isnan(value)
            else:
                assert value == pytest.approx(p[i, proposal], abs=1e-5)
                assert beta[0.5][i] == pytest.approx(min(1.0, p[i, proposal] / 0.5), abs=1e-5)
    assert 0 < without_draft < sum(len(text.token_ids) for text in texts)


def lookup_token(text: list[int]) -> int | None:
    """Return the token after the latest earlier occurrence of the last three tokens, two or one."""
    for size in (3, 2, 1):
        for end in range(len(text) - 1, size - 1, -1):
            if text[end - size : end] == text[-size:]:
                return text[end]
    return None


def test_beta_of_ngram_and_random_drafters_is_that_of_their_distributions() -> None:
    ngram = outpace.NGramDrafter.fit([5, 6, 7, 5, 6, 8, 5, 9, 9], n=2, vocab_size=V)
    texts, found = measured(ngram, SamplingParams())
    _, random_beta = measured(outpace.RandomDrafter(V), SamplingParams())
    for text, counts, random in zip(texts, found, random_beta, strict=True):
        p = distributions(tiny(), text, SamplingParams())
        before = [text.start[-1], *text.token_ids[:-1]]
        q = np.zeros_like(p)
        for i, last in enumerate(before):
            after = {5: [6, 6, 9], 6: [7, 8], 7: [5], 8: [5], 9: [9]}.get(last, [5, 6, 7, 5, 6, 8, 5, 9, 9])
            np.add.at(q[i], after, 1 / len(after))
        np.testing.assert_allclose(counts[1.0], theory.acceptance(p, q), atol=2e-5)
        np.testing.assert_allclose(random[0.5], theory.acceptance(p, np.full_like(p, 1 / V), 0.5), atol=2e-5)


def test_beta_of_encoder_decoder_models_is_measured() -> None:
    target_model, draft_model = tiny_seq2seq(), tiny_seq2seq(seed=1)
    prompts = [Prompt(ids, "a") for ids in sources("t5", 4, 9)]
    baseline, decoder = Decoder(target_model), Decoder(target_model, draft_model)
    texts = alpha.target_texts(baseline, prompts, SamplingParams(), 8, [0, 1])
    found = alpha.acceptance_along(decoder, texts, SamplingParams(), [1.0])
    for prompt, text, beta in zip(prompts, texts, found, strict=True):
        ids = torch.tensor([[*text.start, *text.token_ids[:-1]]])
        with torch.inference_mode():
            inputs = {"input_ids": torch.tensor([prompt.ids]), "decoder_input_ids": ids}
            p, q = (model(**inputs).logits[0].double().softmax(-1) for model in (target_model, draft_model))
        np.testing.assert_allclose(beta[1.0], theory.acceptance(p, q), atol=2e-5)


def test_all_drafters_are_measured_on_the_same_texts_and_are_reset_afterwards() -> None:
    model, draft_model = tiny(), tiny(seed=1)
    baseline = Decoder(model)
    drafts = {
        "small": Decoder(model, draft_model),
        "self": Decoder(model, tiny()),
        "lookup": Decoder(model, "lookup"),
    }
    found = list(
        alpha.measure(baseline, drafts, PROMPTS, SamplingParams(), max_new_tokens=10, lenience=[0.5], seed=3)
    )
    assert [one.prompt.domain for one in found] == ["a", "b", "a", "c", "c"]
    assert all(one.new_tokens == 10 and set(one.beta) == set(drafts) for one in found)
    for one in found:
        np.testing.assert_allclose(one.beta["self"][1.0], 1.0, atol=1e-5)
        assert set(one.beta["small"]) == {1.0, 0.5}
    out = drafts["small"].generate([5, 6, 7], temperature=0, max_new_tokens=20)
    assert out.token_ids == greedy(model, [5, 6, 7], 20)


def test_draft_tokens_of_a_bigram_pair_are_accepted_independently() -> None:
    """Standard errors: about 0.05 of correlations of 480 tokens, at most 0.04 of fractions of 140 steps."""
    made = synthetic.pair(TARGET, DRAFT, 0.8, dtype=torch.float32)
    baseline, decoder = Decoder(made.target), Decoder(made.target, made.draft, num_draft_tokens=Fixed(4))
    prompts = [Prompt([i], "a") for i in range(8)]
    texts = alpha.measure(baseline, {"it": decoder}, prompts, SamplingParams(), max_new_tokens=60)
    beta = [one.beta["it"][1.0] for one in texts]
    found = estimate(beta)
    assert found is not None
    assert found.mean == pytest.approx(made.alpha, abs=0.015)
    assert all(abs(one or 1.0) < 0.2 for one in autocorrelation(beta))
    blocks = count_accepted(decoder, prompts, SamplingParams(), max_new_tokens=60)
    assert blocks.acceptance == pytest.approx(made.alpha, abs=0.05)
    np.testing.assert_allclose(blocks.observed, blocks.predicted(found.mean), atol=0.1)


def test_accepted_tokens_of_blocks_match_a_count_by_hand() -> None:
    blocks = Blocks({0: [(2, 2), (2, 0)], 3: [(2, 1), (1, 1)]})
    assert blocks.acceptance == 4 / 6
    first, second = blocks.by_position()
    assert first == estimate([np.array([1.0, 0.0]), np.array([1.0, 1.0])])
    assert second == estimate([np.array([1.0]), np.array([0.0])])
    assert first is not None
    assert second is not None
    assert (first.mean, second.mean) == (3 / 4, 1 / 2)
    assert blocks.observed == [1 / 4, 2 / 4, 1 / 4]
    # Three steps with two draft tokens: 1/2, 1/4, 1/4; one with one: 1/2, 1/2
    assert blocks.predicted(0.5) == pytest.approx([1 / 2, 5 / 16, 3 / 16])
    assert Blocks().acceptance is None
    assert Blocks().observed == [0.0]


def test_trace_records_every_step() -> None:
    decoder = Decoder(tiny(), tiny(), num_draft_tokens=Fixed(3))
    found = trace(decoder, PROMPTS[0], SamplingParams(temperature=0), max_new_tokens=12)
    assert [one["num_accepted"] for one in found["iterations"]] == [0, 3, 3, 2]  # the first is the prefill
    assert all(
        {"draft", "target", "verify", "other"} <= set(one["phases"]) for one in found["iterations"][1:]
    )
    assert found["pieces"] == []  # without a tokenizer there is no text


def test_time_of_a_graph_step_is_divided_in_proportion_to_its_parts() -> None:
    decoder = Decoder(tiny(), tiny(), num_draft_tokens=Fixed(3), engine=True)
    found = trace(decoder, PROMPTS[0], SamplingParams(temperature=0), max_new_tokens=12)["iterations"]
    parts = cost.graph_phases(decoder, 3, context=16)
    assert parts is not None
    assert parts.draft > 0
    for before, after in zip(found, divide_phases(found, parts), strict=True):
        phases = after["phases"]
        assert set(phases) == {"draft", "target", "verify", "other"}
        assert sum(phases.values()) == pytest.approx(sum(before["phases"].values()))
        assert phases["draft"] / phases["target"] <= parts.draft / parts.target * (1 + 1e-9)
        assert phases["verify"] > -1e-12
    assert divide_phases([], parts) == []


def test_extra_time_of_a_long_step_is_counted_as_target_time() -> None:
    found = [{"phases": {"target": seconds, "other": 0.1}} for seconds in (9.0, 1.0, 1.0, 1.0, 0.5)]
    phases = [one["phases"] for one in divide_phases(found, Phases(draft=200.0, target=600.0))]
    assert phases[0] == pytest.approx({"draft": 0.2, "verify": 0.2, "target": 8.6, "other": 0.1})
    assert phases[1] == pytest.approx({"draft": 0.2, "verify": 0.2, "target": 0.6, "other": 0.1})
    assert phases[4] == pytest.approx({"draft": 0.1, "verify": 0.1, "target": 0.3, "other": 0.1})


def test_drafter_on_the_host_has_its_own_draft_time_with_an_engine() -> None:
    """Its steps are not divided."""
    decoder = Decoder(tiny(), RandomDrafter(V), num_draft_tokens=Fixed(3), engine=True)
    found = trace(decoder, PROMPTS[0], SamplingParams(temperature=0), max_new_tokens=12)["iterations"]
    assert cost.graph_phases(decoder, 3, context=16) is None
    assert sum(one["num_draft_tokens"] > 0 for one in found) > 2
    assert all(one["phases"]["draft"] > 0 for one in found if one["num_draft_tokens"])


class Broken:
    """A drafter whose logits are NaN."""

    def propose(self, state: State, g: int) -> Draft:
        tokens = torch.zeros(len(state.slots), 1, dtype=torch.int64)
        return Draft(tokens, torch.full((len(state.slots), 1, state.vocab_size), torch.nan))

    def commit(self, accepted: torch.Tensor, next_token: torch.Tensor) -> None: ...

    def reset(self, rows: Any) -> None: ...


def test_wrong_arguments_are_refused_with_their_name() -> None:
    with pytest.raises(
        ValueError, match=r"draft: it has an acceptance rate of nan at token 0, outside \[0, 1\]"
    ):
        measured(Broken(), SamplingParams())
    with pytest.raises(ValueError, match="draft: it drafts nothing"):
        measured(None, SamplingParams())
    baseline = Decoder(tiny())
    with pytest.raises(ValueError, match=r"lenience: got 1\.5"):
        next(alpha.measure(baseline, {}, PROMPTS, SamplingParams(), max_new_tokens=1, lenience=[1.5]))
    processor = SamplingParams(processors=[lambda ids, scores: scores])
    with pytest.raises(ValueError, match="sampling: it has processors"):
        next(alpha.measure(baseline, {}, PROMPTS, processor, max_new_tokens=1))
