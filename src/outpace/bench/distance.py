"""Distance of a rule's output from the target distribution, and its acceptance rate, as exact sums.

Nothing is sampled. The sums follow the rules' definitions, in float64, on synthetic logits. These are flatter
than a language model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outpace.bench.kernel import Inputs
from outpace.bench.vocabulary import VOCABULARIES, Vocabulary
from outpace.verification.rules import Rule, parse, sigmoid

SCALES = (10, 1000, 10000, 100000)  # beta = −alpha in Wagner's Tables 2 and 7
POSITIONS = 8  # draft positions that means are over


@dataclass(frozen=True)
class Quality:
    """Acceptance rate and bias of a rule at one draft position."""

    acceptance: float  # probability that the draft token is accepted
    distance: float  # total variation between the output token and p
    bonus_distance: float  # the same for the bonus token, sampled if all draft tokens were accepted


@dataclass(frozen=True)
class Scaling:
    """Quality of one rule at one vocabulary."""

    vocabulary: str
    V: int
    rule: str
    quality: Quality


def scaling(
    device: torch.device, dtype: torch.dtype, vocabularies: Sequence[Vocabulary] = VOCABULARIES
) -> list[Scaling]:
    """Return the quality of the exact rule and of sigmoids of several scales, on the same logits."""
    rules = (parse("token"), *(sigmoid(-scale, scale) for scale in SCALES))
    found = []
    for one in vocabularies:
        inputs = positions(one.V, device, dtype)
        found += [Scaling(one.name, one.V, str(rule), quality(inputs, rule)) for rule in rules]
    return found


def positions(V: int, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Return inputs that are the same at every call, so that a rule's figures are the same everywhere."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        return Inputs.random(1, POSITIONS, V, device, dtype)


def quality(inputs: Inputs, rule: Rule) -> Quality:
    """Return the quality of rule token or a sigmoid, as means over all draft positions.

    The output is token x in two cases. It was drafted and accepted: q(x)·min(1, w(x)/v(x)). Or a draft token
    was rejected and x was sampled from (w − v)+. For rule token, w and v are p and q. For a sigmoid, they are
    the sigmoids of both models' logits.
    """
    found = effects(inputs.target[:, : inputs.tokens.shape[1]], inputs.draft, rule)
    return Quality(*(round(float(one.mean()), 6) for one in found))


def effects(target: Tensor, draft: Tensor, rule: Rule) -> tuple[Tensor, Tensor, Tensor]:
    """Return the numbers of a ``Quality`` at each position ``[...]`` of logits ``[..., V]``."""
    z, y = target.double(), draft.double()
    p, q = z.softmax(-1), y.softmax(-1)
    w, v = (p, q) if rule.exact else (squash(z, rule), squash(y, rule))
    accepted = q * torch.where(w > 0, (w / v).clamp(max=1), 0)
    acceptance = accepted.sum(-1, keepdim=True)
    rest = (w - v).clamp(min=0)
    # The rules sample from w where w − v is nowhere positive.
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, w)
    out = accepted + (1 - acceptance) * normalized(rest)
    return acceptance.squeeze(-1), total_variation(out, p), total_variation(normalized(w), p)


def squash(logits: Tensor, rule: Rule) -> Tensor:
    """Return the sigmoids of logits: Wagner eq. 5."""
    return ((logits - rule.alpha) / (rule.beta - rule.alpha)).sigmoid()


def normalized(weights: Tensor) -> Tensor:
    """Return weights divided by their sum over the last dimension."""
    return weights / weights.sum(-1, keepdim=True)


def total_variation(one: Tensor, other: Tensor) -> Tensor:
    """Return the total variation distance over the last dimension."""
    return (one - other).abs().sum(-1) / 2
