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
from outpace.bench.prompts import Prompt
from outpace.decoder import Decoder
from outpace.sampling import SamplingParams

TRACE_TOKENS = 48  # tokens of a trace


@dataclass
class Blocks:
    """Numbers of draft tokens and of accepted ones, for each step with draft tokens.

    Attributes:
        texts: Numbers of draft tokens and of accepted ones of each step, by text.
    """

    texts: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    @property
    def steps(self) -> list[tuple[int, int]]:
        """Numbers of draft tokens and of accepted ones of each step, of all texts."""
        return [one for some in self.texts.values() for one in some]

    @property
    def acceptance(self) -> float | None:
        """Accepted draft tokens divided by verified ones; those after a rejected one are not verified."""
        verified = sum(min(accepted + 1, g) for g, accepted in self.steps)
        return sum(accepted for _, accepted in self.steps) / verified if verified else None

    def by_position(self, confidence: float = 0.95) -> list[Estimate | None]:
        """Return how often the first, second, ... draft token of a step was accepted.

        A draft token counts only if those before it were accepted.
        """
        return [
            estimate(
                [
                    np.array([float(accepted > i) for g, accepted in some if g > i and accepted >= i])
                    for some in self.texts.values()
                ],
                confidence,
            )
            for i in range(self._longest)
        ]

    @property
    def observed(self) -> list[float]:
        """Fractions of steps that accepted 0, 1, ... draft tokens."""
        counts = np.bincount([accepted for _, accepted in self.steps], minlength=self._longest + 1)
        return [float(one) for one in counts / max(1, len(self.steps))]

    def predicted(self, alpha: float) -> list[float]:
        """Return the same fractions as predicted by α, for the same numbers of draft tokens per step."""
        shares = np.zeros(self._longest + 1)
        for g, _ in self.steps:
            shares[: g + 1] += theory.accepted_probabilities(alpha, g) / len(self.steps)
        return [float(one) for one in shares]

    @property
    def _longest(self) -> int:
        return max((g for g, _ in self.steps), default=0)


def count_accepted(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    max_new_tokens: int,
    seed: int = 0,
) -> Blocks:
    """Generate after each prompt, and count draft tokens and accepted ones of each step."""
    found = Blocks()
    seeds = list(range(seed, seed + len(prompts)))
    steps = decoder.stream(
        [one.ids for one in prompts], sampling, max_new_tokens=max_new_tokens, seed=seeds, batch_size=ROWS
    )
    for step in steps:
        if step.num_draft_tokens:
            found.texts.setdefault(step.index, []).append((step.num_draft_tokens, step.num_accepted))
    return found


def trace(
    decoder: Decoder,
    prompt: Prompt,
    sampling: SamplingParams,
    *,
    max_new_tokens: int = TRACE_TOKENS,
    seed: int = 0,
) -> dict[str, Any]:
    """Generate one text and record it step by step.

    Returns:
        ``iterations`` has the times, the number of draft tokens and the number of accepted ones of each step.
        ``pieces`` has the pieces of text with the kind of each: ``"accepted"``, ``"correction"``,
        ``"bonus"`` or ``"target"``.
    """
    iterations, pieces, kinds = [], [], list[str]()
    for step in decoder.stream(prompt.ids, sampling, max_new_tokens=max_new_tokens, seed=seed):
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


def divide_phases(iterations: Sequence[Mapping[str, Any]], parts: Phases) -> list[Mapping[str, Any]]:
    """Divide the time of steps that are one graph each among draft, target and verification.

    ``parts`` are the times of draft and target by themselves. In a step of median duration, the rest is
    verification. Extra time of longer steps, such as those with a prefill, is the target's.
    """
    if not iterations:
        return []
    median_seconds = float(np.median([one["phases"]["target"] for one in iterations]))
    draft, target = parts.draft / 1000, parts.target / 1000
    whole = max(median_seconds, draft + target)
    shares = {"draft": draft / whole, "verify": 1 - (draft + target) / whole}
    found = list[Mapping[str, Any]]()
    for one in iterations:
        seconds, drafting = one["phases"]["target"], one["phases"].get("draft", 0.0)  # on the host
        others = {part: min(seconds, median_seconds) * share for part, share in shares.items()}
        phases = one["phases"] | others | {"target": seconds - sum(others.values())}
        phases["draft"] += drafting
        found.append({**one, "phases": phases})
    return found
