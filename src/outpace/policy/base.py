"""Interface of a draft-length policy: its inputs, and the outcome that it learns from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Hint:
    """Draft of a free drafter, known before the policy chooses.

    Attributes:
        lengths: Number of draft tokens of each sequence.
        confidence: Drafter's confidence in the draft of each sequence, in [0, 1].
    """

    lengths: Sequence[int]
    confidence: Sequence[float]


@dataclass(frozen=True)
class Load:
    """Size and limits of one target forward pass.

    Attributes:
        batch: Rows of the pass. Some slots may be idle.
        context: Tokens of the longest sequence.
        catch_up_tokens: Tokens of all sequences that the drafter must read before it drafts. They were
            generated without it. The graph executor reads whole chunks and counts those.
        captured: Values of g that need no capture. A capture takes time. None: all.
        remaining_draft_tokens: Number of draft tokens that each sequence can use. None: any number.
        executor: Executor of the pass. Times measured with one executor do not hold for another.
        padded_drafts: True if every sequence drafts g tokens, because drafting is part of the pass.
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
        accepted: Number of those that were accepted, per sequence.
        g: Draft tokens that the pass was wide enough for. It costs as much as g + 1 tokens per sequence.
        load: Size and limits of the pass.
        seconds: Duration of the whole step. None if it was not measured.
        draft_seconds: Part of ``seconds`` spent on drafting, or on the proposal of a free drafter. 0 if
            unknown.
        draft_steps: Draft steps that the drafter ran.
        catch_up_seconds: Seconds before the step in which the draft model read tokens that were generated
            without it.
        idle_seconds: Seconds before the step in which the device was idle, because the host had to see the
            last outcome. The host needs it to draft, and after every step with draft tokens.
        requested: Draft tokens that drafting time was spent on, proposed or not, per sequence. By default
            those in ``drafted``.
        unscored_correct: Per sequence, whether the first draft token that was not scored was correct. None if
            there was none.
        capture_seconds: Seconds before the step in which such steps were captured. ``seconds`` was then not
            measured.
        catch_up_capture_seconds: Seconds before the step in which the catching up of a draft model was
            captured. ``catch_up_seconds`` is then unknown.
    """

    slots: Sequence[int]
    drafted: Sequence[int]
    accepted: Sequence[int]
    g: int
    load: Load
    seconds: float | None
    draft_seconds: float = 0.0
    draft_steps: int = 0
    catch_up_seconds: float = 0.0
    idle_seconds: float = 0.0
    requested: Sequence[int] = ()
    unscored_correct: Sequence[bool | None] = ()
    capture_seconds: float = 0.0
    catch_up_capture_seconds: float = 0.0


class DraftLengthPolicy(Protocol):
    """Interface of a draft-length policy.

    A policy may hold any memory, per slot and for all slots. Its choice may depend on all earlier steps, on
    clocks and on the hint. It must never depend on a sampled token that is still to be verified.

    Attributes:
        max_draft_tokens: Upper limit of a choice.
    """

    max_draft_tokens: int  # upper limit of a choice

    @property
    def asks(self) -> bool:
        """True if ``enough`` is to be called between the draft steps of this choice, which takes time."""
        return False

    @property
    def idle(self) -> bool:
        """True if a free drafter need not propose now, and ``choose`` need not be called.

        A proposal takes time, even if the drafter is free.
        """
        return False

    def choose(
        self, slots: Sequence[int], *, load: Load | None = None, hint: Hint | None = None
    ) -> list[int]:
        """Choose the number of draft tokens of each slot.

        Args:
            slots: Slots of the sequences.
            load: Size and limits of the pass. By default a batch of these slots.
            hint: Available draft tokens, if the drafter is free.

        Returns:
            Number of draft tokens of each slot.
        """

    def enough(self, confidence: Sequence[float]) -> bool:
        """Return whether to stop drafting with the tokens sampled so far.

        It is called between two draft steps, before a token is sampled.

        Args:
            confidence: Largest probability of each sequence's next draft distribution.
        """
        return False

    def observe(self, done: StepOutcome) -> None:
        """Learn from the outcome of a step.

        Args:
            done: Outcome of the step that ``choose`` was called for.
        """
        return

    def withdraw(self) -> None:
        """Cancel the choice just made.

        The step does not run. ``choose`` will be called again, for other slots.
        """
        return

    def reset(self, slots: Sequence[int]) -> None:
        """Forget what was learned in these slots, which are now free.

        Args:
            slots: The free slots.
        """
        return
