"""Interface of an executor, which runs the steps that the scheduler decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from outpace.draft.base import Draft
from outpace.engine.needs import Needs
from outpace.engine.sequence import SequenceState
from outpace.engine.stats import Clock
from outpace.models.scorer import Prefill
from outpace.policy import Load
from outpace.sampling import Errors


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step, by slot.

    Attributes:
        drafts: The draft tokens.
        accepted: How many of them were accepted.
        next_token: The token that follows the accepted ones.
        bad: Whether there is no next token, because logits after the accepted draft tokens are unusable.
        errors: The errors of processors that made them unusable.
    """

    drafts: Mapping[int, list[int]]
    accepted: Mapping[int, int]
    next_token: Mapping[int, int]
    bad: Mapping[int, bool]
    errors: Mapping[int, Exception] = field(default_factory=dict)

    def num_new_tokens(self, slot: int) -> int:
        """Return the number of new tokens of a slot."""
        return self.accepted[slot] + (not self.bad[slot])

    def with_errors(self, errors: Errors) -> Outcome:
        """Return the outcome with errors of processors, by slot.

        An error after a rejected draft token has no effect: without speculation it would not have occurred.
        """
        reached = {slot: error for slot, (i, error) in errors.items() if i == self.accepted[slot]}
        return replace(self, errors=reached)


class Pending(ABC):
    """A started step, whose outcome the host has not read yet.

    Attributes:
        capture_seconds: Seconds that the capture of the step's graph took; 0 without a capture.
        catch_up_capture_seconds: The same for graphs of the catch-up.
    """

    capture_seconds: float = 0.0
    catch_up_capture_seconds: float = 0.0

    @abstractmethod
    def read(self) -> Outcome:
        """Wait for the step and return its outcome."""

    @property
    def seconds(self) -> float | None:
        """Seconds of the step on its device, after ``read``. None if they were not measured."""
        return None

    @property
    def catch_up_seconds(self) -> float:
        """Seconds of the catch-up: the draft model processed tokens that were generated without it."""
        return 0.0


class Executor(ABC):
    """Interface of an executor, which runs steps for the sequences in the slots.

    Attributes:
        name: Name for users and policies: "eager" or "graph".
        drafts: Whether drafting is part of a step. Otherwise draft tokens come from the host.
        is_async: Whether a started step runs while the host does something else.
    """

    name: str
    drafts: bool
    is_async: bool

    def waits(self, sequences: Sequence[SequenceState]) -> bool:
        """Return whether a step of these sequences can start only after the last one was committed."""
        return False

    @abstractmethod
    def prepare(self, slots: int, tokens: int) -> None:
        """Prepare for sequences of up to ``tokens`` tokens in the first slots, so that no memory moves."""

    @abstractmethod
    def prefill(self, sequences: Sequence[SequenceState], clock: Clock) -> Prefilling:
        """Begin to prefill new sequences.

        Args:
            sequences: The sequences. They have slots.
            clock: Clock of the prefill.
        """

    @abstractmethod
    def start(
        self,
        sequences: Mapping[int, SequenceState],
        g: int,
        draft: Draft | None,
        clock: Clock,
        limits: Mapping[int, int] | None = None,
    ) -> Pending:
        """Start a step.

        Args:
            sequences: The sequences that take part, by slot.
            g: Number of draft tokens per sequence. 0 decodes without speculation.
            draft: Draft tokens from the host, in the order of ``sequences``. None: the executor drafts, or g
                is 0.
            clock: Attributes the seconds of an executor that is not asynchronous.
            limits: If the executor drafts: draft tokens that the target scores, at most g, by slot. None: g
                each.
        """

    @abstractmethod
    def commit(self, sequence: SequenceState, g: int, accepted: int) -> None:
        """Commit the outcome of a step to the target's KV cache.

        Args:
            sequence: The sequence.
            g: Number of draft tokens that the step scored, padding included.
            accepted: Number of accepted draft tokens.
        """

    @abstractmethod
    def release(self, sequence: SequenceState, keep: bool) -> None:
        """Free the slot of a sequence.

        Args:
            sequence: The sequence.
            keep: Whether later prompts may reuse its KV cache.
        """

    def warm_up(self, g: int, slots: int, needs: Needs) -> None:
        """Capture a step ahead of its first use, where steps are captured.

        Args:
            g: Number of draft tokens per sequence.
            slots: Number of sequences.
            needs: What the step computes.
        """
        return

    def reset(self) -> None:
        """Free everything that is kept between calls, apart from KV caches. No sequence may be active."""
        return

    def padded(self, sequences: int) -> int:
        """Return the number of slots in a step of this many sequences, idle ones included."""
        return sequences

    def load(self, sequences: Mapping[int, SequenceState], load: Load) -> Load:
        """Return a load that includes what only this executor knows, such as padding and captures.

        Args:
            sequences: The sequences of the next step, by slot.
            load: The load as the sequences alone determine it.
        """
        return replace(load, executor=self.name)

    @abstractmethod
    def describe(self) -> str:
        """Return one line for users."""


class Prefilling:
    """New sequences that an executor prefills, one forward pass at a time.

    Args:
        sequences: The sequences.
        prefills: The prefills of the target and of the draft model.
    """

    def __init__(self, sequences: Sequence[SequenceState], prefills: Sequence[Prefill]) -> None:
        self.sequences, self.prefills = list(sequences), list(prefills)

    @torch.inference_mode()
    def advance(self) -> bool:
        """Run a forward pass of each model; return whether all prompts are complete."""
        complete = [prefill.advance() for prefill in self.prefills]
        return all(complete)

    def finish(self, clock: Clock) -> Outcome | None:
        """Return the first token of each sequence; None if the first step samples it."""
        return None
