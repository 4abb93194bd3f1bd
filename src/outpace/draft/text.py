"""Drafter that runs a smaller model with another tokenizer, through text.

Its tokens are decoded to text and encoded again for the target. Its likeliest tokens follow from the text
alone. So draft tokens are chosen, not sampled, and every exact rule stays exact. A mismatch between the
tokenizers costs a draft token, never the correctness of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from math import ceil
from typing import Any

import torch
from torch import Tensor

from outpace.checks.text import REPLACEMENT_CHARACTER
from outpace.draft.base import Draft, Drafter, State
from outpace.draft.model import same_tokenizer
from outpace.draft.retokenizer import Retokenizer, TokenizerAdapter
from outpace.models.choice import scorer_of
from outpace.models.kv_cache import common_prefix_length
from outpace.models.scorer import Prefill, Scorer

WINDOW = 16  # last tokens of a text that are decoded or encoded together with new ones


class TextDrafter(Drafter):
    """Drafter with a causal model whose tokenizer is not the target's.

    The draft model always proposes its likeliest tokens, because the target's sampling parameters mean
    nothing to them. A special token is replaced by the draft's special token of the same name, and
    end-of-text by the draft's own. Other special tokens are left out.

    Args:
        model: The draft model, or its scorer.
        tokenizer: Tokenizer of the draft model.
        target_tokenizer: Tokenizer of the target.
    """

    def __init__(self, model: Any, tokenizer: Any, target_tokenizer: Any) -> None:
        self.draft = TokenizerAdapter("tokenizer", tokenizer)
        self.target = TokenizerAdapter("target_tokenizer", target_tokenizer)
        self.scorer: Scorer = scorer_of(model)
        if self.scorer.has_encoder:
            raise ValueError(
                "model: got an encoder-decoder model; it must be a causal model, because a TextDrafter has "
                "no encoder input"
            )
        self._special_map = self.target.special_tokens_in(self.draft)
        ends = {end: self.target.end for end in self.scorer.end_of_text if self.target.end is not None}
        self._ends = ends | self.draft.special_tokens_in(self.target)
        self._stops = self.draft.special | self.scorer.end_of_text
        self._retokenizers: dict[int, Retokenizer] = {}  # by slot
        self._cached: dict[int, list[int]] = {}  # by slot, tokens in the KV cache

    @torch.inference_mode()
    def propose(self, state: State, g: int) -> Draft:
        retokenizers = {
            row: self._retokenize(row, text) for row, text in zip(state.slots, state.tokens, strict=True)
        }
        waiting = {
            row: len(text) - retokenizers[row].num_read
            for row, text, limit in zip(state.slots, state.tokens, state.limits, strict=True)
            if limit > 0
            and len(text) - retokenizers[row].num_read <= WINDOW  # longer than any incomplete character
        }
        steps = self._steps(list(retokenizers.values()), g + max(waiting.values(), default=0))
        active = [row for row in waiting if 0 < len(retokenizers[row].ids) <= self.scorer.context - steps]
        self.setup_seconds = 0.0
        found = self._started(active, steps) if active else None
        for retokenizer in retokenizers.values():  # while the device runs
            retokenizer.freeze()
        drafted = {} if found is None else self._finished(active, steps, found)
        proposals = [
            self._target_tokens(retokenizers[row], text, drafted[row], state.vocab_size)[:g]
            if row in drafted
            else []
            for row, text in zip(state.slots, state.tokens, strict=True)
        ]
        return Draft.chosen(proposals)

    def _retokenize(self, row: int, text: Sequence[int]) -> Retokenizer:
        retokenizer = self._retokenizers.get(row)
        if retokenizer is None:
            retokenizer = self._retokenizers[row] = Retokenizer(self.target, self.draft, self._special_map)
        retokenizer.update(text)
        return retokenizer

    @staticmethod
    def _steps(retokenizers: Sequence[Retokenizer], g: int) -> int:
        """Return the draft steps for about g + 1 target tokens, the last of which may be incomplete."""
        read = sum(retokenizer.num_read for retokenizer in retokenizers)
        return (
            ceil((g + 1) * sum(len(retokenizer.ids) for retokenizer in retokenizers) / read)
            if read
            else g + 1
        )

    def _started(self, rows: Sequence[int], steps: int) -> Tensor:
        """Start greedy decoding; return the likeliest tokens, and whether their logits were finite."""
        captured = self.scorer.capture_seconds
        found = self.scorer.greedy(rows, self._unread(rows), steps)  # [R, steps, 2]
        self.setup_seconds = self.scorer.capture_seconds - captured
        return found

    def _finished(self, rows: Sequence[int], steps: int, found: Tensor) -> dict[int, list[int]]:
        """Wait for greedy decoding; return the tokens of each row, as far as their logits are finite."""
        proposals = {}
        for row, pairs in zip(rows, found.tolist(), strict=True):
            tokens = [token for token, _ in pairs]
            self._cached[row] = [*self._retokenizers[row].ids, *tokens[:-1]]
            count = sum(1 for _ in takewhile(bool, (is_finite for _, is_finite in pairs)))
            if count < steps:  # a mask does not hide NaN left in the KV cache
                self.scorer.reset([row])
                del self._cached[row]
            proposals[row] = tokens[:count]
        return proposals

    def _unread(self, rows: Sequence[int]) -> list[list[int]]:
        """Return the tokens of each sequence that the KV cache lacks, at least one.

        The matching prefix stays in the KV cache. Rejected draft tokens are removed here. New sequences are
        prefilled up to their last token.
        """
        cache = self.scorer.cache
        new = [row for row in rows if row not in self._cached]
        if new:
            texts = [self._known(self._retokenizers[row].ids) for row in new]
            prefill = Prefill(self.scorer, new, texts, leave_last=True, append=self.scorer.append_prompt)
            while not prefill.advance():
                pass
        for row in rows:
            if row in self._cached:
                ids = self._retokenizers[row].ids
                length = common_prefix_length(self._cached[row], ids, len(ids) - 1)
                cache.truncate(row, length)
                del self._cached[row][length:]  # at once, in case that memory runs short below
        return [self._known(self._retokenizers[row].ids[cache.length(row) :]) for row in rows]

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Return tokens with 0 for those that the model has no embedding for.

        This gives a worse draft, not an error.
        """
        return [token if token < self.scorer.vocab_size else 0 for token in tokens]

    def _target_tokens(
        self, retokenizer: Retokenizer, text: Sequence[int], proposal: Sequence[int], vocab_size: int
    ) -> list[int]:
        """Return the target's tokens for a draft, as far as they are certain."""
        text_ids = list(
            takewhile(lambda token: token not in self._stops and token < self.draft.size, proposal)
        )
        end = self._ends.get(proposal[len(text_ids)]) if len(text_ids) < len(proposal) else None
        new = self.draft.decode_after(
            retokenizer.ids[max(retokenizer.origin, len(retokenizer.ids) - WINDOW) :], text_ids
        )
        if REPLACEMENT_CHARACTER in new:
            new, end = new[: new.index(REPLACEMENT_CHARACTER)], None
        before = text[max(0, retokenizer.num_read - WINDOW) : retokenizer.num_read]
        tokens = self.target.encode_after(self.target.decode(before), new, before)
        tokens = tokens[:-1] if end is None else [*tokens, end]
        waiting = list(text[retokenizer.num_read :])  # tokens of a character that is not complete yet
        if tokens[: len(waiting)] != waiting:
            return []
        return list(takewhile(lambda token: token < vocab_size, tokens[len(waiting) :]))

    def reset(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._retokenizers.pop(slot, None)
            if self.scorer.cache.is_open(slot):
                self.scorer.reset([slot], [self._cached.pop(slot, ())])

    def check(self, target: Scorer, tokenizer: Any) -> None:
        """Check that the drafter can read the target's text.

        Raises:
            ValueError: The target is an encoder-decoder model, or its tokenizer is not ``target_tokenizer``.
        """
        if target.has_encoder:
            raise ValueError(
                "draft: got a TextDrafter, which does not see the encoder input of the target; it must be a "
                "model with the target's tokenizer"
            )
        if tokenizer is not None and not same_tokenizer(tokenizer, self.target.tokenizer):
            raise ValueError(
                "draft: got a TextDrafter whose target_tokenizer is not the Decoder's tokenizer; it must be "
                "the third argument of TextDrafter(model, tokenizer, target_tokenizer)"
            )

    def describe(self) -> str:
        """Return a description of the drafter and its model."""
        return f"{type(self).__name__}, through text, as the tokenizers differ: {self.scorer.describe()}"
