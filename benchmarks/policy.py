"""The default draft-length policy in simulated worlds, and what each of its mechanisms earns there.

    python benchmarks/policy.py --out benchmarks/results/policy.json
    python benchmarks/policy.py --time --out benchmarks/results/policy_time.json

A world has known acceptance rates and known costs (`outpace.bench.simulation`), so the best number of draft
tokens is known. The score of a world is the throughput of the policy over that of the best numbers, captures
counted. Real texts (`lookup_traces.py`) have known draft tokens of prompt lookup, and are decoded again with
the costs of a step that were measured on two machines, and with a flat cost. Their score is the throughput
over that without speculation, for each category and temperature. The ablation takes one mechanism away at a
time, and reports the change of the mean score with its standard error. Nothing is timed, so the figures do
not depend on the machine. With ``--time``, the program measures the policy's own time instead.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from report import arguments, machine, write

from outpace import Goodput
from outpace.bench import theory
from outpace.bench.simulation import Cost, Simulation, flat, steep
from outpace.policy import Load, StepOutcome
from outpace.policy.config import GoodputConfig
from outpace.policy.costs import StepCosts

TRACES = Path(__file__).parent / "results" / "lookup_traces.json"
Phases = tuple[tuple[int, float], ...]  # steps and acceptance rate of each phase
DEFAULT = GoodputConfig()
NEVER = 10**12


@dataclass(frozen=True)
class World:
    """A simulated world.

    Attributes:
        kind: Group of worlds.
        cost: Seconds of a pass.
        batch: Number of sequences.
        c: Seconds of a draft step, in baseline steps.
        phases: Acceptance rates.
        capture: Seconds of a capture, in baseline steps. 0: no captures.
        slope: Fraction by which passes take longer for each token of context.
        busy: Whether every 50th step takes ten times as long.
        later_c: If set, the same policy then decodes as many steps again, with this c.
    """

    kind: str
    cost: Cost
    batch: int
    c: float
    phases: Phases
    capture: float = 0.0
    slope: float = 0.0
    busy: bool = False
    later_c: float | None = None

    def score(self, policy: Goodput, seed: int) -> float:
        """Return the logarithm of the throughput over that of the best numbers of draft tokens."""
        if self.later_c is not None:
            before, after = replace(self, later_c=None), replace(self, later_c=None, c=self.later_c)
            return statistics.mean((before.score(policy, seed), after.score(policy, seed + 1000)))
        baseline, steps = self.cost(self.batch, 0), sum(n for n, _ in self.phases)
        alphas = [alpha for n, alpha in self.phases for _ in range(n)]
        simulation = Simulation(
            lambda t, slot: alphas[t],
            self.cost,
            self.batch,
            self.c * baseline,
            catch_up=self.c * baseline / 16 / self.batch,
            seed=seed,
            prompt=32,
            stalls=dict.fromkeys(range(7, steps, 50), 10.0) if self.busy else {},
            slope=self.slope,
            capture=self.capture * baseline,
            captured={0: 0} if self.capture else {},
            in_graph=self.capture > 0,
            max_new_tokens=256,
        ).run(policy, steps)
        tokens = sum(
            self.batch * float(theory.expected_tokens(alpha, g))
            for g, alpha in zip(simulation.chosen, alphas, strict=True)
        )
        best = sum(n * max(self._rate(alpha, g) for g in range(17)) for n, alpha in self.phases) / steps
        # Without stalls and context, which are the same for all choices
        seconds = sum(self.cost(self.batch, g) + g * self.c * baseline for g in simulation.chosen)
        lost = simulation.capture_seconds + simulation.catch_up_seconds
        return math.log(tokens / (seconds + lost) / best)

    def _rate(self, alpha: float, g: int) -> float:
        seconds = self.cost(self.batch, g) + g * self.c * self.cost(self.batch, 0)
        return self.batch * float(theory.expected_tokens(alpha, g)) / seconds


@dataclass(frozen=True)
class Machine:
    """A machine that decodes real texts with prompt lookup, one after another.

    Times are in baseline steps.

    Attributes:
        name: Name of the machine.
        ratios: Duration of a step, by number of draft tokens. In between it is interpolated.
        capture: Duration of a capture. 0: no captures, and prompt lookup proposes before the policy chooses.
        proposal: Duration of such a proposal.
    """

    name: str
    ratios: dict[int, float]
    capture: float = 0.0
    proposal: float = 0.0

    def scores(self, policy: Goodput, seed: int) -> dict[str, float]:
        """Return the logarithm of the throughput over the baseline, by temperature and category."""
        rng, captured = np.random.default_rng(seed), {0}
        costs = np.interp(range(policy.max_draft_tokens + 1), list(self.ratios), list(self.ratios.values()))
        took, baseline = defaultdict[str, float](float), defaultdict[str, float](float)
        texts = json.loads(TRACES.read_text())["texts"]
        random.Random(seed).shuffle(texts)
        for text in texts:
            policy.reset([0])
            proposed, correct = ([int(n) for n in text[key].split()] for key in ("proposed", "correct"))
            cell, t = f"temperature {text['temperature']:g}, {text['category']}", 0
            baseline[cell] += len(proposed)
            while t < len(proposed):
                left, seconds = len(proposed) - t - 1, self.proposal
                load = Load(
                    1,
                    text["prompt_tokens"] + t + 1,
                    captured=frozenset(captured) if self.capture else None,
                    remaining_draft_tokens=(left,),
                    padded_drafts=self.capture > 0,
                )
                known = min(left, proposed[t], policy.max_draft_tokens)
                if self.capture:
                    (g,) = policy.choose([0], load=load)
                    tested, right = (g, min(correct[t], g)) if g else (1, min(correct[t], 1))
                elif policy.idle or left < 1:
                    g = tested = right = 0
                    seconds = 0.0
                else:
                    (g,) = policy.choose([0], load=load, proposed=[known])
                    tested = min(g + (correct[t] >= g), known)
                    right = min(correct[t], tested)
                capture = 0.0 if g in captured or not self.capture else self.capture
                captured.add(g)
                done = StepOutcome(
                    [0],
                    [min(g, known)],
                    [min(correct[t], g)],
                    g,
                    load,
                    None if capture else costs[g] * (1 + 0.03 * rng.standard_normal()),
                    [tested],
                    [right],
                    proposal_seconds=seconds,
                    capture_seconds=capture,
                )
                policy.observe(done)
                took[cell] += costs[g] + seconds + capture
                t += done.accepted[0] + 1
        return {cell: math.log(baseline[cell] / took[cell]) for cell in sorted(took)}


# H200 and CPU: SmolLM2-135M-Instruct, as in `real_text_h200.json` and `real_text_cpu.json`
MACHINES = (
    Machine("H200", {0: 1.0, 1: 1.12, 2: 1.14, 4: 1.16, 8: 1.29, 16: 1.41}, capture=100.0),
    Machine("flat cost", {0: 1.0, 1: 1.02, 4: 1.03, 8: 1.05, 16: 1.08}, capture=100.0),
    Machine("CPU", {0: 1.0, 1: 1.02, 2: 1.1, 4: 1.48, 8: 1.73, 16: 2.2}, proposal=0.002),
)


def worlds() -> Iterator[World]:
    for cost, B in itertools.product((flat, steep), (1, 8, 64)):
        for alpha, c in ((0.02, 0.0), (0.02, 0.2), (0.3, 0.9), (0.8, 0.9)):
            yield World("drafter that cannot pay", cost, B, c, ((1000, alpha),))
        for alpha, c in itertools.product((0.3, 0.6, 0.8, 0.9), (0.02, 0.2)):
            yield World("constant acceptance", cost, B, c, ((500, alpha),))
    for B, alpha, c in itertools.product((1, 8), (0.02, 0.3, 0.6, 0.9), (0.02, 0.2)):
        yield World("captures", flat, B, c, ((1500, alpha),), capture=40.0)
    for cost, c in ((flat, 0.02), (flat, 0.1), (flat, 0.3), (steep, 0.0), (steep, 0.1)):
        for capture in (0.0, 40.0):
            yield World("jumps", cost, 1, c, ((300, 0.9), (300, 0.1), (300, 0.9)), capture=capture)
    for cost, alpha in itertools.product((flat, steep), (0.05, 0.6, 0.9)):
        yield World("stalls", cost, 1, 0.1, ((600, alpha),), busy=True)
        yield World("long contexts", cost, 8, 0.1, ((600, alpha),), slope=0.002)
        for c, later in ((0.1, 1.0), (1.0, 0.1), (0.05, 0.3)):
            yield World("changing costs", cost, 1, c, ((600, alpha),), later_c=later)


class WithoutSpeed(StepCosts):
    """Each g has seconds of its own: a measurement of one moves no other."""

    def record(self, g: int, seconds: float) -> None:
        before, speed = dict(self._relative), self._speed
        super().record(g, seconds)
        if before:
            own = self._relative[g] + self._speed - speed
            self._relative, self._speed = before | {g: own}, speed


class FreeCatchUp(StepCosts):
    """A catch-up is expected to cost nothing."""

    def catch_up(self, tokens: int) -> float:
        return 0.0


class WithCosts(Goodput):
    """The policy with another cost model."""

    def __init__(self, model: type[StepCosts]) -> None:
        super().__init__()
        self._model = model

    def costs(self, load: Load) -> StepCosts:
        key = load.executor, (load.batch - 1).bit_length()
        if key not in self._by_size:
            self._by_size[key] = self._model(self.max_draft_tokens, self.config)
        return self._by_size[key]


class CapturesAtOnce(Goodput):
    """The policy with captures that are expected to cost nothing."""

    def observe(self, done: StepOutcome) -> None:
        super().observe(replace(done, capture_seconds=min(done.capture_seconds, 1e-9)))


class ProbesAtOnce(Goodput):
    """The policy with probes that are due in any step, also right after wrong draft tokens."""

    def observe(self, done: StepOutcome) -> None:
        super().observe(done)
        self._steps_since_rejection = NEVER


def with_config(**changes: Any) -> Callable[[], Goodput]:
    return lambda: Goodput(config=replace(DEFAULT, **changes))


def without_balance() -> Goodput:
    policy = Goodput()
    policy.balance = 0.0
    return policy


def with_larger_balance() -> Goodput:
    policy = Goodput(config=replace(DEFAULT, balance=24.0))
    policy.balance = DEFAULT.balance
    return policy


VARIANTS: dict[str, Callable[[], Goodput]] = {
    "as it is": Goodput,
    "α never jumps": with_config(jump_probability=1e-9),
    "new sequences resemble none": with_config(prior_outcomes=NEVER),
    "no uniform share": with_config(uniform_share=1e-9),
    "one measurement per cost": with_config(cost_measurements=1),
    "costs never get stale": with_config(stale_passes=NEVER),
    "outliers are not clipped": with_config(outlier_factor=1e9),
    "first g up to 16": with_config(first_draft_tokens=16),
    "no margin": with_config(margin=0.0),
    "no balance at the start": without_balance,
    "no income": with_config(income=0.0),
    "balance up to 24": with_larger_balance,
    "probes whenever the balance permits": with_config(probe_share=1e9),
    "probes are always due": ProbesAtOnce,
    "no shared speed": lambda: WithCosts(WithoutSpeed),
    "catch-up costs nothing": lambda: WithCosts(FreeCatchUp),
    "captures cost nothing": CapturesAtOnce,
}


def scores(job: tuple[str, int]) -> list[tuple[str, float]]:
    """Return the kind and the mean score of each world, and of each category of texts, for a variant."""
    name, seeds = job
    found = [
        (world.kind, statistics.mean(world.score(VARIANTS[name](), seed) for seed in range(seeds)))
        for world in worlds()
    ]
    for each in MACHINES:
        runs = [each.scores(VARIANTS[name](), seed) for seed in range(seeds)]
        for cell in runs[0]:
            kind = f"texts, {each.name}, {cell.split(',')[0]}"
            found.append((kind, statistics.mean(run[cell] for run in runs)))
    return found


class Timed(Goodput):
    """The policy, which notes the seconds of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.choice_seconds, self.outcome_seconds = list[float](), list[float]()

    def choose(self, *args: Any, **options: Any) -> list[int]:
        started_at = time.perf_counter()
        chosen = super().choose(*args, **options)
        self.choice_seconds.append(time.perf_counter() - started_at)
        return chosen

    def observe(self, done: StepOutcome) -> None:
        started_at = time.perf_counter()
        super().observe(done)
        self.outcome_seconds.append(time.perf_counter() - started_at)


def own_time(steps: int = 3000) -> list[dict[str, float]]:
    """Return the microseconds of a choice and of its outcome, medians over the steps of a simulation."""
    found = []
    for B in (1, 8, 64):
        policy = Timed()
        Simulation(lambda t, slot: 0.7, flat, B, 0.1, 0.01 / B, max_new_tokens=300).run(policy, steps)
        choice, outcome = (
            round(1e6 * statistics.median(each), 1)
            for each in (policy.choice_seconds, policy.outcome_seconds)
        )
        found.append({"B": B, "choice": choice, "outcome": outcome, "sum": round(choice + outcome, 1)})
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--time", action="store_true", help="measure the policy's own time instead")
    parser.add_argument("--seeds", type=int, default=3, help="simulations of each world (default 3)")
    parser.add_argument("--processes", type=int, default=2, help="processes at a time (default 2)")
    parser.add_argument("--only", nargs="+", help="variants to run (default all)", choices=list(VARIANTS))
    options = parser.parse_args()
    if options.time:
        command = "python " + " ".join(sys.argv)
        write({"command": command, "machine": machine(), "microseconds": own_time()}, options.out)
        return
    names = ["as it is", *(options.only or list(VARIANTS)[1:])]
    with ProcessPoolExecutor(options.processes) as pool:
        found = dict(zip(names, pool.map(scores, [(name, options.seeds) for name in names]), strict=True))
    full, rows = found["as it is"], []
    kinds = list(dict.fromkeys(kind for kind, _ in full))
    for name, each in found.items():
        changes = [(kind, 100 * (b - a)) for (kind, a), (_, b) in zip(full, each, strict=True)]
        by_kind = {
            kind: round(statistics.mean(change for its, change in changes if its == kind), 2)
            for kind in kinds
        }
        values = [change for _, change in changes]
        error = statistics.stdev(values) / math.sqrt(len(values))
        row = {
            "variant": name,
            "change_percent": round(statistics.mean(values), 2),
            "standard_error": round(error, 2),
            "by_kind": by_kind,
        }
        rows.append(row)
        print(f"{name:36} {row['change_percent']:7.2f} ± {error:.2f} %   {by_kind}", flush=True)
    cells = {kind: [score for its, score in full if its == kind] for kind in kinds}
    geometric = {kind: round(math.exp(statistics.mean(some)), 4) for kind, some in cells.items()}
    lowest = {kind: round(math.exp(min(some)), 4) for kind, some in cells.items()}
    print("geometric mean of the score:", geometric)
    print("lowest score:", lowest)
    report = {
        "command": "python " + " ".join(sys.argv),
        "machine": machine(),
        "cells": len(full),
        "score": geometric,
        "lowest": lowest,
        "ablation": rows,
    }
    write(report, options.out)


if __name__ == "__main__":
    main()
