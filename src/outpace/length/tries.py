"""When to try what does not pay by what is believed, or what nothing is known of."""

from __future__ import annotations

import math

from outpace.length.account import SELDOM, Account, Price

AGAIN = 8  # iterations without news after which guesses are tries, whatever is believed of them
PATIENCE = 40  # iterations at most until it is worth thinking again
LATE = 4  # iterations, after which a try that nothing was heard of has come to nothing
MADE = 12.0  # plain passes, no more than which a try is booked for making a length ready, which is done once


def booked(seconds: float, plain: float) -> float:
    """Plain passes that making something ready is booked as."""
    return min(seconds / plain, MADE)


class Tries:
    """One at a time: the next is not made before the outcome of the last is known.

    account    pays for them
    went_well  whether the last guess was one that went well, or followed one: then the next may be at once
    untried    whether nothing was ever heard of any guess
    """

    def __init__(self, account: Account) -> None:
        self.account = account
        self.went_well = False
        self.untried = True
        self._time = 0  # iterations so far
        self._blind = 0  # iterations since anything was learnt of guesses
        self._rested = 0  # iterations since the last guess
        self._wait = 0  # iterations until it is worth thinking again
        self._open: tuple[Price, int] | None = None  # one whose outcome is not known, and when it was made

    @property
    def blind(self) -> bool:
        """Whether too little was heard lately for any belief."""
        return self._blind >= AGAIN

    def rest(self) -> bool:
        """In an iteration that begins, if it is too early to think again; whether it is."""
        resting = self._wait > 0
        self._wait -= resting
        return resting

    def make(self, price: Price) -> None:
        self._open = price, self._time

    def withdraw(self) -> None:
        """The one that was made last is not."""
        self._open = None

    def make_if_due(self, price: Price, hopeless: bool, thinking: float) -> bool:
        """One at this price; whether it was made.

        hopeless  costs speak against any; but they may have changed
        thinking  iterations that thinking again has to wait at least, by the time it takes
        """
        wait = self.account.wait(price, math.inf if self.went_well else self._rested)
        if hopeless:
            wait = max(wait, SELDOM - self._rested)
        if self._open is not None:  # its outcome decides
            return False
        if wait > 0:
            # Where there is news without guesses, more may come at any time.
            self._wait = round(min(PATIENCE, max(wait if self._blind else 0, thinking)))
            return False
        self.make(price)
        return True

    def over(self, guessed: bool) -> Price | None:
        """An iteration is, with or without guesses; the price of the try that it was."""
        self._time += 1
        self._blind += 1
        self._rested += 1
        if guessed:
            self._rested = self._wait = 0
        if self._open is None or not (guessed or self._time > self._open[1] + LATE):
            return None
        price, _ = self._open
        self._open = None
        return price

    def heard(self, went_well: bool) -> None:
        """Something was learnt of guesses in this iteration."""
        self.went_well, self.untried, self._blind = went_well, False, 0

    def another_text(self) -> None:
        """It may be another matter."""
        self.went_well, self._wait = False, 0
