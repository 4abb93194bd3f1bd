"""Every rule, vocabulary, draft length, sampling, draft kind: the joint distribution of what is accepted.

The full tier has every cell, the default one every pair of such values.
"""

from __future__ import annotations

from collections.abc import Hashable

import pytest
import torch

import outpace
from outpace.sampling import SamplingParams, random
from outpace.sampling.random import Stream
from tests import tiers
from tests.statistical import chisquare
from tests.statistical.checks import Case, check_joint, check_text, number_of_draws

pytestmark = pytest.mark.statistical

EXACT = ("token", "block", "match")
APPROXIMATE = "sigmoid(-2, 2)"
SIZES = ((2, 1), (3, 2), (4, 3))
SAMPLINGS = (  # of the target, of the draft
    (SamplingParams(), SamplingParams()),
    (SamplingParams(temperature=0.7, top_k=2), SamplingParams(temperature=0.7, top_k=2)),
    (SamplingParams(top_p=0.8), SamplingParams(temperature=1.3, min_p=0.1)),
    (SamplingParams(temperature=0), SamplingParams()),
)
PLAIN = SAMPLINGS[0]

GRID = [
    Case(rule, V, g, *sampling, draft=draft, ragged=ragged)
    for V, g in SIZES
    for sampling in SAMPLINGS
    for draft in ("soft", "point")
    for ragged in (False, True)
    for rule in EXACT
]
BESIDE = [
    Case(rule, 3, 2, *sampling, draft=draft, ragged=True)
    for sampling in SAMPLINGS
    for draft in ("soft", "point")
    for rule in ("rejection", APPROXIMATE)
]
LENIENT = [
    Case("token", V, g, *PLAIN, draft=draft, lenience=lenience)
    for V, g in SIZES
    for draft in ("soft", "point")
    for lenience in (0.5, 0.1)
]
LENIENT += [Case("token", 3, 2, *sampling, ragged=True, lenience=0.5) for sampling in SAMPLINGS[1:3]]
PENALIZED = [  # what p is depends on the drafts before it
    Case(
        rule,
        3,
        2,
        SamplingParams(
            repetition_penalty=1.8, frequency_penalty=0.4, presence_penalty=-0.5, logit_bias={2: 0.7}
        ),
        SamplingParams(repetition_penalty=0.6, frequency_penalty=-0.3, allowed_token_ids=[0, 2]),
        draft=draft,
        ragged=True,
    )
    for draft in ("soft", "point")
    for rule in EXACT
]
OFF_DIAGONAL = [Case(rule, V, g, *PLAIN) for V, g in ((2, 3), (4, 1), (3, 0)) for rule in EXACT]
WIDE = [Case(rule, 12, 1, *PLAIN) for rule in EXACT]
GUMBEL = [Case(rule, V, g, *PLAIN, draft="gumbel") for V, g in SIZES for rule in ("token", "block")]
DTYPES = [
    Case(rule, 3, 2, *PLAIN, dtype=dtype)
    for dtype in (torch.float16, torch.bfloat16, torch.float64)
    for rule in EXACT
]


def factors(case: Case) -> tuple[Hashable, ...]:
    samplings = case.sampling, case.draft_sampling
    return case.rule, (case.V, case.g), str(samplings), case.draft, case.ragged, case.lenience, case.dtype


CASES = tiers.pairwise(
    [*GRID, *BESIDE, *LENIENT, *PENALIZED, *OFF_DIAGONAL, *WIDE, *GUMBEL, *DTYPES], factors
)
JUDGED: dict[Case, list[Case]] = {}  # by what is drafted: drawing a million takes as long as judging them
for one in CASES:
    JUDGED.setdefault(one.drafting, []).append(one)


@pytest.mark.parametrize("cases", JUDGED.values(), ids=lambda cases: "+".join(map(str, cases))[:120])
def test_kept_tokens_and_next_token_have_their_exact_joint_distribution(cases: list[Case]) -> None:
    wrong = []
    for case in cases:
        try:
            check_joint(case)
        except AssertionError as error:
            wrong.append(error)
    assert not wrong


@pytest.mark.parametrize("rule", [*EXACT, "rejection"])
def test_texts_of_several_iterations_are_the_targets(rule: str) -> None:
    check_text(rule)


def test_match_stays_exact_when_the_drafter_uses_the_targets_noise() -> None:
    check_text("match", draft="target noise")


def test_acceptance_is_the_sum_of_minima_and_block_keeps_no_fewer() -> None:
    n, g, V = 300_000, 3, 6
    target, draft = torch.randn(g + 1, V), torch.randn(g, V)
    p, q = target.double().softmax(-1), draft.double().softmax(-1)
    seed, start = torch.arange(n)[:, None], torch.tensor(0)
    u = random.uniform(seed, torch.arange(g), start, Stream.DRAFT)
    tokens = torch.stack([random.sample(q[i].expand(n, V), u[:, i]) for i in range(g)], 1)
    kept = {
        rule: outpace.verify(
            tokens, draft.expand(n, g, V), target.expand(n, g + 1, V), rule=rule, seed=seed[:, 0], position=0
        ).accepted
        for rule in ("token", "block")
    }
    beta = torch.minimum(p[:g], q).sum(-1)
    reached = torch.nn.functional.pad(torch.nn.functional.pad(beta.cumprod(0), (1, 0), value=1.0), (0, 1))
    counts = torch.bincount(kept["token"], minlength=g + 1)
    chisquare.agrees(counts.numpy(), (reached[:-1] - reached[1:]).numpy(), "drafts kept by token")
    spread = 6.1 * g / n**0.5  # six standard deviations of the mean, generously
    assert kept["block"].double().mean() >= float(reached[1:].sum()) - spread
    assert kept["block"].double().mean() > kept["token"].double().mean()


@pytest.mark.parametrize("lenience", [0.7, 0.2])
def test_no_token_comes_out_above_its_lenient_bound(lenience: float) -> None:
    n, V = number_of_draws(), 5
    target, draft = (
        torch.tensor([[2.0, 0.5, 0.0, -1.0, -2.0]] * 2),
        torch.tensor([[-1.0, 2.0, 1.0, 0.0, -1.0]]),
    )
    q, p = draft[0].double().softmax(-1), target[0].double().softmax(-1)
    seed, start = torch.arange(n), torch.tensor(0)
    tokens = random.sample(q.expand(n, V), random.uniform(seed, start, start, Stream.DRAFT))[:, None]
    verdict = outpace.verify(
        tokens, draft.expand(n, 1, V), target.expand(n, 2, V), lenience=lenience, seed=seed, position=0
    )
    first = torch.where(verdict.accepted == 1, tokens[:, 0], verdict.next_token)
    share = torch.bincount(first, minlength=V) / n
    assert (share <= p / lenience + 6.1 * 0.5 / n**0.5).all()
    assert (share > p + 0.02).any()  # it is not exact
