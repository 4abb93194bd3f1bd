"""Counter-based noise: (seed, position, start, stream, token id) in, the same number out, on every device.

Every random number of a generation is a pure function of its key, never of the batch index or of the order of
calls, so a row's text does not depend on its neighbours. The words come from Philox4x32-10 (Salmon et al. 2011,
"Parallel random numbers: as easy as 1, 2, 3"), whose 128-bit counter holds

    c0 = token id // 4   (lane = token id % 4; 0 where one number serves the whole row)
    c1 = position        absolute position of the token that the noise is for
    c2 = start           first position of the iteration; 0 in the target stream
    c3 = stream

under the 64-bit key `seed`. The words equal Triton's `tl.philox(seed, c0, c1, c2, c3)` bit for bit.

`start` is in the key because a rule may spend noise that lies past its cut (block verification decides where to
cut from all uniforms of the block): in the next iteration the same position must see fresh noise. The target
stream leaves it out, so that the token drawn at a position is the same however the positions were grouped into
iterations; that is what rule "match" promises.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outpace.arguments import integer, integers

Array = npt.NDArray[Any]
Words = TypeVar("Words", int, Array, Tensor)

WORD = 0xFFFFFFFF
CACHED = 1 << 13  # Philox blocks evaluated at a time on the CPU, so that intermediate arrays stay in cache


class Stream(IntEnum):
    """What a number is for. Streams never share a word, whatever seed, position and start are."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    TARGET = 3


def philox(
    c0: Words, c1: Words, c2: Words, c3: Words, k0: Words, k1: Words
) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10 on 32-bit words held in wider integers: Python ints, int64 arrays or int64 tensors.

    A product of two words may wrap around int64; the masks keep just the bits that do not care.
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


def words(seed: Tensor, position: Tensor, start: Tensor, stream: Stream, blocks: int = 1) -> Tensor:
    """Four words for each key and each c0 in 0..blocks-1: uint32 `[..., blocks, 4]`. Keys are int64, broadcast."""
    keys = torch.broadcast_tensors(seed, position, start)  # type: ignore[no-untyped-call]
    columns = [key.reshape(-1, 1) for key in keys]
    block = torch.arange(blocks, device=seed.device)[None]
    draw = _words_cpu if seed.device.type == "cpu" else _words_elsewhere
    return draw(*columns, stream, block).view(*keys[0].shape, blocks, 4)


def _words_elsewhere(seed: Tensor, position: Tensor, start: Tensor, stream: Stream, block: Tensor) -> Tensor:
    """`words` for columns of keys `[N, 1]` and a row of blocks, on any device."""
    c3 = torch.full_like(block[:, :1], stream)
    lanes = philox(block, position & WORD, start & WORD, c3, seed & WORD, (seed >> 32) & WORD)
    return torch.stack(lanes, dim=-1).to(torch.uint32)


def _words_cpu(seed: Tensor, position: Tensor, start: Tensor, stream: Stream, block: Tensor) -> Tensor:
    """The same by NumPy, whose calls cost a third of PyTorch's on small arrays, in pieces that stay in cache."""
    seeds, positions, starts, row = seed.numpy(), position.numpy(), start.numpy(), block.numpy()
    out = np.empty((len(seeds), row.size, 4), dtype=np.uint32)
    c3 = np.full((1, 1), stream, dtype=np.int64)
    width = max(1, min(row.size, CACHED))
    height = CACHED // width
    for top in range(0, len(seeds), height):
        rows = slice(top, top + height)
        c1, c2 = positions[rows] & WORD, starts[rows] & WORD
        k0, k1 = seeds[rows] & WORD, (seeds[rows] >> 32) & WORD
        for left in range(0, row.size, width):
            columns = slice(left, left + width)
            for lane, word in enumerate(philox(row[:, columns], c1, c2, c3, k0, k1)):
                out[rows, columns, lane] = word
    return torch.from_numpy(out)


def unit32(word: Tensor) -> Tensor:
    """A word as a float32 uniform in [2**-33, 1 - 2**-24]: 32 bits near 0, where races are decided, never 0 or 1."""
    return (word.to(torch.float32) * 2.0**-32 + 2.0**-33).clamp_(max=1 - 2.0**-24)


def uniform(seed: Tensor, position: Tensor, start: Tensor, stream: Stream) -> Tensor:
    """One float64 uniform with 52 bits per key, strictly between 0 and 1. Arguments are int64 and broadcast."""
    word = words(seed, position, start, stream)[..., 0, :2].to(torch.int64) >> 6
    return ((word[..., 0] << 26) + word[..., 1]).to(torch.float64).add_(0.5).mul_(2.0**-52)


def exponential(
    seed: Tensor,
    position: Tensor,
    vocab_size: int,
    stream: Stream = Stream.TARGET,
    start: Tensor | None = None,
) -> Tensor:
    """Standard exponential noise for every token id: float32 `[..., vocab_size]`.

    −log1p(−u), not −log(u): the latter is exactly 0 where u rounds to 1, and a zero wins every race.
    """
    if stream is Stream.TARGET:
        start = torch.zeros_like(position)
    elif start is None:
        raise ValueError(f"start: missing; stream {stream.name} is keyed by the iteration's first position")
    word = words(seed, position, start, stream, blocks=-(-vocab_size // 4))
    return unit32(word.flatten(-2)[..., :vocab_size]).neg_().log1p_().neg_()


def gumbel(
    seed: Tensor,
    position: Tensor,
    vocab_size: int,
    stream: Stream = Stream.TARGET,
    start: Tensor | None = None,
) -> Tensor:
    """Standard Gumbel noise for every token id: float32 `[..., vocab_size]`, always finite."""
    return exponential(seed, position, vocab_size, stream, start).log_().neg_()


def race(logits: Tensor, noise: Tensor) -> Tensor:
    """Draw from softmax(logits): the token with the largest logit plus Gumbel noise. `[..., V]` to `[...]`."""
    # Shifting by the maximum keeps the noise's digits when logits are large.
    return (logits - logits.amax(-1, keepdim=True) + noise).argmax(-1)


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """Draw from unnormalised weights `[..., V]` with one uniform `[...]`: inverse CDF, summed in float64.

    A token of weight 0 is never drawn: u·total lies strictly between 0 and the total, and the first token whose
    running sum exceeds it is taken.
    """
    cdf = weights.cumsum(-1, dtype=torch.float64)
    level = u[..., None] * cdf[..., -1:]
    return torch.searchsorted(cdf, level, right=True).squeeze(-1).clamp_(max=weights.shape[-1] - 1)


def keys(name: str, value: int | Sequence[int] | Tensor, rows: int, device: torch.device) -> Tensor:
    """A seed or position argument as an int64 tensor `[rows]`; 64-bit patterns above 2**63 wrap around."""
    if isinstance(value, Tensor):
        integers(name, value, "an int, one int per row, or an int64 tensor")
        if value.shape not in ((), (rows,)):
            raise ValueError(
                f"{name}: got shape {tuple(value.shape)}; with {rows} rows it must be () or ({rows},)"
            )
        return value.to(device=device, dtype=torch.int64).expand(rows)
    values = list(value) if isinstance(value, Sequence) else [value] * rows
    if len(values) != rows:
        raise ValueError(f"{name}: got {len(values)} values for {rows} rows; give one int or one per row")
    for one in values:
        integer(name, one, "an int of at most 64 bits, or one per row", lambda i: -(2**63) <= i < 2**64)
    return torch.tensor(
        [one - 2**64 if one >= 2**63 else one for one in values], dtype=torch.int64, device=device
    )
