"""Edits of single logits as one kernel: the counterpart of ``outpace.sampling.rows.edit`` on CUDA."""

from __future__ import annotations

import triton
import triton.language as tl

from outpace.sampling import rows
from outpace.verification.kernels.pieces import load_logits

MAX_COUNT, WORD = tl.constexpr(rows.MAX_COUNT), tl.constexpr(rows.WORD)


@triton.jit(
    do_not_specialize=["n", "before", "splits"],
    do_not_specialize_on_alignment=["bias", "allowed", "penalties", "seen", "drafted", "out"],
)
def edit_rows(
    logits, bias, allowed, penalties, seen, drafted, out, n, before, V, splits, row_stride,
    position_stride, draft_stride, SPLIT: tl.constexpr,
):  # fmt: skip
    """Change the logits of one split of one position. Position i follows ``before + i`` draft tokens."""
    pid = tl.program_id(0)
    row = (pid // splits).to(tl.int64)
    b, i = row // n, row % n
    ids = pid % splits * SPLIT + tl.arange(0, SPLIT)
    inside = ids < V
    repetition, frequency = tl.load(penalties + 3 * b), tl.load(penalties + 3 * b + 1)
    presence = tl.load(penalties + 3 * b + 2)
    word = tl.load(seen + b * V + ids, mask=inside, other=0).to(tl.int32)
    z = load_logits(logits + b * row_stride + i * position_stride, ids, V)
    z += tl.load(bias + b * V + ids, mask=inside, other=0.0)
    bits = tl.load(allowed + b * tl.cdiv(V, WORD) + ids // WORD, mask=inside, other=0)
    z = tl.where((bits >> (ids % WORD)) & 1 == 1, z, -float("inf"))
    count = (word & MAX_COUNT).to(tl.float32)
    for j in range(before + i):
        count += (ids == tl.load(drafted + b * draft_stride + j)).to(tl.float32)
    penalized = tl.where(z < 0, z * repetition, tl.div_rn(z, repetition))
    z = tl.where((count > 0) | (word < 0), penalized, z)
    z = z - frequency * count
    tl.store(out + row * V + ids, tl.where(count > 0, z - presence, z), mask=inside)
