"""The verification rules, and what each one promises about the text that comes out.

token       exactly p. Keeps E[Σ min(p, q)] of the drafts one by one, the most that deciding one by one can
            keep. With lenience l < 1: no token above p(x)/l, and Σ min(p/l, q) kept.
block       exactly p. Decides about the drafts together and never keeps fewer on average than `token`.
match       exactly p, and the very tokens that plain decoding draws with the same seed.
sigmoid     not p: an approximation that keeps nearly every draft. Never the default.
rejection   exactly p. Keeps fewer than `token`; for comparison only.

docs/rules.md derives them.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from outpace.arguments import number
from outpace.wording import suggestion

OFFERED = ("token", "block", "match")
NAMES = (*OFFERED, "rejection")  # the last one only for comparison
KNOWN = f'known are {", ".join(OFFERED)} and "sigmoid(ALPHA, BETA)"'


@dataclass(frozen=True)
class Rule:
    """A rule by name; `alpha` and `beta` belong to `sigmoid` alone."""

    name: str
    alpha: float = 0.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        if self.name == "sigmoid":
            number("alpha", self.alpha, "a finite number", math.isfinite)
            number("beta", self.beta, "a finite number", math.isfinite)
            if not self.alpha < self.beta:
                raise ValueError(
                    f"alpha, beta: got {self.alpha}, {self.beta}; sigmoid(alpha, beta) needs alpha < beta"
                )
        elif self.name not in NAMES or self.alpha or self.beta:
            raise ValueError(f"rule: got {self!r}; {KNOWN}")

    @property
    def exact(self) -> bool:
        """Whether the output distribution is the target's (at lenience 1)."""
        return self.name != "sigmoid"

    def __str__(self) -> str:
        return f"sigmoid({self.alpha}, {self.beta})" if self.name == "sigmoid" else self.name


def sigmoid(alpha: float, beta: float) -> Rule:
    """Wagner et al. 2024, eq. 5: σ((z − alpha)/(beta − alpha)) stands for the softmax. Not exact.

    The paper takes −10³, 10³ for speech and −10⁴, 10⁴ for text.
    """
    return Rule("sigmoid", alpha, beta)


_named = {name: Rule(name) for name in NAMES}


def parse(rule: Rule | str) -> Rule:
    """A rule from its name, such as "block" or "sigmoid(-1e4, 1e4)"."""
    if isinstance(rule, Rule):
        return rule
    if not isinstance(rule, str):
        raise TypeError(f"rule: got {rule!r}; it must be a name or a Rule")
    if rule in _named:
        return _named[rule]
    call = re.fullmatch(r"sigmoid\(\s*([^,\s]+)\s*,\s*([^,\s]+)\s*\)", rule)
    if call is None:
        raise ValueError(f"rule: got {rule!r}; {KNOWN}{suggestion(rule, (*OFFERED, 'sigmoid(ALPHA, BETA)'))}")
    try:
        alpha, beta = map(float, call.groups())
    except ValueError:
        raise ValueError(f"rule: got {rule!r}; {KNOWN}") from None
    return sigmoid(alpha, beta)
