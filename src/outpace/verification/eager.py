"""Rules in batched PyTorch: any device, any float dtype, no host synchronization off the CPU.

Shapes: B rows, g draft tokens, V vocabulary entries. Row b has ``lengths[b]`` <= g draft tokens, and
later entries are ignored. p is the target's distribution and q the draft's, both a softmax of adjusted
logits.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from outpace.sampling import SamplingParams, random, warp
from outpace.sampling.random import Stream
from outpace.sampling.workspace import reusable_buffer, softmax
from outpace.verification.block import Block, SampledTokens, Verdict
from outpace.verification.rules import Rule

PIECE = 3 << 20  # logits processed at a time on the CPU, in a reused workspace
LARGE_VOCAB = 2048  # vocabulary size from which Python code per row costs less than copies of all rows
FEW_ROWS = 2  # most rows of a large vocabulary that are decided one by one

Outcome = tuple[Tensor, Tensor, Tensor]
"""Accepted draft tokens `[B]`, weights of the next token `[B, V]`, and rows without such weights `[B]`."""


def verify(block: Block, rule: Rule, lenience: float = 1.0) -> Verdict:
    """Apply a rule to a block.

    In rows without draft tokens, the next token is sampled with the target stream, whatever the rule.
    """
    if rule.name == "match" or block.tokens.shape[1] == 0:
        return match(block)
    B, _, V = block.target_logits.shape
    few_large = B <= FEW_ROWS and V >= LARGE_VOCAB and block.target_logits.device.type == "cpu"
    if rule.name == "token" and few_large and block.draft_lse is None:
        verdict = make_verdict(block, *token_by_row(block, lenience))
    else:
        r, u = noise(block)
        parts = pieces(block.target_logits)
        if len(parts) == 1:
            verdict = make_verdict(block, *decide(block, rule, lenience, r, u))
        else:
            decided = [decide(block.rows(rows), rule, lenience, r[rows], u[rows]) for rows in parts]
            verdict = make_verdict(block, *map(torch.cat, zip(*decided, strict=True)))
    return sample_undrafted_rows(block, verdict)


def decide(block: Block, rule: Rule, lenience: float, r: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the accepted draft tokens, the next token, and rows without a next token.

    All are ``[B]``. ``r`` and ``u`` are the uniforms of ``noise``.
    """
    if rule.name == "token":
        accepted, weights, bad = token(block, r, lenience)
    elif rule.name == "block":
        accepted, weights, bad = joint(block, r)
    elif rule.name == "sigmoid":
        accepted, weights, bad = approximate(block, r, rule.alpha, rule.beta)
    elif rule.name == "rejection":
        accepted, weights, bad = rejection(block, r)
    else:
        raise ValueError(f"rule: got {rule}; it must be token, block, sigmoid or rejection")
    return accepted, random.sample(weights, u.gather(1, accepted[:, None]).squeeze(1)), bad


def pieces(logits: Tensor) -> list[slice]:
    """Return slices of rows to process at a time: as few as ``PIECE`` allows, of about equal size."""
    B = logits.shape[0]
    if logits.device.type != "cpu" or B < 2:
        return [slice(0, B)]
    count = -(-B // max(1, PIECE // logits[0].numel()))
    step = -(-B // count)
    return [slice(first, first + step) for first in range(0, B, step)]


def token(block: Block, r: Tensor, lenience: float) -> Outcome:
    """Accept x with probability min(1, p(x)/(l·q(x))), left to right.

    The token at the first rejection is sampled from (p − q)+. This is Leviathan Alg. 1 with the lenience l of
    A.5, and Chen Alg. 2.
    """
    p, q = softmax(block.target_logits, "p"), draft_softmax(block)
    accept, bad = accepts(chosen(p, block), chosen(q, block), r, lenience), no_softmax(block, p, q)
    if block.greedy_accept is not None:
        accept |= block.greedy_accept
    accepted = leading(accept & block.drafted & ~bad[:, :-1])
    return accepted, remainder(block, p, q, accepted), at_end(bad, accepted)


def token_by_row(block: Block, lenience: float) -> tuple[Tensor, Tensor, Tensor]:
    """Apply ``token`` to each row only as far as its draft tokens are accepted.

    On a CPU, sums over a large vocabulary cost more than Python code per row.
    """
    greedy_accept = None if block.greedy_accept is None else block.greedy_accept.tolist()
    B, g = block.tokens.shape
    lengths = [g] * B if block.counts is None else block.counts.tolist()
    uniforms = random.halves(
        listed(block.seeds, B), listed(block.starts, B), g + 1, Stream.ACCEPT, block.level
    )
    ends = []
    for b, (tokens, length) in enumerate(zip(block.tokens.tolist(), lengths, strict=True)):
        n, q, qx = 0, None, 1.0
        while True:
            p = upcast(block.target_logits[b, n]).softmax(-1)
            if n == length:
                break
            px = float(p[tokens[n]])
            if block.draft_logits is not None:
                q = upcast(block.draft_logits[b, n]).softmax(-1)
                qx = float(q[tokens[n]])
            accept = px > 0 and uniforms[b][n][0] * (lenience * qx) <= px
            if not accept and not (greedy_accept and greedy_accept[b][n]):
                break
            n, q = n + 1, None
        bad = math.isnan(p[0]) or (q is not None and math.isnan(qx))  # then a softmax is NaN everywhere
        if q is not None:
            p.sub_(q).clamp_(min=0)
        elif n < length:  # a point mass, at the rejected token
            p[tokens[n]] = 0
        token = 0 if bad else random.sample_one(p, uniforms[b][n][1])
        if not bad and not p[token]:  # p equals q up to rounding, so there is no residual: sample from p
            token = random.sample_one(upcast(block.target_logits[b, n]).softmax(-1), uniforms[b][n][1])
        ends.append((n, token, bad))
    accepted, next_token, unusable = zip(*ends, strict=True)
    return torch.tensor(accepted), torch.tensor(next_token), torch.tensor(unusable)


def sample(
    logits: Tensor,
    seeds: Tensor | int,
    starts: Tensor | int,
    step: int,
    rows: list[SamplingParams] | None,
    level: int = 0,
    node: int = 0,
) -> SampledTokens:
    """Sample one draft token from each row of ``[B, V]``: see ``outpace.verification.sample``."""
    B = len(logits)
    adjusted = upcast(logits) if rows is None else warp(upcast(logits)[:, None], rows)[:, 0]
    seed, start = (torch.as_tensor(one, device=logits.device).expand(B) for one in (seeds, starts))
    u = random.uniform(seed, start + step, start, Stream.DRAFT, level, node)
    lse = torch.where(unusable(adjusted), torch.nan, adjusted.double().logsumexp(-1))
    return SampledTokens(random.sample(adjusted.softmax(-1), u).masked_fill(lse.isnan(), 0), lse)


def approximate(block: Block, r: Tensor, alpha: float, beta: float) -> Outcome:
    """Apply ``token`` with σ((z − alpha)/(beta − alpha)) in place of p and q: Wagner eq. 5 and 6."""

    def squash(logits: Tensor) -> Tensor:
        return ((upcast(logits) - alpha) / (beta - alpha)).sigmoid_()

    z, bad = block.target_logits, unusable(block.target_logits)
    px, qx, q = squash(of_tokens(z, block.tokens)).double(), point_masses(block), None
    if block.draft_logits is not None:
        bad[:, :-1] |= unusable(block.draft_logits) & block.drafted
        qx = squash(of_tokens(block.draft_logits, block.tokens)).double()
    accepted = leading(accepts(px, qx, r) & block.drafted & ~bad[:, :-1])
    if block.draft_logits is not None:
        q = squash(at(block.draft_logits, first_rejected(block, accepted)))
    weights = residual(block, squash(at(z, accepted)), q, accepted)
    # Logits far below alpha leave nothing to sample from.
    nothing = (weights.sum(-1) == 0) & (block.lengths > 0)
    return accepted, weights, at_end(bad, accepted) | nothing


def joint(block: Block, r: Tensor) -> Outcome:
    """Apply block verification: decide from the whole block how long a prefix to accept.

    This is Sun et al. 2024, Alg. 2. ``carry[i]`` = min(carry[i-1]·p/q, 1) is the probability with which the
    first i draft tokens may be accepted. The longest prefix i that passes its own test ``h[i]`` is accepted.
    After a shorter one, the next token is sampled from the residual (carry·p − q)+.

    The block ends before the first unusable logits. The output stays exact, because where a block ends may
    depend on the tokens before.
    """
    p, q = softmax(block.target_logits, "p"), draft_softmax(block)
    bad = no_softmax(block, p, q)
    block = replace(block, counts=torch.minimum(block.lengths, leading(~bad)))
    px, qx = chosen(p, block), chosen(q, block)
    g = block.tokens.shape[1]

    carry = torch.ones_like(px[:, :1]).repeat(1, g + 1)  # [B, g+1]
    for i in range(g):
        possible = (carry[:, i] > 0) & (px[:, i] > 0)
        carry[:, i + 1] = torch.where(possible, (carry[:, i] * px[:, i] / qx[:, i]).clamp(max=1), 0)

    if q is None:
        left = carry[:, 1:g] * (1 - px[:, 1:])
    else:
        left = (p[:, 1:g] * carry[:, 1:g, None].to(p.dtype)).sub_(q[:, 1:]).clamp_(min=0)
        left = left.sum(-1, dtype=torch.float64)
    # Without a residual, and with carry 1, a prefix is always accepted.
    free = (left == 0) & (carry[:, 1:g] == 1)
    h = torch.where(free, 1.0, left / (left + (1 - carry[:, 1:g])))
    h = torch.cat((h, carry[:, g:]), dim=1)  # [B, g], the test of prefixes 1..g
    prefix = torch.arange(1, g + 1, device=h.device)
    h = torch.where(prefix == block.lengths[:, None], carry[:, 1:], h)

    passed = (r <= h) & block.drafted
    accepted = (passed * prefix).amax(-1)
    scale = carry.gather(1, accepted[:, None])
    weights = remainder(block, p, q, accepted, scale)
    return accepted, weights, at_end(bad, accepted)


def argmax(block: Block) -> Verdict:
    """Accept draft tokens while they are the target's argmax.

    Every exact rule does this for greedy targets.
    """
    bad = unusable(block.target_logits)
    best = block.target_logits.argmax(-1)
    accepted = leading((best[:, :-1] == block.tokens) & block.drafted & ~bad[:, :-1])
    return make_verdict(block, accepted, at_end(best, accepted), at_end(bad, accepted))


def match(block: Block) -> Verdict:
    """Sample the target's own tokens with the target stream; accept draft tokens while they equal them."""
    bad = unusable(block.target_logits)
    if bad.device.type == "cpu":
        accepted, next_token = match_by_position(block, bad)
        return make_verdict(block, accepted, next_token, at_end(bad, accepted))
    target_tokens = sample_target(block.target_logits, block.seed[:, None], block.positions)
    accepted = leading((target_tokens[:, :-1] == block.tokens) & block.drafted & ~bad[:, :-1])
    return make_verdict(block, accepted, at_end(target_tokens, accepted), at_end(bad, accepted))


def match_by_position(block: Block, bad: Tensor) -> tuple[Tensor, Tensor]:
    """Apply ``match`` position by position, leaving out rows after a rejection.

    On a CPU, noise costs more than Python code per position. ``bad`` has the positions of unusable logits.
    """
    accepted, next_token = torch.zeros_like(block.lengths), torch.zeros_like(block.lengths)
    rows = torch.arange(len(accepted), device=accepted.device)
    for i, position in enumerate(block.positions.unbind(1)):
        target_tokens = sample_target(
            at(block.target_logits, torch.full_like(rows, i), rows), block.seed[rows], position[rows]
        )
        accepted[rows], next_token[rows] = i, target_tokens
        if i < block.tokens.shape[1]:
            equal = target_tokens == block.tokens[rows, i]
            rows = rows[block.drafted[rows, i] & equal & ~bad[rows, i]]
        if not len(rows):
            break
    return accepted, next_token


def sample_target(logits: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Sample as decoding without speculation does: ``[..., V]`` to ``[...]``."""
    return random.race(upcast(logits), random.gumbel(seed, position, logits.shape[-1]))


def sample_undrafted_rows(block: Block, verdict: Verdict) -> Verdict:
    """Replace the next token of rows without draft tokens by that of ``sample_target``."""
    if not block.ragged:
        return verdict
    undrafted = (block.lengths == 0) & ~verdict.bad
    if undrafted.device.type == "cpu":
        rows = undrafted.nonzero().squeeze(1)
        if not len(rows):
            return verdict
        sampled = sample_target(block.target_logits[rows, 0], block.seed[rows], block.start[rows])
        return Verdict(verdict.accepted, verdict.next_token.index_copy(0, rows, sampled), verdict.bad)
    sampled = sample_target(block.target_logits[:, 0], block.seed, block.start)
    return Verdict(verdict.accepted, torch.where(undrafted, sampled, verdict.next_token), verdict.bad)


def rejection(block: Block, r: Tensor) -> Outcome:
    """Accept x with probability p(x)/(M·q(x)), M = max p/q; else sample from p unmodified.

    This is Leviathan A.2. It is exact, weaker than ``token``, and here for comparison only.
    """
    p, q = softmax(block.target_logits, "p"), draft_softmax(block)
    px, qx = chosen(p, block), chosen(q, block)
    if q is None:
        certain = (p[:, :-1] > 0).sum(-1) == 1  # p(x) may round to 1 beside other possible tokens
        most = torch.where(certain, 1.0, torch.inf).to(px.dtype)
    else:
        most = torch.where(p[:, :-1] > 0, p[:, :-1] / q, 0).amax(-1).to(px.dtype)
    bad = no_softmax(block, p, q)
    accepted = leading(accepts(px, most * qx, r) & block.drafted & ~bad[:, :-1])
    return accepted, at(p, accepted), at_end(bad, accepted)


def accepts(px: Tensor, qx: Tensor, u: Tensor, lenience: float = 1.0) -> Tensor:
    """Return whether u <= p/(l·q), without the division.

    An impossible token is never accepted.
    """
    return (u * (lenience * qx) <= px) & (px > 0)


def remainder(
    block: Block, p: Tensor, q: Tensor | None, accepted: Tensor, scale: Tensor | None = None
) -> Tensor:
    """Return ``residual`` at the end of each row's accepted draft tokens.

    p is ``[B, g+1, V]`` and q is ``[B, g, V]``.
    """
    if q is None or scale is not None or p.device.type != "cpu" or p.shape[-1] < LARGE_VOCAB:
        q = None if q is None else at(q, first_rejected(block, accepted))
        return residual(block, at(p, accepted), q, accepted, scale)
    # On a CPU, a loop over the rows costs less than copying long rows together.
    weights = reusable_buffer("weights", (p.shape[0], p.shape[2]), p.dtype)
    ends = zip(weights, p, q, accepted.tolist(), block.lengths.tolist(), strict=True)
    for weight, row_p, row_q, n, drafted in ends:
        if n < drafted:
            torch.sub(row_p[n], row_q[n], out=weight)
        else:
            weight.copy_(row_p[n])
    weights.clamp_(min=0)
    for b in (weights.sum(-1) == 0).nonzero():  # as in `residual`
        weights[b] = p[b, accepted[b]]
    return weights


def residual(
    block: Block, p: Tensor, q: Tensor | None, accepted: Tensor, scale: Tensor | None = None
) -> Tensor:
    """Return the weights of the next token, ``[B, V]``.

    They are (scale·p − q)+ after a rejection, and p where all draft tokens were accepted. p is ``[B, V]``
    after the accepted draft tokens. q is ``[B, V]`` at the first rejected one, or None for point masses.
    """
    weights = p if scale is None else p * scale.to(p.dtype)
    rejected = (accepted < block.lengths)[:, None]
    if q is None:
        # p(x) <= 1 = q(x) at the rejected token, and q is 0 elsewhere.
        token = block.tokens.gather(1, first_rejected(block, accepted)[:, None])
        weights = weights.scatter(1, token, weights.gather(1, token).masked_fill_(rejected, 0))
    else:
        weights = (weights - q.mul_(rejected)).clamp_(min=0)
    # If p equals q up to rounding, there is no residual. Then p is used.
    empty = weights.sum(-1, keepdim=True) == 0
    if empty.device.type == "cpu" and not empty.any():
        return weights
    return torch.where(empty, p, weights)


def first_rejected(block: Block, accepted: Tensor) -> Tensor:
    """Return the index of the first rejected draft token.

    It is that of the last draft token where all were accepted, and 0 where there was none.
    """
    return torch.minimum(accepted, block.lengths - 1).clamp_(min=0)


def draft_softmax(block: Block) -> Tensor | None:
    """Return q, ``[B, g, V]``, or None for point masses."""
    if block.draft_logits is None:
        return None
    if block.draft_lse is None:
        return softmax(block.draft_logits, "q")
    logits = upcast(block.draft_logits)
    high = block.draft_lse.to(logits.dtype)  # two parts, since float32 rounds a large logsumexp too much
    low = (block.draft_lse - high).to(logits.dtype)
    return (logits - high[..., None] - low[..., None]).exp_()


def chosen(probabilities: Tensor | None, block: Block) -> Tensor:
    """Return the probability of each draft token, float64 ``[B, g]``."""
    if probabilities is None:
        return point_masses(block)
    return of_tokens(probabilities, block.tokens).to(torch.float64)


def point_masses(block: Block) -> Tensor:
    """Return the probability 1 for each draft token, float64 ``[B, g]``."""
    return torch.ones(block.tokens.shape, dtype=torch.float64, device=block.tokens.device)


def upcast(logits: Tensor) -> Tensor:
    """Convert logits to float32, unless they are float64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def of_tokens(table: Tensor, tokens: Tensor) -> Tensor:
    """Return ``table[b, i, tokens[b, i]]``: ``[B, n >= g, V]`` to ``[B, g]``."""
    return table[:, : tokens.shape[1]].gather(-1, tokens[..., None]).squeeze(-1)


def at(table: Tensor, index: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return ``table[b, index[b]]`` for every b, or for those in ``rows``: ``[B, n, V]`` to ``[B, V]``."""
    if rows is None:
        rows = torch.arange(table.shape[0], device=table.device)
    return table.flatten(0, 1).index_select(0, rows * table.shape[1] + index)


def leading(accept: Tensor) -> Tensor:
    """Return the number of true entries before the first false one, per row."""
    return accept.to(torch.int64).cumprod(-1).sum(-1)


def noise(block: Block) -> tuple[Tensor, Tensor]:
    """Return the uniforms of a step.

    Returns:
        Uniforms ``[B, g]`` that decide about each draft token, and uniforms ``[B, g+1]`` that sample the next
        token after n accepted ones.
    """
    accept, residual = random.accept_and_residual(
        block.seed[:, None], block.positions, block.start[:, None], block.level
    )
    return accept[:, :-1], residual


def listed(numbers: Tensor | int, rows: int) -> list[int]:
    """Return one number for all rows, or one per row, as a list of ints."""
    return numbers.tolist() if isinstance(numbers, Tensor) else [numbers] * rows


def unusable(logits: Tensor) -> Tensor:
    """Return a mask of positions without a softmax: the maximum is NaN, +inf or -inf."""
    return ~logits.amax(-1).isfinite()


def no_softmax(block: Block, p: Tensor, q: Tensor | None) -> Tensor:
    """Return the bad positions, ``[B, g+1]``.

    A softmax of NaN, +inf or nothing but -inf is NaN in every entry.
    """
    bad = p[..., 0].isnan()
    if q is not None:
        bad[:, :-1] |= q[..., 0].isnan() & block.drafted
    if block.draft_lse is not None and block.draft_logits is not None:  # then q is not a softmax
        bad[:, :-1] |= (unusable(block.draft_logits) | ~block.draft_lse.isfinite()) & block.drafted
    return bad


def at_end(table: Tensor, accepted: Tensor) -> Tensor:
    """Return each row's entry at the position after its accepted draft tokens: ``[B, g+1]`` to ``[B]``."""
    return table.gather(1, accepted[:, None]).squeeze(1)


def make_verdict(block: Block, accepted: Tensor, next_token: Tensor, bad: Tensor) -> Verdict:
    """Return the verdict, with next token 0 in bad rows, and nothing accepted in invalid ones."""
    if block.invalid is not None:
        accepted, bad = accepted.masked_fill(block.invalid, 0), bad | block.invalid
    elif bad.device.type == "cpu" and not bad.any():
        return Verdict(accepted, next_token, bad)
    return Verdict(accepted, next_token.masked_fill(bad, 0), bad)
