"""Interface of a draft-length policy: its inputs, and the outcome that it learns from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Load:
    """Size and limits of one forward pass of the target.

    Attributes:
        batch: Number of slots in the forward pass, idle ones included.
        context: Number of tokens of the longest sequence.
        catch_up_tokens: Number of tokens that the draft model must process before it can draft, over all
            sequences. They were generated without it. In the graph executor the number includes padding.
        captured: Numbers of draft tokens for which a step needs no capture. A capture takes time. None: no
            step needs a capture.
        remaining_draft_tokens: Largest useful number of draft tokens of each sequence. None: no limit.
        executor: Name of the executor. Times measured in one executor do not hold for another.
        padded_drafts: True if all sequences of a step get the same number of draft tokens, because drafting
            is part of the graph.
    """

    batch: int
    context: int = 1
    catch_up_tokens: int = 0
    captured: frozenset[int] | None = None
    remaining_draft_tokens: tuple[int, ...] | None = None
    executor: str = ""
    padded_drafts: bool = False


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of one step.

    Attributes:
        slots: Slots that took part.
        drafted: Number of draft tokens that the target scored, per sequence.
        accepted: Number of draft tokens that were accepted, per sequence.
        g: Number of draft tokens per sequence in the target's forward pass, padding included. The pass is
            over g + 1 tokens per sequence.
        load: Size and limits of the forward pass.
        seconds: Duration of the step. It includes drafting by a model, but no proposal of a free drafter, and
            no catch-up that was timed by itself. None if it was not measured.
        tested: Number of draft tokens per sequence that are known to be correct or wrong. Those that were
            requested and not proposed count as wrong. The first one that a free drafter proposed and the
            target did not score counts if all before it are correct. Empty: the same as ``drafted``.
        correct: Number of those before the first wrong one, per sequence. Empty: the same as ``accepted``.
        proposal_seconds: Seconds before the step in which a free drafter proposed, and in which the device
            waited for it; or in which a draft model ran and proposed nothing.
        catch_up_seconds: Seconds before the step in which the draft model processed tokens that were
            generated without it. 0 if this was not timed by itself.
        capture_seconds: Seconds of captures before the step. ``seconds`` is then None.
        forced: Whether requests set a number of draft tokens above 0 for some sequences. The policy did not
            choose those numbers.
    """

    slots: Sequence[int]
    drafted: Sequence[int]
    accepted: Sequence[int]
    g: int
    load: Load
    seconds: float | None
    tested: Sequence[int] = ()
    correct: Sequence[int] = ()
    proposal_seconds: float = 0.0
    catch_up_seconds: float = 0.0
    capture_seconds: float = 0.0
    forced: bool = False


class DraftLengthPolicy(ABC):
    """Interface of a draft-length policy.

    A policy may keep any state, per slot and for all slots. Its choice may depend on all earlier steps, on
    clocks and on how many tokens a free drafter has proposed. It must never depend on a sampled token that
    is still to be verified.

    Attributes:
        max_draft_tokens: Largest number of draft tokens that the policy chooses.
        is_timed: Whether choices depend on measured times, so that they may differ between equal calls.
        exploration_seconds: Seconds that were lost so far in steps that the policy chose to learn.
    """

    max_draft_tokens: int
    is_timed: bool = False
    exploration_seconds: float = 0.0

    @property
    def idle(self) -> bool:
        """True if a free drafter need not propose now, and ``choose`` need not be called.

        A proposal takes time, even if the drafter is free.
        """
        return False

    @abstractmethod
    def choose(
        self, slots: Sequence[int], *, load: Load | None = None, proposed: Sequence[int] | None = None
    ) -> list[int]:
        """Choose the number of draft tokens of each slot.

        Args:
            slots: Slots of the sequences.
            load: Size and limits of the forward pass. By default a batch of these slots.
            proposed: Number of draft tokens that a free drafter on the host has proposed for each sequence.
                None for other drafters.

        Returns:
            Number of draft tokens of each slot.
        """

    def observe(self, done: StepOutcome) -> None:
        """Learn from the outcome of a step.

        Args:
            done: Outcome of the step that ``choose`` was called for.
        """
        return

    def reset(self, slots: Sequence[int]) -> None:
        """Discard what was learned about the sequences in these slots, which have ended.

        Args:
            slots: Slots of the ended sequences.
        """
        return

    def describe(self) -> str:
        """Return the policy, and what it has learned, for a user."""
        return repr(self)
