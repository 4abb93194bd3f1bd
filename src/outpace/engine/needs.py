"""Needs of the sequences in a step, which decide what its graph computes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from outpace.engine.sequence import SequenceState
from outpace.sampling import SamplingParams


@dataclass(frozen=True)
class Needs:
    """Results and kernels of a step, which serves any mix of sequences that need no more.

    Attributes:
        filters: Top-k, top-p or min-p.
        edits: Bias, allowed tokens or penalties.
        match: Rule ``match``, for sequences that have it.
        rule: The decoder's own rule, for the others.
        top: How many of the likeliest tokens get log-probabilities, a power of two. 0: the new tokens alone.
            None: no log-probabilities.
        values: The logits, before and after the sampling parameters.
        processors: Python functions, which change logits between the target's pass and verification.
        limits: Numbers of draft tokens per sequence, below that of the step.
    """

    filters: bool = False
    edits: bool = False
    match: bool = False
    rule: bool = True
    top: int | None = None
    values: bool = False
    processors: bool = False
    limits: bool = False

    @classmethod
    def of(cls, sequences: Collection[SequenceState], g: int) -> Needs:
        """Return what sequences need together.

        Args:
            sequences: The sequences.
            g: Draft tokens of the step. Without them, all rules sample as rule ``match`` does.
        """
        samplings = [one.sampling for one in sequences]
        drafting = [one.draft_sampling or one.sampling for one in sequences]
        tops = [one.top for one in sequences if one.top is not None]
        match = g == 0 or any(one.match for one in sequences)
        return cls(
            any(has_filters(one) for one in [*samplings, *(drafting if g else ())]),
            any(has_edits(one) for one in [*samplings, *drafting]),  # the host's edits are not the draft's
            match,
            g > 0 and not all(one.match for one in sequences),
            None if not tops else (1 << (max(tops) - 1).bit_length() if max(tops) else 0),
            any(one.scores is not None or one.logits is not None for one in sequences),
            any(one.processors for one in samplings),
            g > 0 and any(one.num_draft_tokens is not None for one in sequences),
        )

    def covers(self, other: Needs) -> bool:
        """Return whether a step that computes this serves sequences with other needs.

        With processors a step is two graphs, so it does not serve sequences without.
        """
        top = other.top is None or (self.top is not None and self.top >= other.top)
        flags = ("filters", "edits", "match", "rule", "values", "limits")
        more = all(getattr(self, name) >= getattr(other, name) for name in flags)
        return top and more and self.processors == other.processors

    def size(self) -> int:
        """Return a number that grows with what a step computes."""
        flags = self.filters, self.edits, self.match, self.rule, self.top is not None, self.limits
        return sum(flags) + 2 * self.values


def has_filters(one: SamplingParams) -> bool:
    """Return whether sampling parameters have top-k, top-p or min-p."""
    return bool(one.top_k or one.top_p < 1 or one.min_p)


def has_edits(one: SamplingParams) -> bool:
    """Return whether bias, allowed tokens or penalties change single logits."""
    return bool(one.logit_bias) or one.allowed_token_ids is not None or one.has_penalties
