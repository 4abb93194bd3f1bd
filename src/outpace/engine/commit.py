"""Commit of verified tokens to sequences."""

from __future__ import annotations

from collections.abc import Sequence

from outpace.draft.base import Draft, State
from outpace.engine.sequence import Row, Step

Verdicts = tuple[Sequence[int], Sequence[int], Sequence[int | bool]]
"""For each sequence: tokens accepted, the token that follows, and whether logits were unusable."""


def advance(
    rows: Sequence[Row], draft: Draft, state: State | None, verdicts: Verdicts, context: int
) -> list[Step]:
    """Append to each sequence the tokens that it gained, up to its end.

    Returns:
        One ``Step`` per sequence.
    """
    drafts = draft.tokens.tolist()
    drafted = list(draft.lengths or [])
    steps = []
    for i, (row, accepted, next_token, bad) in enumerate(zip(rows, *verdicts, strict=True)):
        row.stats.target_passes += 1
        row.stats.count(drafted[i], accepted)
        won = [*drafts[i][:accepted], next_token]
        if bad:
            won, row.finish_reason = [], "error"
            row.error = ValueError(
                f"the logits at position {len(row.tokens)} are unusable: the target, the draft or a "
                "processor left NaN, +inf or nothing but -inf"
            )
        elif row.draft_sampling is not None and state is not None and state.after:
            row.draft_sampling = state.after[min(accepted, len(state.after) - 1)][i]
        kept = row.extend(won, context)
        if row.finish_reason is not None and row.text is not None:
            row.text.finish()
        steps.append(
            Step(
                row.index,
                None if row.text is None else row.text.take(final=row.finish_reason is not None),
                won[:kept],
                drafted[i],
                accepted,
                next_token,
                drafts[i][: drafted[i]],
            )
        )
    return steps
