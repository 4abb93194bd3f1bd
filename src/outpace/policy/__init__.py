"""Draft-length policies: they choose the number of draft tokens of each step, 0 included."""

from outpace.policy.base import DraftLengthPolicy, Load, StepOutcome
from outpace.policy.config import GoodputConfig
from outpace.policy.goodput import Goodput
from outpace.policy.simple import Fixed, Heuristic

__all__ = [
    "DraftLengthPolicy",
    "Fixed",
    "Goodput",
    "GoodputConfig",
    "Heuristic",
    "Load",
    "StepOutcome",
]
