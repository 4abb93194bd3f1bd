"""Simulated decoding without models: draft tokens with a known acceptance rate, and passes of known cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from outpace.policy import DraftLengthPolicy, Load, StepOutcome

Cost = Callable[[int, int], float]  # seconds of a pass, by batch size and g


def flat(batch: int, g: int) -> float:
    """Cost as on a GPU: more tokens cost next to nothing."""
    return 1.0 + 0.01 * g * math.sqrt(batch)


def steep(batch: int, g: int) -> float:
    """Cost as on a small CPU: a second token doubles it, some more are nearly free."""
    tokens = batch * (g + 1)
    return 1.0 if tokens == 1 else 2.0 + 0.06 * tokens + 0.12 * max(0, tokens - 8)


@dataclass
class Simulation:
    """Simulated decoding, with its own clock.

    Attributes:
        alpha: Probability that a draft token is accepted, by step and slot.
        cost: Seconds of a pass.
        batch: Number of sequences.
        draft_step: Seconds of a draft step.
        catch_up: Seconds to read one token that the draft model has not read.
        free_catch_up: Number of those tokens that a draft step reads at no extra cost.
        noise: Standard deviation of times, as a fraction.
        seed: Seed of acceptance and noise.
        prompt: Tokens of each prompt.
        stalls: Factors by which some steps take longer, by their number.
        slope: Fraction by which passes take longer for each token of context.
        capture: Seconds of a capture, when a g is first chosen. They are not counted. 0: no captures.
        captured: Values of g that are captured, and the step of the capture.
        ahead: Choices that are made before an outcome is known, because the device runs ahead of the host.
        seconds: Simulated seconds so far.
        tokens: Generated tokens so far.
        chosen: Chosen g of each step so far.
    """

    alpha: Callable[[int, int], float]
    cost: Cost
    batch: int = 1
    draft_step: float = 0.0
    catch_up: float = 0.0
    free_catch_up: int = 0
    noise: float = 0.05
    seed: int = 0
    prompt: int = 0
    stalls: Mapping[int, float] = field(default_factory=dict)
    slope: float = 0.0
    capture: float = 0.0
    captured: dict[int, int] = field(default_factory=dict)
    ahead: int = 0
    seconds: float = 0.0
    tokens: int = 0
    chosen: list[int] = field(default_factory=list)

    def run(self, policy: DraftLengthPolicy, steps: int) -> Simulation:
        """Generate one sequence per slot. The policy may have learned from earlier ones."""
        rng, draft_rng = (np.random.default_rng([self.seed, len(self.chosen), *key]) for key in ([], [1]))
        slots: Sequence[int] = range(self.batch)
        policy.reset(slots)
        catch_up_tokens, context = self.prompt * self.batch, self.prompt + 1
        outcomes: list[StepOutcome] = []
        for _ in range(steps):
            captured = frozenset(self.captured) if self.capture else None
            t, load = len(self.chosen), Load(self.batch, context, catch_up_tokens, captured)
            drafted = policy.choose(slots, load=load)
            g = max(drafted)
            accepted = []
            for slot, length in zip(slots, drafted, strict=True):
                rejected = np.flatnonzero(rng.random(length) >= self.alpha(t, slot))
                accepted.append(int(rejected[0]) if len(rejected) else length)
            draft = (
                (g * self.draft_step + max(0, catch_up_tokens - self.free_catch_up) * self.catch_up)
                if g
                else 0.0
            )
            target = self.cost(self.batch, g) * (1 + self.slope * context)
            stall = self.stalls.get(t, 1.0)
            draft_seconds = draft * stall * (1 + self.noise * draft_rng.standard_normal())
            seconds = draft_seconds + target * stall * (1 + self.noise * rng.standard_normal())
            if self.capture and g not in self.captured:
                self.captured[g] = t
                outcomes.append(
                    StepOutcome(slots, drafted, accepted, g, load, None, capture_seconds=self.capture)
                )
            else:
                outcomes.append(StepOutcome(slots, drafted, accepted, g, load, seconds, draft_seconds, g))
            if len(outcomes) > self.ahead:
                policy.observe(outcomes.pop(0))
            catch_up_tokens = 0 if g else catch_up_tokens + self.batch
            context += max(accepted) + 1
            self.seconds += draft + target
            self.tokens += sum(accepted) + self.batch
            self.chosen.append(g)
        return self

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds
