"""Prompt lookup: drafting by copying from the context.

What followed the same tokens last time may follow them again. (Saxena 2023; the same idea as LLMA, Yang et
al. 2023.) It costs next to nothing. It pays where the output repeats the input: summaries, edits, retrieval,
code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.checks.arguments import integer
from outpace.draft.base import Draft, State


class LookupDrafter:
    """Drafter that copies what followed the latest earlier occurrence of the last tokens.

    The longest match decides, from ``max_ngram`` tokens down to ``min_ngram``. A match of a single token is
    weak, so it proposes a single draft token. A copy that reaches the end of the sequence continues with
    itself. So a sequence that repeats is drafted to go on repeating. Encoder input counts as earlier text, if
    encoder and decoder share a vocabulary.

    Args:
        max_ngram: Longest match, in tokens.
        min_ngram: Shortest match, in tokens.
    """

    free = True

    def __init__(self, max_ngram: int = 3, min_ngram: int = 2) -> None:
        integer("min_ngram", min_ngram, "an int >= 1", lambda n: n >= 1)
        integer("max_ngram", max_ngram, f"an int >= min_ngram = {min_ngram}", lambda n: n >= min_ngram)
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self._indices: dict[int, Index] = {}  # by slot

    def propose(self, state: State, g: int) -> Draft:
        """See ``Drafter.propose``."""
        proposals, sure = [], []
        sources = state.sources or [None] * len(state.rows)
        for row, text, limit, source in zip(state.rows, state.tokens, state.limits, sources, strict=True):
            if source is not None and source.copyable:
                text = [*source.copyable, *text]
            index = self._indices.setdefault(row, Index(self.min_ngram, self.max_ngram))
            index.extend(text)
            proposal, size = index.proposal(text, min(g, limit))
            proposals.append(proposal)
            sure.append(size / self.max_ngram)
        return Draft.chosen(proposals, state.device, sure)

    def commit(self, accepted: Tensor, next_token: Tensor) -> None:
        """Do nothing: the next text shows what was accepted."""

    def reset(self, rows: Sequence[int]) -> None:
        """See ``Drafter.reset``."""
        for row in rows:
            self._indices.pop(row, None)


class Index:
    """Positions where each n-gram of a growing sequence last ended.

    The end of the sequence itself does not count.

    Args:
        least: Shortest n-grams.
        most: Longest n-grams.
    """

    def __init__(self, least: int, most: int) -> None:
        self.sizes = range(most, least - 1, -1)
        self.ends: dict[tuple[int, ...], int] = {}
        self.covered = 0  # n-grams that end before this position are in

    def extend(self, text: Sequence[int]) -> None:
        """Add the tokens that the sequence has grown by.

        Its last token stays out, because nothing follows it yet.
        """
        for end in range(max(self.covered, 1), len(text)):
            for size in self.sizes:
                if size <= end:
                    self.ends[tuple(text[end - size : end])] = end
        self.covered = max(self.covered, len(text))

    def proposal(self, text: Sequence[int], most: int) -> tuple[list[int], int]:
        """Return draft tokens after the text, and the length of the match.

        Args:
            text: Tokens of the sequence.
            most: Largest number of draft tokens.
        """
        for size in self.sizes:
            end = self.ends.get(tuple(text[-size:])) if size <= len(text) else None
            if end is not None:
                period = len(text) - end
                most = 1 if size == 1 < self.sizes.start else most
                return [text[end + i % period] for i in range(most)], size
        return [], 0


def copied(text: Tensor, lengths: Tensor, g: int, least: int, most: int) -> tuple[Tensor, Tensor]:
    """Return the draft tokens of prompt lookup, computed with tensors.

    They are those that ``Index.proposal`` finds.

    Args:
        text: Token ids ``[rows, T]``.
        lengths: Number of tokens of each sequence.
        g: Number of draft tokens.
        least: Shortest match, in tokens.
        most: Longest match, in tokens.

    Returns:
        Draft tokens ``[rows, g]``, and how many of them count in each row.
    """
    T = text.shape[1]
    end = torch.arange(T, device=text.device)  # end of an earlier match
    alike = torch.zeros_like(text)  # number of tokens before it that equal the last ones of the text
    for back in range(most, 0, -1):
        last = text.gather(1, (lengths[:, None] - back).clamp(min=0))
        same = (text[:, : T - back] == last) & (lengths[:, None] >= back)
        alike[:, :back] = 0
        alike[:, back:] = torch.where(same, alike[:, back:] + 1, 0)
    earlier = (end < lengths[:, None]) & (alike >= least)
    best = torch.where(earlier, alike * T + end, 0).amax(dim=1, keepdim=True)  # the longest, then the latest
    size, at = best // T, best % T
    again = torch.arange(g, device=text.device) % (lengths[:, None] - at).clamp(min=1)
    counts = torch.where((size == 1) & (most > 1), 1, g) * (size > 0)
    return text.gather(1, at + again), counts.squeeze(1)
