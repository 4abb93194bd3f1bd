"""Exact outcome distributions of each rule, by summing over every block that could have been drafted.

A pair of models is a pair of trees: `p[i]` and `q[i]` hold one distribution for each of the V**i prefixes of
length i (`[V**i, V]`, float64). An outcome is (tokens kept, next token), numbered by `code`. These sums use
the rules' acceptance probabilities, no random numbers, and share nothing with `outpace.verify`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Tree = Sequence[Floats]
Ending = tuple[int, float, Floats]  # tokens kept, probability, distribution of the next token
Endings = Callable[[Sequence[int], list[Floats], list[Floats]], Iterator[Ending]]


def node(tokens: Sequence[int], V: int) -> int:
    """Index of a prefix among those of its length."""
    index = 0
    for x in tokens:
        index = index * V + x
    return index


def outcomes(V: int, g: int) -> int:
    return sum(int(V ** (n + 1)) for n in range(g + 1))


def code(tokens: Sequence[int], V: int) -> int:
    """Number of the outcome whose kept tokens and next token are `tokens`."""
    return sum(int(V**n) for n in range(1, len(tokens))) + node(tokens, V)


def joint(p: Tree, q: Tree, g: int, endings: Endings) -> Floats:
    """P(kept tokens, next token) when g tokens are drafted from q."""
    V = p[0].shape[1]
    total = np.zeros(outcomes(V, g))
    for block in itertools.product(range(V), repeat=g):
        ps = [p[i][node(block[:i], V)] for i in range(g + 1)]
        qs = [q[i][node(block[:i], V)] for i in range(g)]
        chance = float(np.prod([qs[i][x] for i, x in enumerate(block)]))
        if chance == 0:
            continue
        for n, probability, following in endings(block, ps, qs):
            if probability > 0:
                at = code([*block[:n], 0], V)
                total[at : at + V] += chance * probability * following
    return total


def normalized(weights: Floats, otherwise: Floats) -> Floats:
    return weights / weights.sum() if weights.sum() > 0 else otherwise


def token(lenience: float = 1.0) -> Endings:
    def endings(block: Sequence[int], p: list[Floats], q: list[Floats]) -> Iterator[Ending]:
        reached = 1.0
        for i, x in enumerate(block):
            keep = min(1.0, p[i][x] / (lenience * q[i][x]))
            yield i, reached * (1 - keep), normalized(np.maximum(p[i] - q[i], 0), p[i])
            reached *= keep
        yield len(block), reached, p[len(block)]

    return endings


def block(tokens: Sequence[int], p: list[Floats], q: list[Floats]) -> Iterator[Ending]:
    g = len(tokens)
    carry = [1.0]
    for i, x in enumerate(tokens):
        carry.append(min(1.0, carry[i] * p[i][x] / q[i][x]))
    rest = [np.maximum(carry[i] * p[i] - q[i], 0) for i in range(g)]

    def passes(i: int) -> float:
        left = rest[i].sum()
        return 1.0 if left == 0 and carry[i] == 1 else float(left / (left + (1 - carry[i])))

    h = [1.0, *(passes(i) for i in range(1, g)), carry[g]]
    if g == 0:
        h = [1.0]
    none_longer = 1.0
    for n in range(g, -1, -1):
        yield n, h[n] * none_longer, p[g] if n == g else normalized(rest[n], p[n])
        none_longer *= 1 - h[n]


def match(tokens: Sequence[int], p: list[Floats], q: list[Floats]) -> Iterator[Ending]:
    reached = 1.0
    for i, x in enumerate(tokens):
        other = p[i].copy()
        other[x] = 0
        yield i, reached * other.sum(), normalized(other, other)
        reached *= float(p[i][x])
    yield len(tokens), reached, p[len(tokens)]


def rejection(tokens: Sequence[int], p: list[Floats], q: list[Floats]) -> Iterator[Ending]:
    reached = 1.0
    for i, x in enumerate(tokens):
        with np.errstate(divide="ignore", invalid="ignore"):
            most = float(np.where(p[i] > 0, p[i] / q[i], 0).max())
        keep = p[i][x] / (most * q[i][x])
        yield i, reached * (1 - keep), p[i]
        reached *= keep
    yield len(tokens), reached, p[len(tokens)]


def sigmoid(p_hat: Tree, q_hat: Tree) -> Endings:
    """Wagner's rule: `token` with other numbers than the distributions that tokens come from."""

    def endings(block: Sequence[int], p: list[Floats], q: list[Floats]) -> Iterator[Ending]:
        V, g = len(p[0]), len(block)
        ps = [p_hat[i][node(block[:i], V)] for i in range(g + 1)]
        qs = [q_hat[i][node(block[:i], V)] for i in range(g)]
        reached = 1.0
        for i, x in enumerate(block):
            keep = min(1.0, ps[i][x] / qs[i][x])
            yield i, reached * (1 - keep), normalized(np.maximum(ps[i] - qs[i], 0), normalized(ps[i], ps[i]))
            reached *= keep
        yield g, reached, normalized(ps[g], ps[g]) if g else p[0]

    return endings


def text(p: Tree, length: int) -> Floats:
    """What the target alone writes: P(tokens) over all V**length texts."""
    V = p[0].shape[1]
    total = np.ones(1)
    for i in range(length):
        total = (total[:, None] * p[i][: V**i]).reshape(-1)
    return total


def completed(outcome: Floats, p: Tree, g: int) -> Floats:
    """The first g+1 tokens, when plain decoding goes on after each outcome."""
    V = p[0].shape[1]
    total = np.zeros(V ** (g + 1))
    for n in range(g + 1):
        for tokens in itertools.product(range(V), repeat=n + 1):
            rest = np.full(1, outcome[code(tokens, V)])
            for i in range(n + 1, g + 1):
                first = node(tokens, V) * V ** (i - n - 1)
                rest = (rest[:, None] * p[i][first : first + V ** (i - n - 1)]).reshape(-1)
            first = node(tokens, V) * V ** (g - n)
            total[first : first + V ** (g - n)] += rest
    return total


def kept(outcome: Floats, V: int, g: int) -> float:
    """Expected number of drafted tokens kept."""
    at, mean = 0, 0.0
    for n in range(g + 1):
        mean += n * float(outcome[at : at + V ** (n + 1)].sum())
        at += V ** (n + 1)
    return mean
