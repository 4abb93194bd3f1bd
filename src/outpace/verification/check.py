"""Checks of the arguments of ``outpace.verify``.

Each error names the argument, its value and the values that fit. Values on a GPU are not read, because the
host would have to wait. There, a row with a value out of range is flagged as bad instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.checks.arguments import floats, int_or_row_integers, integers, number, row_integers
from outpace.sampling import Prefix, SamplingParams
from outpace.verification.rules import Rule


def shapes(
    draft_tokens: Tensor, draft_logits: Tensor | None, target_logits: Tensor, draft_lse: Tensor | None
) -> tuple[int, int]:
    """Check types, shapes, dtypes and devices of the tensors.

    Returns:
        B and g.
    """
    floats("target_logits", target_logits)
    if target_logits.dim() != 3 or target_logits.shape[1] < 1 or target_logits.shape[2] < 1:
        raise ValueError(f"target_logits: got shape {_shape(target_logits)}; it must be [B, g+1, V]")
    B, g, V = target_logits.shape
    g -= 1
    integers("draft_tokens", draft_tokens, "an int64 tensor [B, g]")
    expected: list[tuple[str, Tensor, tuple[int, ...]]] = [("draft_tokens", draft_tokens, (B, g))]
    if draft_logits is not None:
        floats("draft_logits", draft_logits)
        if draft_logits.dtype is not target_logits.dtype:
            raise TypeError(
                f"draft_logits: got dtype {draft_logits.dtype}, and target_logits {target_logits.dtype}; "
                "they must be the same"
            )
        expected.append(("draft_logits", draft_logits, (B, g, V)))
    if draft_lse is not None:
        floats("draft_lse", draft_lse)
        if draft_logits is None:
            raise ValueError("draft_lse: given without draft_logits; point masses have no logsumexp")
        expected.append(("draft_lse", draft_lse, (B, g)))
    for name, tensor, shape in expected:
        if tensor.shape != shape:
            raise ValueError(
                f"{name}: got shape {_shape(tensor)}; it must be {shape} with target_logits "
                f"{_shape(target_logits)}"
            )
        if tensor.device != target_logits.device:
            raise ValueError(
                f"{name}: got a tensor on {tensor.device}; it must be on {target_logits.device}, as "
                "target_logits"
            )
    return B, g


def lenience(value: float, rule: Rule) -> None:
    """Check that the lenience is in (0, 1], and that the rule has one."""
    if type(value) is float and value == 1:  # the usual case
        return
    number("lenience", value, "a number in (0, 1]", lambda l: 0 < l <= 1)
    if value < 1 and rule.name != "token":
        raise ValueError(f'lenience: got {value!r} with rule "{rule}"; only rule "token" has lenience')


def lengths(
    value: Sequence[int] | Tensor | None, rows: int, g: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Check the number of draft tokens per row.

    Returns:
        Numbers in 0..g, int64 ``[rows]``, or None for all g. Then a mask of rows that were out of range, or
        None.
    """
    if value is None:
        return None, None
    counts = row_integers("lengths", value, rows, device, 0, g)
    if device.type == "cpu":
        return counts, None
    return counts.clamp(0, g), (counts < 0) | (counts > g)


def tokens(draft_tokens: Tensor, counts: Tensor | None, vocab_size: int) -> tuple[Tensor, Tensor | None]:
    """Check the draft tokens.

    Returns:
        Token ids, int64 ``[B, g]``, which are 0 past a row's count. Then a mask of rows with a token out of
        range, or None.
    """
    ids = draft_tokens.to(torch.int64)
    if counts is not None:
        drafted = torch.arange(ids.shape[1], device=counts.device) < counts[:, None]
        ids = torch.where(drafted, ids, 0)
    if ids.device.type != "cpu":
        return ids.clamp(0, vocab_size - 1), ((ids < 0) | (ids >= vocab_size)).any(-1)
    low, high = map(int, torch.aminmax(ids)) if ids.numel() else (0, 0)
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"draft_tokens: got token id {low if low < 0 else high}; it must be in 0..{vocab_size - 1}"
        )
    return ids, None


def cut(
    value: tuple[Tensor, Tensor], draft_lse: Tensor | None, draft_params: object, draft_tokens: Tensor
) -> None:
    """Check ``draft_cut``, which needs ``draft_lse`` and ``draft_sampling``."""
    if draft_lse is None or draft_params is None:
        raise ValueError("draft_cut: given without draft_lse or draft_sampling; pass all three")
    if (
        not isinstance(value, tuple | list)
        or len(value) != 2
        or not all(isinstance(one, Tensor) for one in value)
    ):
        raise TypeError(
            f"draft_cut: got {type(value).__name__}; it must be a pair of tensors, cut and tie of `sample`"
        )
    for name, one, dtype in zip(("cut", "tie"), value, (torch.float32, torch.int32), strict=True):
        if one.device != draft_tokens.device:
            raise ValueError(
                f"draft_cut: got {name} on {one.device}; it must be on {draft_tokens.device}, as draft_tokens"
            )
        if one.shape != draft_tokens.shape or one.dtype is not dtype:
            raise ValueError(
                f"draft_cut: got {name} of {one.dtype} {tuple(one.shape)}; it must be {dtype} "
                f"{tuple(draft_tokens.shape)}, as `sample` returns it"
            )


def prefix(
    value: Prefix | Tensor | Sequence[Sequence[int]] | None, rows: int, device: torch.device
) -> Prefix | None:
    """Check the prefix, and convert it to a ``Prefix``."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        value = Prefix(value)
    elif not isinstance(value, Prefix):
        value = Prefix.of(value, device=device)
    if value.tokens.shape[0] != rows:
        raise ValueError(f"prefix: got {value.tokens.shape[0]} rows; it must have {rows}, as target_logits")
    if value.tokens.device != device:
        raise ValueError(
            f"prefix: got a tensor on {value.tokens.device}; it must be on {device}, as target_logits"
        )
    return value


def position(
    value: int | Sequence[int] | Tensor | None,
    prefix: Prefix | None,
    samplings: Sequence[SamplingParams],
    rows: int,
    g: int,
    device: torch.device,
) -> Tensor | int:
    """Return the absolute position of each row's first draft token.

    Returns:
        Positions, int64 ``[rows]``, or one int for all rows.
    """
    if value is None:
        return 0 if prefix is None else prefix.row_lengths()
    positions = int_or_row_integers("position", value, rows, device, 0, 2**32 - 1 - g)
    if prefix is None and any(one.reads_prefix for one in samplings):
        if isinstance(positions, int):
            before, where = positions > 0, f"{positions}"
        else:
            before, where = positions.device.type != "cpu" or bool(positions.any()), f"{positions.tolist()}"
        if before:
            raise ValueError(
                f"prefix: missing; it must hold the tokens before position {where}, because penalties and "
                "processors of the sampling read them"
            )
    return positions


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
