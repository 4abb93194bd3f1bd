"""How often a drafter that costs nothing is asked. It takes time, too: beside a small model on a CPU, a few
hundredths of a pass."""

from __future__ import annotations

SHARE = 0.01  # of the time, that asking may take while it is not made up for
SELDOM = 7  # iterations at most in which nobody asks, whatever it takes
GRACE = 1.0  # plain passes that asking may take before anything is won
WON = 4.0  # plain passes, won by its guesses, that asking may take later


class Asking:
    """An account in plain passes: what guesses won, and what asking for them took.

    rest  iterations in which nobody asks
    """

    def __init__(self) -> None:
        self.rest = 0
        self._won = GRACE

    def book(self, taken: float, gain: float, right: bool) -> None:
        """Of an iteration with asking, in plain passes: what that took, and what guesses won after it. right:
        whether one that was not used would have been kept; then the next may be, too."""
        self._won = min(WON, max(0.0, self._won) + gain - taken)
        if self._won < 0 and not right:
            self.rest = min(SELDOM, int(taken / SHARE))

    def over(self) -> None:
        """An iteration is."""
        self.rest = max(0, self.rest - 1)
