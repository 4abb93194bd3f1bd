"""The audit reports no difference for a correct decoder, and finds every planted fault by sampling alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import outpace
from outpace import Decoder, Fixed, Goodput
from outpace.auditing.audit import audit, is_tie
from outpace.auditing.faults import FAULTS, planted
from outpace.auditing.report import Greedy, Joint, Report
from outpace.auditing.samples import Sampler, balanced, distribution
from outpace.draft.base import Draft
from outpace.engine.eager import EagerExecutor
from outpace.engine.sequence import SequenceState
from outpace.models.causal import CausalScorer
from outpace.verification import Verdict
from tests.tiny import V, tiny

PROMPTS = [[5, 6, 7], [9, 8, 7, 6]]
REPEATING = [5, 6, 7, 5, 5, 7, 6, 6, 5, 7, 7, 5, 6]
REPORT = Report(
    [Greedy(32, None, 40)],
    [Joint(4768, 27, 0, 0.4, 0.05, 6000, 2500)],
    tokens=3,
    different=False,
    p_value=0.4,
    alarm=1e-4,
    detectable=0.05,
    rounding=0.0,
    draft_length_policy="Fixed(3)",
    forced=True,
    seconds=90.0,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_difference_is_found_in_a_correct_decoder_and_the_report_states_its_power(
    dtype: torch.dtype,
) -> None:
    model = tiny(num_hidden_layers=3).to(dtype)  # deep enough for rounding to show in 16 bits
    decoder = Decoder(model, tiny(seed=1), num_draft_tokens=Fixed(3))
    report = audit(decoder, PROMPTS, samples=600, progress=False)
    assert report.passed, str(report)
    text = str(report)
    assert text.startswith("No difference found.")
    assert "2 of 2 prompts gave the target's own tokens" in text
    assert report.detectable is not None
    assert f"A misplacement of {report.detectable:.1%} or more" in text
    assert "on every prompt would have been found with 99% certainty" in text
    assert "found different in at most 1 of 1,000 audits" in text
    assert ("attributed to rounding in 16 bits" in text) == (report.rounding > 0)
    assert report.rounding == 0 or dtype == torch.bfloat16  # some CPUs round passes of any size alike
    assert 0.05 < report.detectable <= min(one.detectable for one in report.joint) < 0.5
    assert report.joint[0].outcomes == 3**3
    assert report.draft_tokens > report.accepted_tokens > 0
    for word in ("prove", "lossless", "guess", "agree"):
        assert word not in text.lower()


def test_number_of_samples_depends_on_the_misplacement_to_find() -> None:
    models = tiny(num_hidden_layers=3), tiny(seed=1, num_hidden_layers=3)
    decoder = Decoder(*models, num_draft_tokens=Fixed(3))
    report = audit(decoder, [REPEATING], misplacement=0.2, greedy_tokens=0, temperature=3, progress=False)
    assert report.passed
    assert report.detectable is not None
    assert 0.19 < report.detectable <= 0.2
    assert report.joint[0].detectable == pytest.approx(report.detectable, abs=1e-3)


def test_audit_finds_that_lenience_changes_the_distribution() -> None:
    decoder = Decoder(tiny(), outpace.RandomDrafter(V), num_draft_tokens=Fixed(3), lenience=0.05)
    report = audit(decoder, PROMPTS[:1], samples=1000, greedy_tokens=0, progress=False)
    assert report.verdict == "difference found"
    assert str(report).startswith("DIFFERENCE FOUND")


def test_a_large_difference_ends_the_audit_early() -> None:
    decoder = Decoder(tiny(), tiny(seed=1), num_draft_tokens=Fixed(3))
    with planted(decoder, "noise"):
        report = audit(decoder, [REPEATING], samples=1600, greedy_tokens=0, progress=False)
    assert report.verdict == "difference found"
    assert report.joint[0].samples == 200


@pytest.mark.parametrize(
    ("p_value", "different", "verdict", "odds"),
    [
        (7.56e-6, True, "difference found", "at most 1 of 44,092 audits"),
        (3e-4, False, "could not tell", "at most 1 of 1,111 audits"),
        (0.3, False, "no difference found", "at most 1 of 10,000 audits"),
    ],
)
def test_verdict_depends_on_the_p_value(p_value: float, different: bool, verdict: str, odds: str) -> None:
    report = replace(REPORT, p_value=p_value, different=different)
    assert report.verdict == verdict
    assert report.passed == (verdict == "no difference found")
    text = str(report)
    assert f"Sampling: {verdict} in 4,768 samples of 3 tokens; p-value {p_value:.2g}." in text
    assert odds in text
    assert ("suspicious" in text) == (verdict == "could not tell")
    assert ("would have been found" in text) == (verdict == "no difference found")


def test_a_greedy_difference_alone_is_reported_but_a_tie_is_not() -> None:
    report = replace(REPORT, greedy=[Greedy(32, 7, 40)])
    assert (report.verdict, report.sampling) == ("difference found", "no difference found")
    tied = replace(REPORT, greedy=[Greedy(32, None, 40, ties=2)])
    assert tied.passed
    assert "(32 compared, 2 of them at ties that rounding decides)" in str(tied)


def test_the_report_names_checks_that_could_not_run() -> None:
    joint = REPORT.joint[0]
    assert "None was accepted" in str(replace(REPORT, joint=[replace(joint, accepted_tokens=0)]))
    assert "None was rejected" in str(
        replace(REPORT, joint=[replace(joint, accepted_tokens=joint.draft_tokens)])
    )
    assert "tokens that the logit bias ruled out" in str(
        replace(REPORT, joint=[replace(joint, impossible=3)])
    )
    few = replace(REPORT, detectable=1.0)
    assert few.verdict == "could not tell"
    assert "too few samples" in str(few)


def test_a_prompt_without_draft_tokens_is_named() -> None:
    joint = REPORT.joint[0]
    some = replace(REPORT, joint=[joint, replace(joint, draft_tokens=0, accepted_tokens=0)])
    assert some.passed
    assert "No draft token was proposed in the samples of prompt 2" in str(some)
    none = replace(REPORT, joint=[replace(joint, draft_tokens=0, accepted_tokens=0)])
    assert none.verdict == "could not tell"


def test_without_samples_there_is_no_p_value() -> None:
    report = audit(
        Decoder(tiny(), tiny(seed=1), num_draft_tokens=Fixed(3)), PROMPTS, samples=0, progress=False
    )
    assert (report.p_value, report.detectable, report.joint) == (None, None, [])
    assert report.passed


def test_cached_and_uncached_forward_passes_give_the_same_probabilities_up_to_rounding() -> None:
    uncached = distribution(tiny(), REPEATING, 3, [5, 6, 7])
    cached = distribution(tiny(), REPEATING, 3, [5, 6, 7], cached=True)
    assert cached == pytest.approx(uncached, rel=1e-4)


def test_rounding_tolerance_is_twice_the_distance_between_two_computations_in_16_bits() -> None:
    model = tiny().to(torch.bfloat16)
    sampler = Sampler(Decoder(model, "lookup", num_draft_tokens=Fixed(3)), [REPEATING], 3, 3, 1.0, 64, 0)
    p = np.array([*sampler.exact[0].values()])
    q = np.array([*distribution(model, REPEATING, 3, sampler._allowed[0], cached=True).values()])
    assert sampler.rounding()[0] == pytest.approx(4 * ((q - p) ** 2 / p).sum())
    exact = Sampler(Decoder(tiny(), "lookup", num_draft_tokens=Fixed(3)), [REPEATING], 3, 3, 1.0, 64, 0)
    assert exact.rounding()[0] == 0


def test_rounding_tolerance_knows_forward_passes_that_round_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny().to(torch.bfloat16)
    decoder = Decoder(model, "lookup", num_draft_tokens=Fixed(3))
    sampler = Sampler(decoder, [REPEATING], 3, 3, 1.0, 64, 0)
    prefill = decoder.scorer.prefill
    noise = 0.05 * torch.randn(decoder.scorer.vocab_size, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(decoder.scorer, "prefill", lambda *args: prefill(*args) + noise)
    before = sampler.rounding()[0]
    monkeypatch.undo()
    assert before > 4 * sampler.rounding()[0]


def test_greedy_check_finds_a_decoder_with_wrong_logits() -> None:
    class Negated(CausalScorer):
        def append(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
            return -super().append(slots, tokens)

        def score(self, slots: Sequence[int], tokens: Tensor, prefill: bool = False) -> Tensor:
            return -super().score(slots, tokens, prefill)

    decoder = Decoder(Negated(tiny()), num_draft_tokens=0)
    report = audit(decoder, PROMPTS, samples=0, progress=False)
    assert not report.passed
    assert all(one.differs_at is not None for one in report.greedy)


def test_the_exact_distribution_is_the_product_of_conditionals() -> None:
    model = tiny()
    allowed = [7, 11, 3]
    exact = distribution(model, [5, 6], tokens=2, allowed=allowed)
    assert len(exact) == 9
    assert sum(exact.values()) == pytest.approx(1)
    with torch.inference_mode():
        first = model(input_ids=torch.tensor([[5, 6]])).logits[0, -1].double()
        a, b = allowed[1], allowed[2]
        then = model(input_ids=torch.tensor([[5, 6, a]])).logits[0, -1].double()
    chance = first[allowed].softmax(0)[1] * then[allowed].softmax(0)[2]
    assert exact[a, b] == pytest.approx(float(chance), rel=1e-5)


def test_a_prompt_that_leaves_no_context_for_the_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="prompts: got one of 126 tokens; it must have at most 96"):
        audit(Decoder(tiny()), [[1] * 126], progress=False)
    with pytest.raises(ValueError, match="prompts: give a list of at least one prompt"):
        audit(Decoder(tiny()), [], progress=False)


def test_sampled_tokens_come_from_the_prompt_and_none_is_rare() -> None:
    assert set(balanced(tiny(), REPEATING, top=3)) == {5, 6, 7}
    assert {5, 6} < set(balanced(tiny(), [5, 6, 5, 6], top=8))
    prompt = [5, 6, 7, 9, 8, 7, 6, 11, 3, 20]
    chosen = balanced(tiny(), prompt, top=3)
    assert set(chosen) <= set(prompt)

    def entropy(tokens: list[int]) -> float:
        exact = torch.tensor([*distribution(tiny(), prompt, 2, tokens).values()])
        return float(-torch.xlogy(exact, exact).sum())

    assert entropy(chosen) >= max(entropy([5, 6, 7]), entropy([11, 3, 20])) - 1e-6


def test_samples_of_equal_prompts_have_different_noise() -> None:
    decoder = Decoder(tiny(), tiny(seed=1), num_draft_tokens=Fixed(3))
    first, second = audit(decoder, [REPEATING] * 2, samples=300, greedy_tokens=0, progress=False).joint
    assert first.p_value != second.p_value


def test_a_policy_that_depends_on_measured_time_is_replaced_during_the_audit() -> None:
    decoder = Decoder(tiny(), "lookup")
    policy = decoder.policy
    assert isinstance(policy, Goodput)
    report = audit(decoder, [REPEATING], samples=300, progress=False)
    assert decoder.policy is policy
    assert report.forced
    assert report.draft_tokens > 0
    assert "(policy Fixed(3), set by the audit)" in str(report)
    assert not audit(
        Decoder(tiny(), "lookup", num_draft_tokens=2), [REPEATING], samples=100, progress=False
    ).forced


def test_samples_cover_steps_with_zero_to_three_draft_tokens() -> None:
    drafts: list[int] = []

    class Recording(EagerExecutor):
        def verify(self, sequences: Sequence[SequenceState], draft: Draft, *rest: Any) -> Verdict:
            drafts.append(draft.tokens.shape[1])
            return super().verify(sequences, draft, *rest)

    decoder = Decoder(tiny(), tiny(seed=1), num_draft_tokens=Fixed(3))
    decoder.executor = Recording(decoder.scorer, decoder.drafter, decoder.rule, decoder.lenience)
    audit(decoder, [REPEATING], samples=600, greedy_tokens=0, progress=False)
    assert {0, 1, 2, 3} <= set(drafts)


def test_the_audit_first_reports_how_long_it_takes() -> None:
    lines: list[str] = []
    decoder = Decoder(tiny(), tiny(seed=1), num_draft_tokens=Fixed(3))
    audit(decoder, [REPEATING], samples=300, greedy_tokens=0, progress=False, tell=lines.append)
    assert len(lines) == 1
    assert lines[0].startswith("sampling: 300 samples, about ")


def test_without_draft_tokens_the_verdict_is_could_not_tell() -> None:
    report = audit(Decoder(tiny()), PROMPTS[:1], samples=200, progress=False)
    assert report.verdict == "could not tell"
    assert not report.tested
    assert str(report).startswith("Could not tell: no draft token was proposed")


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tokens, top: got 11, 5; .* are too many to count"):
        audit(Decoder(tiny()), PROMPTS, tokens=11, top=5)
    with pytest.raises(ValueError, match=f"top: got {V + 1}; it must be an int in 2..{V}"):
        audit(Decoder(tiny()), PROMPTS, tokens=1, top=V + 1)
    with pytest.raises(ValueError, match="temperature: got 0"):
        audit(Decoder(tiny()), PROMPTS, temperature=0)
    with pytest.raises(ValueError, match=r"alarm: got 0.01; it must be a number in \(0, 0.001\]"):
        audit(Decoder(tiny()), PROMPTS, alarm=0.01)
    with pytest.raises(ValueError, match="misplacement: got 0; it must be"):
        audit(Decoder(tiny()), PROMPTS, misplacement=0)


@pytest.mark.parametrize("drafter", ["model", "lookup"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_by_sampling_alone(fault: str, drafter: str) -> None:
    decoder = Decoder(tiny(), tiny(seed=1) if drafter == "model" else drafter, num_draft_tokens=Fixed(3))
    with planted(decoder, fault):
        found = audit(decoder, [REPEATING], samples=1600, greedy_tokens=0, temperature=1.5, progress=False)
    assert found.sampling == "difference found"


@pytest.mark.parametrize("drafter", ["model", "lookup"])
def test_removing_a_planted_fault_restores_the_decoder(drafter: str) -> None:
    decoder = Decoder(
        tiny(), tiny(seed=1) if drafter == "model" else drafter, num_draft_tokens=Fixed(3), engine=True
    )
    before = dict(vars(decoder))
    for fault in FAULTS:
        with planted(decoder, fault):
            assert decoder.executor.name == "eager"
    assert vars(decoder) == before
    assert audit(decoder, [REPEATING], samples=400, progress=False).passed


def test_an_unknown_fault_is_refused() -> None:
    with (
        pytest.raises(ValueError, match="plant: got 'gremlin'; known are"),
        planted(Decoder(tiny()), "gremlin"),
    ):
        pass


@pytest.mark.parametrize(("seen", "is_rounding"), [(0.2, False), (0.15, False), (0.05, True), (-0.1, True)])
def test_in_16_bits_a_gap_is_a_tie_if_another_forward_pass_sees_another_gap(
    seen: float, is_rounding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, other = torch.tensor([1.0, 2.2, 2.0, -80.0]), torch.tensor([1.0, 2.0 + seen, 2.0, -80.0])
    monkeypatch.setattr("outpace.auditing.audit.forward_passes", lambda *_: [lambda _: other[None]])
    scorer, exact = (Decoder(tiny().to(dtype)).scorer for dtype in (torch.bfloat16, torch.float32))
    assert is_tie(scorer, [5], logits, 1, 2) == is_rounding
    assert not is_tie(exact, [5], logits, 1, 2)
    logits[1] = 3.0  # no rounding is as large
    assert not is_tie(scorer, [5], logits, 1, 2)
