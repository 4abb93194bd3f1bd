"""The rules in batched PyTorch: any device, any float dtype, no host synchronization off the CPU.

Shapes: B rows, g drafted tokens, V tokens. Row b drafted lengths[b] <= g tokens; what lies past them is ignored.
p is the target's distribution, q the draft's, both softmaxed from adjusted logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outpace import random
from outpace.random import Stream
from outpace.verify.block import Block, Verdict
from outpace.verify.rules import Rule


def verify(block: Block, rule: Rule, lenience: float = 1.0) -> Verdict:
    """Apply a rule to a block. Rows that drafted nothing draw from the target stream, whatever the rule."""
    if rule.name == "match" or block.tokens.shape[1] == 0:
        return match(block)
    if rule.name == "token":
        verdict = token(block, lenience)
    elif rule.name == "block":
        verdict = joint(block)
    elif rule.name == "sigmoid":
        verdict = approximate(block, rule.alpha, rule.beta)
    else:
        verdict = rejection(block)
    return plain_where_undrafted(block, verdict)


def token(block: Block, lenience: float) -> Verdict:
    """Keep x with probability min(1, p(x)/(l·q(x))), left to right; redraw the first one lost from (p − q)+.

    Leviathan Alg. 1 with A.5's lenience l; Chen Alg. 2.
    """
    p, q = target_probabilities(block), draft_probabilities(block)
    return keep_or_correct(block, p, q, no_softmax(block, p, q), lenience)


def approximate(block: Block, alpha: float, beta: float) -> Verdict:
    """Wagner eq. 5 and 6: as `token`, with σ((z − alpha)/(beta − alpha)) in the place of p and q."""

    def squash(logits: Tensor) -> Tensor:
        return ((wide(logits) - alpha) / (beta - alpha)).sigmoid_()

    bad = ~usable(block.target_logits)
    q = None
    if block.draft_logits is not None:
        q = squash(block.draft_logits)
        bad[:, :-1] |= ~usable(block.draft_logits) & block.drafted
    return keep_or_correct(block, squash(block.target_logits), q, among_drafted(block, bad))


def keep_or_correct(block: Block, p: Tensor, q: Tensor | None, bad: Tensor, lenience: float = 1.0) -> Verdict:
    keep = accepts(chosen(p, block.tokens), chosen(q, block.tokens), accept_noise(block), lenience)
    if block.greedy_keep is not None:
        keep |= block.greedy_keep
    accepted = leading(keep & block.drafted)
    return finish(block, accepted, residual(block, p, q, accepted), bad)


def joint(block: Block) -> Verdict:
    """Block verification (Sun et al. 2024, Alg. 2): decide how long a prefix to keep from the whole block.

    carry[i] is the probability with which the first i drafts may be kept, min(carry[i-1]·p/q, 1). The longest
    prefix i that passes its own test h[i] stays; what a shorter one leaves over, (carry·p − q)+, corrects it.
    """
    p, q = target_probabilities(block), draft_probabilities(block)
    g = block.tokens.shape[1]
    px, qx = chosen(p, block.tokens), chosen(q, block.tokens)

    carry = torch.ones_like(px[:, :1]).repeat(1, g + 1)  # [B, g+1]
    for i in range(g):
        possible = (carry[:, i] > 0) & (px[:, i] > 0)
        carry[:, i + 1] = torch.where(possible, (carry[:, i] * px[:, i] / qx[:, i]).clamp(max=1), 0)

    if q is None:
        left = carry[:, 1:g] * (1 - px[:, 1:])
    else:
        left = (
            (carry[:, 1:g, None].to(p.dtype) * p[:, 1:g])
            .sub_(q[:, 1:])
            .clamp_(min=0)
            .sum(-1, dtype=torch.float64)
        )
    # Nothing left over and nothing to lose: such a prefix may always be kept.
    free = (left == 0) & (carry[:, 1:g] == 1)
    h = torch.where(free, 1.0, left / (left + 1 - carry[:, 1:g]))
    h = torch.cat((h, carry[:, g:]), dim=1)  # [B, g], the test of prefixes 1..g
    prefix = torch.arange(1, g + 1, device=h.device)
    h = torch.where(prefix == block.lengths[:, None], carry[:, 1:], h)

    passed = (accept_noise(block) <= h) & block.drafted
    accepted = (passed * prefix).amax(-1)
    scale = carry.gather(1, accepted[:, None])
    return finish(block, accepted, residual(block, p, q, accepted, scale), no_softmax(block, p, q))


def match(block: Block) -> Verdict:
    """Draw the target's own tokens with the target stream's noise; keep drafts while they are the same."""
    V = block.target_logits.shape[-1]
    own = random.race(wide(block.target_logits), random.gumbel(block.seed[:, None], block.positions, V))
    accepted = leading((own[:, :-1] == block.tokens) & block.drafted)
    next_token = own.gather(1, accepted[:, None]).squeeze(1)
    return settle(block, accepted, next_token, among_drafted(block, ~usable(block.target_logits)))


def rejection(block: Block) -> Verdict:
    """Leviathan A.2: keep x with probability p(x)/(M·q(x)), M = max p/q, else draw from p unmodified.

    Exact, and weaker than `token`; here for comparison only.
    """
    p, q = target_probabilities(block), draft_probabilities(block)
    px, qx = chosen(p, block.tokens), chosen(q, block.tokens)
    if q is None:
        most = torch.where(px == 1, 1.0, torch.inf)
    else:
        ratio = p[:, :-1] / q
        most = torch.where(p[:, :-1] > 0, ratio, 0).amax(-1).to(px.dtype)
    accepted = leading(accepts(px, most * qx, accept_noise(block)) & block.drafted)
    return finish(block, accepted, at(p, accepted), no_softmax(block, p, q))


def accepts(px: Tensor, qx: Tensor, u: Tensor, lenience: float = 1.0) -> Tensor:
    """u <= p/(l·q), without the division; an impossible token is never kept."""
    return (u * (lenience * qx) <= px) & (px > 0)


def residual(
    block: Block, p: Tensor, q: Tensor | None, accepted: Tensor, scale: Tensor | None = None
) -> Tensor:
    """Weights of the next token, `[B, V]`: (scale·p − q)+ at the first lost draft, p where all were kept."""
    row = at(p, accepted)
    weights = row if scale is None else row * scale.to(row.dtype)
    last = block.tokens.shape[1] - 1
    lost = (accepted < block.lengths)[:, None]
    if q is None:
        # p(x) <= 1 = q(x) at the lost token, and q is 0 elsewhere.
        token = block.tokens.gather(1, accepted.clamp(max=last)[:, None])
        weights = torch.where(lost, weights.scatter(1, token, 0), row)
    else:
        weights = torch.where(lost, (weights - at(q, accepted.clamp(max=last))).clamp_(min=0), row)
    # p and q equal up to rounding leave nothing over; then p is as good.
    return torch.where(weights.sum(-1, keepdim=True) > 0, weights, row)


def plain_where_undrafted(block: Block, verdict: Verdict) -> Verdict:
    if not block.ragged:
        return verdict
    undrafted = block.lengths == 0
    if undrafted.device.type == "cpu" and not undrafted.any():
        return verdict
    logits = wide(block.target_logits[:, 0])
    own = random.race(logits, random.gumbel(block.seed, block.start, logits.shape[-1]))
    return Verdict(
        verdict.accepted, torch.where(undrafted & ~verdict.bad, own, verdict.next_token), verdict.bad
    )


def target_probabilities(block: Block) -> Tensor:
    return softmax(block.target_logits)


def draft_probabilities(block: Block) -> Tensor | None:
    if block.draft_logits is None:
        return None
    if block.draft_lse is None:
        return softmax(block.draft_logits)
    return (wide(block.draft_logits) - block.draft_lse[..., None]).exp_()


def softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def chosen(probabilities: Tensor | None, tokens: Tensor) -> Tensor:
    """Probability of each drafted token, float64 `[B, g]`; None stands for point masses."""
    if probabilities is None:
        return torch.ones(tokens.shape, dtype=torch.float64, device=tokens.device)
    return probabilities[:, : tokens.shape[1]].gather(-1, tokens[..., None]).squeeze(-1).to(torch.float64)


def at(rows: Tensor, index: Tensor) -> Tensor:
    """rows[b, index[b]] for every b: `[B, n, V]` to `[B, V]`."""
    return rows[torch.arange(rows.shape[0], device=rows.device), index]


def leading(keep: Tensor) -> Tensor:
    """How many of each row's entries are true before the first false one."""
    return keep.to(torch.int64).cumprod(-1).sum(-1)


def accept_noise(block: Block) -> Tensor:
    return random.uniform(block.seed[:, None], block.positions[:, :-1], block.start[:, None], Stream.ACCEPT)


def residual_noise(block: Block, accepted: Tensor) -> Tensor:
    return random.uniform(block.seed, block.start + accepted, block.start, Stream.RESIDUAL)


def usable(logits: Tensor) -> Tensor:
    return logits.amax(-1).isfinite()


def no_softmax(block: Block, p: Tensor, q: Tensor | None) -> Tensor:
    """Rows without a distribution: a softmax that meets NaN, +inf or only -inf is NaN in every entry."""
    bad = p[..., 0].isnan()
    if q is not None:
        bad[:, :-1] |= q[..., 0].isnan() & block.drafted
    return among_drafted(block, bad)


def among_drafted(block: Block, bad: Tensor) -> Tensor:
    """Whether any of the g+1 positions is bad, those past a row's drafts left out: `[B, g+1]` to `[B]`."""
    bad[:, 1:] &= block.drafted
    return bad.any(-1)


def finish(block: Block, accepted: Tensor, weights: Tensor, bad: Tensor) -> Verdict:
    return settle(block, accepted, random.draw(weights, residual_noise(block, accepted)), bad)


def settle(block: Block, accepted: Tensor, next_token: Tensor, bad: Tensor) -> Verdict:
    bad = bad | block.bad
    return Verdict(accepted.masked_fill(bad, 0), next_token.masked_fill(bad, 0), bad)
