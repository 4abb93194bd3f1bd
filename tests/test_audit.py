"""The audit passes what is lossless and fails what is not."""

from __future__ import annotations

import pytest
import torch

import outpace
from outpace import Decoder, Fixed
from outpace.audit import audit, distribution, likely, p_value
from outpace.faults import FAULTS, planted
from tests.tiny import V, greedy, tiny

PROMPTS = [[5, 6, 7], [9, 8, 7, 6]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lossless_decoder_passes_and_the_report_says_how_sure_it_is(dtype: torch.dtype) -> None:
    model = tiny().to(dtype)
    decoder = Decoder(model, tiny(seed=1), length=Fixed(3))
    report = audit(decoder, PROMPTS, samples=1000, progress=False)
    assert report.passed, str(report)
    said = str(report)
    assert said.startswith("Lossless as far as these checks can see.")
    assert "2 of 2 prompts gave the target's own tokens" in said
    assert "would have been found with 99 % certainty" in said
    assert "once in 500,000 audits" in said
    assert 0.01 < report.joint[0].detectable < 0.2
    assert report.joint[0].outcomes == 5**4
    assert report.joint[0].drafted > report.joint[0].accepted > 0


def test_lenience_is_found_out() -> None:
    decoder = Decoder(tiny(), outpace.RandomDrafter(V), length=Fixed(3), lenience=0.05)
    report = audit(decoder, PROMPTS[:1], samples=1000, greedy_tokens=0, progress=False)
    assert not report.passed
    assert str(report).startswith("NOT LOSSLESS")


def test_another_text_is_found_out() -> None:
    decoder = Decoder(tiny(), length=0)
    decoder.scorer.model = tiny(seed=1)  # what is compared with is not what decodes
    honest = decoder.scorer._forward
    decoder.scorer._forward = lambda *a, **k: -honest(*a, **k)  # type: ignore[method-assign]
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


def test_p_values_are_those_of_the_definition() -> None:
    # χ² = (60-50)²/50 + (40-50)²/50 = 4 with one degree of freedom
    assert p_value([60, 40], [0.5, 0.5], expected=5) == pytest.approx(0.0455, abs=1e-4)
    assert p_value([60, 40, 1], [0.5, 0.5, 0.0], expected=5) == 0
    with pytest.raises(ValueError, match="too few draws"):
        p_value([1, 2], [0.5, 0.5], expected=5)


def test_prompts_need_room() -> None:
    with pytest.raises(ValueError, match="prompts: got one of 126 tokens; to be audited it may have 96"):
        audit(Decoder(tiny()), [[1] * 126], progress=False)
    with pytest.raises(ValueError, match="prompts: give a list of at least one prompt"):
        audit(Decoder(tiny()), [], progress=False)


def test_audited_texts_may_go_on_as_the_target_would() -> None:
    prompt = [5, 6, 7]
    allowed = likely(tiny(), prompt, tokens=3, top=5)
    assert set(greedy(tiny(), prompt, 3)) <= set(allowed)
    assert len(set(allowed)) == 5


def test_a_report_says_when_nothing_was_guessed() -> None:
    report = audit(Decoder(tiny()), PROMPTS[:1], samples=200, progress=False)
    assert report.passed
    assert not report.tested
    assert str(report).startswith("Not tested: nothing was guessed")


def test_what_cannot_be_counted_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tokens, top: got 11, 5; .* are too many to count"):
        audit(Decoder(tiny()), PROMPTS, tokens=11)
    with pytest.raises(ValueError, match="temperature: got 0"):
        audit(Decoder(tiny()), PROMPTS, temperature=0)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    decoder = Decoder(tiny(), tiny(seed=1), length=Fixed(3))
    assert audit(decoder, PROMPTS[:1], samples=1000, progress=False).passed
    with planted(decoder, fault):
        assert not audit(decoder, PROMPTS[:1], samples=1000, progress=False).passed
    assert audit(decoder, PROMPTS[:1], samples=1000, progress=False).passed


def test_an_unknown_fault_is_named() -> None:
    with (
        pytest.raises(ValueError, match="plant: got 'gremlin'; known are"),
        planted(Decoder(tiny()), "gremlin"),
    ):
        pass
