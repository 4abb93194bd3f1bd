"""Counter-based noise: equal keys give equal bits on every device.

Every random number of a generation is a pure function of its key. It never depends on the batch index or on
the order of calls, so a sequence's text does not depend on its neighbours. The words come from Philox4x32-10
(Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), whose 128-bit counter holds::

    c0 = token id // 4   (lane = token id % 4; 0 where one number serves the whole row)
    c1 = position        absolute position of the token that the noise is for
    c2 = start           first position of the step; 0 in the target stream
    c3 = stream // 2 + 2**8 level + 2**16 node

The 64-bit key is ``seed``. The words equal Triton's ``tl.philox(seed, c0, c1, c2, c3)`` bit for bit, and
uniforms are exact functions of them. Gumbel noise goes through a logarithm, whose last digit differs between
devices.

``start`` is in the key because a rule may use noise past the accepted prefix. Block verification decides
where to cut from all uniforms of the block. In the next step the same position must see fresh noise. The
target stream leaves ``start`` out, so the token sampled at a position does not depend on how positions were
grouped into steps. Rule "match" relies on that.

``level`` and ``node`` are 0 in a chain of draft tokens. ``level`` is the depth in a cascade of drafters: the
inner and the outer verification of one position must not share a uniform. ``node`` is the index among
siblings of a tree: siblings with the same noise would be copies of each other. The target stream has neither,
since all levels and nodes of a position compare with the one token that the target samples there.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outpace.sampling.workspace import reusable_buffer

Array = npt.NDArray[Any]
Words = TypeVar("Words", int, Array, Tensor)
Floats = TypeVar("Floats", float, Array, Tensor)

WORD = 0xFFFFFFFF  # mask of 32 bits
CACHED = 1 << 13  # Philox blocks evaluated at a time on the CPU, so that intermediate arrays stay in cache
STRETCH = 256  # tokens summed together in the inverse CDF over a large vocabulary
LEAST = 1e-6  # a sum of float32 exponentials above this has dropped no token likelier than 1e-32
MANY = 4  # rows from which tensors are faster than Python's floats row by row
HANDFUL = 16  # Philox blocks below which Python's integers are the fastest


class Stream(IntEnum):
    """The purpose of a random number.

    Streams never share a word, whatever seed, position and start are. The accept and the residual number of a
    position are the two halves of one block, since a verdict needs both.
    """

    DRAFT = 0
    ACCEPT = 2
    RESIDUAL = 3
    TARGET = 4


def philox(
    c0: Words, c1: Words, c2: Words, c3: Words, k0: Words, k1: Words
) -> tuple[Words, Words, Words, Words]:
    """Compute Philox4x32-10 on 32-bit words held in wider integers.

    The integers are Python ints, int64 arrays or int64 tensors. A product of two words may wrap around int64.
    The masks keep only bits that the wrap does not change.
    """
    for _ in range(10):
        even, odd = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((odd >> 32) & WORD) ^ c1 ^ k0,
            odd & WORD,
            ((even >> 32) & WORD) ^ c3 ^ k1,
            even & WORD,
        )
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


Key = tuple[Tensor, Tensor, Tensor, Tensor]
"""Seed, position, start and fourth counter word: int64 tensors that broadcast."""


def key(
    seed: Tensor,
    position: Tensor,
    start: Tensor | None,
    stream: Stream,
    level: int = 0,
    node: Tensor | int = 0,
) -> Key:
    """Return the key of random numbers.

    Args:
        seed: Seed of the sequence.
        position: Absolute position of the token that the noise is for.
        start: First position of the step. The target stream ignores it.
        stream: Purpose of the number.
        level: Depth in a cascade of drafters, below 256. The target stream ignores it.
        node: Index among siblings of a tree, below 65536. The target stream ignores it.

    Raises:
        ValueError: ``start`` is missing, or ``level`` or an int ``node`` is out of range.
    """
    if stream is Stream.TARGET:
        start, level, node = torch.zeros_like(position), 0, 0
    elif start is None:
        raise ValueError(f"start: missing; stream {stream.name} is keyed by the step's first position")
    check_branch(level, node)
    c3 = stream // 2 + (level << 8)
    if isinstance(node, int):
        word = torch.full((), c3 + (node << 16), dtype=torch.int64, device=seed.device)
    else:
        word = (node << 16) + c3
    return seed, position, start, word


def check_branch(level: int, node: Tensor | int = 0) -> None:
    """Raise ValueError if a level or an int node is out of range."""
    if not 0 <= level < 1 << 8:
        raise ValueError(f"level: got {level}; it must be 0 to 255")
    if isinstance(node, int) and not 0 <= node < 1 << 16:
        raise ValueError(f"node: got {node}; it must be 0 to 65535")


def words(key: Key, blocks: int = 1) -> Tensor:
    """Return four words for each key and each c0 < blocks: int64 ``[..., blocks, 4]``."""
    if key[0].device.type == "cpu":
        return torch.from_numpy(_words_cpu(key, blocks).astype(np.int64))
    return _words_elsewhere(key, blocks)


def _words_elsewhere(key: Key, blocks: int) -> Tensor:
    seed, position, start, c3 = (one[..., None] for one in key)
    c0 = torch.arange(blocks, device=seed.device)
    lanes = philox(c0, position & WORD, start & WORD, c3 & WORD, seed & WORD, (seed >> 32) & WORD)
    return torch.stack(lanes, dim=-1)


def _words_cpu(key: Key, blocks: int) -> Array:
    """Return the same words as uint32, computed by NumPy, whose calls cost a third of PyTorch's.

    A few words are computed with Python's integers, which cost less still. Large requests are computed in
    pieces that fit the processor's cache.
    """
    keys = [one.numpy() for one in key]
    shape = np.broadcast_shapes(*(one.shape for one in keys))
    if math.prod(shape) * blocks <= HANDFUL:
        made = _words_handful(_listed(key, shape), blocks)
        return np.array(made, dtype=np.uint32).reshape(*shape, blocks, 4)
    out = np.empty((*shape, blocks, 4), dtype=np.uint32)
    block = np.arange(blocks)
    if out.size <= 4 * CACHED:
        _fill(out, keys, block)
    else:
        flat, columns = out.reshape(-1, blocks, 4), [np.broadcast_to(one, shape).reshape(-1) for one in keys]
        width = min(blocks, CACHED)
        height = CACHED // width
        for top in range(0, len(flat), height):
            rows = [column[top : top + height] for column in columns]
            for left in range(0, blocks, width):
                piece = flat[top : top + height, left : left + width]
                _fill(piece, rows, block[left : left + width])
    return out


def _words_handful(
    keys: Iterable[tuple[int, int, int, int]], blocks: int = 1
) -> list[tuple[int, int, int, int]]:
    """Return the words of each key, computed with Python's integers."""
    made, rounds, last = [], [(0, 0)], None
    for s, p, t, word in keys:
        if s != last:  # most keys share a seed
            k0, k1 = s & WORD, (s >> 32) & WORD
            rounds = [((k0 + i * 0x9E3779B9) & WORD, (k1 + i * 0xBB67AE85) & WORD) for i in range(10)]
            last = s
        for block in range(blocks):
            c0, c1, c2, c3 = block, p & WORD, t & WORD, word & WORD
            for k0, k1 in rounds:  # as in `philox`, with integers that never wrap
                even, odd = c0 * 0xD2511F53, c2 * 0xCD9E8D57
                c0, c1, c2, c3 = (odd >> 32) ^ c1 ^ k0, odd & WORD, (even >> 32) ^ c3 ^ k1, even & WORD
            made.append((c0, c1, c2, c3))
    return made


def _listed(key: Key, shape: Sequence[int]) -> Iterable[tuple[int, int, int, int]]:
    """Return a broadcast key as plain integers."""
    return zip(*(one.expand(shape).flatten().tolist() for one in key), strict=True)


def _fill(out: Array, keys: list[Array], block: Array) -> None:
    seed, position, start, c3 = (one[..., None] for one in keys)
    lanes = philox(block, position & WORD, start & WORD, c3 & WORD, seed & WORD, (seed >> 32) & WORD)
    for lane, word in enumerate(lanes):
        out[..., lane] = word


def uniform(
    seed: Tensor, position: Tensor, start: Tensor, stream: Stream, level: int = 0, node: Tensor | int = 0
) -> Tensor:
    """Return one float64 uniform with 52 bits per ``key``, strictly between 0 and 1."""
    return _halves(key(seed, position, start, stream, level, node))[..., stream % 2]


def accept_and_residual(
    seed: Tensor, position: Tensor, start: Tensor, level: int = 0, node: Tensor | int = 0
) -> tuple[Tensor, Tensor]:
    """Return ``uniform`` of the accept and the residual stream at once."""
    accept, residual = _halves(key(seed, position, start, Stream.ACCEPT, level, node)).unbind(-1)
    return accept, residual


def halves(
    seeds: Sequence[int], starts: Sequence[int], count: int, stream: Stream, level: int = 0
) -> list[list[tuple[float, float]]]:
    """Return the two uniforms of a Philox block for the first ``count`` positions of each sequence's step.

    The numbers are plain floats, for callers that use them one by one.
    """
    if len(seeds) * count <= HANDFUL:
        c3 = stream // 2 + (level << 8)
        return [
            _pairs((seed, start + i, start, c3) for i in range(count))
            for seed, start in zip(seeds, starts, strict=True)
        ]
    first = torch.tensor(starts)[:, None]
    made = _halves(key(torch.tensor(seeds)[:, None], first + torch.arange(count), first, stream, level))
    return [[(one, other) for one, other in row] for row in made.tolist()]


def _pairs(keys: Iterable[tuple[int, int, int, int]]) -> list[tuple[float, float]]:
    return [(unit52(a >> 6, b >> 6), unit52(c >> 6, d >> 6)) for a, b, c, d in _words_handful(keys)]


def _halves(key: Key) -> Tensor:
    """Return two uniforms from each block of four words: float64 ``[..., 2]``."""
    if key[0].device.type == "cpu":
        shape = np.broadcast_shapes(*(one.shape for one in key))
        if math.prod(shape) <= HANDFUL:
            made = _pairs(_listed(key, shape))
            return torch.tensor(made, dtype=torch.float64).view(*shape, 2)
        word = (_words_cpu(key, 1)[..., 0, :] >> 6).astype(np.float64)
        return torch.from_numpy(unit52(word[..., 0::2], word[..., 1::2]))
    bits = _words_elsewhere(key, 1)[..., 0, :] >> 6
    return unit52(bits[..., 0::2].to(torch.float64), bits[..., 1::2].to(torch.float64))


def unit52(high: Floats, low: Floats) -> Floats:
    """Return the uniform, strictly between 0 and 1, that two 26-bit numbers make."""
    return (high * 2.0**26 + low + 0.5) * 2.0**-52


def unit32(word: Tensor) -> Tensor:
    """Return a word as a float32 uniform in ``[2**-33, 1 - 2**-24]``, never 0 or 1.

    It has 32 bits near 0, where races are decided.
    """
    return (word.to(torch.float32) * 2.0**-32 + 2.0**-33).clamp_(max=1 - 2.0**-24)


def exponential(
    seed: Tensor,
    position: Tensor,
    vocab_size: int,
    stream: Stream = Stream.TARGET,
    start: Tensor | None = None,
    level: int = 0,
    node: Tensor | int = 0,
) -> Tensor:
    """Return standard exponential noise for every token id: float32 ``[..., vocab_size]``.

    The formula is −log1p(−u), not −log(u). The latter is exactly 0 where u rounds to 1, and a zero wins every
    race.
    """
    noise_key = key(seed, position, start, stream, level, node)
    blocks = -(-vocab_size // 4)
    if seed.device.type == "cpu":
        word = torch.from_numpy(_words_cpu(noise_key, blocks))
    else:
        word = _words_elsewhere(noise_key, blocks)
    return unit32(word.flatten(-2)[..., :vocab_size]).neg_().log1p_().neg_()


def gumbel(
    seed: Tensor,
    position: Tensor,
    vocab_size: int,
    stream: Stream = Stream.TARGET,
    start: Tensor | None = None,
    level: int = 0,
    node: Tensor | int = 0,
) -> Tensor:
    """Return standard Gumbel noise for every token id: float32 ``[..., vocab_size]``, always finite."""
    return exponential(seed, position, vocab_size, stream, start, level, node).log_().neg_()


def race(logits: Tensor, noise: Tensor) -> Tensor:
    """Sample from softmax(logits): take the token with the largest logit plus Gumbel noise.

    ``[..., V]`` becomes ``[...]``.
    """
    logits = logits.to(torch.promote_types(logits.dtype, noise.dtype))
    # Shifting by the maximum keeps the noise's digits when logits are large.
    return (logits - logits.amax(-1, keepdim=True) + noise).argmax(-1)


def sample(weights: Tensor, u: Tensor) -> Tensor:
    """Sample from unnormalised weights ``[B, V]`` with one uniform ``[B]``: inverse CDF, in float64.

    The result is the first token whose running sum exceeds u times the total. A token of weight 0 is never
    sampled, since u is neither 0 nor 1. Over a large vocabulary the running sum first goes over stretches of
    tokens, then over the tokens of the stretch that u falls into.
    """
    B, V = weights.shape
    if V < 8 * STRETCH:
        return _inverse(weights, u)[0]
    if V % STRETCH:
        weights = torch.nn.functional.pad(weights, (0, -V % STRETCH))
    weights = weights.view(B, -1, STRETCH)
    return _from_stretches(weights, weights.sum(-1), u)


def _inverse(weights: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entry that u falls into, and the position of u within that entry.

    The position is again a uniform.
    """
    cdf = weights.cumsum(-1, dtype=torch.float64)
    level = u[:, None] * cdf[:, -1:]
    found = torch.searchsorted(cdf, level, right=True).clamp_(max=weights.shape[-1] - 1)
    above = (cdf.gather(1, found) - level) / weights.gather(1, found)
    return found.squeeze(1), (1 - above).clamp_(2.0**-53, 1 - 2.0**-53).squeeze(1)


def sample_softmax(logits: Tensor, u: Sequence[float]) -> tuple[Tensor, list[bool]]:
    """Sample from the softmax of float32 logits ``[B, V]`` on a CPU, with one uniform per row.

    Over a large vocabulary the weights are the exponentials themselves. That saves a sum and a quotient, and
    two cores share one row. Where exponentials leave float32's range, the weights are the softmax.

    Returns:
        The tokens ``[B]``, and for each row whether it had a distribution to sample from.
    """
    B, V = logits.shape
    if V >= 8 * STRETCH and V % STRETCH == 0:
        # For one row fresh memory is as fast as a reused buffer; for many it is slower.
        out = None if B == 1 else reusable_buffer("sample", logits.shape, logits.dtype)
        weights = torch.exp(logits, out=out).view(B, -1, STRETCH)
        sums = weights.sum(-1)
        usual = [LEAST < total < math.inf for total in sums.sum(-1).tolist()]
        if all(usual):
            return _from_stretches(weights, sums, u), usual
        if B > 1:  # a row's token must not depend on its neighbours, not even through rounding
            each = [sample_softmax(row[None], [one]) for row, one in zip(logits, u, strict=True)]
            return torch.cat([tokens for tokens, _ in each]), [sound for _, [sound] in each]
    weights = logits.softmax(-1)
    tokens = sample(weights, torch.tensor(u, dtype=torch.float64))
    # The softmax of logits with NaN or +inf, or of nothing but -inf, is NaN everywhere.
    return tokens, weights[:, 0].isfinite().tolist()


def sample_one(weights: Tensor, u: float) -> int:
    """Return the token that ``sample`` returns for one row of weights ``[V]`` on a CPU."""
    V = len(weights)
    if V < 8 * STRETCH or V % STRETCH:
        return int(sample(weights[None], torch.tensor([u], dtype=torch.float64)))
    stretches = weights.view(-1, STRETCH)
    return _in_stretches(stretches, stretches.sum(-1).tolist(), u)


def _from_stretches(weights: Tensor, sums: Tensor, u: Tensor | Sequence[float]) -> Tensor:
    """Sample from weights ``[B, n, STRETCH]`` and their sums ``[B, n]``, with one uniform per row."""
    if weights.device.type == "cpu" and len(weights) < MANY:
        each = zip(weights, sums.tolist(), u.tolist() if isinstance(u, Tensor) else u, strict=True)
        return torch.tensor([_in_stretches(*row) for row in each], dtype=torch.int64)
    u = u if isinstance(u, Tensor) else torch.tensor(u, dtype=torch.float64)
    stretch, within = _inverse(sums, u)
    token, _ = _inverse(weights[torch.arange(len(weights), device=weights.device), stretch], within)
    return stretch * STRETCH + token


def _in_stretches(stretches: Tensor, sums: list[float], u: float) -> int:
    """Sample for one row with Python's own floats.

    Between two forward passes of a model the processor's caches are cold. Every library call then costs ten
    times what it costs alone.
    """
    stretch, within = _inverse_one(sums, u)
    token, _ = _inverse_one(stretches[stretch].tolist(), within)
    return stretch * STRETCH + token


def _inverse_one(weights: list[float], u: float) -> tuple[int, float]:
    cdf = list(accumulate(weights))
    level = u * cdf[-1]
    found = min(bisect_right(cdf, level), len(cdf) - 1)
    within = 1 - (cdf[found] - level) / weights[found] if weights[found] else 0.5
    return found, min(max(within, 2.0**-53), 1 - 2.0**-53)
