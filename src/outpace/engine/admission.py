"""Admission: requests wait until a slot is free and the KV caches have memory for them."""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from outpace.engine.sequence import SequenceState
from outpace.models.kv_cache import size
from outpace.models.scorer import Demand, Scorer


class Admission:
    """Requests that wait for a slot and for memory of the KV caches, the oldest one first.

    Args:
        scorers: The target, and the draft model if there is one.
        max_draft_tokens: Most draft tokens that the policy chooses.
        slots: Most sequences at a time.
        padded: Returns the number of slots that a step of some sequences uses.
    """

    def __init__(
        self, scorers: Sequence[Scorer], max_draft_tokens: int, slots: int, padded: Callable[[int], int]
    ) -> None:
        self.scorers, self.max_draft_tokens, self.slots = scorers, max_draft_tokens, slots
        self._padded = padded
        self.waiting: deque[SequenceState] = deque()

    def retry_alone(self, sequences: Sequence[SequenceState]) -> None:
        """Let sequences wait again. Each is then prefilled alone."""
        for sequence in sequences:
            sequence.alone = True
        self.waiting.extendleft(reversed(sequences))

    def admit(self, active: Mapping[int, SequenceState]) -> tuple[list[SequenceState], list[SequenceState]]:
        """Give slots to waiting requests, beside the active sequences.

        Args:
            active: The active sequences, by slot.

        Returns:
            Requests that now have a slot, and requests that failed.
        """
        free = [slot for slot in range(self.slots) if slot not in active]
        new, failed = list[SequenceState](), list[SequenceState]()
        readable = (one for one in self.waiting if one.error is None)
        candidates = list(itertools.islice(readable, len(free)))
        # Checked at once, since one check per candidate takes time in proportion to their square
        all_fit = bool(candidates) and self._fits([*active.values(), *candidates])
        while self.waiting and (len(new) < len(free) or self.waiting[0].error is not None):
            sequence = self.waiting[0]
            if new and (sequence.alone or new[0].alone):
                break
            if sequence.error is None and not all_fit and not self._fits([*active.values(), *new, sequence]):
                if active or new:
                    break  # it waits for memory
                sequence.error, sequence.finish_reason = self._too_long(sequence), "error"
            self.waiting.popleft()
            if sequence.error is not None:
                failed.append(sequence)
            else:
                sequence.slot = free[len(new)]
                new.append(sequence)
        return new, failed

    def reservation(self, sequences: Sequence[SequenceState]) -> tuple[int, int]:
        """Return the slots and the tokens per slot to reserve before sequences are added.

        Args:
            sequences: The sequences.

        Returns:
            How many of the longest sequences fit together, and the most tokens of the longest one.
        """
        g = self._most_draft_tokens(sequences)
        longest_first = sorted(sequences, key=lambda one: self._max_tokens(one, g), reverse=True)
        longest_first = longest_first[: self.slots]
        counts = range(1, len(longest_first) + 1)
        fitting = bisect.bisect_left(counts, True, key=lambda n: not self._fits(longest_first[:n]))
        return fitting, self._max_tokens(longest_first[0], g)

    def _most_draft_tokens(self, sequences: Sequence[SequenceState]) -> int:
        """Return the most draft tokens of a step that these sequences share."""
        return max([self.max_draft_tokens, *(one.num_draft_tokens or 0 for one in sequences)])

    def _max_tokens(self, sequence: SequenceState, g: int) -> int:
        """Return the most tokens of a sequence in the KV cache, with g draft tokens per step."""
        longest = min(sequence.prompt_length + sequence.max_new_tokens, self.scorers[0].context)
        return longest + g + 1

    def _fits(self, sequences: Sequence[SequenceState]) -> bool:
        """Return whether the KV caches have memory for these sequences, however long they become."""
        padding = self._padded(len(sequences)) - len(sequences)
        return all(one.nbytes <= one.budget for one in self._demands(sequences, padding))

    def _demands(self, sequences: Sequence[SequenceState], padding: int = 0) -> list[Demand]:
        """Return the memory that these sequences need, however long they become."""
        g = self._most_draft_tokens(sequences)
        lengths = [self._max_tokens(one, g) for one in sequences] + [0] * padding
        sources = [one.source for one in sequences]
        return [one for scorer in self.scorers for one in scorer.demands(lengths, sources)]

    def _too_long(self, sequence: SequenceState) -> Exception:
        too_large = next(one for one in self._demands([sequence]) if one.nbytes > one.budget)
        return MemoryError(
            f"the KV cache of {too_large.what} needs {size(too_large.nbytes)}; its budget is "
            f"{size(too_large.budget)}: pass a shorter prompt, a smaller max_new_tokens, or a larger "
            "kv_cache_bytes"
        )
