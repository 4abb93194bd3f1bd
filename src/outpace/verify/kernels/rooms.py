"""The workspace that one launch leaves numbers in for the next: where what lies, and whose row it is of."""

from __future__ import annotations

import triton
import triton.language as tl

from outpace.verify.kernels.threshold import FACTS

SMALL = [  # tensors whose alignment does not matter
    "lengths", "seeds", "starts", "given_up", "tokens", "draft_lse", "draft_cut", "draft_tie", "knobs",
    "q_knobs", "accepted", "next_token", "bad", "work",
]  # fmt: skip
# What may change from call to call without a kernel being compiled anew
SIZES = ["B", "g", "splits", "tiles", "seed", "start", "skipped"]


@triton.jit
def rooms(work, B, g, P, splits):
    """Where in the workspace the kernels leave what: `room` says how much there is. P rows of each B are the
    target's, g the draft's."""
    rows = (B * (P + g)).to(tl.int64)
    cells = rows * splits
    ends = ((g + 1) * B * splits).to(tl.int64)
    parts = work + 3 * cells
    facts = parts + 5 * ends + B
    return (
        work,
        work + cells,
        work + 2 * cells,
        parts,
        parts + 4 * ends,
        facts - B,
        facts,
        facts + FACTS * rows,
    )


def room(B: int, g: int, P: int, splits: int, chunks: int) -> int:
    """Floats that the kernels need beside their inputs."""
    rows = B * (P + g)
    return 3 * rows * splits + 5 * (g + 1) * B * splits + B + rows * (int(FACTS.value) + chunks)


@triton.jit
def place_of(row, B, g, P):
    """Whose row it is: the sequence, the position, and whether the draft's."""
    q_side = (row >= B * P).to(tl.int32)
    within = tl.where(q_side == 1, row - B * P, row)
    width = tl.where(q_side == 1, g, P)
    return (within // width).to(tl.int64), within % width, q_side


@triton.jit
def note(facts, most, mass, cut, tie, listed):
    """A row without a softmax has NaN for its logsumexp; one whose cut is still to be found, the mass."""
    sound = (mass > 0) & (mass < float("inf"))
    tl.store(facts, most)
    tl.store(facts + 1, tl.where(listed < 0, mass, tl.where(sound, tl.log(mass), float("nan"))))
    tl.store(facts + 2, cut)
    tl.store(facts + 3, tie.to(tl.float32, bitcast=True))
    tl.store(facts + 4, listed.to(tl.float32))


@triton.jit
def facts_of(facts, row, there):
    """What `narrow` noted of rows, where there are any."""
    at = facts + FACTS * row
    most = tl.load(at, mask=there, other=0.0)
    log = tl.load(at + 1, mask=there, other=0.0)
    cut = tl.load(at + 2, mask=there, other=0.0)
    return most, log, cut, tl.load(at + 3, mask=there, other=0.0).to(tl.int32, bitcast=True)


@triton.jit
def listed_of(facts, row):
    """How many tokens `narrow` listed of a row: all that may stay, or 0; -1 before `widen` has found the
    cut."""
    return tl.load(facts + FACTS * row + 4).to(tl.int32)


@triton.jit
def list_of(chunks, row, B, g, P, splits, CHUNKS: tl.constexpr, FEW: tl.constexpr):
    """Where they are: behind the chunks' maxima of all rows."""
    return chunks + (B * (P + g)).to(tl.int64) * splits * CHUNKS + row * 2 * FEW
