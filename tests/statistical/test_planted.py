"""The suite can fail: each bug below, all of them seen in the wild, is planted and must be caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outpace.sampling import SamplingParams, random
from outpace.sampling.random import Stream
from outpace.verification import eager
from outpace.verification.block import Block, Verdict
from outpace.verification.rules import Rule
from tests import tiers
from tests.statistical import checks
from tests.statistical.checks import Case, check_joint, check_race, check_text

pytestmark = pytest.mark.statistical

Plant = Callable[[pytest.MonkeyPatch], None]
TOKEN = Case("token", 3, 2)


def reversed_acceptance(patch: pytest.MonkeyPatch) -> None:
    """The lecture's code rejects with probability p/q where it should with 1 − p/q."""

    def accepts(px: Tensor, qx: Tensor, u: Tensor, lenience: float = 1.0) -> Tensor:
        return ~((qx > px) & (u > 1 - px / qx))

    patch.setattr(eager, "accepts", accepts)


def residual_without_subtraction(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(eager, "residual", lambda block, p, q, accepted, scale=None: p)


def draft_noise_for_the_residual(patch: pytest.MonkeyPatch) -> None:
    honest = eager.noise

    def noise(block: Block) -> tuple[Tensor, Tensor]:
        key = block.seed[:, None], block.positions, block.start[:, None]
        return honest(block)[0], random.uniform(*key, Stream.DRAFT)

    patch.setattr(eager, "noise", noise)


def argmax_labelled_as_soft(patch: pytest.MonkeyPatch) -> None:
    honest = checks.draft_block
    patch.setattr(checks, "draft_block", lambda case, *rest: honest(replace(case, draft="point"), *rest))


def bonus_skipped(patch: pytest.MonkeyPatch) -> None:
    honest = eager.verify

    def verify(block: Block, rule: Rule, lenience: float = 1.0) -> Verdict:
        verdict = honest(block, rule, lenience)
        full = verdict.accepted == block.lengths
        return Verdict(
            torch.where(full, verdict.accepted - 1, verdict.accepted),
            torch.where(full, block.tokens[:, -1], verdict.next_token),
            verdict.bad,
        )

    patch.setattr(eager, "verify", verify)


def noise_past_the_cut_again(patch: pytest.MonkeyPatch) -> None:
    """Keyed by position alone, uniforms that block verification looked at and passed over come back."""

    honest = eager.noise

    def noise(block: Block) -> tuple[Tensor, Tensor]:
        nowhere = torch.zeros_like(block.start[:, None])
        accept = random.uniform(block.seed[:, None], block.positions, nowhere, Stream.ACCEPT)
        return accept[:, :-1], honest(block)[1]

    patch.setattr(eager, "noise", noise)


def minus_log_u(patch: pytest.MonkeyPatch) -> None:
    def exponential(
        seed: Tensor,
        position: Tensor,
        vocab_size: int,
        stream: Stream = Stream.TARGET,
        start: Tensor | None = None,
        level: int = 0,
        node: Tensor | int = 0,
    ) -> Tensor:
        word = random.words(random.key(seed, position, start, stream), blocks=-(-vocab_size // 4))
        return -(word.flatten(-2)[..., :vocab_size].to(torch.float32) * 2.0**-32 + 2.0**-33).log()

    patch.setattr(random, "exponential", exponential)


def lenience_with_the_wrong_sign(patch: pytest.MonkeyPatch) -> None:
    """q over l instead of q in the residual, for the lenience 0.5 that the check asks for."""
    honest = eager.residual

    def residual(
        block: Block, p: Tensor, q: Tensor | None, accepted: Tensor, scale: Tensor | None = None
    ) -> Tensor:
        return honest(block, p, None if q is None else q / 0.5, accepted, scale)

    patch.setattr(eager, "residual", residual)


CAUGHT: list[tuple[Plant, Callable[[], None]]] = [
    (reversed_acceptance, lambda: check_joint(TOKEN)),
    (reversed_acceptance, lambda: check_text("token")),
    (residual_without_subtraction, lambda: check_joint(TOKEN)),
    (residual_without_subtraction, lambda: check_joint(Case("block", 3, 2))),
    (residual_without_subtraction, lambda: check_joint(Case("token", 3, 2, draft="point"))),
    (draft_noise_for_the_residual, lambda: check_joint(TOKEN)),
    (draft_noise_for_the_residual, lambda: check_joint(Case("block", 3, 2))),
    *tiers.sized([], [(draft_noise_for_the_residual, lambda: check_text("block"))]),  # needs many draws
    (argmax_labelled_as_soft, lambda: check_joint(TOKEN)),
    (
        argmax_labelled_as_soft,
        lambda: check_joint(Case("block", 4, 3, SamplingParams(temperature=0.7, top_k=2))),
    ),
    (bonus_skipped, lambda: check_joint(TOKEN)),
    (bonus_skipped, lambda: check_joint(Case("block", 2, 1))),
    (noise_past_the_cut_again, lambda: check_text("block")),
    (minus_log_u, check_race),
    (lenience_with_the_wrong_sign, lambda: check_joint(replace(TOKEN, lenience=0.5))),
]


@pytest.mark.parametrize(("plant", "check"), CAUGHT, ids=[plant.__name__ for plant, _ in CAUGHT])
def test_planted_bug_is_caught(
    plant: Plant, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="χ²"):
        check()


@pytest.mark.parametrize("check", {check: None for _, check in CAUGHT[-2:]}, ids=["race", "lenience"])
def test_the_same_checks_pass_over_sound_code(check: Callable[[], None]) -> None:
    check()
