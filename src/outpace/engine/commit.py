"""Commit of verified tokens to sequences."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.draft.base import Draft, State
from outpace.engine.sequence import SequenceState, Step

Verdicts = tuple[Sequence[int], Sequence[int], Sequence[int | bool]]
"""For each sequence: number of accepted draft tokens, next token, and whether logits were unusable."""


def advance(
    rows: Sequence[SequenceState], draft: Draft, state: State | None, verdicts: Verdicts, context: int
) -> list[Step]:
    """Append the accepted draft tokens and the next token to each sequence.

    Tokens after the first one that ends the sequence are dropped.

    Returns:
        One ``Step`` per sequence.
    """
    draft_tokens = draft.tokens.tolist()
    num_drafted = list(draft.lengths or [])
    steps = []
    for i, (row, accepted, next_token, bad) in enumerate(zip(rows, *verdicts, strict=True)):
        row.stats.target_passes += 1
        row.stats.count(num_drafted[i], accepted)
        new_tokens = [*draft_tokens[i][:accepted], next_token]
        if bad:
            new_tokens, row.finish_reason = [], "error"
            row.error = ValueError(
                f"the logits at position {len(row.tokens)} are unusable: the target, the draft model or a "
                "processor returned NaN, +inf, or -inf for all tokens; check weights, dtype and processors"
            )
        elif row.draft_sampling is not None and state is not None and state.after:
            row.draft_sampling = state.after[min(accepted, len(state.after) - 1)][i]
        num_appended = row.extend(new_tokens, context)
        if row.finish_reason is not None and row.text is not None:
            row.text.finish()
        steps.append(
            Step(
                row.index,
                None if row.text is None else row.text.take(final=row.finish_reason is not None),
                new_tokens[:num_appended],
                num_drafted[i],
                accepted,
                next_token,
                draft_tokens[i][: num_drafted[i]],
            )
        )
    return steps
