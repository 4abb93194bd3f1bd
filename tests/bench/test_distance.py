"""Acceptance and distance match the oracle, which runs over a grid of all random numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outpace.bench.distance import POSITIONS, positions, quality
from outpace.bench.kernel import Inputs
from outpace.verification import oracle
from outpace.verification.rules import Rule, parse, sigmoid

CPU = torch.device("cpu")
STEPS = 2000


def one_position(draft: Tensor, target: Tensor) -> Inputs:
    zero = torch.zeros(1, dtype=torch.int64)
    return Inputs(zero[None], draft[None, None], target.expand(1, 2, -1), zero, zero)


def decided(x: int, made: Inputs, rule: Rule, r: float, u: float) -> tuple[int, int]:
    z, y = made.target[0].tolist(), made.draft[0].tolist()
    if rule.exact:
        return oracle.token([x], [oracle.softmax(row) for row in z], [oracle.softmax(y[0])], [r], [u, u])
    return oracle.sigmoid([x], z, y, [r], [u, u], rule.alpha, rule.beta)


def distance_to(p: list[float], q: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2


@pytest.mark.parametrize("rule", ["token", "sigmoid(-1, 1)", "sigmoid(-3, 5)", "sigmoid(-100, 100)"])
@pytest.mark.parametrize("shift", [0.0, -1.0], ids=["different", "empty residual"])
def test_acceptance_and_distance_match_the_oracle(rule: str, shift: float) -> None:
    """A shift leaves p and q the same, but every sigmoid of the target is below the draft's."""
    draft, other = 3 * torch.randn(2, 6, dtype=torch.float64)
    target = draft + shift if shift else other
    made, parsed = one_position(draft, target), parse(rule)
    p, q = oracle.softmax(target.tolist()), oracle.softmax(draft.tolist())
    grid = [(i + 0.5) / STEPS for i in range(STEPS)]

    accepted = [sum(decided(x, made, parsed, r, 0.5)[0] for r in grid) / STEPS for x in range(6)]
    hardest = min(range(6), key=accepted.__getitem__)
    out = [a * b for a, b in zip(q, accepted, strict=True)]
    acceptance, bonus = sum(out), [0.0] * 6
    for u in grid:
        bonus[decided(hardest, made, parsed, 0.0, u)[1]] += 1 / STEPS
        if accepted[hardest] < 1:
            out[decided(hardest, made, parsed, 1 - 1e-12, u)[1]] += (1 - acceptance) / STEPS

    found = quality(made, parsed)
    assert found.acceptance == pytest.approx(acceptance, abs=1e-3)
    assert found.distance == pytest.approx(distance_to(out, p), abs=1e-3)
    assert found.bonus_distance == pytest.approx(distance_to(bonus, p), abs=1e-3)


def test_exact_rule_has_distance_zero_and_accepts_the_overlap() -> None:
    made = positions(500, CPU, torch.bfloat16)
    p, q = made.target[:, :-1].double().softmax(-1), made.draft.double().softmax(-1)
    found = quality(made, parse("token"))
    assert found.acceptance == pytest.approx(float(torch.minimum(p, q).sum(-1).mean()), abs=1e-6)
    assert found.distance == found.bonus_distance == 0


def test_wide_sigmoid_accepts_everything_and_outputs_the_draft_distribution() -> None:
    made = positions(500, CPU, torch.float32)
    p, q = made.target[:, :-1].double().softmax(-1), made.draft.double().softmax(-1)
    found = quality(made, sigmoid(-1e6, 1e6))
    assert found.acceptance == pytest.approx(1, abs=1e-5)
    assert found.distance == pytest.approx(float((p - q).abs().sum(-1).mean()) / 2, abs=1e-5)
    assert found.bonus_distance == pytest.approx(float((p - 1 / 500).abs().sum(-1).mean()) / 2, abs=1e-5)


def test_positions_are_reproducible_and_leave_the_random_generator_unchanged() -> None:
    before = torch.get_rng_state()
    made, again = positions(50, CPU, torch.float32), positions(50, CPU, torch.float32)
    assert made.draft.shape == (1, POSITIONS, 50)
    assert torch.equal(made.draft, again.draft)
    assert torch.equal(made.target, again.target)
    assert torch.equal(before, torch.get_rng_state())
