"""Accepted draft tokens of real runs, beside the number expected with independent acceptance rate α."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outpace.bench import theory
from outpace.bench.alpha import ROWS
from outpace.bench.engine import Phases
from outpace.bench.estimate import Estimate, estimate
from outpace.bench.prompts import Asked
from outpace.decoder import Decoder
from outpace.sampling import SamplingParams

TRACED = 48  # tokens of a trace


@dataclass
class Blocks:
    """Numbers of draft tokens and of accepted ones, for each step with a draft.

    Attributes:
        texts: Both numbers of each step, by text.
    """

    texts: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    @property
    def passes(self) -> list[tuple[int, int]]:
        """Both numbers of each step, of all texts."""
        return [one for some in self.texts.values() for one in some]

    @property
    def acceptance(self) -> float | None:
        """Fraction of draft tokens accepted, of those that no rejected one precedes in their step."""
        judged = sum(min(kept + 1, drafts) for drafts, kept in self.passes)
        return sum(kept for _, kept in self.passes) / judged if judged else None

    def by_position(self, confidence: float = 0.95) -> list[Estimate | None]:
        """Return how often the first, second, ... draft token of a step was accepted.

        It counts only where those before it were accepted.
        """
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
        """Fractions of steps that accepted 0, 1, ... draft tokens."""
        counts = np.bincount([kept for _, kept in self.passes], minlength=self._longest + 1)
        return [float(one) for one in counts / max(1, len(self.passes))]

    def predicted(self, alpha: float) -> list[float]:
        """Return the same fractions by α, for steps with as many draft tokens as there were."""
        shares = np.zeros(self._longest + 1)
        for drafts, _ in self.passes:
            shares[: drafts + 1] += theory.kept_shares(alpha, drafts) / len(self.passes)
        return [float(one) for one in shares]

    @property
    def _longest(self) -> int:
        return max((drafts for drafts, _ in self.passes), default=0)


def counted(
    decoder: Decoder, prompts: Sequence[Asked], sampling: SamplingParams, *, tokens: int, seed: int = 0
) -> Blocks:
    """Generate up to ``tokens`` tokens after each prompt, and count draft tokens."""
    found = Blocks()
    seeds = list(range(seed, seed + len(prompts)))
    steps = decoder.stream(
        [one.ids for one in prompts], sampling, max_new_tokens=tokens, seed=seeds, batch_size=ROWS
    )
    for step in steps:
        if step.num_draft_tokens:
            found.texts.setdefault(step.row, []).append((step.num_draft_tokens, step.num_accepted))
    return found


def trace(
    decoder: Decoder, prompt: Asked, sampling: SamplingParams, *, tokens: int = TRACED, seed: int = 0
) -> dict[str, Any]:
    """Generate one text and record it step by step.

    Returns:
        The times and the numbers of draft tokens and of accepted ones per step (``iterations``). And the
        pieces of text with the kind of each: ``"accepted"``, ``"correction"``, ``"bonus"`` or ``"plain"``.
    """
    iterations, pieces, kinds = [], [], list[str]()
    for step in decoder.stream(prompt.ids, sampling, max_new_tokens=tokens, seed=seed):
        kinds += step.kinds
        pieces += [[text, kinds[token]] for token, text in step.pieces or []]
        iterations.append(
            {
                "phases": dict(step.phases),
                "num_draft_tokens": step.num_draft_tokens,
                "num_accepted": step.num_accepted,
            }
        )
    return {"iterations": iterations, "pieces": pieces}


def divided(iterations: Sequence[Mapping[str, Any]], parts: Phases) -> list[Mapping[str, Any]]:
    """Divide the time of steps that are one graph each among draft, target and verification.

    ``parts`` are the times of draft and target by themselves. In a step of median duration, the rest is
    verification. Extra time of longer steps, such as those with a prefill, is the target's.
    """
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
