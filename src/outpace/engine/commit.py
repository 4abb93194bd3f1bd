"""Commit of verified tokens to a sequence."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.engine.sequence import SequenceState, Step


def advance(
    row: SequenceState, draft: Sequence[int], accepted: int, next_token: int, bad: bool, context: int
) -> Step:
    """Append the accepted draft tokens and the next token to a sequence.

    Tokens after the first one that ends the sequence are dropped.

    Args:
        row: The sequence.
        draft: Draft tokens that the target scored.
        accepted: Number of accepted draft tokens.
        next_token: The target's own token after them.
        bad: Whether logits were unusable.
        context: Maximum number of tokens of a sequence.
    """
    row.stats.target_passes += 1
    row.stats.count(len(draft), accepted)
    new_tokens = [*draft[:accepted], next_token]
    if bad:
        new_tokens, row.finish_reason = [], "error"
        row.error = ValueError(
            f"the logits at position {len(row.tokens)} are unusable: the target, the draft model or a "
            "processor returned NaN, +inf, or -inf for all tokens; check weights, dtype and processors"
        )
    num_appended = row.extend(new_tokens, context)
    ended = row.finish_reason is not None
    if ended and row.text is not None:
        row.text.finish()
    return Step(
        row.index,
        None if row.text is None else row.text.take(final=ended),
        new_tokens[:num_appended],
        len(draft),
        accepted,
        next_token,
        list(draft),
        row.finish_reason,
        row.output() if ended else None,
    )
