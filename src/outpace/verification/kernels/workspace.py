"""Layout of the workspace through which the kernels pass numbers to each other."""

from __future__ import annotations

import triton
import triton.language as tl

from outpace.verification.kernels.threshold import NUM_ROW_STATS

ANY_ALIGNMENT = [  # tensors whose alignment does not matter
    "lengths", "seeds", "starts", "invalid", "tokens", "draft_lse", "draft_cut", "draft_tie", "p_params",
    "q_params", "accepted", "next_token", "bad", "workspace",
]  # fmt: skip
# Arguments that may change from call to call without compiling a kernel again
NOT_SPECIALIZED = ["B", "g", "splits", "tiles", "seed", "start", "skipped", "depth"]


@triton.jit
def workspace_parts(workspace, B, g, P, splits):
    """Return pointers to the parts of the workspace, whose size ``workspace_size`` computes.

    For each of B sequences, P rows are the target's and g are the draft's.
    """
    rows = (B * (P + g)).to(tl.int64)
    cells = rows * splits
    ends = ((g + 1) * B * splits).to(tl.int64)
    parts = workspace + 3 * cells
    row_stats = parts + 5 * ends + B
    return (
        workspace,
        workspace + cells,
        workspace + 2 * cells,
        parts,
        parts + 4 * ends,
        row_stats - B,
        row_stats,
        row_stats + NUM_ROW_STATS * rows,
    )


def workspace_size(B: int, g: int, P: int, splits: int, chunks: int) -> int:
    """Return the number of floats that the kernels need beside their inputs."""
    rows = B * (P + g)
    return 3 * rows * splits + 5 * (g + 1) * B * splits + B + rows * (int(NUM_ROW_STATS.value) + chunks)


@triton.jit
def locate_row(row, B, g, P):
    """Return the sequence and the position of a row, and whether it is the draft's."""
    is_draft = (row >= B * P).to(tl.int32)
    within = tl.where(is_draft == 1, row - B * P, row)
    width = tl.where(is_draft == 1, g, P)
    return (within // width).to(tl.int64), within % width, is_draft


@triton.jit
def store_row_stats(row_stats, max_logit, mass, cut, tie, num_listed):
    """Store the statistics of a row.

    A row without a softmax gets NaN for its logsumexp. A row whose cut ``widen`` has to find gets the sum of
    exponentials instead.
    """
    has_softmax = (mass > 0) & (mass < float("inf"))
    tl.store(row_stats, max_logit)
    tl.store(row_stats + 1, tl.where(num_listed < 0, mass, tl.where(has_softmax, tl.log(mass), float("nan"))))
    tl.store(row_stats + 2, cut)
    tl.store(row_stats + 3, tie.to(tl.float32, bitcast=True))
    tl.store(row_stats + 4, num_listed.to(tl.float32))


@triton.jit
def load_row_stats(row_stats, row, mask):
    """Return maximum, logsumexp, cut and tie that ``narrow`` or ``widen`` stored for rows, if ``mask``."""
    at = row_stats + NUM_ROW_STATS * row
    max_logit = tl.load(at, mask=mask, other=0.0)
    log_sum = tl.load(at + 1, mask=mask, other=0.0)
    cut = tl.load(at + 2, mask=mask, other=0.0)
    return max_logit, log_sum, cut, tl.load(at + 3, mask=mask, other=0.0).to(tl.int32, bitcast=True)


@triton.jit
def load_num_listed(row_stats, row):
    """Return the number of tokens that ``narrow`` listed for a row.

    The list includes all survivors. The number is 0 if there is no list, and -1 until ``widen`` has found the
    cut.
    """
    return tl.load(row_stats + NUM_ROW_STATS * row + 4).to(tl.int32)


@triton.jit
def token_list_at(chunks, row, B, g, P, splits, CHUNKS: tl.constexpr, MAX_LISTED: tl.constexpr):
    """Return the pointer to a row's list of tokens.

    The lists lie behind the chunk maxima of all rows.
    """
    return chunks + (B * (P + g)).to(tl.int64) * splits * CHUNKS + row * 2 * MAX_LISTED
