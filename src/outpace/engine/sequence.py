"""Sequences that are being generated, their steps and their outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.checks.arguments import on_device
from outpace.engine.stats import Stats
from outpace.engine.text import Detokenizer
from outpace.models.source import Source
from outpace.sampling import SamplingParams


@dataclass(frozen=True)
class Output:
    """The result of one sequence.

    Attributes:
        text: The new text, up to a stop string. None without a tokenizer.
        token_ids: The new token ids. They include the end-of-text token, or the tokens of the stop string,
            that ended the sequence.
        finish_reason: "stop", "length", or "error" for a sequence of a batch that failed.
        stats: Counts and seconds of the generation.
        logprobs: With ``logprobs=``: the log-probability of each new token under the target's distribution,
            after all sampling parameters. Greedy decoding counts as temperature 1 without top-k, top-p and
            min-p.
        top_logprobs: With ``logprobs=k``: for each token the k likeliest ids with their log-probabilities.
        error: The error of a sequence that failed; None otherwise.
        scores: With ``scores=True``: the logits ``[tokens, V]`` after all sampling parameters, from which
            each token was sampled. Greedy decoding counts as for ``logprobs``.
        logits: With ``logits=True``: the target's own logits ``[tokens, V]`` before any adjustment.
        context_full: Whether the model's full context ended generation before ``max_new_tokens``.
        prompt_logprobs: With ``prompt_logprobs=``: None for the first token of the prompt, then the
            log-probability of each token given those before it. They are those of the model's own logits,
            without sampling parameters.
        prompt_top_logprobs: With ``prompt_logprobs=k``: None for the first token of the prompt, then the k
            likeliest ids at each position, with their log-probabilities.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: str
    stats: Stats
    logprobs: list[float] | None = None
    top_logprobs: list[dict[int, float]] | None = None
    error: Exception | None = None
    scores: Tensor | None = None
    logits: Tensor | None = None
    context_full: bool = False
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[dict[int, float] | None] | None = None


@dataclass(frozen=True)
class Step:
    """The result of one decode step for one sequence.

    Attributes:
        index: Index of the output that the step belongs to. With a scheduler: the id of the request.
        pieces: New text that no later token can change. Each piece comes with the index of its token, counted
            from the first new one.
        token_ids: New token ids: accepted draft tokens, then the target's own, cut where the sequence ends.
        num_draft_tokens: Draft tokens that the target scored.
        num_accepted: Draft tokens that were accepted.
        token: The target's own token after the accepted ones. -1 if there is none, because logits were
            unusable or the request failed.
        draft_token_ids: The draft tokens.
        finish_reason: The sequence's ``finish_reason``, if this is its last step.
        output: The sequence's ``Output``, if this is its last step.
        phases: Seconds of the step for all sequences together, by phase: "encode" (prefill with an encoder),
            "draft", "target", "verify" and "other". In the graph executor, "target" includes verification,
            and also drafting if it is part of the graph.
    """

    index: int
    pieces: list[tuple[int, str]] | None
    token_ids: list[int]
    num_draft_tokens: int
    num_accepted: int
    token: int
    draft_token_ids: list[int]
    finish_reason: str | None = None
    output: Output | None = None
    phases: Mapping[str, float] = field(default_factory=dict)

    @property
    def text(self) -> str | None:
        """New text that no later token can change; None without a tokenizer."""
        return None if self.pieces is None else "".join(text for _, text in self.pieces)

    @property
    def kinds(self) -> list[str]:
        """The kind of each of ``token_ids``.

        "accepted" is an accepted draft token. The target's own token is "correction" after a rejection,
        "bonus" if all draft tokens were accepted, and "target" without draft tokens.
        """
        after_draft = "bonus" if self.num_accepted == self.num_draft_tokens else "correction"
        last = after_draft if self.num_draft_tokens else "target"
        return [*["accepted"] * self.num_accepted, last][: len(self.token_ids)]


@dataclass
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens, which all samples of the prompt share.

    Attributes:
        top: How many of the likeliest tokens get log-probabilities, too.
        values: None for the first token, then the log-probability of each token. Shorter than the prompt
            until all of it is scored.
        top_values: None for the first token, then the likeliest ids with their log-probabilities.
    """

    top: int
    values: list[float | None] = field(default_factory=list)
    top_values: list[dict[int, float] | None] = field(default_factory=list)


@dataclass
class SequenceState:
    """A sequence that is being generated."""

    index: int  # of its output
    tokens: list[int]  # prompt and output; the last one is not in the target's KV cache yet
    prompt_length: int
    sampling: SamplingParams
    draft_sampling: SamplingParams | None  # None: the target's
    seed: int
    match: bool  # whether the rule is ``match``, instead of the decoder's own
    max_new_tokens: int
    stop_tokens: frozenset[int]
    text: Detokenizer | None
    top: int | None  # None: no log-probabilities; 0: those of the tokens; k: also of the k likeliest
    stop_when: Callable[[SequenceState], bool] | None = None
    scores: list[Tensor] | None = None  # `[V]` per token; None: not requested
    logits: list[Tensor] | None = None
    source: Source | None = None  # the encoder's input, where there is an encoder
    prompt_logprobs: PromptLogprobs | None = None  # None: not requested
    num_draft_tokens: int | None = None  # of each step; None: the draft-length policy chooses
    slot: int = -1
    added: bool = False  # to a scheduler
    alone: bool = False  # whether it must not be prefilled together with others
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    finish_reason: str | None = None
    error: Exception | None = None
    context_full: bool = False

    @property
    def new_tokens(self) -> list[int]:
        """The token ids after the prompt."""
        return self.tokens[self.prompt_length :]

    def extend(self, tokens: Sequence[int], context: int) -> int:
        """Append tokens up to the first one that ends the sequence, as without speculation.

        Args:
            tokens: New token ids.
            context: Maximum number of tokens of a sequence.

        Returns:
            The number of tokens appended.
        """
        for count, token in enumerate(tokens, 1):
            self.tokens.append(token)
            self.stats.new_tokens += 1
            complete = self.text is not None and self.text.push(token)
            stopped = self.stop_when is not None and self.stop_when(self)
            if self.finish_reason is not None:  # ``stop_when`` has cancelled the sequence
                return count
            if complete or stopped or token in self.stop_tokens:
                self.finish_reason = "stop"
            elif self.stats.new_tokens == self.max_new_tokens or len(self.tokens) >= context:
                self.finish_reason = "length"
                self.context_full = self.stats.new_tokens < self.max_new_tokens
            if self.finish_reason is not None:
                return count
        return len(tokens)

    def output(self) -> Output:
        """Return the result of a sequence that has ended."""
        assert self.finish_reason is not None
        prompt = self.prompt_logprobs
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
            None if prompt is None else list(prompt.values),
            list(prompt.top_values) if prompt is not None and prompt.top else None,
        )

    def failed_step(self, new: int = 0) -> Step:
        """Return the last step of a sequence that failed, after it got ``new`` tokens in this step."""
        assert self.error is not None
        tokens = self.tokens[len(self.tokens) - new :]
        text = None if self.text is None else self.text.take(final=True)
        return Step(self.index, text, tokens, 0, 0, -1, [], self.finish_reason, self.output())

    def _stacked(self, rows: list[Tensor] | None) -> Tensor | None:
        return torch.stack(rows[: self.stats.new_tokens]) if rows else None


def advance(
    sequence: SequenceState,
    draft: Sequence[int],
    accepted: int,
    next_token: int,
    bad: bool,
    context: int,
    error: Exception | None = None,
) -> Step:
    """Append the accepted draft tokens and the next token to a sequence.

    Tokens after the first one that ends the sequence are dropped. If there is no next token, and no accepted
    draft token ends the sequence, it ends with an error, as without speculation.

    Args:
        sequence: The sequence.
        draft: Draft tokens that the target scored.
        accepted: Number of accepted draft tokens.
        next_token: The target's own token after them.
        bad: Whether there is no next token, because logits after the accepted draft tokens are unusable.
        context: Maximum number of tokens of a sequence.
        error: The error that made logits unusable, if it is known.
    """
    sequence.stats.target_passes += 1
    sequence.stats.count(len(draft), accepted)
    new_tokens = [*draft[:accepted], *([] if bad else [next_token])]
    num_appended = sequence.extend(new_tokens, context)
    if bad and sequence.finish_reason is None:
        sequence.finish_reason = "error"
        sequence.error = error or ValueError(
            f"the logits at position {len(sequence.tokens)} are unusable: the target, the draft model or a "
            "processor returned NaN, +inf, or -inf for all tokens, or logit_bias and allowed_token_ids "
            "forbid all; check weights, dtype, processors and these parameters"
        )
    ended = sequence.finish_reason is not None
    if ended and sequence.text is not None:
        sequence.text.finish()
    return Step(
        sequence.index,
        None if sequence.text is None else sequence.text.take(final=ended),
        new_tokens[:num_appended],
        len(draft),
        accepted,
        -1 if bad else next_token,
        list(draft),
        sequence.finish_reason,
        sequence.output() if ended else None,
    )


def seeds(sequences: Sequence[SequenceState], device: torch.device) -> Tensor:
    """Return the seeds of the sequences, ``[R]``."""
    return on_device([one.seed for one in sequences], torch.int64, device)
