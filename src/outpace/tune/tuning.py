"""Tuning from a target and drafts to a recommended setup, in stages within a time budget.

The stages are costs, acceptance, a race of whole texts, the rule, and larger batches. Results are saved after
each stage, and are useful at any moment.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outpace.bench import alpha, cost
from outpace.bench.estimate import estimate
from outpace.bench.prompts import Asked
from outpace.bench.results import Results
from outpace.bench.runs import AUTO, BEGINNING
from outpace.checks.errors import too_few
from outpace.decoder import Decoder
from outpace.draft.lookup import LookupDrafter
from outpace.draft.ngram import NGramDrafter
from outpace.sampling import SamplingParams
from outpace.tune.budget import Budget
from outpace.tune.costs import Costs, PrecisionCosts
from outpace.tune.decision import LEAST
from outpace.tune.findings import PAYS, Findings
from outpace.tune.race import Race
from outpace.tune.replay import Replay
from outpace.tune.way import NGRAM, Candidate, Setting, plainly

# Shares of the budget at which stages end: time that one leaves over is the next one's.
TIMED, FITTED, FORESEEN, RACED, JUDGED = 0.12, 0.25, 0.4, 0.88, 0.95
PROMPTS = 64  # prompts that texts are timed with, at most
TEXTS = 16  # texts that acceptance is measured on, at most
FEWEST = 8  # tokens of such a text, at least
SHORT = 24  # tokens of a text that is timed, at least, if there is no time for all
ROUNDS, WAYS = 12, 3  # texts, and setups, that a race needs time for
GRAMS = 3  # n of the table that is fitted
CROWD = 1, 3, 6  # tokens of the passes to time with larger batches, besides those of the chosen setup

Tell = Callable[[str], None]


@dataclass(frozen=True)
class TunePlan:
    """The settings of a tuning.

    Attributes:
        sampling: Sampling parameters.
        tokens: Maximum number of new tokens of a text.
        batches: Batch sizes that the chosen setup is measured with.
        seed: Seed of sampling, and of the order of prompts.
    """

    sampling: SamplingParams
    tokens: int = 64
    batches: Sequence[int] = cost.BATCHES
    seed: int = 0


class Tuning:
    """A search for the fastest setup of a target.

    Args:
        sides: The target in each precision; the others are compared with the first.
        prompts: Prompts to measure with.
        plan: Settings.
        budget: Time budget.
        results: File that the results are saved in.
        tell: Called with lines about the progress.
        fit: Whether to include an n-gram table. It is fitted to the target's texts for half of the prompts,
            which are then not measured with.
    """

    def __init__(
        self,
        sides: Sequence[PrecisionCosts],
        prompts: Sequence[Asked],
        plan: TunePlan,
        budget: Budget,
        results: Results,
        tell: Tell = lambda line: None,
        fit: bool = False,
    ) -> None:
        self.sides, self.plan, self.budget, self.results, self._tell = sides, plan, budget, results, tell
        mixed = random.Random(plan.seed).sample(list(prompts), len(prompts))  # files are often sorted by kind
        held_back = fit and len(mixed) >= 2 * LEAST
        self.held = mixed[1::2] if held_back else []
        self.prompts = (mixed[::2] if held_back else mixed)[:PROMPTS]
        self.costs, self.findings = Costs(plan.sampling), Findings(plainly(sides[0].dtype))
        self.ngram: NGramDrafter | None = None
        self.tokens = plan.tokens
        for side in sides:
            self.findings.add(plainly(side.dtype), *(self._auto(name, side) for name in side.drafts))
        if fit and not held_back:
            few = too_few(len(mixed), "prompt")
            self._give_up(NGRAM, f"{few} to hold some back; it takes {2 * LEAST}")

    def run(self) -> None:
        """Run all stages, and save the results after each."""
        for stage in (self.time, self.fit, self.foresee, self.race, self.judge, self.crowd):
            stage()
            self.put()

    def put(self) -> None:
        """Save the results so far."""
        spent = round(self.budget.spent, 1)
        self.results.put(spent_seconds=spent, **self.costs.found(), **self.findings.content())

    def tell(self, what: str) -> None:
        """Report progress, with the seconds that are left."""
        self._tell(f"{what} ({max(0.0, self.budget.left()):.0f} s left)")

    def time(self) -> None:
        """Time forward passes of the target."""
        for i, side in enumerate(self.sides):
            self.tell("passes of the target")
            self.costs.time(side, 1, self.budget.left(TIMED * (i + 1) / len(self.sides)))
        plain = self.costs.plain(self.sides[0].dtype)
        fit = int((RACED - FORESEEN) * self.budget.seconds / (ROUNDS * WAYS * plain))
        self.tokens = min(self.tokens, max(SHORT, fit))
        for side in self.sides[1:]:
            speed = plain / self.costs.plain(side.dtype), None
            self.findings.expect(plainly(side.dtype), speed, 0.0, speed)

    def fit(self) -> None:
        """Fit an n-gram table to the target's texts for prompts that nothing is measured with."""
        plan, plain, texts = self.plan, self.sides[0].plain, list[list[int]]()
        took = self._writing(alpha.ROWS)
        for i in range(0, len(self.held), alpha.ROWS):
            before = self.budget.left(FITTED)
            if before < took:
                break
            self.tell(f"texts to count n-grams of: {len(texts)}")
            some = [one.ids for one in self.held[i : i + alpha.ROWS]]
            seeds = list(range(plan.seed + i, plan.seed + i + len(some)))
            outs = plain.generate(some, plan.sampling, max_new_tokens=self.tokens, seed=seeds)
            # With the prompt's last tokens, which the first draft tokens depend on.
            texts += [[*ids[1 - GRAMS :], *out.token_ids] for ids, out in zip(some, outs, strict=True)]
            took = max(took, before - self.budget.left(FITTED))
        if texts:
            self.ngram = NGramDrafter.fit(texts, GRAMS, plain.scorer.vocab_size)
            for side in self.sides:
                side.drafts[NGRAM] = Decoder(side.plain.scorer, self.ngram, side.plain.tokenizer)
                self.findings.add(self._auto(NGRAM, side))
                self.costs.time_verification(side, 1)
        elif self.held:
            self._give_up(NGRAM, "no time to let the target write what would be counted")

    def foresee(self) -> None:
        """Measure acceptance on the target's own texts, and derive expected speeds with the costs."""
        every = [(side, name) for side in self.sides for name in side.drafts]
        for side, name in every:
            if self.budget.left(FORESEEN) > 0:
                self.tell(f"steps of a draft: {name}")
                self.costs.time_step(side, name)
        self._walk()
        for side, name in every:
            if name in self.findings.beta and self.costs.knows(side.dtype, name):
                self._foresee(side, name)

    def _walk(self) -> None:
        plan, side = self.plan, self.sides[0]
        drafts = {name: one for name, one in side.drafts.items() if self.costs.knows(side.dtype, name)}
        count = min(TEXTS, len(self.prompts))
        took = self._writing(alpha.ROWS) * (1 + self.costs.steps(side.dtype))
        tokens = min(self.tokens, int(self.tokens * self.budget.left(FORESEEN) / took))
        if not drafts or tokens < FEWEST:
            return
        took = 0.0
        for i in range(0, count, alpha.ROWS):
            before = self.budget.left(FORESEEN)
            if before < took:
                return
            self.tell(f"α: {i} of {count} prompts")
            some, seed = self.prompts[i : min(count, i + alpha.ROWS)], plan.seed + i
            for one in alpha.measure(side.plain, drafts, some, plan.sampling, tokens=tokens, seed=seed):
                for name in drafts:
                    if one.tokens:
                        self.findings.beta.setdefault(name, []).append(one.beta[name][1.0])
            took = max(took, before - self.budget.left(FORESEEN))

    def _foresee(self, side: PrecisionCosts, name: str) -> None:
        texts = self.findings.beta[name]
        found = estimate(texts)
        if found is None:
            self.findings.dropped[self._auto(name, side)] = "drafted nothing"
            return
        # With more draft tokens, nothing of a text would be left to time.
        most = min(self.tokens // BEGINNING - 2, side.plain.scorer.context - 1)
        plain = self.costs.iterations(self.sides[0], name, found.mean)[0]
        iterations = self.costs.iterations(side, name, found.mean)
        replay = Replay(texts, iterations[: most + 1], plain)
        if replay.lengths == [0]:
            return
        g, alone = replay.best(), plain / iterations[0]  # the speed of this precision without speculation
        auto, fixed = self._auto(name, side), Setting(name, str(g), "token", side.dtype)
        speed, hope = replay.fixed(g), replay.chosen()
        self.findings.expect(auto, max(speed, (alone, None), key=lambda one: one[0]), PAYS * alone, hope)
        # A fixed number does no better than the best one of each text, however well either is known.
        self.findings.expect(fixed, speed, PAYS * alone, hope if auto in self.findings.dropped else speed)

    def race(self) -> None:
        """Decode whole texts with the promising setups and without speculation, in turn."""
        enough = self.enough()
        self._race(self.findings.promising(), RACED)
        self.findings.ended = (
            f"there was no time to measure whole texts in {self.budget.seconds:g} s; "
            f"about {math.ceil(enough)} s would do"
        )

    def enough(self) -> float:
        """Return about how many seconds of budget would leave time for a race."""
        race = ROUNDS * WAYS * SHORT * self.costs.plain(self.sides[0].dtype)
        return max((self.budget.spent + race) / RACED, race / (RACED - FORESEEN))

    def judge(self) -> None:
        """Compare the rules block and token with the chosen setup, where they differ."""
        way = self.findings.choice.way
        if not way.plain and cost.draws(self._decoder(way), self.plan.sampling):
            block = Setting(way.draft, way.length, "block", way.dtype)
            self.findings.add(block)
            self._race([way, block], JUDGED)

    def _race(self, ways: Sequence[Setting], share: float) -> None:
        first, record = self.findings.first, self.findings.record
        if not ways:
            return
        for side in self.sides:
            cost.let_go(side.plain)
            side.reserve(self.tokens + max(len(one.ids) for one in self.prompts))
        race = Race(
            {way: self._decoder(way) for way in ways}, (first, self._decoder(first)),
            [one.ids for one in self.prompts], self.plan.sampling,
            tokens=self.tokens, seed=self.plan.seed, text=self._writing(1), record=record,
        )  # fmt: skip
        for _ in race.rounds(lambda: self.budget.left(share), self.tell, record.rounds):
            self.findings.decide()
            self.put()

    def crowd(self) -> None:
        """Derive the expected speed of the chosen setup with larger batches."""
        way = self.findings.choice.way
        texts = self.findings.beta.get(way.draft)
        found = estimate(texts) if texts is not None else None
        if way.plain or texts is None or found is None:
            return
        side = next(one for one in self.sides if one.dtype == way.dtype)
        near = self.findings.nearest()
        sizes = tuple(sorted({*CROWD, *(() if near is None else (near + 1,))}))
        # A pass takes no longer than its sequences one after the other.
        row = 2 * (cost.ROUNDS + 1) * self.costs.longest(way.dtype, sizes)
        for B in sorted({*self.plan.batches} - {1}):
            if self.budget.left() < B * row:
                return
            self.tell(f"passes over B = {B} rows")
            self.costs.time(side, B, self.budget.left(), sizes)
            self.costs.time_step(side, way.draft, B)
            iterations = self.costs.iterations(side, way.draft, found.mean, B)
            replay = Replay(texts, iterations, iterations[0], B)
            speed, interval = replay.fixed(int(way.length) if way.length.isdecimal() else replay.best())
            why = "expected to pay" if speed > PAYS else "not expected to pay"
            self.findings.crowds.append(
                Candidate(way.draft, way.length, way.dtype, way.rule, B, speed, interval, None, why)
            )

    def _decoder(self, way: Setting) -> Decoder:
        side = next(one for one in self.sides if one.dtype == way.dtype)
        if way.plain:  # the drafter is never used
            return Decoder(side.plain.scorer, LookupDrafter(), side.plain.tokenizer)
        own = side.drafts[way.draft]
        if way.rule == "token":
            return own
        return Decoder(own.scorer, own.drafter, own.tokenizer, rule=way.rule)

    def _writing(self, rows: int) -> float:
        """Return about how many seconds it takes to decode texts, without their prompts.

        Several sequences take longer than one.
        """
        return self.tokens * self.costs.plain(self.sides[0].dtype) * (1 if rows == 1 else 2)

    def _auto(self, name: str, side: PrecisionCosts) -> Setting:
        return Setting(name, AUTO, "token", side.dtype)

    def _give_up(self, name: str, why: str) -> None:
        way = self._auto(name, self.sides[0])
        self.findings.add(way)
        self.findings.untried[way] = why
