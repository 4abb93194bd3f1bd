"""What speculation brings, in closed form: Leviathan et al. 2023, section 3 and appendices A.2 and A.5.

alpha  probability that a draft is kept, each time anew
g      drafts a pass
c      time of a draft's step, of a target's pass, whose time does not depend on g
ops    operations of a draft's step, of the target's for a token

All but `kept_shares`, which returns one, and what takes distributions work on arrays as on numbers, and
broadcast.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.ArrayLike
Found = Any  # a float for numbers, an array for arrays

LONGEST = 1000  # draft tokens that `best_length` looks at, by default
MOST_SEARCHED = 100_000  # draft tokens; more would fill the memory


def expected_tokens(alpha: Numbers, g: Numbers) -> Found:
    """Of a pass: (1 − α^(g+1))/(1 − α), equation 1."""
    alpha, g = _share("alpha", alpha), _drafts(g)
    sure = alpha == 1
    rest = np.where(sure, 1.0, 1 - alpha)
    return _plain(np.where(sure, g + 1.0, (1 - alpha ** (g + 1)) / rest))


def speedup(alpha: Numbers, g: Numbers, c: Numbers = 0.0) -> Found:
    """Over plain decoding: theorem 3.8."""
    with np.errstate(over="ignore"):  # 0 is right where the time is too large for a float
        return _plain(expected_tokens(alpha, g) / (1 + _drafts(g) * _cost("c", c)))


def measured_speedup(tokens: Numbers, g: Numbers, step: Numbers, target: Numbers, plain: Numbers) -> Found:
    """Over plain decoding, where a pass over more tokens takes longer: theorem 3.8 with times as they are.

    tokens  that an iteration brings
    step    time of a draft's step, of which there are g
    target  time of the target's pass over all g + 1 tokens, with verification; plain, over a single one
    """
    taken = _drafts(g) * _cost("step", step) + _cost("target", target)
    return _plain(_cost("tokens", tokens) * _cost("plain", plain) / taken)


def kept_shares(alpha: float, g: int) -> Found:
    """Probabilities `[g + 1]` that 0, 1, ... g drafts of a pass are kept: a geometric distribution, cut."""
    alpha, g = float(_share("alpha", alpha)), int(_drafts(g))
    return np.append(alpha ** np.arange(g) * (1 - alpha), alpha**g)


def operations(alpha: Numbers, g: Numbers, ops: Numbers = 0.0) -> Found:
    """Times as many as plain decoding's: theorem 3.11."""
    g = _drafts(g)
    with np.errstate(over="ignore"):  # inf is right where they are too many for a float
        return _plain((g * _cost("ops", ops) + g + 1) / expected_tokens(alpha, g))


def best_length(alpha: Numbers, c: Numbers, most: int = LONGEST) -> Any:
    """The g that `speedup` is largest for: section 3.5. 0 where no draft pays; the smallest of several.

    An int for numbers, an array for arrays.
    """
    if not isinstance(most, int) or not 0 <= most <= MOST_SEARCHED:
        raise ValueError(f"most: got {most!r}; it must be an int from 0 to {MOST_SEARCHED}")
    speeds = speedup(np.asarray(alpha)[..., None], np.arange(most + 1), np.asarray(c)[..., None])
    best = np.argmax(np.round(speeds, 12), axis=-1)
    return int(best) if best.ndim == 0 else best


def least_speedup(alpha: Numbers, c: Numbers) -> Found:
    """What the best g brings at least, where α > c: (1 + α)/(1 + c), corollary 3.9; 1 elsewhere."""
    alpha, c = _share("alpha", alpha), _cost("c", c)
    return _plain(np.where(alpha > c, (1 + alpha) / (1 + c), 1.0))


def oracle_speedup(alpha: Numbers, c: Numbers) -> Found:
    """If it was known how many drafts will be kept, and no other was made: section 3.5.

    A pass then brings 1/(1 − α) tokens after α/(1 − α) drafts. No choice of lengths is faster.
    """
    alpha, c = _share("alpha", alpha), _cost("c", c)
    with np.errstate(divide="ignore"):
        return _plain(1 / (1 - alpha + alpha * c))


def needed_alpha(c: Numbers, wanted: Numbers = 1.0, g: Numbers = 1) -> Found:
    """The least α for a speedup at this g; NaN where none is enough. For any speedup at all, g = 1: α > c."""
    c, wanted, g = np.broadcast_arrays(_cost("c", c), np.asarray(wanted, float), _drafts(g))
    low, high = np.zeros(c.shape), np.ones(c.shape)
    enough = speedup(high, g, c) >= wanted
    for _ in range(60):  # speedup grows with α
        middle = (low + high) / 2
        reached = speedup(middle, g, c) >= wanted
        low, high = np.where(reached, low, middle), np.where(reached, middle, high)
    return _plain(np.where(enough, high, np.nan))


def acceptance(p: npt.ArrayLike, q: npt.ArrayLike, lenience: float = 1.0) -> Found:
    """β of distributions `[..., V]`: Σ min(q, p/l), equation 3 and A.5."""
    p, q = _distribution("p", p), _distribution("q", q)
    if not 0 < lenience <= 1:
        raise ValueError(f"lenience: got {lenience!r}; it must be in (0, 1]")
    return _plain(np.minimum(q, p / lenience).sum(-1))


def divergence(p: npt.ArrayLike, q: npt.ArrayLike) -> Found:
    """D_LK, definition 3.2: half of Σ|p − q|, which is 1 − β."""
    return _plain(np.abs(_distribution("p", p) - _distribution("q", q)).sum(-1) / 2)


def rejection_acceptance(p: npt.ArrayLike, q: npt.ArrayLike) -> Found:
    """Of the alternative of A.2, plain rejection sampling: min q/p, never more than β."""
    p, q = _distribution("p", p), _distribution("q", q)
    ratio = np.divide(q, p, out=np.full(np.broadcast_shapes(p.shape, q.shape), np.inf), where=p > 0)
    return _plain(ratio.min(-1))


def _share(name: str, value: Any) -> npt.NDArray[np.float64]:
    found = np.asarray(value, float)
    if not ((found >= 0) & (found <= 1)).all():
        raise ValueError(f"{name}: got {_said(value)}; it must be in [0, 1]")
    return found


def _cost(name: str, value: Any) -> npt.NDArray[np.float64]:
    found = np.asarray(value, float)
    if not ((found >= 0) & np.isfinite(found)).all():
        raise ValueError(f"{name}: got {_said(value)}; it must be a finite number >= 0")
    return found


def _drafts(value: Any) -> npt.NDArray[np.float64]:
    found = np.asarray(value, float)
    if not ((found >= 0) & (found == np.floor(found))).all():
        raise ValueError(f"g: got {_said(value)}; it must be an int >= 0")
    return found


def _distribution(name: str, value: Any) -> npt.NDArray[np.float64]:
    found = np.asarray(value, float)
    if found.ndim < 1 or (found < 0).any() or not np.allclose(found.sum(-1), 1, atol=1e-6):
        raise ValueError(f"{name}: it must hold probabilities that sum to 1 over its last dimension")
    return found


def _said(value: Any) -> str:
    """A number as one, however it is wrapped."""
    found = np.asarray(value)
    return repr(found.item()) if found.size == 1 else repr(value)


def _plain(value: Any) -> Found:
    """A float of what is one."""
    found = np.asarray(value)
    return float(found) if found.ndim == 0 else found
