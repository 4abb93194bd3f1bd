"""Tuning from a target and drafts to a recommended candidate, in stages within a time budget.

The stages are costs, an n-gram table, acceptance, a race of whole texts, the rule, and larger batches.
Results are saved after each stage, and are useful at any moment.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outpace.bench import alpha, cost
from outpace.bench.estimate import estimate
from outpace.bench.prompts import Prompt
from outpace.bench.results import Results
from outpace.bench.runs import AUTO, SKIPPED_STEPS
from outpace.checks.errors import too_few
from outpace.decoder import Decoder
from outpace.draft.lookup import LookupDrafter
from outpace.draft.ngram import NGramDrafter
from outpace.sampling import SamplingParams
from outpace.tune.budget import Budget
from outpace.tune.candidate import NGRAM, Candidate, CandidateResult, baseline
from outpace.tune.costs import DecoderSet, StepCosts
from outpace.tune.decision import MIN_PROMPTS
from outpace.tune.findings import MIN_SPEEDUP, Findings
from outpace.tune.race import Race
from outpace.tune.replay import Replay

# Shares of the budget at which stages end. Time that a stage does not use goes to the next one.
COSTS_END, NGRAM_END, ACCEPTANCE_END, RACE_END, RULE_END = 0.12, 0.25, 0.4, 0.88, 0.95
MAX_PROMPTS = 64  # prompts of a race
MAX_ACCEPTANCE_TEXTS = 16  # texts that acceptance is measured on
MIN_ACCEPTANCE_TOKENS = 8  # tokens of such a text
MIN_RACE_TOKENS = 24  # tokens of a text of a race, if there is no time for all
RACE_ROUNDS, RACE_CANDIDATES = 12, 3  # rounds and candidates that a race needs time for
NGRAM_ORDER = 3  # n of the table that is fitted
BATCH_PASS_SIZES = 1, 3, 6  # tokens of the passes to time with larger batches, besides the chosen number

Tell = Callable[[str], None]


@dataclass(frozen=True)
class TunePlan:
    """The settings of a tuning.

    Attributes:
        sampling: Sampling parameters.
        max_new_tokens: Maximum number of new tokens of a text.
        batches: Batch sizes that the chosen candidate is measured with.
        seed: Seed of sampling, and of the order of prompts.
    """

    sampling: SamplingParams
    max_new_tokens: int = 64
    batches: Sequence[int] = cost.BATCHES
    seed: int = 0


class Tuning:
    """A search for the fastest candidate of a target.

    Args:
        decoder_sets: Decoders of the target in each precision; the first has the reference.
        prompts: Prompts to measure with.
        plan: Settings.
        budget: Time budget.
        results: File that the results are saved in.
        tell: Called with lines about the progress.
        fit_ngram: Whether to include an n-gram table. It is fitted to the target's texts for half of the
            prompts, which are then not measured with.
    """

    def __init__(
        self,
        decoder_sets: Sequence[DecoderSet],
        prompts: Sequence[Prompt],
        plan: TunePlan,
        budget: Budget,
        results: Results,
        tell: Tell = lambda line: None,
        fit_ngram: bool = False,
    ) -> None:
        self.decoder_sets, self.plan, self.budget, self.results = decoder_sets, plan, budget, results
        self._tell = tell
        shuffled = random.Random(plan.seed).sample(list(prompts), len(prompts))  # files are often sorted
        hold_back = fit_ngram and len(shuffled) >= 2 * MIN_PROMPTS
        self.ngram_prompts = shuffled[1::2] if hold_back else []
        self.prompts = (shuffled[::2] if hold_back else shuffled)[:MAX_PROMPTS]
        self.costs, self.findings = StepCosts(plan.sampling), Findings(baseline(decoder_sets[0].dtype))
        self.ngram: NGramDrafter | None = None
        self.max_new_tokens = plan.max_new_tokens
        for decoders in decoder_sets:
            auto = (self._auto(name, decoders) for name in decoders.by_draft)
            self.findings.add(baseline(decoders.dtype), *auto)
        if fit_ngram and not hold_back:
            few = too_few(len(shuffled), "prompt")
            self._skip(NGRAM, f"{few} to hold some back; it takes {2 * MIN_PROMPTS}")

    def run(self) -> None:
        """Run all stages, and save the results after each."""
        for stage in (
            self.time_target,
            self.fit_ngram,
            self.measure_acceptance,
            self.race,
            self.compare_rules,
            self.expect_larger_batches,
        ):
            stage()
            self.save()

    def save(self) -> None:
        """Save the results so far."""
        spent = round(self.budget.spent, 1)
        self.results.put(spent_seconds=spent, **self.costs.content(), **self.findings.content())

    def tell(self, what: str) -> None:
        """Report progress, with the seconds that are left."""
        self._tell(f"{what} ({max(0.0, self.budget.left()):.0f} s left)")

    def time_target(self) -> None:
        """Time forward passes of the target."""
        for i, decoders in enumerate(self.decoder_sets):
            self.tell("forward passes of the target")
            share = COSTS_END * (i + 1) / len(self.decoder_sets)
            self.costs.time_target(decoders, 1, self.budget.left(share))
        token_seconds = self.costs.baseline_seconds(self.decoder_sets[0].dtype)
        race_seconds = (RACE_END - ACCEPTANCE_END) * self.budget.seconds
        fit = int(race_seconds / (RACE_ROUNDS * RACE_CANDIDATES * token_seconds))
        self.max_new_tokens = min(self.max_new_tokens, max(MIN_RACE_TOKENS, fit))
        for decoders in self.decoder_sets[1:]:
            speedup = token_seconds / self.costs.baseline_seconds(decoders.dtype), None
            self.findings.expect(baseline(decoders.dtype), speedup, 0.0, speedup)

    def fit_ngram(self) -> None:
        """Fit an n-gram table to the target's texts for prompts that nothing is measured with."""
        plan, target, texts = self.plan, self.decoder_sets[0].baseline, list[list[int]]()
        needed = self._text_seconds(alpha.ROWS)
        for i in range(0, len(self.ngram_prompts), alpha.ROWS):
            before = self.budget.left(NGRAM_END)
            if before < needed:
                break
            self.tell(f"texts for the n-gram table: {len(texts)}")
            prompts = [one.ids for one in self.ngram_prompts[i : i + alpha.ROWS]]
            seeds = list(range(plan.seed + i, plan.seed + i + len(prompts)))
            outs = target.generate(prompts, plan.sampling, max_new_tokens=self.max_new_tokens, seed=seeds)
            # With the prompt's last tokens, which the first draft tokens depend on.
            texts += [
                [*ids[1 - NGRAM_ORDER :], *out.token_ids] for ids, out in zip(prompts, outs, strict=True)
            ]
            needed = max(needed, before - self.budget.left(NGRAM_END))
        if texts:
            self.ngram = NGramDrafter.fit(texts, NGRAM_ORDER, target.scorer.vocab_size)
            for decoders in self.decoder_sets:
                own = decoders.baseline
                decoders.by_draft[NGRAM] = Decoder(own.scorer, self.ngram, own.tokenizer, rule="token")
                self.findings.add(self._auto(NGRAM, decoders))
                self.costs.time_verification(decoders, 1)
        elif self.ngram_prompts:
            self._skip(NGRAM, "no time to generate texts for the n-gram table")

    def measure_acceptance(self) -> None:
        """Measure acceptance on the target's own texts, and compute expected speedups with the costs."""
        pairs = [(decoders, name) for decoders in self.decoder_sets for name in decoders.by_draft]
        for decoders, name in pairs:
            if self.budget.left(ACCEPTANCE_END) > 0:
                self.tell(f"steps of a draft: {name}")
                self.costs.time_drafting(decoders, name)
        self._measure_beta()
        for decoders, name in pairs:
            if name in self.findings.beta and self.costs.is_timed(decoders.dtype, name):
                self._expect(decoders, name)

    def _measure_beta(self) -> None:
        plan, decoders = self.plan, self.decoder_sets[0]
        drafts = {
            name: decoder
            for name, decoder in decoders.by_draft.items()
            if self.costs.is_timed(decoders.dtype, name)
        }
        count = min(MAX_ACCEPTANCE_TEXTS, len(self.prompts))
        needed = self._text_seconds(alpha.ROWS) * (1 + self.costs.relative_draft_time(decoders.dtype))
        fit = int(self.max_new_tokens * self.budget.left(ACCEPTANCE_END) / needed)
        tokens = min(self.max_new_tokens, fit)
        if not drafts or tokens < MIN_ACCEPTANCE_TOKENS:
            return
        needed = 0.0
        for i in range(0, count, alpha.ROWS):
            before = self.budget.left(ACCEPTANCE_END)
            if before < needed:
                return
            self.tell(f"α: {i} of {count} prompts")
            prompts, seed = self.prompts[i : min(count, i + alpha.ROWS)], plan.seed + i
            for one in alpha.measure(
                decoders.baseline, drafts, prompts, plan.sampling, max_new_tokens=tokens, seed=seed
            ):
                for name in drafts:
                    if one.new_tokens:
                        self.findings.beta.setdefault(name, []).append(one.beta[name][1.0])
            needed = max(needed, before - self.budget.left(ACCEPTANCE_END))

    def _expect(self, decoders: DecoderSet, name: str) -> None:
        texts = self.findings.beta[name]
        found = estimate(texts)
        if found is None:
            self.findings.dropped[self._auto(name, decoders)] = "drafted nothing"
            return
        # With more draft tokens, nothing of a text would be left to time.
        max_draft_tokens = min(self.max_new_tokens // SKIPPED_STEPS - 2, decoders.baseline.scorer.context - 1)
        reference_seconds = self.costs.step_seconds(self.decoder_sets[0], name, found.mean)[0]
        step_seconds = self.costs.step_seconds(decoders, name, found.mean)
        replay = Replay(texts, step_seconds[: max_draft_tokens + 1], reference_seconds)
        if replay.num_draft_tokens == [0]:
            return
        g = replay.best()
        baseline_speedup = reference_seconds / step_seconds[0]  # of this precision without speculation
        auto, fixed = self._auto(name, decoders), Candidate(name, str(g), "token", decoders.dtype)
        speedup, best_case = replay.fixed(g), replay.best_per_text()
        min_speedup = MIN_SPEEDUP * baseline_speedup
        auto_speedup = max(speedup, (baseline_speedup, None), key=lambda one: one[0])
        self.findings.expect(auto, auto_speedup, min_speedup, best_case)
        # A fixed number does no better than the best one of each text, however well either is known.
        fixed_best_case = best_case if auto in self.findings.dropped else speedup
        self.findings.expect(fixed, speedup, min_speedup, fixed_best_case)

    def race(self) -> None:
        """Decode whole texts with the promising candidates and the baseline, in turn."""
        sufficient = self.sufficient_budget()
        self._race(self.findings.promising(), RACE_END)
        self.findings.unmeasured_reason = (
            f"there was no time to measure whole texts in {self.budget.seconds:g} s; "
            f"about {math.ceil(sufficient)} s would do"
        )

    def sufficient_budget(self) -> float:
        """Return about how many seconds of budget would leave time for a race."""
        texts = RACE_ROUNDS * RACE_CANDIDATES
        race = texts * MIN_RACE_TOKENS * self.costs.baseline_seconds(self.decoder_sets[0].dtype)
        return max((self.budget.spent + race) / RACE_END, race / (RACE_END - ACCEPTANCE_END))

    def compare_rules(self) -> None:
        """Compare the rules block and token with the chosen candidate, where they differ."""
        chosen = self.findings.recommendation.candidate
        if not chosen.is_baseline and cost.drafts_are_sampled(self._decoder(chosen), self.plan.sampling):
            block = Candidate(chosen.draft, chosen.num_draft_tokens, "block", chosen.dtype)
            self.findings.add(block)
            self._race([chosen, block], RULE_END)

    def _race(self, candidates: Sequence[Candidate], share: float) -> None:
        reference, record = self.findings.reference, self.findings.record
        if not candidates:
            return
        for decoders in self.decoder_sets:
            decoders.baseline.release()
            decoders.reserve(self.max_new_tokens + max(len(one.ids) for one in self.prompts))
        race = Race(
            {candidate: self._decoder(candidate) for candidate in candidates},
            (reference, self._decoder(reference)),
            [one.ids for one in self.prompts], self.plan.sampling, max_new_tokens=self.max_new_tokens,
            seed=self.plan.seed, text_seconds=self._text_seconds(1), record=record,
        )  # fmt: skip
        for _ in race.rounds(lambda: self.budget.left(share), self.tell, record.rounds):
            self.findings.decide()
            self.save()

    def expect_larger_batches(self) -> None:
        """Compute the expected speedup of the chosen candidate with larger batches."""
        chosen = self.findings.recommendation.candidate
        texts = self.findings.beta.get(chosen.draft)
        found = estimate(texts) if texts is not None else None
        if chosen.is_baseline or texts is None or found is None:
            return
        decoders = self._decoder_set(chosen.dtype)
        fixed = self.findings.nearest_fixed()
        sizes = tuple(sorted({*BATCH_PASS_SIZES, *(() if fixed is None else (fixed + 1,))}))
        # A pass takes no longer than its sequences one after the other.
        sequence_seconds = 2 * (cost.ROUNDS + 1) * self.costs.upper_bound(chosen.dtype, sizes)
        for B in sorted({*self.plan.batches} - {1}):
            if self.budget.left() < B * sequence_seconds:
                return
            self.tell(f"forward passes with batch size {B}")
            self.costs.time_target(decoders, B, self.budget.left(), sizes)
            self.costs.time_drafting(decoders, chosen.draft, B)
            step_seconds = self.costs.step_seconds(decoders, chosen.draft, found.mean, B)
            replay = Replay(texts, step_seconds, step_seconds[0], B)
            is_fixed = chosen.num_draft_tokens.isdecimal()
            speedup, interval = replay.fixed(int(chosen.num_draft_tokens) if is_fixed else replay.best())
            why = "expected to pay" if speedup > MIN_SPEEDUP else "not expected to pay"
            result = CandidateResult(
                chosen.draft, chosen.num_draft_tokens, chosen.dtype, chosen.rule,
                B, speedup, interval, None, why,
            )  # fmt: skip
            self.findings.larger_batches.append(result)

    def _decoder_set(self, dtype: str) -> DecoderSet:
        return next(decoders for decoders in self.decoder_sets if decoders.dtype == dtype)

    def _decoder(self, candidate: Candidate) -> Decoder:
        decoders = self._decoder_set(candidate.dtype)
        if candidate.is_baseline:  # the drafter is never used
            own = decoders.baseline
            return Decoder(own.scorer, LookupDrafter(), own.tokenizer, rule="token")
        own = decoders.by_draft[candidate.draft]
        if candidate.rule == "token":
            return own
        return Decoder(own.scorer, own.drafter, own.tokenizer, rule=candidate.rule)

    def _text_seconds(self, sequences: int) -> float:
        """Return about how many seconds it takes to decode texts, without their prompts.

        Several sequences take longer than one.
        """
        token_seconds = self.costs.baseline_seconds(self.decoder_sets[0].dtype)
        return self.max_new_tokens * token_seconds * (1 if sequences == 1 else 2)

    def _auto(self, name: str, decoders: DecoderSet) -> Candidate:
        return Candidate(name, AUTO, "token", decoders.dtype)

    def _skip(self, name: str, reason: str) -> None:
        candidate = self._auto(name, self.decoder_sets[0])
        self.findings.add(candidate)
        self.findings.skipped[candidate] = reason
