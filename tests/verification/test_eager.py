"""With the same noise, the batched rules decide as the oracle does, row by row."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import outpace
from outpace.sampling import random
from outpace.sampling.random import Stream
from outpace.verification import eager, oracle
from outpace.verification.block import Block
from outpace.verification.rules import parse
from tests import tiers

pytest.importorskip("hypothesis", reason="hypothesis is not installed: pip install 'outpace[dev]'")
from hypothesis import given, settings
from hypothesis import strategies as st

RULES = ("token", "block", "match", "rejection", "sigmoid(-3, 5)")
Row = list[float]


def decide(
    rule: str,
    tokens: list[int],
    draft: list[Row] | None,
    target: list[Row],
    noise: dict[str, Any],
    lenience: float,
) -> tuple[int, int]:
    """Return the oracle's decision for one row.

    A row without draft tokens is decoded without speculation under every rule.
    """
    if rule == "match" or not tokens:
        return oracle.match(tokens, target, noise["gumbel"][: len(target)])
    r, u = noise["r"], noise["u"]
    if rule.startswith("sigmoid"):
        scale = parse(rule)
        return oracle.sigmoid(tokens, target, draft, r, u, scale.alpha, scale.beta)
    p = [oracle.softmax(row) for row in target]
    q = None if draft is None else [oracle.softmax(row) for row in draft]
    if rule == "token":
        return oracle.token(tokens, p, q, r, u, lenience)
    return {"block": oracle.block, "rejection": oracle.rejection}[rule](tokens, p, q, r, u)


def noise_of(seed: int, start: int, g: int, V: int) -> dict[str, Any]:
    """Return the random numbers that `verify` uses for a row, in the oracle's form."""
    key, first = torch.tensor(seed), torch.tensor(start)
    positions = first + torch.arange(g + 1)
    return {
        "r": random.uniform(key, positions[:g], first, Stream.ACCEPT).tolist(),
        "u": random.uniform(key, positions, first, Stream.RESIDUAL).tolist(),
        "gumbel": random.gumbel(key, positions, V).tolist(),
    }


def blocks(
    B: int, g: int, V: int, sharpness: float = 1.0, masked: float = 0.0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random draft tokens and logits.

    A share ``masked`` of the vocabulary is impossible, other tokens for p than for q.
    """

    def logits(n: int) -> Tensor:
        z = sharpness * torch.randn(B, n, V, dtype=torch.float64)
        out = torch.rand(B, n, V) < masked
        out.scatter_(-1, torch.randint(V, (B, n, 1)), False)
        return z.masked_fill(out, -math.inf).to(dtype)

    target = logits(g + 1)
    draft = torch.where(torch.rand(B, g, 1) < 0.5, target[:, :g] + 0.5 * logits(g), logits(g))
    draft = torch.where(draft.amax(-1, keepdim=True).isfinite(), draft, target[:, :g])
    tokens = torch.multinomial(draft.double().softmax(-1).flatten(0, 1), 1).view(B, g)
    return tokens, draft, target


def assert_equals_oracle(
    rule: str, tokens: Tensor, draft: Tensor | None, target: Tensor, lengths: list[int], lenience: float = 1.0
) -> None:
    B, g, V = target.shape[0], target.shape[1] - 1, target.shape[2]
    seeds, starts = [1000 + b for b in range(B)], [3 * b for b in range(B)]
    verdict = outpace.verify(
        tokens, draft, target, rule=rule, lenience=lenience, seed=seeds, position=starts, lengths=lengths
    )
    assert not verdict.bad.any()
    for b, length in enumerate(lengths):
        expected = decide(
            rule,
            tokens[b, :length].tolist(),
            None if draft is None else draft[b, :length].tolist(),
            target[b, : length + 1].tolist(),
            noise_of(seeds[b], starts[b], g, V),
            lenience,
        )
        assert (int(verdict.accepted[b]), int(verdict.next_token[b])) == expected, f"row {b}"


GRID: list[tuple[str, int, int, bool]] = list(
    itertools.product(RULES, [0, 1, 2, 6], [1, 2, 5, 100, 2500], [True, False])
)
PAIRS = tiers.pairwise(GRID, lambda cell: cell)


@pytest.mark.parametrize(("rule", "g", "V", "soft"), PAIRS)
def test_decisions_equal_the_oracles(rule: str, g: int, V: int, soft: bool) -> None:
    B = 60 if V < 1000 else 8
    for masked in (0.0, 0.5):
        tokens, draft, target = blocks(B, g, V, masked=masked)
        assert_equals_oracle(rule, tokens, draft if soft else None, target, [b % (g + 1) for b in range(B)])


@pytest.mark.parametrize("lenience", [0.9, 0.3, 0.01])
@pytest.mark.parametrize("soft", [True, False])
def test_lenient_decisions_equal_the_oracles(lenience: float, soft: bool) -> None:
    tokens, draft, target = blocks(200, 4, 6, sharpness=2.0, masked=0.2)
    assert_equals_oracle("token", tokens, draft if soft else None, target, [4] * 200, lenience)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.sampled_from(RULES),
    st.integers(0, 8),
    st.integers(1, 40),
    st.sampled_from([0.0, 0.1, 1.0, 10.0, 300.0]),
    st.sampled_from([0.0, 0.3, 0.9]),
    st.booleans(),
    st.integers(0, 2**31),
)
def test_decisions_equal_the_oracles_for_random_inputs(
    rule: str, g: int, V: int, sharpness: float, masked: float, soft: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    tokens, draft, target = blocks(6, g, V, sharpness, masked)
    assert_equals_oracle(rule, tokens, draft if soft else None, target, torch.randint(g + 1, (6,)).tolist())


def stable_decision(
    rule: str, tokens: list[int], draft: list[Row], target: list[Row], noise: dict[str, Any]
) -> Any:
    """Return the oracle's decision, or None where slightly different noise would change it."""
    answers = set()
    for nudge in (-2e-5, 0.0, 2e-5):
        near = {name: [x * (1 + nudge) for x in noise[name]] for name in "ru"}
        near["u"] = [x + nudge for x in noise["u"]]
        near["gumbel"] = noise["gumbel"]
        answers.add(decide(rule, tokens, draft, target, near, 1.0))
    if rule == "match" or not tokens:
        for z, e in zip(target, noise["gumbel"], strict=True):
            best = sorted((a + b for a, b in zip(z, e, strict=True)), reverse=True)
            if len(best) > 1 and best[0] - best[1] < 2e-5:
                return None
    return answers.pop() if len(answers) == 1 else None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rule", RULES)
def test_lower_precision_decides_alike_except_at_near_ties(rule: str, dtype: torch.dtype) -> None:
    B, g, V = 300, 3, 20
    tokens, draft, target = blocks(B, g, V, dtype=dtype)
    verdict = outpace.verify(tokens, draft, target, rule=rule, seed=list(range(B)), position=9)
    ties = 0
    for b in range(B):
        noise = noise_of(b, 9, g, V)
        expected = stable_decision(rule, tokens[b].tolist(), draft[b].tolist(), target[b].tolist(), noise)
        ties += expected is None
        if expected is not None:
            assert (int(verdict.accepted[b]), int(verdict.next_token[b])) == expected
    assert ties < B / 20


@pytest.mark.parametrize("rule", RULES)
def test_verdicts_do_not_depend_on_the_chunk_size(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, draft, target = blocks(23, 3, 11)
    draft[5:9] = target[5:9, :3]  # a rejection leaves no residual in these rows
    whole = outpace.verify(tokens, draft, target, rule=rule, seed=list(range(23)))
    for piece in (1, 100, 200):
        monkeypatch.setattr(eager, "PIECE", piece)
        monkeypatch.setattr(eager, "LARGE_VOCAB", 12 if piece == 100 else 1)
        chunked = outpace.verify(tokens, draft, target, rule=rule, seed=list(range(23)))
        assert torch.equal(chunked.accepted, whole.accepted)
        assert torch.equal(chunked.next_token, whole.next_token)


def test_passing_draft_lse_does_not_change_the_verdict() -> None:
    tokens, draft, target = blocks(50, 4, 30)
    for rule in ("token", "block", "rejection"):
        without_lse = outpace.verify(tokens, draft, target, rule=rule, seed=3)
        with_lse = outpace.verify(tokens, draft, target, rule=rule, seed=3, draft_lse=draft.logsumexp(-1))
        assert torch.equal(without_lse.accepted, with_lse.accepted)
        assert torch.equal(without_lse.next_token, with_lse.next_token)


@pytest.mark.parametrize("rule", RULES)
def test_rejected_token_is_never_resampled_at_equal_p_and_q(rule: str) -> None:
    """If p = q up to rounding, the residual is empty, and the next token is sampled from p."""
    tokens, draft, _ = blocks(500, 3, 8, dtype=torch.float32)
    target = torch.cat((draft + 1000.0, torch.randn(500, 1, 8)), 1)  # the same softmax, rounded otherwise
    verdict = outpace.verify(tokens, draft, target, rule=rule, seed=list(range(500)))
    assert not verdict.bad.any()
    if rule in ("token", "block"):
        assert (verdict.accepted == 3).float().mean() > 0.95
    exact = torch.cat((draft, torch.randn(500, 1, 8)), 1)
    if rule in ("token", "block", "rejection"):
        assert (outpace.verify(tokens, draft, exact, rule=rule, seed=list(range(500))).accepted == 3).all()


@pytest.mark.parametrize("rule", ["token", "block", "match", "rejection"])
def test_greedy_target_accepts_exactly_its_argmax(rule: str) -> None:
    tokens, _draft, target = blocks(100, 4, 5)
    tokens = torch.where(torch.rand(100, 4) < 0.7, target[:, :4].argmax(-1), tokens)
    verdict = outpace.verify(
        tokens, None, target, rule=rule, seed=1, sampling=outpace.SamplingParams(temperature=0)
    )
    for b in range(100):
        p = [oracle.softmax(row) for row in target[b].tolist()]
        assert (int(verdict.accepted[b]), int(verdict.next_token[b])) == oracle.greedy(tokens[b].tolist(), p)


@pytest.mark.parametrize("lenience", [1.0, 0.7, 0.2])
def test_greedy_lenience_accepts_tokens_near_the_largest_probability(lenience: float) -> None:
    tokens, draft, target = blocks(300, 4, 5)
    sampling = outpace.SamplingParams(temperature=0)
    verdict = outpace.verify(tokens, draft, target, lenience=lenience, seed=1, sampling=sampling)
    for b in range(300):
        p = [oracle.softmax(row) for row in target[b].tolist()]
        expected = oracle.greedy(tokens[b].tolist(), p, lenience)
        assert (int(verdict.accepted[b]), int(verdict.next_token[b])) == expected


def test_greedy_lenience_compares_probabilities_after_penalties() -> None:
    target = torch.tensor([[[2.0, 1.9, -5.0]] * 2])
    sampling = outpace.SamplingParams(temperature=0, repetition_penalty=2.0)
    without_prefix = outpace.verify(
        torch.tensor([[1]]), None, target, lenience=0.8, seed=0, sampling=sampling
    )
    assert without_prefix.accepted.item() == 1
    with_prefix = outpace.verify(
        torch.tensor([[1]]), None, target, lenience=0.8, seed=0, sampling=sampling, prefix=[[1, 1]]
    )
    assert with_prefix.accepted.item() == 0


def test_match_equals_decoding_without_speculation_token_for_token() -> None:
    """The text equals that of g = 0, for any draft tokens and any grouping into steps."""
    V, length, rows = 6, 12, 40
    table = torch.randn(V, V)
    seed = torch.arange(rows)

    def generate(g: int, hit_rate: float) -> list[list[int]]:
        texts = [[0] for _ in range(rows)]
        while min(map(len, texts)) <= length:
            last = torch.tensor([text[-1] for text in texts])
            drafts = torch.randint(V, (rows, g))
            context = torch.cat((last[:, None], drafts), 1)
            for i in range(g):  # a share of the draft tokens is right
                target_tokens = random.race(
                    table[context[:, i]], random.gumbel(seed, torch.tensor(list(map(len, texts))) + i, V)
                )
                hit = torch.rand(rows) < hit_rate
                drafts[:, i] = torch.where(hit, target_tokens, drafts[:, i])
                context[:, i + 1] = drafts[:, i]
            verdict = outpace.verify(
                drafts, None, table[context], rule="match", seed=seed, position=[len(text) for text in texts]
            )
            for b, text in enumerate(texts):
                text += [*drafts[b, : int(verdict.accepted[b])].tolist(), int(verdict.next_token[b])]
        return [text[: length + 1] for text in texts]

    baseline = generate(0, 0.0)
    assert baseline == [[int(t) for t in text] for text in baseline]
    for g, hit_rate in ((1, 0.0), (3, 0.5), (5, 1.0)):
        assert generate(g, hit_rate) == baseline


def test_rows_without_draft_tokens_decode_without_speculation_under_every_rule() -> None:
    tokens, draft, target = blocks(30, 3, 9)
    seeds = list(range(30))
    baseline = outpace.verify(tokens[:, :0], None, target[:, :1], seed=seeds, position=4)
    for rule in RULES:
        no_drafts = outpace.verify(
            tokens[:, :0], draft[:, :0], target[:, :1], rule=rule, seed=seeds, position=4
        )
        ragged = outpace.verify(tokens, draft, target, rule=rule, seed=seeds, position=4, lengths=[0, 3] * 15)
        assert torch.equal(no_drafts.next_token, baseline.next_token)
        assert torch.equal(ragged.next_token[::2], baseline.next_token[::2])
        assert (ragged.accepted[::2] == 0).all()


@pytest.mark.parametrize("rule", RULES)
def test_a_row_does_not_depend_on_its_neighbours(rule: str) -> None:
    tokens, draft, target = blocks(12, 3, 9)
    seeds, lengths = list(range(12)), [b % 4 for b in range(12)]
    whole = outpace.verify(tokens, draft, target, rule=rule, seed=seeds, position=5, lengths=lengths)
    for b in range(12):
        alone = outpace.verify(
            tokens[b : b + 1, : lengths[b]],
            draft[b : b + 1, : lengths[b]],
            target[b : b + 1, : lengths[b] + 1],
            rule=rule,
            seed=seeds[b],
            position=5,
        )
        assert (alone.accepted.item(), alone.next_token.item()) == (
            whole.accepted[b].item(),
            whole.next_token[b].item(),
        )


@pytest.mark.parametrize("rule", RULES)
def test_tokens_and_logits_past_the_length_of_a_row_are_ignored(rule: str) -> None:
    tokens, draft, target = blocks(8, 3, 9)
    lengths = [0, 1, 2, 3] * 2
    before = outpace.verify(tokens, draft, target, rule=rule, seed=2, lengths=lengths)
    for b, length in enumerate(lengths):
        tokens[b, length:] = -1
        draft[b, length:] = math.nan
        target[b, length + 1 :] = math.nan
    after = outpace.verify(tokens, draft, target, rule=rule, seed=2, lengths=lengths)
    assert not after.bad.any()
    assert torch.equal(before.accepted, after.accepted)
    assert torch.equal(before.next_token, after.next_token)


@pytest.mark.parametrize("V", [7, eager.LARGE_VOCAB])  # with the larger one, row by row
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("poisoned", ["target", "draft"])
def test_a_block_ends_before_unusable_logits(rule: str, poison: float, poisoned: str, V: int) -> None:
    """Draft tokens before them are accepted as without them. There is no next token if all are accepted."""
    B, g = 40, 3
    tokens, draft, target = blocks(B, g, V)
    target[:, :g] = draft + 0.5 * torch.randn(B, g, V)  # so that some are accepted
    ends = torch.arange(B) % (g + 1 if poisoned == "target" else g)
    cut = outpace.verify(tokens, draft, target, rule=rule, seed=6, lengths=ends)
    logits = {"target": target, "draft": draft}[poisoned]
    where = slice(None) if poison == -math.inf else 4
    for b, end in enumerate(ends.tolist()):
        logits[b, end, where] = poison
    verdict = outpace.verify(tokens, draft, target, rule=rule, seed=6)
    if rule == "match" and poisoned == "draft":  # which does not read them
        assert not verdict.bad.any()
        return
    assert torch.equal(verdict.accepted, cut.accepted)
    assert torch.equal(verdict.bad, cut.accepted == ends)
    assert torch.equal(verdict.next_token, cut.next_token.masked_fill(verdict.bad, 0))
    if V < eager.LARGE_VOCAB:
        assert len(set(verdict.accepted[verdict.bad].tolist())) > 1


@pytest.mark.parametrize("B", [2, 5])  # one row at a time, and all together
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_greedy_lenience_accepts_nothing_after_unusable_logits(poison: float, B: int) -> None:
    V = eager.LARGE_VOCAB
    tokens, _, target = blocks(B, 3, V)
    tokens[:] = target[:, :3].argmax(-1)
    target[:, 1] = poison
    verdict = outpace.verify(
        tokens, None, target, seed=1, lenience=0.5, sampling=[outpace.SamplingParams(temperature=0)] * B
    )
    assert verdict.bad.all()
    assert verdict.accepted.tolist() == [1] * B


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_unusable_draft_logits_are_flagged_when_draft_lse_is_passed(poison: float) -> None:
    tokens, draft, target = blocks(2, 2, 7)
    lse = draft.logsumexp(-1)
    draft[0, 0, 4] = poison
    for stored in (lse, draft.logsumexp(-1)):
        for rule in ("token", "block", "rejection"):
            verdict = outpace.verify(tokens, draft, target, rule=rule, seed=0, draft_lse=stored)
            assert verdict.bad.tolist() == [True, False]
            assert verdict.accepted[0] == 0


def test_a_sigmoid_that_underflows_everywhere_is_flagged() -> None:
    target = torch.full((3, 2, 5), -1000.0)
    target[..., 4] = -math.inf
    target[1] = 0
    tokens = torch.zeros(3, 1, dtype=torch.int64)
    verdict = outpace.verify(tokens, None, target, rule="sigmoid(-1, 1)", seed=0, lengths=[1, 1, 0])
    assert verdict.bad.tolist() == [True, False, False]  # the last row is decoded without speculation
    assert verdict.next_token[2] != 4


def test_unusable_logits_are_flagged_with_sampling_parameters() -> None:
    tokens, draft, target = blocks(2, 2, 7)
    target[1, 0, 2] = math.nan
    for sampling in (
        outpace.SamplingParams(temperature=0),
        outpace.SamplingParams(top_k=3, top_p=0.9, repetition_penalty=1.2),
    ):
        assert outpace.verify(tokens, draft, target, seed=0, sampling=sampling).bad.tolist() == [False, True]


@pytest.mark.parametrize("rule", ["token", "block", "match", "rejection"])
def test_impossible_tokens_are_never_output(rule: str) -> None:
    tokens, draft, target = blocks(2000, 2, 6, masked=0.5)
    verdict = outpace.verify(tokens, draft, target, rule=rule, seed=list(range(2000)))
    for i in range(2):
        accepted = verdict.accepted > i
        assert target[accepted, i].gather(-1, tokens[accepted, i : i + 1]).isfinite().all()
    last = target[torch.arange(2000), verdict.accepted]
    assert last.gather(-1, verdict.next_token[:, None]).isfinite().all()


@pytest.mark.parametrize("scale", [1e4, 65504.0])
def test_extreme_logits_are_decided_as_small_ones(scale: float) -> None:
    tokens, draft, target = blocks(200, 2, 6, dtype=torch.float32)
    shifted = outpace.verify(tokens, draft, (target * 8).round() / 8 + 8192, seed=list(range(200)))
    unshifted = outpace.verify(tokens, draft, (target * 8).round() / 8, seed=list(range(200)))
    assert torch.equal(shifted.accepted, unshifted.accepted)
    assert torch.equal(shifted.next_token, unshifted.next_token)
    corners = torch.where(torch.rand(200, 3, 6) < 0.5, scale, -scale)
    corners.scatter_(-1, torch.randint(6, (200, 3, 1)), scale)
    for rule in RULES:
        verdict = outpace.verify(tokens, None, corners.half(), rule=rule, seed=0)
        assert not verdict.bad.any()


@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize("lenience", [1.0, 0.4])
def test_rows_of_a_large_vocabulary_are_decided_one_by_one_alike(
    soft: bool, lenience: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    B, g, V = 60, 4, 40
    tokens, draft, target = blocks(B, g, V, dtype=torch.float32)
    target[: B // 2, :g] = draft[: B // 2] + 0.3 * torch.randn(B // 2, g, V)  # so that some are accepted
    lengths, seed = torch.arange(B) % (g + 1), torch.arange(B)
    block = Block(tokens, draft if soft else None, target, None, seed, seed + 7, lengths)
    expected = eager.verify(block, parse("token"), lenience)
    monkeypatch.setattr(eager, "LARGE_VOCAB", V)
    monkeypatch.setattr(eager, "FEW_ROWS", B)
    found = eager.verify(block, parse("token"), lenience)
    assert len(set(expected.accepted.tolist())) > 2 or not soft
    assert torch.equal(found.accepted, expected.accepted)
    assert torch.equal(found.next_token, expected.next_token)
    assert not found.bad.any()
