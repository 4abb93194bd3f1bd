"""How far to guess: policies that choose g for each iteration. g = 0 is plain decoding."""

from outpace.length.base import Done, Hint, Length, Load
from outpace.length.fixed import Fixed
from outpace.length.goodput import Goodput
from outpace.length.heuristic import Heuristic

__all__ = ["Done", "Fixed", "Goodput", "Heuristic", "Hint", "Length", "Load"]
