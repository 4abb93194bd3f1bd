"""Rows: texts that are being generated, and what comes back of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.models.source import Source
from outpace.sampling import Sampling
from outpace.stats import Stats
from outpace.text import Text


@dataclass(frozen=True)
class Output:
    """What one row came to.

    text           the new text, up to a stop string; None without a tokenizer
    tokens         the new token ids, with the end-of-text token or those of the stop string, if that ended it
    finish_reason  "stop", "length", or, for a row of a batch that failed, "error"
    stats          what happened on the way
    logprobs       with logprobs=: of each token, its log-probability under the adjusted target (for greedy
                   rows: under the softmax that the argmax was taken of)
    top_logprobs   with logprobs=k: of each token, the k likeliest ids there with theirs
    error          why the row failed; None otherwise
    scores         with scores=True: the adjusted logits `[tokens, V]` that each token was drawn from
                   (for greedy rows: that the argmax was taken of)
    logits         with logits=True: alike, the target's own before any adjustment
    context_full   whether generation ended, before max_new_tokens, because the model's context was full
    """

    text: str | None
    tokens: list[int]
    finish_reason: str
    stats: Stats
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    error: Exception | None = None
    scores: Tensor | None = None
    logits: Tensor | None = None
    context_full: bool = False


@dataclass(frozen=True)
class Step:
    """What one iteration brought to one row.

    row            which output it belongs to
    pieces         text that is certain now, by the token it came with, counted from the row's first new one
    tokens         new token ids: kept drafts, then the target's own, cut where the row ends
    drafted        tokens that were guessed
    accepted       guesses that were kept
    token          the target's own token after them; -1 where a prompt could not be read
    draft_tokens   the guesses
    finish_reason  of the row, if this is its last step
    output         the row's Output, if this is its last step
    phases         seconds of the iteration, all rows together, by what they were spent on: draft, target,
                   verify, other
    """

    row: int
    pieces: list[tuple[int, str]] | None
    tokens: list[int]
    drafted: int
    accepted: int
    token: int
    draft_tokens: list[int]
    finish_reason: str | None = None
    output: Output | None = None
    phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def text(self) -> str | None:
        """Text that is certain now; None without a tokenizer."""
        return None if self.pieces is None else "".join(text for _, text in self.pieces)

    @property
    def kinds(self) -> list[str]:
        """What each of `tokens` is: "kept", "correction", "bonus", or "plain" where nothing was guessed."""
        own = "plain" if not self.drafted else "bonus" if self.accepted == self.drafted else "correction"
        return [*["kept"] * self.accepted, own][: len(self.tokens)]


@dataclass
class Row:
    """A text that is being generated."""

    index: int  # among the outputs
    tokens: list[int]  # prompt and output; the last one is not in the target's cache yet
    prompt_length: int
    sampling: Sampling
    draft_sampling: Sampling | None  # None: as the target's
    seed: int
    max_new_tokens: int
    stop_tokens: frozenset[int]
    text: Text | None
    top: int | None  # log-probabilities wanted: None, 0 for the tokens' own, k for the k likeliest too
    stop_when: Callable[[Row], bool] | None = None
    scores: list[Tensor] | None = None  # `[V]` a token; None: not wanted
    logits: list[Tensor] | None = None
    source: Source | None = None  # what it is written about, where there is an encoder
    slot: int = -1
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    finish_reason: str | None = None
    error: Exception | None = None
    context_full: bool = False

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def extend(self, tokens: Sequence[int], context: int) -> int:
        """Take in tokens up to where plain decoding would have stopped; how many those are."""
        for count, token in enumerate(tokens, 1):
            self.tokens.append(token)
            self.stats.new_tokens += 1
            complete = self.text is not None and self.text.push(token)
            asked = self.stop_when is not None and self.stop_when(self)
            if complete or asked or token in self.stop_tokens:
                self.finish_reason = "stop"
            elif self.stats.new_tokens == self.max_new_tokens or len(self.tokens) >= context:
                self.finish_reason = "length"
                self.context_full = self.stats.new_tokens < self.max_new_tokens
            if self.finish_reason is not None:
                return count
        return len(tokens)

    def output(self) -> Output:
        assert self.finish_reason is not None
        return Output(
            None if self.text is None else self.text.text,
            self.new_tokens,
            self.finish_reason,
            self.stats,
            None if self.top is None else self.logprobs[: self.stats.new_tokens],
            self.top_logprobs[: self.stats.new_tokens] if self.top else None,
            self.error,
            self._stacked(self.scores),
            self._stacked(self.logits),
            self.context_full,
        )

    def refused(self) -> Step:
        """Return the only step of a prompt that could not be read."""
        assert self.error is not None
        pieces: list[tuple[int, str]] | None = None if self.text is None else []
        return Step(self.index, pieces, [], 0, 0, -1, [], self.finish_reason, self.output())

    def _stacked(self, kept: list[Tensor] | None) -> Tensor | None:
        return torch.stack(kept[: self.stats.new_tokens]) if kept else None
