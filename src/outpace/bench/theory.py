"""Speedup of speculative decoding in closed form: Leviathan et al. 2023.

The formulas are those of section 3 and appendices A.2 and A.5. Symbols:

- ``alpha``: probability that a draft token is accepted, independent of the others.
- ``g``: draft tokens per forward pass of the target.
- ``c``: time of a draft's forward pass, relative to the target's, which does not depend on g.
- ``ops``: operations of a draft's forward pass, relative to the target's for a token.

Functions take numbers or arrays, which broadcast. ``accepted_probabilities`` takes numbers and returns an
array. Functions of distributions take arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.ArrayLike
Found = Any  # a float for numbers, an array for arrays

LONGEST = 1000  # the largest g that `best_length` considers, by default
MOST_SEARCHED = 100_000  # draft tokens; more would fill the memory


def expected_tokens(alpha: Numbers, g: Numbers) -> Found:
    """Return the expected tokens per forward pass of the target: equation 1, ``(1 − α^(g+1))/(1 − α)``."""
    alpha, g = _probability("alpha", alpha), _drafts(g)
    sure = alpha == 1
    rest = np.where(sure, 1.0, 1 - alpha)
    return _scalar(np.where(sure, g + 1.0, (1 - alpha ** (g + 1)) / rest))


def speedup(alpha: Numbers, g: Numbers, c: Numbers = 0.0) -> Found:
    """Return the speedup over decoding without speculation: theorem 3.8."""
    with np.errstate(over="ignore"):  # 0 is right where the time is too large for a float
        return _scalar(expected_tokens(alpha, g) / (1 + _drafts(g) * _cost("c", c)))


def measured_speedup(tokens: Numbers, g: Numbers, step: Numbers, target: Numbers, baseline: Numbers) -> Found:
    """Return the speedup where a forward pass over more tokens takes longer: theorem 3.8 with measured times.

    Args:
        tokens: Tokens per step.
        g: Number of draft tokens.
        step: Time of a draft's forward pass, of which there are g.
        target: Time of the target's forward pass over all g + 1 tokens, with verification.
        baseline: Time of the target's forward pass over a single token, with verification.
    """
    time = _drafts(g) * _cost("step", step) + _cost("target", target)
    return _scalar(_cost("tokens", tokens) * _cost("baseline", baseline) / time)


def accepted_probabilities(alpha: float, g: int) -> Found:
    """Return the probabilities ``[g + 1]`` that 0, 1, ... g draft tokens of a forward pass are accepted.

    They are a truncated geometric distribution.
    """
    alpha, g = float(_probability("alpha", alpha)), int(_drafts(g))
    return np.append(alpha ** np.arange(g) * (1 - alpha), alpha**g)


def operations(alpha: Numbers, g: Numbers, ops: Numbers = 0.0) -> Found:
    """Return the operations relative to decoding without speculation: theorem 3.11."""
    g = _drafts(g)
    with np.errstate(over="ignore"):  # inf is right where they are too many for a float
        return _scalar((g * _cost("ops", ops) + g + 1) / expected_tokens(alpha, g))


def best_length(alpha: Numbers, c: Numbers, most: int = LONGEST) -> Any:
    """Return the g with the largest ``speedup``: section 3.5.

    It is 0 where no draft pays, and the smallest of several.

    Args:
        alpha: Acceptance rate.
        c: Time of a draft's forward pass, relative to the target's.
        most: Largest g to consider.

    Returns:
        An int for numbers, an array for arrays.

    Raises:
        ValueError: ``most`` is no int from 0 to ``MOST_SEARCHED``.
    """
    if not isinstance(most, int) or not 0 <= most <= MOST_SEARCHED:
        raise ValueError(f"most: got {most!r}; it must be an int from 0 to {MOST_SEARCHED}")
    speeds = speedup(np.asarray(alpha)[..., None], np.arange(most + 1), np.asarray(c)[..., None])
    best = np.argmax(np.round(speeds, 12), axis=-1)
    return int(best) if best.ndim == 0 else best


def least_speedup(alpha: Numbers, c: Numbers) -> Found:
    """Return the least speedup of the best g: corollary 3.9.

    It is ``(1 + α)/(1 + c)`` where α > c, and 1 elsewhere.
    """
    alpha, c = _probability("alpha", alpha), _cost("c", c)
    return _scalar(np.where(alpha > c, (1 + alpha) / (1 + c), 1.0))


def oracle_speedup(alpha: Numbers, c: Numbers) -> Found:
    """Return the speedup if the number of accepted draft tokens was known in advance: section 3.5.

    No other draft tokens are made then. A forward pass brings 1/(1 − α) tokens after α/(1 − α) draft tokens.
    No choice of draft lengths is faster.
    """
    alpha, c = _probability("alpha", alpha), _cost("c", c)
    with np.errstate(divide="ignore"):
        return _scalar(1 / (1 - alpha + alpha * c))


def needed_alpha(c: Numbers, at_least: Numbers = 1.0, g: Numbers = 1) -> Found:
    """Return the least α at which the speedup is ``at_least`` with g draft tokens; NaN where none is enough.

    Any speedup needs α > c, for which g = 1 is enough.
    """
    c, at_least, g = np.broadcast_arrays(_cost("c", c), np.asarray(at_least, float), _drafts(g))
    low, high = np.zeros(c.shape), np.ones(c.shape)
    enough = speedup(high, g, c) >= at_least
    for _ in range(60):  # speedup grows with α
        middle = (low + high) / 2
        reached = speedup(middle, g, c) >= at_least
        low, high = np.where(reached, low, middle), np.where(reached, middle, high)
    return _scalar(np.where(enough, high, np.nan))


def acceptance(p: npt.ArrayLike, q: npt.ArrayLike, lenience: float = 1.0) -> Found:
    """Return the acceptance rate β of distributions ``[..., V]``: ``Σ min(q, p/l)``, equation 3 and A.5.

    Raises:
        ValueError: ``lenience`` is not in (0, 1], or an argument is no distribution.
    """
    p, q = _distribution("p", p), _distribution("q", q)
    if not 0 < lenience <= 1:
        raise ValueError(f"lenience: got {lenience!r}; it must be in (0, 1]")
    return _scalar(np.minimum(q, p / lenience).sum(-1))


def divergence(p: npt.ArrayLike, q: npt.ArrayLike) -> Found:
    """Return D_LK of definition 3.2: ``Σ|p − q| / 2``, which is 1 − β."""
    return _scalar(np.abs(_distribution("p", p) - _distribution("q", q)).sum(-1) / 2)


def rejection_acceptance(p: npt.ArrayLike, q: npt.ArrayLike) -> Found:
    """Return the acceptance rate of ordinary rejection sampling (A.2): ``min q/p``, never more than β."""
    p, q = _distribution("p", p), _distribution("q", q)
    ratio = np.divide(q, p, out=np.full(np.broadcast_shapes(p.shape, q.shape), np.inf), where=p > 0)
    return _scalar(ratio.min(-1))


def _probability(name: str, value: Any) -> npt.NDArray[np.float64]:
    found = np.asarray(value, float)
    if not ((found >= 0) & (found <= 1)).all():
        raise ValueError(f"{name}: got {_shown(value)}; it must be in [0, 1]")
    return found


def _cost(name: str, value: Any) -> npt.NDArray[np.float64]:
    found = np.asarray(value, float)
    if not ((found >= 0) & np.isfinite(found)).all():
        raise ValueError(f"{name}: got {_shown(value)}; it must be a finite number >= 0")
    return found


def _drafts(value: Any) -> npt.NDArray[np.float64]:
    found = np.asarray(value, float)
    if not ((found >= 0) & (found == np.floor(found))).all():
        raise ValueError(f"g: got {_shown(value)}; it must be an int >= 0")
    return found


def _distribution(name: str, value: Any) -> npt.NDArray[np.float64]:
    found = np.asarray(value, float)
    if found.ndim < 1 or (found < 0).any() or not np.allclose(found.sum(-1), 1, atol=1e-6):
        raise ValueError(f"{name}: it must hold probabilities that sum to 1 over its last dimension")
    return found


def _shown(value: Any) -> str:
    """Return a value as text; a single number appears without its wrapper."""
    found = np.asarray(value)
    return repr(found.item()) if found.size == 1 else repr(value)


def _scalar(value: Any) -> Found:
    """Return a float for a single number, else the array."""
    found = np.asarray(value)
    return float(found) if found.ndim == 0 else found
