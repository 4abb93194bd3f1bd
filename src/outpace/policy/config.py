"""Settings of ``Goodput``."""

from __future__ import annotations

from dataclasses import dataclass, fields

from outpace.checks.arguments import integer, number


@dataclass(frozen=True)
class GoodputConfig:
    """Settings of ``Goodput``. A baseline step is a step without speculation; its duration is a unit of time.

    Attributes:
        jump_probability: Probability that the acceptance rate of a sequence jumps in a step.
        prior_outcomes: Number of recent outcomes that the estimate for a new sequence is the mean of.
        uniform_share: Fraction of that estimate that is spread evenly over all acceptance rates.
        cost_measurements: Number of recent measurements that the cost of a step is the mean of.
        stale_passes: Forward passes after which a measured cost may no longer hold.
        outlier_factor: Times longer or shorter than expected; measured seconds beyond this are clipped.
        first_draft_tokens: Largest number of draft tokens while none is measured.
        margin: Fraction by which speculation must be faster than baseline steps. Debt multiplies it.
        balance: Baseline steps that exploration may lose at the start; also the largest balance and debt.
        income: Baseline steps that exploration may lose later, for each step.
        probe_share: Fraction of the steps since most draft tokens were wrong that a probe may lose.
    """

    jump_probability: float = 0.02
    prior_outcomes: int = 60
    uniform_share: float = 0.05
    cost_measurements: int = 8
    stale_passes: int = 256
    outlier_factor: float = 1.5
    first_draft_tokens: int = 2
    margin: float = 0.02
    balance: float = 6.0
    income: float = 0.0075
    probe_share: float = 0.02

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if isinstance(field.default, int):
                integer(name, value, "an int >= 1", lambda n: n >= 1)
            elif name == "jump_probability":
                number(name, value, "a number in (0, 1]", lambda p: 0 < p <= 1)
            elif name == "outlier_factor":
                number(name, value, "a number > 1", lambda x: x > 1)
            else:
                number(name, value, "a number >= 0", lambda x: x >= 0)
