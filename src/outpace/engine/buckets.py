"""Buckets: the numbers of slots that graphs of a step are captured for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from outpace.engine.needs import Needs
from outpace.engine.sequence import SequenceState
from outpace.models.capture import Graphs

BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # slots that graphs serve
PATIENCE = 64  # steps that a smaller bucket must suffice for, before a graph of it is captured


def bucket_of(slots: int) -> int:
    """Return the smallest bucket of at least this many slots."""
    largest = BUCKETS[-1]
    return next((size for size in BUCKETS if size >= slots), -(-slots // largest) * largest)


class StepKey(NamedTuple):
    """The key of a step's graph."""

    g: int  # draft tokens per sequence
    slots: int  # that take part
    needs: Needs  # what the step computes
    host_buffers: int | None  # id of the buffers for draft tokens from the host; None: the executor drafts


class Buckets:
    """The bucket of each step. A batch that shrinks keeps its graphs for a while.

    Args:
        graphs: The graphs of the executor.
    """

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self._last, self._smaller_for = 0, 0  # slots of the last step, and steps that fewer sufficed for
        # Steps that computed more than was needed, by g, bucket and buffers of the host
        self._more_for: dict[tuple[int, int, int | None], int] = {}
        self._needs: dict[tuple[int, int, int | None], list[Needs]] = {}  # see `_captured_needs`
        self._version = -1  # of the graphs, when `_needs` was computed

    def slots(self, sequences: Mapping[int, SequenceState]) -> int:
        """Return the number of slots in the next step of these sequences, idle ones included."""
        needed = max(sequences) + 1
        if not self._graphs.enabled:
            return needed
        bucket = bucket_of(needed)
        if bucket < self._last and self._smaller_for < PATIENCE:
            active = sequences.values()
            captured = [size for size in BUCKETS if size >= bucket and self.captured(size, active)]
            return min(captured, default=bucket)
        return bucket

    def use(self, sequences: Mapping[int, SequenceState]) -> int:
        """Return ``slots(sequences)`` for a step that starts now, and count steps with fewer sequences."""
        self._last = self.slots(sequences)
        self._smaller_for = self._smaller_for + 1 if self._last > bucket_of(max(sequences) + 1) else 0
        return self._last

    def steps(self) -> Iterator[StepKey]:
        """Iterate over the keys of the steps that are captured."""
        for key in self._graphs:
            if isinstance(key, StepKey):
                yield key
            elif isinstance(key, tuple) and isinstance(key[0], StepKey) and key[1] == "score":
                yield key[0]

    def captured(self, slots: int, sequences: Collection[SequenceState]) -> frozenset[int] | None:
        """Return each g for which a captured step serves a bucket; None if there are no CUDA graphs.

        Args:
            slots: The bucket.
            sequences: The sequences of the step.
        """
        if not self._graphs.enabled:
            return None
        needs = {drafting: Needs.of(sequences, int(drafting)) for drafting in (False, True)}
        return frozenset(
            g
            for (g, size, _), captured in self._captured_needs().items()
            if size == slots and any(one.covers(needs[g > 0]) for one in captured)
        )

    def serving(self, needs: Needs, g: int, slots: int, host_buffers: int | None) -> Needs:
        """Return what the next step computes: just what is needed, or more if such a step is captured.

        If sequences leave, a batch needs less. A step that computes less is captured only after ``PATIENCE``
        steps that computed more.

        Args:
            needs: What the sequences need.
            g: Draft tokens per sequence.
            slots: The bucket.
            host_buffers: As in ``StepKey``.
        """
        step = g, slots, host_buffers
        covering = [one for one in self._captured_needs().get(step, []) if one.covers(needs)]
        steps = self._more_for.get(step, 0)
        if needs in covering or not covering or steps >= PATIENCE:
            self._more_for[step] = 0
            return needs
        self._more_for[step] = steps + 1
        return min(covering, key=Needs.size)

    def _captured_needs(self) -> dict[tuple[int, int, int | None], list[Needs]]:
        """Return what captured steps compute, by g, bucket and buffers of the host."""
        if self._version != self._graphs.version:
            self._needs, self._version = defaultdict(list), self._graphs.version
            for key in self.steps():
                self._needs[key.g, key.slots, key.host_buffers].append(key.needs)
        return self._needs
