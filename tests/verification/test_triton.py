"""The kernels decide as the oracle does. Here under Triton's interpreter; on a GPU, `pytest -m gpu` runs the
same tests compiled, and more of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace import SamplingParams
from outpace.sampling import random, warp
from outpace.sampling.random import Stream
from outpace.sampling.rows import Edits, RowSampling, edit, shape_of
from outpace.verification import eager, oracle
from outpace.verification.block import Block, Verdict
from outpace.verification.rules import parse
from tests import tiers
from tests.sampling.test_rows import case

pytest.importorskip("hypothesis", reason="hypothesis is not installed: pip install 'outpace[dev]'")
from hypothesis import given, settings
from hypothesis import strategies as st

kernels = pytest.importorskip("outpace.verification.triton", reason="needs triton", exc_type=ImportError)
device = pytest.importorskip(
    "outpace.verification.kernels.pieces", reason="needs triton", exc_type=ImportError
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
RULES = ["token", "block", "match", "sigmoid(-8, 8)"]


EVERYTHING = tiers.full or DEVICE == "cuda"  # the interpreter is slow
FEW_RULES = RULES if EVERYTHING else ["token", "match"]  # each goes through kernels of its own
BOTH = ["one split", "many splits"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def combinations(*factors: Iterable[Any]) -> list[Any]:
    """Return all combinations, or under the interpreter those of the tier."""
    return list(itertools.product(*factors)) if EVERYTHING else tiers.each_value(*factors)


@pytest.fixture(params=BOTH if EVERYTHING else BOTH[1:])
def splits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Split small vocabularies into pieces of 32 tokens, several to a block.

    Under the interpreter, only ``test_decisions_equal_the_eager_rules`` also runs without splits.
    """
    if request.param == "many splits":
        monkeypatch.setattr(kernels, "sizes", lambda V: (32, -(-V // 32), kernels.power_of_2(-(-V // 32))))
        monkeypatch.setattr(kernels, "BLOCKS", 4)
        for name, size in (("CHUNKS", 8), ("SCAN_TILE", 32), ("MAX_LISTED", 32), ("ROW_TILE", 64)):
            monkeypatch.setattr(kernels, name, size)
    return str(request.param)


def block_of(
    B: int,
    g: int,
    V: int,
    *,
    soft: bool = True,
    ragged: bool = False,
    dtype: torch.dtype = torch.float32,
    stored: bool = False,
    masked: float = 0.0,
    scale: float = 2.0,
) -> Block:
    """Drafts drawn from logits near the target's."""
    target = scale * torch.randn(B, g + 1, V)
    target = target.masked_fill(torch.rand(B, g + 1, V) < masked, -torch.inf)
    target[..., 0] = 0.5  # something is always possible
    draft = (target[:, :g] + 0.7 * torch.randn(B, g, V)).to(dtype)
    tokens = torch.zeros(B, g, dtype=torch.int64)
    if g:
        tokens = draft.float().softmax(-1).flatten(0, 1).multinomial(1).view(B, g)
    block = Block(
        tokens,
        draft if soft else None,
        target.to(dtype),
        draft.float().logsumexp(-1) if stored and soft else None,
        torch.randint(-(2**63), 2**63 - 1, (B,)),
        torch.randint(0, 1000, (B,)),
        torch.arange(B) % (g + 1) if ragged else None,
    )
    return moved(block, DEVICE)


def moved(block: Block, device: str) -> Block:
    each = {field.name: getattr(block, field.name) for field in dataclasses.fields(block)}
    there: dict[str, Any] = {
        name: value.to(device) for name, value in each.items() if isinstance(value, Tensor)
    }
    return dataclasses.replace(block, **there)


def assert_same(found: Verdict, expected: Verdict, at_most: int = 0) -> None:
    """Row by row, but for a few that lie on the edge of a rounding."""
    unlike = (found.accepted != expected.accepted) | (found.next_token != expected.next_token)
    unlike |= found.bad != expected.bad
    assert int(unlike.sum()) <= at_most, (
        found.accepted[unlike].tolist(),
        expected.accepted[unlike].tolist(),
        found.next_token[unlike].tolist(),
        expected.next_token[unlike].tolist(),
    )


Decision = tuple[str, bool, bool, str]
DECISIONS: list[Decision] = list(itertools.product(RULES, [True, False], [False, True], BOTH))
PAIRWISE_DECISIONS = tiers.pairwise(DECISIONS, lambda decision: decision)


@pytest.mark.parametrize(("rule", "soft", "ragged", "splits"), PAIRWISE_DECISIONS, indirect=["splits"])
def test_decisions_equal_the_eager_rules(rule: str, soft: bool, ragged: bool, splits: str) -> None:
    for B, g, V in ((5 if EVERYTHING else 3, 3, 61), (2, 2, 100)):
        block = block_of(B, g, V, soft=soft, ragged=ragged, masked=0.2)
        assert_same(kernels.verify(block, parse(rule)), eager.verify(block, parse(rule)))


@pytest.mark.parametrize(("rule", "soft"), combinations(["token", "block"], [True, False]))
def test_decisions_equal_the_oracle(rule: str, soft: bool) -> None:
    block = block_of(6, 4, 37, soft=soft)
    verdict = kernels.verify(block, parse(rule))
    here = moved(block, "cpu")
    accept, residual = random.accept_and_residual(here.seed[:, None], here.positions, here.start[:, None])
    for b in range(6):
        p = [oracle.softmax(row) for row in here.target_logits[b].double().tolist()]
        q = None
        if here.draft_logits is not None:
            q = [oracle.softmax(row) for row in here.draft_logits[b].double().tolist()]
        judge = oracle.token if rule == "token" else oracle.block
        n, token = judge(here.tokens[b].tolist(), p, q, accept[b, :-1].tolist(), residual[b].tolist())
        assert (int(verdict.accepted[b]), int(verdict.next_token[b])) == (n, token)


@pytest.mark.parametrize("rule", FEW_RULES)
def test_a_level_of_a_cascade_has_noise_of_its_own(rule: str, splits: str) -> None:
    block = block_of(12 if EVERYTHING else 4, 2, 61)
    deeper = dataclasses.replace(block, level=2)
    found = kernels.verify(deeper, parse(rule))
    assert_same(found, eager.verify(deeper, parse(rule)))
    usual = kernels.verify(block, parse(rule))
    assert torch.equal(found.next_token, usual.next_token) == (rule == "match")  # one target token for all


def test_siblings_are_sampled_with_noise_of_their_own(splits: str) -> None:
    logits = torch.randn(16, 61, device=DEVICE)
    seed = torch.arange(16, device=DEVICE)
    tokens = []
    for level, node in ((0, 0), (0, 1), (3, 0), (3, 65535)):
        found = kernels.sample(logits, seed, 9, 2, None, level, node)
        assert torch.equal(found.tokens, eager.sample(logits, seed, 9, 2, None, level, node).tokens)
        tokens.append(found.tokens)
    assert all(not torch.equal(one, other) for one, other in itertools.combinations(tokens, 2))


@pytest.mark.parametrize(("dtype", "rule"), combinations([torch.float16, torch.bfloat16], RULES))
def test_half_precision_logits_are_read_as_they_are(dtype: torch.dtype, rule: str) -> None:
    block = block_of(4, 2, 61, dtype=dtype)
    assert block.draft_logits is not None
    wide = dataclasses.replace(
        block, draft_logits=block.draft_logits.float(), target_logits=block.target_logits.float()
    )
    assert_same(kernels.verify(block, parse(rule)), kernels.verify(wide, parse(rule)))


@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_each_row_has_its_own_temperature(rule: str, splits: str) -> None:
    rows = [SamplingParams(temperature=t) for t in (0.6, 0.0, 1.0, 1.7, 0.0)]
    block = block_of(5, 3, 61)
    assert block.draft_logits is not None
    block.tokens[1, :2] = block.target_logits[1, :2].argmax(-1)  # a greedy row that keeps some
    found = kernels.verify(block, parse(rule), 1.0, rows, [SamplingParams(temperature=1.2)])
    adjusted = dataclasses.replace(
        block,
        target_logits=warp(block.target_logits, rows),
        draft_logits=warp(block.draft_logits, [SamplingParams(temperature=1.2)]),
    )
    assert_same(found, eager.verify(adjusted, parse(rule)))
    assert int(found.accepted[1]) >= 2


FILTERS = [
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=0.8, top_k=9, top_p=0.9),
    SamplingParams(temperature=1.3, top_p=0.95, min_p=0.05),
    SamplingParams(temperature=0.7, top_k=40, top_p=0.8, min_p=0.02),
    SamplingParams(top_k=1),
    SamplingParams(top_p=0.0),
    SamplingParams(min_p=1.0),
    SamplingParams(top_k=1000, top_p=0.999),
    SamplingParams(),
    SamplingParams(temperature=0.0, top_k=3),
]


@pytest.mark.parametrize(
    ("rule", "dtype"),
    combinations(FEW_RULES, [torch.float32, torch.bfloat16, torch.float16][: len(FEW_RULES)]),
)
def test_each_row_has_its_own_filters(rule: str, dtype: torch.dtype, splits: str) -> None:
    """Logits of few digits tie often; the same ones stay."""
    rows = FILTERS if parse(rule).exact else FILTERS[:-1]
    if not EVERYTHING:
        rows = FILTERS[3:10]
    B, g = len(rows), 2 if EVERYTHING else 1
    block = block_of(B, g, 61, masked=0.2)
    assert block.draft_logits is not None
    coarse = dataclasses.replace(
        block,
        target_logits=(block.target_logits * 2).round().div(2).to(dtype),
        draft_logits=(block.draft_logits * 2).round().div(2).to(dtype),
    )
    assert coarse.draft_logits is not None
    draft_rows = [rows[(b + 3) % B] for b in range(B)]
    adjusted = dataclasses.replace(
        coarse,
        target_logits=warp(coarse.target_logits.float(), rows),
        draft_logits=warp(coarse.draft_logits.float(), draft_rows),
    )
    assert adjusted.draft_logits is not None
    coarse.tokens.copy_(adjusted.draft_logits.softmax(-1).flatten(0, 1).multinomial(1).view(B, g))
    found = kernels.verify(coarse, parse(rule), 1.0, rows, draft_rows)
    assert_same(found, eager.verify(adjusted, parse(rule)))


@pytest.mark.parametrize("rule", FEW_RULES)
def test_parameters_in_a_tensor_equal_parameters_per_row(rule: str, splits: str) -> None:
    rows = FILTERS[3:7] if not EVERYTHING else FILTERS if parse(rule).exact else FILTERS[:-1]
    block = block_of(len(rows), 2, 61, ragged=True)
    tensors = RowSampling(torch.tensor([shape_of(one, 61) for one in rows]).to(block.tokens.device), True)
    found = kernels.verify(block, parse(rule), 1.0, tensors, tensors)
    assert_same(found, kernels.verify(block, parse(rule), 1.0, rows, rows))


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edits_equal_those_of_pytorch(n: int, dtype: torch.dtype, splits: str) -> None:
    logits, drafted, edits, _ = case(n, dtype)
    device = block_of(1, 1, 61).tokens.device
    logits, drafted = logits.to(device), drafted.to(device)
    edits = Edits(*(one.to(device) for one in edits.tensors()))
    torch.testing.assert_close(kernels.edit(logits, edits, drafted), edit(logits, edits, drafted))
    steps = [drafted[:, :i] for i in range(n)]  # as a drafter calls it: one position, all tokens before it
    for i, before in enumerate(steps):
        one = logits[:, i : i + 1]
        torch.testing.assert_close(kernels.edit(one, edits, before), edit(one, edits, before))


@pytest.mark.parametrize("rule", FEW_RULES)
def test_one_filter_for_all_rows_needs_no_tensor(rule: str, splits: str) -> None:
    block = block_of(4, 2, 61, ragged=True)
    one = [SamplingParams(temperature=0.8, top_k=9, top_p=0.9, min_p=0.01)]
    expected = dataclasses.replace(block, target_logits=warp(block.target_logits, one))
    assert_same(kernels.verify(block, parse(rule), 1.0, one), eager.verify(expected, parse(rule)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if EVERYTHING else [torch.bfloat16])
def test_sampling_a_draft_token_equals_the_eager_sampler(dtype: torch.dtype, splits: str) -> None:
    B = len(FILTERS)
    logits = (torch.randn(B, 61) * 4).round().div(2).to(dtype).to(DEVICE)
    seed, start = torch.randint(-(2**63), 2**63 - 1, (B,)), torch.randint(0, 1000, (B,))
    seed, start = seed.to(DEVICE), start.to(DEVICE)
    for rows in (None, [SamplingParams(temperature=0.7)], FILTERS[3:4], FILTERS):
        found = kernels.sample(logits, seed, start, 2, rows)
        expected = eager.sample(logits, seed, start, 2, rows)
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.allclose(found.lse, expected.lse, atol=1e-5)


def test_numbers_of_any_kind_are_floats_to_the_kernels() -> None:
    """Triton compiles an int of 1 in, and takes it for every later one."""
    for one in (
        SamplingParams(top_p=0),
        SamplingParams(top_k=50, min_p=1),
        SamplingParams(temperature=1, top_p=1),
    ):
        assert all(type(number) is float for number in shape_of(one, 100))


def test_a_draw_without_a_distribution_is_flagged() -> None:
    logits = torch.randn(4, 61)
    logits[0, 7], logits[1, 9], logits[2] = math.nan, math.inf, -math.inf
    for rows in (None, FILTERS[5:6]):
        drawn = kernels.sample(logits.to(DEVICE), 7, 3, 0, rows)
        assert drawn.lse.isnan().tolist() == [True, True, True, False]
        assert drawn.tokens[:3].tolist() == [0, 0, 0]


@pytest.mark.parametrize("splits", ["many splits"], indirect=True)
@pytest.mark.usefixtures("splits")
def test_statistics_from_the_drafter_replace_recomputation() -> None:
    targets, rows = FILTERS[1:6], [*FILTERS[3:6], *FILTERS[-2:]]
    if not EVERYTHING:
        targets, rows = targets[2:], rows[2:]
    B, g = len(rows), 2 if EVERYTHING else 1
    block = block_of(B, g, 61)
    assert block.draft_logits is not None
    drawn = [kernels.sample(block.draft_logits[:, i], block.seed, block.start, i, rows) for i in range(g)]
    block = dataclasses.replace(block, tokens=torch.stack([one.tokens for one in drawn], dim=1))
    with_statistics = dataclasses.replace(
        block,
        draft_lse=torch.stack([one.lse for one in drawn], dim=1),
        draft_cut=torch.stack([one.cut for one in drawn if one.cut is not None], dim=1),
        draft_tie=torch.stack([one.tie for one in drawn if one.tie is not None], dim=1),
    )
    for rule in ("token", "block") if EVERYTHING else ("token",):
        found = kernels.verify(with_statistics, parse(rule), 1.0, targets, rows)
        assert_same(found, kernels.verify(block, parse(rule), 1.0, targets, rows))


@pytest.mark.parametrize(
    ("target_sampling", "draft_sampling"),
    [
        (None, [SamplingParams(top_k=5)]),
        (None, [SamplingParams(temperature=0.0)]),
        ([SamplingParams(temperature=0.9)], [SamplingParams(temperature=one) for one in (0.7, 0.0, 1.0)]),
    ],
)
def test_they_do_so_with_any_target_sampling(
    target_sampling: list[SamplingParams] | None, draft_sampling: list[SamplingParams]
) -> None:
    g = 2 if EVERYTHING else 1
    block = block_of(3, g, 61)
    assert block.draft_logits is not None
    drawn = [
        kernels.sample(block.draft_logits[:, i], block.seed, block.start, i, draft_sampling) for i in range(g)
    ]
    tokens, lse, cut, tie = (
        torch.stack([getattr(one, name) for one in drawn], dim=1) for name in ("tokens", "lse", "cut", "tie")
    )
    block = dataclasses.replace(block, tokens=tokens)
    with_statistics = dataclasses.replace(block, draft_lse=lse, draft_cut=cut, draft_tie=tie)
    for rule in ("token", "block") if EVERYTHING else ("block",):
        found = kernels.verify(with_statistics, parse(rule), 1.0, target_sampling, draft_sampling)
        assert_same(found, kernels.verify(block, parse(rule), 1.0, target_sampling, draft_sampling))


@pytest.mark.parametrize(("rule", "stored"), combinations(["token", "sigmoid(-8, 8)"], [False, True]))
def test_a_filter_hides_no_nan_in_the_draft_logits(rule: str, stored: bool) -> None:
    block = block_of(4, 1, 61, stored=stored)
    assert block.draft_logits is not None
    block.draft_logits[1, 0, int(block.tokens[1, 0])] = math.nan
    block.draft_logits[2, 0, (int(block.tokens[2, 0]) + 1) % 61] = math.nan
    verdict = kernels.verify(
        block, parse(rule), 1.0, None, [SamplingParams(top_k=61), *[SamplingParams(top_k=5)] * 3]
    )
    assert verdict.bad.tolist() == [False, True, True, False]


@pytest.mark.parametrize("splits", ["many splits"], indirect=True)
@pytest.mark.usefixtures("splits")
def test_more_surviving_tokens_than_the_list_holds_are_found() -> None:
    """More than the list holds: flat logits under top-p, and a large k."""
    rows = [
        *(
            SamplingParams(top_p=0.9),
            SamplingParams(top_k=70),
            SamplingParams(min_p=0.5),
            SamplingParams(top_k=50, top_p=0.6),
        ),
        SamplingParams(top_p=0.95),
    ]
    logits = torch.rand(5, 75) / 2
    logits[4, :2] = 12.0  # two likely ones in one chunk
    logits = logits.to(DEVICE)
    seed, start = torch.arange(5, device=DEVICE), torch.zeros(5, dtype=torch.int64, device=DEVICE)
    found, expected = (one.sample(logits, seed, start, 1, rows) for one in (kernels, eager))
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.allclose(found.lse, expected.lse, atol=1e-5)
    both = logits[:, None].expand(-1, 2, -1).contiguous()
    block = Block(found.tokens[:, None], both[:, :1], both, None, seed, start)
    warped = warp(both, rows)
    adjusted = dataclasses.replace(block, target_logits=warped, draft_logits=warped[:, :1])
    for rule in ("token", "match") if EVERYTHING else ("token",):
        assert_same(kernels.verify(block, parse(rule), 1.0, rows, rows), eager.verify(adjusted, parse(rule)))


@pytest.mark.parametrize("splits", ["many splits"], indirect=True)
@pytest.mark.usefixtures("splits")
def test_any_number_of_tied_tokens_survives_a_filter() -> None:
    rows = [
        SamplingParams(top_k=7),
        SamplingParams(top_p=0.5),
        SamplingParams(top_k=60, top_p=0.5),
        SamplingParams(min_p=0.9),
    ]
    logits = torch.full((4, 97), 2.5, device=DEVICE)
    seed, start = torch.arange(4, device=DEVICE), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    found, expected = (one.sample(logits, seed, start, 0, rows) for one in (kernels, eager))
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.allclose(found.lse, expected.lse, atol=1e-5)


@settings(max_examples=6 if DEVICE == "cpu" else 60, deadline=None, derandomize=True, database=None)
@given(
    V=st.integers(1, 130),
    g=st.integers(0, 20),
    B=st.integers(1, 3 if DEVICE == "cpu" else 67),
    rule=st.sampled_from(RULES),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    soft=st.booleans(),
    ragged=st.booleans(),
    masked=st.sampled_from([0.0, 0.5, 1.0]),
    scale=st.sampled_from([0.01, 1.0, 100.0]),
)
def test_any_block_is_decided_as_the_eager_rules_do(
    V: int,
    g: int,
    B: int,
    rule: str,
    dtype: torch.dtype,
    soft: bool,
    ragged: bool,
    masked: float,
    scale: float,
) -> None:
    block = block_of(B, g, V, soft=soft, ragged=ragged, dtype=dtype, masked=masked, scale=scale)
    assert_same(kernels.verify(block, parse(rule)), eager.verify(block, parse(rule)))


@pytest.mark.skipif(DEVICE == "cpu", reason="an interpreter draws too few to tell distributions apart")
@pytest.mark.parametrize("splits", ["many splits"], indirect=True)
@pytest.mark.usefixtures("splits")
def test_texts_are_distributed_as_the_targets_with_drafts_of_the_sampler() -> None:
    """Two drafted tokens and what follows them, filtered: the first token is the adjusted target's."""
    n, V = 200_000, 7
    target, draft = 1.5 * torch.randn(3, V), 1.5 * torch.randn(2, V)
    target_sampling, draft_sampling = (
        [SamplingParams(temperature=0.8, top_k=5)],
        [SamplingParams(temperature=1.2)],
    )
    seed, start = torch.arange(n, device=DEVICE), torch.full((n,), 11, device=DEVICE)
    p, q = (one.expand(n, *one.shape).contiguous().to(DEVICE) for one in (target, draft))
    drawn = [kernels.sample(q[:, i], seed, start, i, draft_sampling) for i in range(2)]
    tokens = torch.stack([one.tokens for one in drawn], dim=1)
    lse = torch.stack([one.lse for one in drawn], dim=1)
    verdict = kernels.verify(
        Block(tokens, q, p, lse, seed, start), parse("token"), 1.0, target_sampling, draft_sampling
    )
    first = torch.where(verdict.accepted > 0, tokens[:, 0], verdict.next_token).cpu()
    expected = n * warp(target[None], target_sampling)[0, 0].double().softmax(-1)
    seen = first.bincount(minlength=V)
    assert not seen[expected == 0].any()
    chi2 = ((seen - expected) ** 2 / expected)[expected > 0].sum()
    freedom = torch.tensor(int((expected > 0).sum()) - 1.0, dtype=torch.float64)
    assert torch.special.gammaincc(freedom / 2, chi2 / 2) > 1e-6


def test_a_greedy_draft_is_a_point_mass(splits: str) -> None:
    block = block_of(6, 3, 61)
    assert block.draft_logits is not None
    block.tokens.copy_(block.draft_logits.argmax(-1))
    greedy = [SamplingParams(temperature=0.0)]
    found = kernels.verify(block, parse("token"), 1.0, None, greedy)
    assert_same(found, kernels.verify(dataclasses.replace(block, draft_logits=None), parse("token")))


@pytest.mark.parametrize("greedy", [False, True])
def test_lenience_accepts_more(greedy: bool, splits: str) -> None:
    block = block_of(6, 4, 61)
    rows = [SamplingParams(temperature=0.0 if greedy else 1.3)]
    found = kernels.verify(block, parse("token"), 0.2, rows)
    near = None
    if greedy:
        score = block.target_logits[:, :4].gather(-1, block.tokens[..., None]).squeeze(-1)
        near = score >= block.target_logits[:, :4].amax(-1) + math.log(0.2)
    adjusted = dataclasses.replace(block, target_logits=warp(block.target_logits, rows), greedy_accept=near)
    assert_same(found, eager.verify(adjusted, parse("token"), 0.2))


def test_a_stored_logsumexp_replaces_reading_the_draft() -> None:
    block = block_of(6, 3, 61, stored=True)
    assert_same(kernels.verify(block, parse("token")), eager.verify(block, parse("token")))
    without = dataclasses.replace(block, draft_lse=None)
    assert_same(kernels.verify(block, parse("token")), kernels.verify(without, parse("token")))


@pytest.mark.parametrize(
    ("rule", "poison", "poisoned"),
    tiers.each_value(RULES, [math.nan, math.inf, -math.inf], ["target", "draft"]),
)
def test_a_block_ends_before_unusable_logits(rule: str, poison: float, poisoned: str, splits: str) -> None:
    """Draft tokens before them are accepted as without them. There is no next token if all are accepted."""
    B, g = 5, 3
    block = block_of(B, g, 61)
    ends = torch.arange(B, device=DEVICE) % (g + 1 if poisoned == "target" else g)
    cut = kernels.verify(dataclasses.replace(block, counts=ends), parse(rule))
    logits = block.target_logits if poisoned == "target" else block.draft_logits
    assert logits is not None
    for b, end in enumerate(ends.tolist()):
        where = slice(None) if poison == -math.inf or end == g else int(block.tokens[b, end])
        logits[b, end, where] = poison
    verdict = kernels.verify(block, parse(rule))
    if poisoned == "draft" and (rule == "match" or (poison == -math.inf and rule.startswith("sigmoid"))):
        assert not verdict.bad.any()  # which the rule does not read, or not for other tokens
        return
    assert torch.equal(verdict.accepted, cut.accepted)
    assert torch.equal(verdict.bad, cut.accepted == ends)
    assert verdict.bad.any()
    assert torch.equal(verdict.next_token, cut.next_token.masked_fill(verdict.bad, 0))


@pytest.mark.parametrize("place", [0, 1])
def test_tokens_and_lengths_out_of_range_are_flagged(place: int) -> None:
    block = block_of(4, 2, 61, ragged=True)
    assert block.counts is not None
    block.counts[:] = torch.tensor([2, 2, 7, -1])
    block.tokens[0, place] = 61
    for rule in FEW_RULES:
        verdict = kernels.verify(block, parse(rule))
        assert verdict.bad.tolist() == [True, False, True, True]
        assert verdict.accepted[verdict.bad].tolist() == [0, 0, 0]


def test_extreme_logits_and_equal_distributions_draw_what_is_possible(splits: str) -> None:
    block = block_of(4, 2, 61)
    assert block.draft_logits is not None
    block.target_logits[0] = torch.full((3, 61), -1e4, device=DEVICE).index_fill_(
        1, torch.tensor([7], device=DEVICE), 1e4
    )
    block.target_logits[1] += 1e4
    block.draft_logits[2] = block.target_logits[2, :2]  # p = q: everything is kept
    block.draft_logits[3] = block.target_logits[3, :2] + 3  # the same distribution up to rounding
    for rule in ("token", "block"):
        found = kernels.verify(block, parse(rule))
        assert_same(found, eager.verify(block, parse(rule)))
        assert found.accepted[2:].tolist() == [2, 2]
        assert int(found.next_token[0]) == 7 or int(found.accepted[0]) < 2


def test_a_row_does_not_depend_on_its_neighbours(splits: str) -> None:
    block = block_of(4, 3, 61)
    for rule in FEW_RULES:
        together = kernels.verify(block, parse(rule))
        for b in range(4):
            alone = kernels.verify(block.rows(slice(b, b + 1)), parse(rule))
            assert alone.accepted[0] == together.accepted[b]
            assert alone.next_token[0] == together.next_token[b]


def test_one_seed_and_position_may_stand_for_all_rows() -> None:
    block = block_of(2, 2, 61)
    one = dataclasses.replace(block, seeds=-7, starts=12)
    each = torch.full((2,), -7, device=DEVICE), torch.tensor(12, device=DEVICE).expand(2)
    for rule in RULES:
        expected = kernels.verify(dataclasses.replace(block, seeds=each[0], starts=each[1]), parse(rule))
        assert_same(kernels.verify(one, parse(rule)), expected)
        assert_same(eager.verify(one, parse(rule)), expected)


def test_without_draft_tokens_the_target_stream_draws() -> None:
    block = block_of(5, 0, 1100)
    own = eager.sample_target(block.target_logits[:, 0], block.seed, block.start)
    for rule in RULES:
        assert torch.equal(kernels.verify(block, parse(rule)).next_token, own)


def test_rows_without_draft_tokens_draw_with_the_target_stream_at_any_logits(splits: str) -> None:
    block = block_of(4, 2, 100, ragged=True)
    assert block.counts is not None
    block.counts[:] = 0
    block.target_logits[:] += 1e4
    plain = eager.sample_target(block.target_logits[:, 0], block.seed, block.start)
    for rule in FEW_RULES:
        assert torch.equal(kernels.verify(block, parse(rule)).next_token, plain)


def test_large_logits_keep_the_digits_of_their_probabilities() -> None:
    """p = q up to a shift: a shift that costs p a thousandth would lose a draft in a thousand."""
    B = 40 if EVERYTHING else 12
    block = block_of(B, 2, 16)
    assert block.draft_logits is not None
    flat = torch.full((B, 3, 16), 1e4 + 0.37, device=DEVICE)
    same = dataclasses.replace(block, target_logits=flat, draft_logits=torch.zeros(B, 2, 16, device=DEVICE))
    same = dataclasses.replace(same, tokens=torch.zeros_like(block.tokens))
    assert kernels.verify(same, parse("token")).accepted.tolist() == [2] * B


def test_types_of_small_tensors_do_not_matter() -> None:
    block = block_of(3, 2, 61, stored=True)
    assert block.draft_lse is not None
    expected = kernels.verify(block, parse("token"))
    other = dataclasses.replace(
        block, draft_lse=block.draft_lse.double(), starts=block.start.int(), tokens=block.tokens.int()
    )
    assert_same(kernels.verify(other, parse("token")), expected)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_draft_without_a_number_is_noticed_beside_a_stored_logsumexp(rule: str) -> None:
    for poison in (math.nan, math.inf):
        block = block_of(3, 1, 61, stored=True)
        assert block.draft_logits is not None
        block.draft_logits[1, 0, int(block.tokens[1, 0])] = poison
        assert kernels.verify(block, parse(rule)).bad.tolist() == [False, True, False]


def test_a_greedy_row_does_not_depend_on_the_draft() -> None:
    block = block_of(3, 2, 61)
    assert block.draft_logits is not None
    block.draft_logits[1] = math.nan
    verdict = kernels.verify(block, parse("token"), 1.0, [SamplingParams(temperature=0.0)])
    assert not verdict.bad.any()
    assert int(verdict.next_token[1]) == int(block.target_logits[1, int(verdict.accepted[1])].argmax())


def test_the_noise_of_the_kernels_is_that_of_the_library() -> None:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator]
    def write(seeds, positions, starts, out, STREAM: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
        i = tl.arange(0, N)
        first, second = device.uniforms(
            tl.load(seeds + i), tl.load(positions + i), tl.load(starts + i), STREAM
        )
        tl.store(out + 2 * i, first)
        tl.store(out + 2 * i + 1, second)

    N = 16
    seed = torch.randint(-(2**63), 2**63 - 1, (N,))
    position, start = torch.randint(0, 2**32 - 1, (N,)), torch.randint(0, 2**32 - 1, (N,))
    out = torch.empty(N, 2, dtype=torch.float64, device=DEVICE)
    write[(1,)](
        seed.to(DEVICE), position.to(DEVICE), start.to(DEVICE), out, STREAM=int(Stream.ACCEPT) // 2, N=N
    )
    accept, residual = random.accept_and_residual(seed, position, start)
    assert torch.equal(out.cpu(), torch.stack((accept, residual), dim=1))


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from outpace.verification.kernels import cut, decide, edit, match

POINTERS = dict(target="*bf16", draft="*bf16", tokens="*i64", lengths="*i64", draft_lse="*fp64", seeds="*i64",
    starts="*i64", invalid="*i1", p_params="*fp32", q_params="*fp32", workspace="*fp32", accepted="*i64",
    next_token="*i64", bad="*i1", lenience="fp32", alpha="fp32", width="fp32", seed="i64", start="i64",
    draft_cut="*fp32", draft_tie="*i32", temperature="fp32", top_k="fp32", drop_limit="fp32", min_p="fp32",
    q_temperature="fp32", q_top_k="fp32", q_drop_limit="fp32", q_min_p="fp32", logits="*bf16", lse="*fp64",
    cuts="*fp32", ties="*i32", bias="*fp32", penalties="*fp32", seen="*i16", allowed="*i32",
    drafted="*i64", out="*fp32")

def build(kernel, **constants):
    # names of Triton's generated launcher, which an argument would overwrite
    assert not {"params", "specialization", "options"} & set(kernel.arg_names), kernel.arg_names
    types, fixed = {}, {}
    for i, name in enumerate(kernel.arg_names):
        types[name] = "constexpr" if name in constants else POINTERS.get(name, "i32")
        if name in constants:
            fixed[(i,)] = constants[name]
    source = ASTSource(fn=kernel, signature=types, constexprs=fixed)
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print(kernel.__name__)

from outpace.verification.kernels.sample import sample_draft
from outpace.verification.kernels.pieces import RULES

for on in map(int, sys.argv[1:]):
    build(decide.scan, SPLIT=2048, CHUNK=32, LENGTHS=on > 0, ADJUST=on, ADJUST_Q=on, GREEDY=on > 0,
        GREEDY_Q=on > 0, CHUNKED=on == 2)
    build(match.race, SPLIT=2048, LENGTHS=on > 0, ADJUST=on)
    build(sample_draft, SPLIT=2048, CHUNK=32, SCAN_TILE=2048, MAX_LISTED=256, S=32, ADJUST=on, SHIFT=16)
    for rule in RULES.values() if len(sys.argv) > 2 else [RULES["token"]]:
        build(decide.finish, SPLIT=2048, CHUNKS=64, MAX_LISTED=256, G=8, S=32, RULE=rule, HAS_Q=True,
            HAS_LSE=on > 0, HAS_CUT=on == 2, LENGTHS=on > 0, HAS_INVALID=on > 0, ADJUST=on, ADJUST_Q=on,
            GREEDY=on > 0, GREEDY_Q=on > 0, LENIENT=on > 0)
build(cut.narrow, SPLIT=2048, CHUNK=32, SCAN_TILE=2048, MAX_LISTED=256, S=32, LENGTHS=True, ADJUST=2,
    ADJUST_Q=2, SHIFT=16, SHIFT_Q=0)
build(cut.widen, ROW_TILE=8192, LENGTHS=True, ADJUST=2, ADJUST_Q=2, SHIFT=16, SHIFT_Q=0)
build(match.compare, G=8, S=32, LENGTHS=True, HAS_INVALID=True)
build(edit.edit_rows, SPLIT=2048)
"""


def test_the_kernels_compile_for_a_gpu_that_is_not_here() -> None:
    levels = ["0", "1", "2"] if tiers.full else ["2"]  # 2 has every branch that 0 and 1 leave out
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *levels],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split().count("finish") == (9 if tiers.full else 1)
    assert "edit_rows" in done.stdout.split()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("B", "g", "V", "dtype"),
    [
        (67, 5, 51865, torch.bfloat16),
        (64, 5, 32000, torch.float16),
        (3, 20, 128256, torch.float32),
        (8, 1, 256000, torch.bfloat16),
    ],
)
def test_large_blocks_decide_as_the_eager_rules(
    rule: str, B: int, g: int, V: int, dtype: torch.dtype
) -> None:
    for soft in (True, False):
        block = block_of(B, g, V, soft=soft, ragged=soft, dtype=dtype)
        assert_same(kernels.verify(block, parse(rule)), eager.verify(block, parse(rule)), at_most=1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("V", [32000, 128256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [2.0, 6.0])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
        SamplingParams(top_k=200),
        SamplingParams(top_k=5000, top_p=0.9),
        SamplingParams(top_p=0.9),
        SamplingParams(min_p=0.02),
        SamplingParams(top_p=0),
    ],
)
def test_large_rows_are_cut_as_the_eager_rules_do(
    V: int, dtype: torch.dtype, scale: float, sampling: SamplingParams
) -> None:
    """Lists of tokens from many chunks, and rows of which more stay than a list holds."""
    block = block_of(8, 3, V, dtype=dtype, scale=scale)
    assert block.draft_logits is not None
    rows = [sampling]
    found, expected = (
        one.sample(block.draft_logits[:, 0], block.seed, block.start, 0, rows) for one in (kernels, eager)
    )
    assert torch.allclose(found.lse, expected.lse, atol=1e-4)
    assert int((found.tokens != expected.tokens).sum()) <= 1
    adjusted = dataclasses.replace(
        block,
        target_logits=warp(block.target_logits.float(), rows),
        draft_logits=warp(block.draft_logits.float(), rows),
    )
    for rule in ("token", "match"):
        assert_same(
            kernels.verify(block, parse(rule), 1.0, rows, rows), eager.verify(adjusted, parse(rule)), 1
        )
