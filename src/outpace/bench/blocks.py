"""Drafts that real runs kept: how many of a pass, and how many one would expect if each was kept anew with
probability α."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outpace import theory
from outpace.bench.alpha import ROWS
from outpace.bench.engine import Phases
from outpace.bench.estimate import Estimate, estimate
from outpace.bench.prompts import Asked
from outpace.decode import Decoder
from outpace.sampling import Sampling

TRACED = 48  # tokens of a trace


@dataclass
class Blocks:
    """Of each pass in which something was guessed: how many drafts, and how many were kept; by text."""

    texts: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    @property
    def passes(self) -> list[tuple[int, int]]:
        return [one for some in self.texts.values() for one in some]

    @property
    def acceptance(self) -> float | None:
        """Share of drafts kept, of those that were judged: before which none of the pass was lost."""
        judged = sum(min(kept + 1, drafts) for drafts, kept in self.passes)
        return sum(kept for _, kept in self.passes) / judged if judged else None

    def by_position(self, confidence: float = 0.95) -> list[Estimate | None]:
        """How often the first, second, ... draft of a pass was kept, if those before it were."""
        return [
            estimate(
                [
                    np.array([float(kept > i) for drafts, kept in some if drafts > i and kept >= i])
                    for some in self.texts.values()
                ],
                confidence,
            )
            for i in range(self._longest)
        ]

    @property
    def observed(self) -> list[float]:
        """Shares of passes that kept 0, 1, ... drafts."""
        counts = np.bincount([kept for _, kept in self.passes], minlength=self._longest + 1)
        return [float(one) for one in counts / max(1, len(self.passes))]

    def predicted(self, alpha: float) -> list[float]:
        """The same by α, for passes with as many drafts as there were."""
        shares = np.zeros(self._longest + 1)
        for drafts, _ in self.passes:
            shares[: drafts + 1] += theory.kept_shares(alpha, drafts) / len(self.passes)
        return [float(one) for one in shares]

    @property
    def _longest(self) -> int:
        return max((drafts for drafts, _ in self.passes), default=0)


def counted(
    decoder: Decoder, prompts: Sequence[Asked], sampling: Sampling, *, tokens: int, seed: int = 0
) -> Blocks:
    """Let a decoder write so many tokens after each prompt."""
    found = Blocks()
    seeds = list(range(seed, seed + len(prompts)))
    steps = decoder.stream(
        [one.ids for one in prompts], sampling, max_new_tokens=tokens, seed=seeds, batch_size=ROWS
    )
    for step in steps:
        if step.drafted:
            found.texts.setdefault(step.row, []).append((step.drafted, step.accepted))
    return found


def trace(
    decoder: Decoder, prompt: Asked, sampling: Sampling, *, tokens: int = TRACED, seed: int = 0
) -> dict[str, Any]:
    """One text, iteration by iteration: where the time went, what was drafted and kept, and the pieces of
    text with what each is ("kept", "correction", "bonus", "plain")."""
    iterations, pieces, kinds = [], [], list[str]()
    for step in decoder.stream(prompt.ids, sampling, max_new_tokens=tokens, seed=seed):
        kinds += step.kinds
        pieces += [[text, kinds[token]] for token, text in step.pieces or []]
        iterations.append({"phases": dict(step.phases), "drafted": step.drafted, "accepted": step.accepted})
    return {"iterations": iterations, "pieces": pieces}


def divided(iterations: Sequence[Mapping[str, Any]], parts: Phases) -> list[Mapping[str, Any]]:
    """Of iterations that are one graph each, the target's time, as their parts by themselves have it in one
    that takes as long as most: what is left there is verification. What others take longer, as where a prompt
    is read, is the target's."""
    if not iterations:
        return []
    usual = float(np.median([one["phases"]["target"] for one in iterations]))
    draft, target = parts.draft / 1000, parts.target / 1000
    whole = max(usual, draft + target)
    shares = {"draft": draft / whole, "verify": 1 - (draft + target) / whole}
    found = list[Mapping[str, Any]]()
    for one in iterations:
        seconds = one["phases"]["target"]
        beside = {part: min(seconds, usual) * share for part, share in shares.items()}
        phases = one["phases"] | beside | {"target": seconds - sum(beside.values())}
        found.append({**one, "phases": phases})
    return found
