"""Layout of the workspace in which one kernel leaves numbers for the next."""

from __future__ import annotations

import triton
import triton.language as tl

from outpace.verification.kernels.threshold import FACTS

SMALL = [  # tensors whose alignment does not matter
    "lengths", "seeds", "starts", "given_up", "tokens", "draft_lse", "draft_cut", "draft_tie", "knobs",
    "q_knobs", "accepted", "next_token", "bad", "work",
]  # fmt: skip
# Arguments that may change from call to call without compiling a kernel again
SIZES = ["B", "g", "splits", "tiles", "seed", "start", "skipped"]


@triton.jit
def rooms(work, B, g, P, splits):
    """Return pointers to the parts of the workspace, whose size ``room`` computes.

    For each of B sequences, P rows are the target's and g are the draft's.
    """
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
    """Return the number of floats that the kernels need beside their inputs."""
    rows = B * (P + g)
    return 3 * rows * splits + 5 * (g + 1) * B * splits + B + rows * (int(FACTS.value) + chunks)


@triton.jit
def place_of(row, B, g, P):
    """Return the sequence and the position of a row, and whether it is the draft's."""
    q_side = (row >= B * P).to(tl.int32)
    within = tl.where(q_side == 1, row - B * P, row)
    width = tl.where(q_side == 1, g, P)
    return (within // width).to(tl.int64), within % width, q_side


@triton.jit
def note(facts, most, mass, cut, tie, listed):
    """Store the facts of a row.

    A row without a softmax gets NaN for its logsumexp. A row whose cut is still to be found gets the mass.
    """
    sound = (mass > 0) & (mass < float("inf"))
    tl.store(facts, most)
    tl.store(facts + 1, tl.where(listed < 0, mass, tl.where(sound, tl.log(mass), float("nan"))))
    tl.store(facts + 2, cut)
    tl.store(facts + 3, tie.to(tl.float32, bitcast=True))
    tl.store(facts + 4, listed.to(tl.float32))


@triton.jit
def facts_of(facts, row, there):
    """Return maximum, logsumexp, cut and tie that ``narrow`` stored for rows, where ``there`` is true."""
    at = facts + FACTS * row
    most = tl.load(at, mask=there, other=0.0)
    log = tl.load(at + 1, mask=there, other=0.0)
    cut = tl.load(at + 2, mask=there, other=0.0)
    return most, log, cut, tl.load(at + 3, mask=there, other=0.0).to(tl.int32, bitcast=True)


@triton.jit
def listed_of(facts, row):
    """Return the number of tokens that ``narrow`` listed for a row.

    They are all that may survive. It is 0 if there is no list, and -1 before ``widen`` has found the cut.
    """
    return tl.load(facts + FACTS * row + 4).to(tl.int32)


@triton.jit
def list_of(chunks, row, B, g, P, splits, CHUNKS: tl.constexpr, FEW: tl.constexpr):
    """Return the pointer to a row's list of tokens.

    The lists lie behind the chunk maxima of all rows.
    """
    return chunks + (B * (P + g)).to(tl.int64) * splits * CHUNKS + row * 2 * FEW
