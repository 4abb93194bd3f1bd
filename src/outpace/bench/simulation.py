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
        capture: Seconds of a capture, when a g is first chosen. 0: no captures.
        captured: Values of g that are captured, and the step of the capture.
        in_graph: Whether drafting is part of the graph: a catch-up is then timed by itself.
        ahead: Choices that are made before an outcome is known, because the device runs ahead of the host.
        max_new_tokens: Tokens of each sequence. None: as many as there are steps for.
        seconds: Simulated seconds so far, without captures.
        capture_seconds: Simulated seconds of captures so far.
        catch_up_seconds: Simulated seconds of catch-ups so far.
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
    in_graph: bool = False
    ahead: int = 0
    max_new_tokens: int | None = None
    seconds: float = 0.0
    capture_seconds: float = 0.0
    catch_up_seconds: float = 0.0
    tokens: int = 0
    chosen: list[int] = field(default_factory=list)

    def run(self, policy: DraftLengthPolicy, steps: int) -> Simulation:
        """Generate sequences for a number of steps. The policy may have learned from earlier ones."""
        end = len(self.chosen) + steps
        while len(self.chosen) < end:
            self._generate(policy, end)
        return self

    def _generate(self, policy: DraftLengthPolicy, end: int) -> None:
        """Generate one sequence per slot, until they are complete or the steps are used up."""
        rng, draft_rng = (np.random.default_rng([self.seed, len(self.chosen), *key]) for key in ([], [1]))
        slots: Sequence[int] = range(self.batch)
        policy.reset(slots)
        unread = 0 if self.in_graph else self.prompt * self.batch
        context, remaining = self.prompt + 1, self.max_new_tokens or 0
        outcomes: list[StepOutcome] = []
        while len(self.chosen) < end and (self.max_new_tokens is None or remaining > 0):
            t, load = len(self.chosen), self._load(context, unread, remaining)
            drafted = policy.choose(slots, load=load)
            g = max(drafted)
            accepted = []
            for slot, length in zip(slots, drafted, strict=True):
                rejected = np.flatnonzero(rng.random(length) >= self.alpha(t, slot))
                accepted.append(int(rejected[0]) if len(rejected) else length)
            catch_up = max(0, unread - self.free_catch_up) * self.catch_up if g else 0.0
            draft, target = g * self.draft_step, self.cost(self.batch, g) * (1 + self.slope * context)
            stall = self.stalls.get(t, 1.0)
            target_seconds = target * stall * (1 + self.noise * rng.standard_normal())
            draft_seconds = draft * stall * (1 + self.noise * draft_rng.standard_normal())
            capture = self.capture if g not in self.captured else 0.0
            if capture:
                self.captured[g] = t
            hidden = 0.0 if self.in_graph else catch_up
            outcomes.append(
                StepOutcome(
                    slots,
                    drafted,
                    accepted,
                    g,
                    load,
                    None if capture else target_seconds + draft_seconds + hidden,
                    catch_up_seconds=catch_up - hidden,
                    capture_seconds=capture,
                )
            )
            if len(outcomes) > self.ahead:
                policy.observe(outcomes.pop(0))
            unread = 0 if g else unread + self.batch
            context, remaining = context + max(accepted) + 1, remaining - min(accepted) - 1
            self.seconds += draft + catch_up + target
            self.capture_seconds += capture
            self.catch_up_seconds += catch_up
            self.tokens += sum(accepted) + self.batch
            self.chosen.append(g)

    def _load(self, context: int, unread: int, remaining: int) -> Load:
        return Load(
            self.batch,
            context,
            unread,
            captured=frozenset(self.captured) if self.capture else None,
            remaining_draft_tokens=None if self.max_new_tokens is None else (remaining,) * self.batch,
            padded_drafts=self.in_graph,
        )

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds
