"""What a length policy is asked, and told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Hint:
    """What a drafter that costs nothing would guess, known before anything is decided.

    lengths      how many tokens each row has a guess for
    confidence   of each row, in [0, 1]: how good the drafter takes its guess to be
    """

    lengths: Sequence[int]
    confidence: Sequence[float]


@dataclass(frozen=True)
class Load:
    """What a pass is over.

    batch    rows; some may stand still
    context  tokens of the longest text
    unread   tokens that the drafter would have to read first, of all texts, as it was not asked meanwhile; an
             engine's reads whole pieces
    ready    lengths that nothing has to be made ready for, which would take time; None: all
    room     guesses that each row has use for; None: any number
    way      how passes are made: what was measured in one way does not hold for another
    padded   whether it has to be a length of all rows as it was chosen, as guessing is part of it
    """

    batch: int
    context: int = 1
    unread: int = 0
    ready: frozenset[int] | None = None
    room: tuple[int, ...] | None = None
    way: str = ""
    padded: bool = False


@dataclass(frozen=True)
class Done:
    """What an iteration came to.

    rows           the slots that took part
    drafted        guesses that the target scored, of each row
    accepted       of those, the ones that were kept
    g              guesses that the pass had room for: its cost is that of g + 1 tokens a row
    load           what the pass was over
    seconds        all of it; None where it was not measured
    draft_seconds  of that, drafting, or asking a drafter that costs nothing; 0 where that cannot be told
    steps          steps that the drafter made
    catching_up    seconds before it, in which a draft read what had been written without it
    waited         seconds before it, in which a device was idle, as the host had to see the last outcome:
                   to guess, or as there had been guesses
    making         seconds before it, in which such iterations were made ready; its own were then not measured
    reading_made   seconds before it, in which a draft's reading was made ready; its own are then not known
    asked          guesses that were paid for, whether they came or not; by default those that were drafted
    unused         of each row, whether the guess after the drafted ones, which was not scored, was right, if
                   there was one
    """

    rows: Sequence[int]
    drafted: Sequence[int]
    accepted: Sequence[int]
    g: int
    load: Load
    seconds: float | None
    draft_seconds: float = 0.0
    steps: int = 0
    catching_up: float = 0.0
    waited: float = 0.0
    asked: Sequence[int] = ()
    unused: Sequence[bool | None] = ()
    making: float = 0.0
    reading_made: float = 0.0


class Length(Protocol):
    """A policy may hold any memory, of each slot and of all.

    What it chooses may depend on all that came before, on clocks and on the hint; never on a token that was
    drawn and is still to be judged.
    """

    most: int  # never more than this

    @property
    def asks(self) -> bool:
        """Whether it wants to be asked, after the choice just made, if that is `enough`: which takes time."""
        return False

    @property
    def idle(self) -> bool:
        """Whether a drafter that costs nothing need not be asked now, nor this for a choice. Asking does take
        time."""
        return False

    def choose(self, rows: Sequence[int], *, load: Load | None = None, hint: Hint | None = None) -> list[int]:
        """Tokens to draft for each of these slots.

        load   what the pass is over; by default these rows
        hint   what there is to be used, if the drafter costs nothing
        """

    def enough(self, confidence: Sequence[float]) -> bool:
        """Asked between two steps of a drafter, before a token is drawn: whether to leave it at those drawn
        so far. confidence: of each row, the largest probability of the distribution to be drawn from."""
        return False

    def observe(self, done: Done) -> None:
        """What came of the choice."""
        return

    def withdraw(self) -> None:
        """The choice just made is not carried out: it will be asked again, for other rows."""
        return

    def reset(self, rows: Sequence[int]) -> None:
        """These slots are free; what was learnt in them is forgotten."""
        return
