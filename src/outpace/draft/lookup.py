"""Prompt lookup: drafting by copying from the context.

The draft tokens are those that followed the last tokens earlier in the context (Saxena 2023; LLMA, Yang et
al. 2023). Drafting costs next to nothing. It pays where the output repeats the input: summaries,
edits, retrieval, code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.checks.arguments import integer
from outpace.draft.base import Draft, Drafter, DraftTensors, GraphDraft, GraphState, State


class LookupDrafter(Drafter):
    """Drafter that copies the tokens after the latest earlier occurrence of the last tokens.

    The longest match decides, from ``max_ngram`` tokens down to ``min_ngram``. A match of a single token is
    weak, so it proposes a single draft token. A copy that reaches the end of the sequence starts again at its
    first token. So a repeating sequence is drafted to keep repeating. Encoder input counts as earlier text
    if encoder and decoder share a vocabulary.

    Args:
        max_ngram: Longest match, in tokens.
        min_ngram: Shortest match, in tokens.
    """

    free = True
    reads_sources = True

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        integer("min_ngram", min_ngram, "an int >= 1", lambda n: n >= 1)
        integer("max_ngram", max_ngram, f"an int >= min_ngram = {min_ngram}", lambda n: n >= min_ngram)
        self.max_ngram, self.min_ngram = max_ngram, min_ngram
        self._indices: dict[int, NGramIndex] = {}  # by slot

    def propose(self, state: State, g: int) -> Draft:
        proposals = []
        sources = state.sources or [None] * len(state.slots)
        for row, text, limit, source in zip(state.slots, state.tokens, state.limits, sources, strict=True):
            if source is not None and source.copyable:
                text = [*source.copyable, *text]
            index = self._indices.setdefault(row, NGramIndex(self.min_ngram, self.max_ngram))
            index.extend(text)
            proposals.append(index.proposal(text, min(g, limit)))
        return Draft.chosen(proposals)

    def reset(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._indices.pop(slot, None)

    def in_graph(self) -> GraphDraft | None:
        """See ``Drafter.in_graph``; a derived class may draft otherwise, so it runs on the host."""
        return LookupGraphDraft(self.min_ngram, self.max_ngram) if type(self) is LookupDrafter else None


class LookupGraphDraft(GraphDraft):
    """Prompt lookup inside a graph."""

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.min_ngram, self.max_ngram = min_ngram, max_ngram

    def propose(self, state: GraphState, g: int) -> DraftTensors:
        tokens, lengths = lookup_draft(state.token_ids, state.lengths, g, self.min_ngram, self.max_ngram)
        return DraftTensors(tokens, lengths=lengths)

    def launch_once(self, state: GraphState, g: int) -> DraftTensors | None:
        # It has no kernels of its own, but verification has another kernel for drafts with lengths
        return self.propose(state, g) if g else None


class NGramIndex:
    """Positions where each n-gram of a growing sequence last ended.

    The end of the sequence itself does not count.

    Args:
        min_ngram: Shortest n-grams.
        max_ngram: Longest n-grams.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self.sizes = range(max_ngram, min_ngram - 1, -1)
        self.ends: dict[tuple[int, ...], int] = {}
        self.covered = 0  # n-grams that end before this position are in `ends`

    def extend(self, text: Sequence[int]) -> None:
        """Add the tokens that the sequence has grown by.

        Its last token stays out, because nothing follows it yet.
        """
        for end in range(max(self.covered, 1), len(text)):
            for size in self.sizes:
                if size <= end:
                    self.ends[tuple(text[end - size : end])] = end
        self.covered = max(self.covered, len(text))

    def proposal(self, text: Sequence[int], max_tokens: int) -> list[int]:
        """Return draft tokens after the text.

        Args:
            text: Tokens of the sequence.
            max_tokens: Largest number of draft tokens.
        """
        for size in self.sizes:
            end = self.ends.get(tuple(text[-size:])) if size <= len(text) else None
            if end is not None:
                period = len(text) - end
                max_tokens = 1 if size == 1 < self.sizes.start else max_tokens
                return [text[end + i % period] for i in range(max_tokens)]
        return []


def lookup_draft(
    text: Tensor, lengths: Tensor, g: int, min_ngram: int, max_ngram: int
) -> tuple[Tensor, Tensor]:
    """Return the draft tokens of prompt lookup, computed with tensors.

    They equal the tokens of ``NGramIndex.proposal``.

    Args:
        text: Token ids ``[rows, T]``.
        lengths: Number of tokens of each sequence.
        g: Number of draft tokens.
        min_ngram: Shortest match, in tokens.
        max_ngram: Longest match, in tokens.

    Returns:
        Draft tokens ``[rows, g]``, and how many of them count in each row.
    """
    T = text.shape[1]
    end = torch.arange(T, device=text.device)  # end of an earlier match
    match_length = torch.zeros_like(text)  # number of tokens before it that equal the last ones of the text
    for offset in range(max_ngram, 0, -1):
        last = text.gather(1, (lengths[:, None] - offset).clamp(min=0))
        matches = (text[:, : T - offset] == last) & (lengths[:, None] >= offset)
        match_length[:, :offset] = 0
        match_length[:, offset:] = torch.where(matches, match_length[:, offset:] + 1, 0)
    earlier = (end < lengths[:, None]) & (match_length >= min_ngram)
    # The longest match, then the latest
    best = torch.where(earlier, match_length * T + end, 0).amax(dim=1, keepdim=True)
    best_length, best_end = best // T, best % T
    again = torch.arange(g, device=text.device) % (lengths[:, None] - best_end).clamp(min=1)
    counts = torch.where((best_length == 1) & (max_ngram > 1), 1, g) * (best_length > 0)
    return text.gather(1, best_end + again), counts.squeeze(1)
