"""Verification rules, and what each one guarantees about the output.

- ``token``: exactly p. It decides about draft tokens one by one. Its acceptance rate E[Σ min(p, q)] is the
  highest possible for such a rule. With lenience l < 1 the rate is E[Σ min(p/l, q)], and no token's
  probability exceeds p(x)/l.
- ``block``: exactly p. It decides about all draft tokens together, and on average never accepts fewer than
  ``token``.
- ``match``: exactly p. With the same seed, it gives the same tokens as decoding without speculation.
- ``sigmoid``: not p. It is an approximation that accepts nearly every draft token. It is never the default.
- ``rejection``: exactly p. It accepts fewer than ``token`` and is for comparison only.

docs/design/verification.md derives these guarantees.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from outpace.checks.arguments import number
from outpace.checks.errors import suggestion

OFFERED = ("token", "block", "match")
NAMES = (*OFFERED, "rejection")  # the last one only for comparison
KNOWN = f'it must be {", ".join(OFFERED)} or "sigmoid(ALPHA, BETA)"'


@dataclass(frozen=True)
class Rule:
    """Verification rule, by name.

    Attributes:
        name: "token", "block", "match", "sigmoid" or "rejection".
        alpha: Lower end of the scale of ``sigmoid``. 0 for other rules.
        beta: Upper end of the scale of ``sigmoid``. 0 for other rules.
    """

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
        """True if the output distribution is the target's (at lenience 1)."""
        return self.name != "sigmoid"

    def __str__(self) -> str:
        return f"sigmoid({self.alpha}, {self.beta})" if self.name == "sigmoid" else self.name


def sigmoid(alpha: float, beta: float) -> Rule:
    """Return the approximate rule of Wagner et al. 2024, eq. 5, which is not exact.

    It uses σ((z − alpha)/(beta − alpha)) in place of the softmax. The paper uses −10³ and 10³ for speech, and
    −10⁴ and 10⁴ for text.

    Args:
        alpha: Lower end of the scale.
        beta: Upper end of the scale.

    Raises:
        ValueError: ``alpha`` is not below ``beta``.
    """
    return Rule("sigmoid", alpha, beta)


_named = {name: Rule(name) for name in NAMES}
MATCH = _named["match"]


def parse(rule: Rule | str) -> Rule:
    """Return a rule by its name, such as "block" or "sigmoid(-1e4, 1e4)".

    Raises:
        TypeError: ``rule`` is neither a name nor a ``Rule``.
        ValueError: There is no such rule.
    """
    if isinstance(rule, Rule):
        return rule
    if not isinstance(rule, str):
        raise TypeError(f"rule: got {rule!r}; it must be the name of a rule, or a Rule")
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
