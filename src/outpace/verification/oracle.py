"""Rules as the papers state them: float64, one sequence at a time, slow and obvious.

This file shares no code with the rest, because the rest is tested against it. Distributions and random
numbers come in as arguments:

- ``tokens``: the g draft tokens.
- ``p``: ``[g+1][V]`` target distributions, ``p[i]`` before token i, ``p[g]`` after the last.
- ``q``: ``[g][V]`` draft distributions, or None where the draft tokens are point masses.
- ``r``: ``[g]`` uniforms that decide about each draft token.
- ``u``: ``[g+1]`` uniforms. ``u[n]`` samples the next token when n are accepted.

Each rule returns the number of accepted draft tokens and the next token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Row = Sequence[float]


def softmax(logits: Row) -> list[float]:
    """Return the softmax of logits."""
    top = max(logits)
    weights = [math.exp(z - top) for z in logits]
    total = math.fsum(weights)
    return [w / total for w in weights]


def point_masses(tokens: Sequence[int], vocab_size: int) -> list[list[float]]:
    """Return a distribution for each token that puts all probability on it."""
    return [[1.0 if y == x else 0.0 for y in range(vocab_size)] for x in tokens]


def sample(weights: Row, u: float) -> int:
    """Sample by inverse CDF: return the first token whose running sum exceeds u times the total."""
    total = 0.0
    for w in weights:
        total += w
    running = 0.0
    for x, w in enumerate(weights):
        running += w
        if running > u * total:
            return x
    raise ValueError("no token has weight")


def positive_part(p: Row, q: Row) -> list[float]:
    """Return (p - q)+ of two distributions."""
    return [max(0.0, a - b) for a, b in zip(p, q, strict=True)]


def token(
    tokens: Sequence[int], p: Sequence[Row], q: Sequence[Row] | None, r: Row, u: Row, lenience: float = 1.0
) -> tuple[int, int]:
    """Apply Leviathan Alg. 1, with the lenience of A.5 and an unchanged residual."""
    if q is None:
        q = point_masses(tokens, len(p[0]))
    n = len(tokens)
    for i, x in enumerate(tokens):
        if p[i][x] == 0 or r[i] * lenience * q[i][x] > p[i][x]:  # r > p / (l q)
            n = i
            break
    if n == len(tokens):
        return n, sample(p[n], u[n])
    rest = positive_part(p[n], q[n])
    return n, sample(rest if sum(rest) > 0 else p[n], u[n])


def greedy(tokens: Sequence[int], p: Sequence[Row], lenience: float = 1.0) -> tuple[int, int]:
    """Apply Leviathan A.5 to a greedy target: accept x while p(x) >= l max p.

    p is the target's distribution before the argmax.
    """
    for i, x in enumerate(tokens):
        best = max(range(len(p[i])), key=p[i].__getitem__)
        if x != best and (lenience == 1 or p[i][x] < lenience * p[i][best]):
            return i, best
    last = p[len(tokens)]
    return len(tokens), max(range(len(last)), key=last.__getitem__)


def block(
    tokens: Sequence[int], p: Sequence[Row], q: Sequence[Row] | None, r: Row, u: Row
) -> tuple[int, int]:
    """Apply Sun et al. 2024, Alg. 2."""
    g = len(tokens)
    if q is None:
        q = point_masses(tokens, len(p[0]))
    carry = [1.0]  # p_0, p_1, ... in the paper
    for i, x in enumerate(tokens):
        if carry[i] == 0 or p[i][x] == 0:
            carry.append(0.0)
        elif q[i][x] == 0:
            carry.append(1.0)
        else:
            carry.append(min(carry[i] * p[i][x] / q[i][x], 1.0))

    def rest(i: int) -> list[float]:
        return positive_part([carry[i] * a for a in p[i]], q[i])

    n = 0
    for i in range(1, g + 1):
        if i == g:
            h = carry[g]
        else:
            left = math.fsum(rest(i))
            h = 1.0 if left == 0 and carry[i] == 1 else left / (left + (1 - carry[i]))
        if r[i - 1] <= h:
            n = i
    if n == g:
        return n, sample(p[n], u[n])
    return n, sample(rest(n) if sum(rest(n)) > 0 else p[n], u[n])


def match(tokens: Sequence[int], logits: Sequence[Row], noise: Sequence[Row]) -> tuple[int, int]:
    """Accept draft tokens while they equal the target's own Gumbel-max samples.

    ``noise`` is ``[g+1][V]``.
    """
    own = []
    for z, e in zip(logits, noise, strict=True):
        scores = [a + b for a, b in zip(z, e, strict=True)]
        own.append(max(range(len(scores)), key=scores.__getitem__))
    n = 0
    while n < len(tokens) and own[n] == tokens[n]:
        n += 1
    return n, own[n]


def sigmoid(
    tokens: Sequence[int],
    target_logits: Sequence[Row],
    draft_logits: Sequence[Row] | None,
    r: Row,
    u: Row,
    alpha: float,
    beta: float,
) -> tuple[int, int]:
    """Apply Wagner eq. 5 and 6: Alg. 1 with sigmoids of scaled logits in place of distributions."""

    def squash(z: float) -> float:
        return 0.0 if z == -math.inf else 1 / (1 + math.exp(-(z - alpha) / (beta - alpha)))

    p = [[squash(z) for z in row] for row in target_logits]
    q = None if draft_logits is None else [[squash(z) for z in row] for row in draft_logits]
    return token(tokens, p, q, r, u)


def rejection(
    tokens: Sequence[int], p: Sequence[Row], q: Sequence[Row] | None, r: Row, u: Row
) -> tuple[int, int]:
    """Apply Leviathan A.2: one attempt at rejection sampling with M = max p/q, else a sample from p."""
    if q is None:
        q = point_masses(tokens, len(p[0]))
    for i, x in enumerate(tokens):
        most = max((math.inf if b == 0 else a / b) for a, b in zip(p[i], q[i], strict=True) if a > 0)
        if p[i][x] == 0 or q[i][x] == 0 or r[i] * most * q[i][x] > p[i][x]:
            return i, sample(p[i], u[i])
    return len(tokens), sample(p[len(tokens)], u[len(tokens)])
