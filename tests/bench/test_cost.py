"""Parts of a step are timed by themselves, and the best g is predicted from them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from outpace import Decoder, SamplingParams
from outpace.bench import cost, theory
from outpace.bench.cost import Drafting, Pass, Verification
from outpace.bench.prediction import Parts
from outpace.engine.graph import GraphExecutor
from outpace.verification import verify_block as original
from tests.tiny import greedy, tiny, tiny_seq2seq

CPU = torch.device("cpu")


class Clock:
    """A clock that only moves when a test says so."""

    def __init__(self) -> None:
        self.ms = 0.0

    def now(self, device: torch.device) -> float:
        return self.ms / 1e3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the clock that parts of a step are timed with."""
    clock = Clock()
    monkeypatch.setattr(cost, "now", clock.now)
    return clock


def test_medians_are_of_runs_in_turn_without_the_first_round(clock: Clock) -> None:
    order: list[str] = []

    def run(name: str, ms: float) -> None:
        order.append(name)
        clock.ms += 100 if len(order) <= 2 else ms * len(order)

    found = cost.medians({"a": lambda: run("a", 2), "b": lambda: run("b", 3)}, CPU, rounds=3)
    assert order == ["a", "b"] * 4
    assert found == {"a": 2 * 5, "b": 3 * 6}  # of the calls 3, 5 and 7, and of 4, 6 and 8


def test_timed_passes_have_the_requested_tokens_and_context(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass takes 3 ms per token."""
    decoder = Decoder(tiny())
    original, seen = decoder.scorer.score, set()

    def score(rows: Any, tokens: torch.Tensor) -> torch.Tensor:
        seen.add((decoder.scorer.cache.length(0), *tokens.shape))
        clock.ms += 3 * tokens.numel()
        return original(rows, tokens)

    monkeypatch.setattr(decoder.scorer, "score", score)
    found = cost.curve(decoder, sizes=(1, 4), batches=(1, 2), context=10)
    assert found == [Pass(1, 1, 3), Pass(1, 4, 12), Pass(2, 1, 6), Pass(2, 4, 24)]
    assert seen == {(10, B, n) for B in (1, 2) for n in (1, 4)}
    monkeypatch.undo()
    out = decoder.generate([5, 6, 7], temperature=0, max_new_tokens=9)
    assert out.token_ids == greedy(tiny(), [5, 6, 7], 9)


def test_extra_time_of_the_first_draft_token_is_measured(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proposal takes 20 ms, and 5 ms per draft token."""
    decoder = Decoder(tiny(), tiny(seed=1))
    assert decoder.drafter is not None
    original, sizes = decoder.drafter.propose, list[int]()

    def propose(state: Any, g: int) -> Any:
        sizes.append(len(state.tokens[0]))
        clock.ms += 20 + 5 * g
        return original(state, g)

    monkeypatch.setattr(decoder.drafter, "propose", propose)
    found = cost.drafting(decoder, 2, context=10)
    assert found == Drafting(step=(20 + 4 * 5) / 4, start=20)
    assert found.milliseconds([0, 1, 4]).tolist() == [0, 25, 40]
    assert np.diff([10, *sizes]).tolist() == [1, 1, 2] * (cost.ROUNDS + 1)
    monkeypatch.undo()
    out = decoder.generate([5, 6, 7], temperature=0, max_new_tokens=9)
    assert out.token_ids == greedy(tiny(), [5, 6, 7], 9)


@pytest.mark.parametrize("drafter", ["lookup", None], ids=["lookup", "model"])
def test_parts_of_a_graph_step_are_timed_if_a_decoder_has_a_graph_executor(drafter: str | None) -> None:
    decoder = Decoder(tiny(), drafter or tiny(seed=1), engine=True)
    executor = decoder.executor
    assert isinstance(executor, GraphExecutor)
    assert len(executor.slots) == 0
    found = cost.curve(decoder, sizes=(1, 3), batches=(2, 1), context=10)
    assert [(one.B, one.n) for one in found] == [(2, 1), (2, 3), (1, 1), (1, 3)]
    assert all(one.ms > 0 for one in found)
    assert cost.drafting(decoder, 2, context=10).step > 0
    assert executor.slots.active.tolist() == [0, 0]
    decoder.release()
    assert len(executor.slots) == 0
    assert decoder.generate([5, 6, 7], temperature=0, max_new_tokens=9).token_ids == greedy(
        tiny(), [5, 6, 7], 9
    )


def test_encoder_decoder_models_are_timed() -> None:
    decoder = Decoder(tiny_seq2seq(), tiny_seq2seq(seed=1))
    assert [one.n for one in cost.curve(decoder, sizes=(1, 3), batches=(2,), context=10)] == [1, 3]
    assert cost.drafting(decoder, 2, context=10).step > 0


def test_verification_is_timed_with_the_requested_draft_tokens_and_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = Decoder(tiny(), lenience=0.5)
    seen = set()

    def verify_block(block: Any, rule: Any, lenience: float, samplings: Any) -> Any:
        seen.add((*block.tokens.shape, block.draft_logits is not None, lenience, samplings[0].temperature))
        return original(block, rule, lenience, samplings)

    monkeypatch.setattr(cost, "verify_block", verify_block)
    sampling = SamplingParams(temperature=0.5, repetition_penalty=1.2)
    sampled = cost.verification(decoder, (0, 3), (1, 2), sampling)
    chosen = cost.verification(decoder, (3,), (1,), sampling, sampled=False)
    sizes = [(1, 0), (1, 3), (2, 0), (2, 3)]
    assert [(one.B, one.g, one.sampled) for one in sampled] == [(*size, True) for size in sizes]
    assert [(one.B, one.g, one.sampled) for one in chosen] == [(1, 3, False)]
    assert all(one.ms > 0 for one in [*sampled, *chosen])
    with_draft = {(B, g, g > 0, 0.5, 0.5) for B in (1, 2) for g in (0, 3)}
    assert seen == with_draft | {(1, 3, False, 0.5, 0.5)}


FLAT = [Pass(1, n, 10.0) for n in (1, 5, 9)]
STEEP = [Pass(1, n, 10.0 * n) for n in (1, 5, 9)]


def test_with_equal_pass_times_the_prediction_is_theorem_3_8() -> None:
    drafting, papers = Drafting(0.5), theory.speedup(0.8, np.arange(9), 0.05)
    np.testing.assert_allclose(Parts(1, drafting, FLAT, []).speedups(0.8, 1.0), papers)
    found = Parts(1, drafting, FLAT, []).best(0.8, 1.0)
    assert found.g == theory.best_length(0.8, 0.05)
    assert found.speedup == pytest.approx(theory.speedup(0.8, found.g, 0.05), abs=1e-4)


def test_predicted_speedup_has_an_interval_from_that_of_alpha() -> None:
    parts = Parts(1, Drafting(2.0), FLAT, [])
    found = parts.best(0.5, 1.0, (0.1, 0.8))
    assert found.g == 1
    assert found.interval == pytest.approx([theory.speedup(end, 1, 0.2) for end in (0.1, 0.8)], abs=1e-4)
    assert parts.best(0.5).interval is None
    # A draft that does not pay may pay at the upper end of the interval, with the best g there.
    found = parts.best(0.1, 1.0, (0.0, 0.8))
    g = theory.best_length(0.8, 0.2)
    assert (found.g, found.speedup) == (0, 1.0)
    assert found.interval == pytest.approx([theory.speedup(end, g, 0.2) for end in (0.0, 0.8)], abs=1e-4)
    assert parts.best(0.1, 1.0, (0.0, 0.15)).interval == (1.0, 1.0)


def test_no_draft_pays_if_passes_cost_as_much_as_their_tokens() -> None:
    found = Parts(1, Drafting(0.0), STEEP, []).best(0.9, 1.0)
    assert (found.g, found.speedup) == (0, 1.0)
    np.testing.assert_allclose(Parts(1, Drafting(0.0), STEEP, []).speedups(1.0, 1.0), 1.0)


def test_best_g_stops_before_pass_times_jump() -> None:
    passes = [Pass(1, n, 10.0 if n <= 4 else 30.0) for n in range(1, 10)]
    assert Parts(1, Drafting(0.0), passes, []).best(0.9, 1.0).g == 3


def test_prediction_with_verification_and_coverage_matches_a_calculation_by_hand() -> None:
    verify = [Verification(1, 0, 2.0, True), Verification(1, 8, 4.0, True)]
    found = Parts(1, Drafting(1.0), FLAT, verify).speedups(0.5, 0.25)
    # g = 4: a quarter of the steps has draft tokens and takes 10 + 3, others take 12; drafting always takes 4
    tokens = 0.25 * theory.expected_tokens(0.5, 4) + 0.75
    assert found[4] == pytest.approx(tokens * 12 / (4 + 0.25 * 13 + 0.75 * 12))
    assert found[0] == 1


def test_prediction_includes_the_extra_time_of_the_first_draft_token() -> None:
    drafting = Drafting(step=2.0, start=4.0)
    assert drafting.milliseconds(range(5)).tolist() == [0.0, 5.0, 6.0, 7.0, 8.0]
    found = Parts(1, drafting, FLAT, []).speedups(0.5, 1.0)
    assert found[0] == 1
    assert found[1] == pytest.approx(1.5 * 10 / 15)


def test_prediction_includes_the_extra_token_a_draft_feeds_after_full_acceptance() -> None:
    drafting = Drafting(step=2.0, start=0.0, behind=3.0)
    assert drafting.milliseconds([0, 1, 2], [1.0, 1.0, 0.5]).tolist() == [0.0, 5.0, 5.5]
    one, two = (Parts(B, drafting, [Pass(B, n, 10.0) for n in range(1, 10)], []) for B in (1, 2))
    assert one.speedups(0.5)[2] == pytest.approx(1.75 * 10 / (14 + 3 / 4))
    assert two.speedups(0.5)[2] == pytest.approx(1.75 * 10 / (14 + 3 * (1 - (3 / 4) ** 2)))
    assert two.speedup(0.5, Counter({2: 7})) == pytest.approx(two.speedups(0.5)[2])
    assert one.speedup(0.5, Counter({2: 1, 0: 1})) == pytest.approx(
        1.375 * 10 / (0.5 * 10 + 0.5 * (14 + 3 / 8))
    )


def test_extra_time_of_feeding_one_more_token_is_measured(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proposal takes 20 ms per token that the draft has not seen."""
    decoder = Decoder(tiny(), tiny(seed=1))
    assert decoder.drafter is not None
    original, read = decoder.drafter.propose, [10]

    def propose(state: Any, g: int) -> Any:
        clock.ms += 20 * (len(state.tokens[0]) - read[-1])
        read.append(len(state.tokens[0]))
        return original(state, g)

    monkeypatch.setattr(decoder.drafter, "propose", propose)
    assert cost.drafting(decoder, 1, context=10).behind == 20


def test_wrong_arguments_are_refused_with_their_name() -> None:
    with pytest.raises(ValueError, match="passes: there must be one over a single token of B = 2 sequences"):
        Parts(2, Drafting(0.0), FLAT, []).speedups(0.5, 1.0)
    decoder = Decoder(tiny(), tiny(max_position_embeddings=40))
    with pytest.raises(ValueError, match="context: got 200; with 4 tokens more it must fit the model's"):
        cost.curve(decoder, (4,), (1,), 200)
    with pytest.raises(ValueError, match=r"context: got 60; with .* it must fit the draft's context of 40"):
        cost.drafting(decoder, 1, 60)
    with pytest.raises(ValueError, match="decoder: it has no drafter"):
        cost.drafting(Decoder(tiny()))
