"""Log-probabilities of prompts: the target scores a prompt before it is prefilled."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from outpace.engine.executor import Executor, Outcome, Prefilling
from outpace.engine.sequence import PromptLogprobs, SequenceState
from outpace.engine.stats import Clock
from outpace.models.scorer import CHUNK, Scorer


class ScoredPrefilling:
    """Prefill of sequences, after prompts whose log-probabilities were requested are scored.

    A prompt is scored in the slot of its sequence. The slot is then closed, and the prefill opens it again
    with the same keys and values. So the prompt is computed once.

    Args:
        executor: The executor that prefills.
        target: The target.
        sequences: The sequences. They have slots.
    """

    def __init__(self, executor: Executor, target: Scorer, sequences: Sequence[SequenceState]) -> None:
        self.sequences, self._executor, self._target = list(sequences), executor, target
        self._waiting = [one for one in sequences if one.prompt_logprobs is not None]
        self._prefilling: Prefilling | None = None

    def advance(self, clock: Clock) -> bool:
        """Score the next tokens of a prompt, or run a forward pass of the prefill."""
        while self._waiting:
            sequence = self._waiting[0]
            assert sequence.prompt_logprobs is not None
            if self._is_scored(sequence, sequence.prompt_logprobs):  # as another sample, or in this slot
                self._waiting.pop(0)
                self._target.reset([sequence.slot], [sequence.tokens])
            else:
                self._score_chunk(sequence, sequence.prompt_logprobs)
                return False
        if self._prefilling is None:
            clock.lap("target")
            self._prefilling = self._executor.prefill(self.sequences, clock)
        return self._prefilling.advance()

    def finish(self, clock: Clock) -> Outcome | None:
        assert self._prefilling is not None
        return self._prefilling.finish(clock)

    @staticmethod
    def _is_scored(sequence: SequenceState, logprobs: PromptLogprobs) -> bool:
        return len(logprobs.values) == sequence.prompt_length

    @torch.inference_mode()
    def _score_chunk(self, sequence: SequenceState, logprobs: PromptLogprobs) -> None:
        """Score the next tokens of a prompt, and store their log-probabilities."""
        cache, slot, device = self._target.cache, sequence.slot, self._target.device
        if not cache.is_open(slot):
            self._target.check_weights()
            slots, lengths = zip(*((one.slot, one.prompt_length) for one in self._waiting), strict=True)
            cache.prepare(max(slots) + 1, max(lengths))  # so that it does not grow with each chunk
            cache.open(slot, sequence.tokens[:1])  # with one token, no cached prefix is reused
            logprobs.values[:], logprobs.top_values[:] = [None], [None]
        start = cache.length(slot)
        end = min(start + CHUNK, sequence.prompt_length - 1)  # the prefill computes the last token
        if start == end:
            return
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            logits = self._target.append_scored(slot, sequence.tokens[start:end])
        store_prompt_logprobs(logprobs, logits, sequence.tokens[start + 1 : end + 1])


def store_prompt_logprobs(logprobs: PromptLogprobs, logits: Tensor, tokens: Sequence[int]) -> None:
    """Store the log-probabilities of tokens of a prompt.

    Args:
        logprobs: Log-probabilities of the tokens before.
        logits: The target's own logits ``[n, V]``, from which the tokens would be sampled.
        tokens: The tokens ``[n]``.
    """
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    ids = torch.tensor(tokens, dtype=torch.int64, device=scores.device)
    logprobs.values += scores.gather(-1, ids[:, None])[:, 0].tolist()
    if logprobs.top:
        top = scores.topk(logprobs.top)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        logprobs.top_values += [dict(zip(*pair, strict=True)) for pair in pairs]
