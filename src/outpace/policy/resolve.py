"""Choice of a draft-length policy: from a user's ``num_draft_tokens``, and where runs must repeat."""

from __future__ import annotations

import numbers
from typing import Any

from outpace.checks.arguments import integer, kind
from outpace.checks.errors import suggestion
from outpace.policy.base import DraftLengthPolicy
from outpace.policy.simple import Fixed, Heuristic

REPEATABLE_START, REPEATABLE_MOST = 5, 20  # draft tokens of `repeatable`
MOST_CAPTURED = 5  # the same on a GPU, where each number needs a CUDA graph


def resolve_policy(num_draft_tokens: Any, context: int) -> DraftLengthPolicy:
    """Return the draft-length policy that a user passed; an int becomes ``Fixed``.

    Raises:
        TypeError: The argument is neither an int nor a policy.
        ValueError: A step may have more draft tokens than fit into the target's context.
    """
    policy = num_draft_tokens
    if isinstance(num_draft_tokens, numbers.Integral):
        expected = "an int >= 0, or a draft-length policy"
        integer("num_draft_tokens", num_draft_tokens, expected, lambda g: g >= 0)
        policy = Fixed(int(num_draft_tokens))
    if not isinstance(policy, DraftLengthPolicy):
        known = ("Fixed", "Heuristic", "Goodput")
        hint = suggestion(policy, known) if isinstance(policy, str) else ""
        expected = 'an int, "auto", Fixed(5), Heuristic(), Goodput() or another DraftLengthPolicy'
        raise TypeError(f"num_draft_tokens: got {kind(policy)[:80]}; it must be {expected}{hint}")
    if policy.max_draft_tokens >= context:
        raise ValueError(
            f"num_draft_tokens: got {policy!r}, up to {policy.max_draft_tokens} draft tokens; it must be "
            f"less than the target's context of {context} tokens"
        )
    return policy


def repeatable(most: int, free: bool, captured: bool) -> DraftLengthPolicy:
    """Return the policy for runs that must repeat: it measures no time.

    Args:
        most: Largest number of draft tokens.
        free: Whether the drafter costs next to nothing.
        captured: Whether each number of draft tokens needs a CUDA graph.
    """
    most = min(MOST_CAPTURED if captured else REPEATABLE_MOST, most)
    return Heuristic(min(REPEATABLE_START, most), most, least=int(free))
