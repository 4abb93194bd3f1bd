"""All measurements of a target and its drafts, part by part, so that partial results are of use.

The parts are α on the target's own texts, counts of real runs, costs, and predictions from these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from outpace.bench import alpha, blocks, cost
from outpace.bench.estimate import Estimate, autocorrelation, estimate
from outpace.bench.prediction import Parts
from outpace.bench.prompts import Prompt
from outpace.bench.results import Results
from outpace.decoder import Decoder
from outpace.policy import Fixed
from outpace.sampling import SamplingParams

VERIFIED_DRAFT_TOKENS = (1, 4, 8, 16)  # g that verification is timed with, besides 0
Tell = Callable[[str], None]


@dataclass(frozen=True)
class MeasurePlan:
    """Settings of a measurement.

    Attributes:
        sampling: Sampling of all texts.
        max_new_tokens: New tokens of each text.
        lenience: Values of l. Accepted tokens are counted at the strictest one.
        g: Draft tokens per step where accepted tokens are counted.
        pass_sizes: Tokens of the forward passes that are timed.
        batches: Numbers of sequences that are timed.
        context: Tokens before a timed forward pass.
        confidence: Confidence of intervals.
        seed: Seed of the first text.
    """

    sampling: SamplingParams
    max_new_tokens: int = 64
    lenience: Sequence[float] = (1.0, 0.5, 0.3, 0.1)
    g: int = 5
    pass_sizes: Sequence[int] = cost.PASS_SIZES
    batches: Sequence[int] = cost.BATCHES
    context: int = cost.CONTEXT
    confidence: float = 0.95
    seed: int = 0

    @property
    def strictest(self) -> float:
        """The strictest lenience, which is the largest."""
        return max(self.lenience)


class Measurement:
    """Measurement of a target and its drafts.

    Args:
        target: Decoder without a drafter.
        drafts: Decoders with the same target and a drafter each, by name.
        prompts: Prompts to measure with.
        plan: Settings.
        results: Receives each part when it is done.
        tell: Called with each progress message.

    Raises:
        ValueError: There are no prompts.
    """

    def __init__(
        self,
        target: Decoder,
        drafts: Mapping[str, Decoder],
        prompts: Sequence[Prompt],
        plan: MeasurePlan,
        results: Results,
        tell: Tell = lambda line: None,
    ) -> None:
        if not prompts:
            raise ValueError("prompts: there are none to measure with")
        self.target, self.drafts, self.prompts, self.plan = target, drafts, prompts, plan
        self.results, self.tell = results, tell
        self.texts: list[alpha.TextAcceptance] = []
        self.estimates: dict[tuple[str, float], Estimate | None] = {}
        self.entries: dict[tuple[str, float], dict[str, Any]] = {}

    def run(self) -> None:
        """Measure everything, and write each part when it is done."""
        self.measure_alpha()
        for name in self.drafts:
            self.count(name)
        self.time()
        self.trace()
        self.results.done()

    def measure_alpha(self) -> None:
        """Measure α of all drafts on the target's own texts.

        Raises:
            ValueError: No text could be generated.
        """
        plan = self.plan
        self.tell(f"α of 0 of {len(self.prompts)} prompts")
        measured = alpha.measure(
            self.target, self.drafts, self.prompts, plan.sampling,
            max_new_tokens=plan.max_new_tokens, lenience=plan.lenience, seed=plan.seed,
        )  # fmt: skip
        for text in measured:
            self.texts.append(text)
            if len(self.texts) % alpha.ROWS == 0:
                self.tell(f"α of {len(self.texts)} of {len(self.prompts)} prompts")
                self._estimate()
        if not self.texts:
            raise ValueError("prompts: the target failed on every prompt")
        self._estimate()

    def _estimate(self) -> None:
        for name in self.drafts:
            for lenience in self.plan.lenience:
                self.entries[name, lenience] = self._entry(name, lenience)
        self._put(prompts=len(self.texts), new_tokens=sum(one.new_tokens for one in self.texts))

    def _entry(self, name: str, lenience: float) -> dict[str, Any]:
        """Return the results of one draft, from the texts so far."""
        beta = [one.beta[name][lenience] for one in self.texts]
        confidence = self.plan.confidence
        found = self.estimates[name, lenience] = estimate(beta, confidence)
        exact = estimate([one.beta[name][1.0] for one in self.texts], confidence)
        new_tokens = sum(one.new_tokens for one in self.texts)
        domains = {}
        for domain in dict.fromkeys(one.prompt.domain for one in self.texts):
            some = [each for each, one in zip(beta, self.texts, strict=True) if one.prompt.domain == domain]
            domains[domain] = _estimate_json(estimate(some, confidence))
        return {
            "draft": name,
            "lenience": lenience,
            **_estimate_json(found),
            "coverage": found.count / new_tokens if found is not None else 0.0,
            "divergence": None if exact is None else 1 - exact.mean,
            "by_domain": domains,
            "autocorrelation": autocorrelation(beta),
            "chance": None if found is None else 2 / math.sqrt(found.count),
            "counted": None, "by_position": [], "by_position_intervals": [],
            "blocks": None, "tokens_per_pass": None,
            "step_ms": None, "start_ms": None, "behind_ms": None,
            "best_g": None, "predicted": None, "predicted_interval": None, "by_batch": [],
        }  # fmt: skip

    def count(self, name: str) -> None:
        """Count accepted draft tokens of real runs, at the strictest lenience."""
        plan, decoder = self.plan, self.drafts[name]
        self.tell(f"runs with g = {plan.g}: {name}")
        found = blocks.count_accepted(
            decoder, self.prompts, plan.sampling, max_new_tokens=plan.max_new_tokens, seed=plan.seed
        )
        acceptance = self.entries[name, plan.strictest]["alpha"]
        if found.steps and acceptance is not None:
            observed, predicted = found.observed, found.predicted(acceptance)
            positions = found.by_position(plan.confidence)
            self.entries[name, plan.strictest] |= {
                "counted": found.acceptance,
                "by_position": [one and one.mean for one in positions],
                "by_position_intervals": [one and one.interval for one in positions],
                "blocks": {"observed": observed, "predicted": predicted},
                "tokens_per_pass": [1 + sum(k * one for k, one in enumerate(each))
                                    for each in (observed, predicted)],
            }  # fmt: skip
        decoder.release()
        self._put()

    def time(self) -> None:
        """Time forward passes, verification and drafting, and predict the fastest g."""
        plan = self.plan
        self.tell("passes of the target")
        passes = cost.curve(self.target, plan.pass_sizes, plan.batches, plan.context)
        self.target.release()
        self._put(passes=[asdict(one) for one in passes])
        self.tell("verification")
        sizes = sorted(
            {0, *(g for g in VERIFIED_DRAFT_TOKENS if g < max(plan.pass_sizes)), max(plan.pass_sizes) - 1}
        )
        kinds = sorted({cost.drafts_are_sampled(decoder, plan.sampling) for decoder in self.drafts.values()})
        verify = [
            one
            for sampled in kinds
            for one in cost.verification(self.target, sizes, plan.batches, plan.sampling, sampled)
        ]
        self._put(verify=[asdict(one) for one in verify])
        for name, decoder in self.drafts.items():
            self.tell(f"steps of a draft: {name}")
            drafting = {B: cost.drafting(decoder, B, plan.context) for B in reversed(plan.batches)}
            decoder.release()
            own = [one for one in verify if one.sampled == cost.drafts_are_sampled(decoder, plan.sampling)]
            for lenience in plan.lenience:
                entry = self.entries[name, lenience]
                acceptance, coverage, interval = entry["alpha"] or 0.0, entry["coverage"], entry["interval"]
                fastest = [
                    Parts(B, drafting[B], passes, own).best(acceptance, coverage, interval)
                    for B in plan.batches
                ]
                found = [
                    {
                        **{f"{part}_ms": ms for part, ms in asdict(one.drafting).items()},
                        "best_g": one.g,
                        "predicted": one.speedup,
                        "predicted_interval": one.interval,
                    }
                    for one in fastest
                ]
                by_batch = [{"B": one.B, **each} for one, each in zip(fastest, found, strict=True)]
                entry |= {**found[0], "by_batch": by_batch}
            self._put()

    def trace(self) -> None:
        """Trace the first prompt that could be decoded, with the first draft.

        The trace uses the draft's best g. If no g pays, it uses that of the counted runs.
        """
        plan, (name, decoder) = self.plan, next(iter(self.drafts.items()))
        g = self.entries[name, plan.strictest]["best_g"] or plan.g
        self.tell(f"a trace with g = {g}: {name}")
        own = decoder.with_policy(Fixed(g))
        max_new_tokens = min(plan.max_new_tokens, blocks.TRACE_TOKENS)
        trace = partial(
            blocks.trace,
            own,
            self.texts[0].prompt,
            plan.sampling,
            max_new_tokens=max_new_tokens,
            seed=plan.seed,
        )
        if own.uses_graphs:  # warm-up: graphs are captured
            trace()
        found, parts = trace(), cost.graph_phases(own, g, plan.context)
        if parts is not None:
            found |= {"iterations": blocks.divide_phases(found["iterations"], parts), "divided": True}
        own.release()
        self._put(trace={"draft": name, "g": g, **found})

    def wide(self, within: float) -> list[str]:
        """Return a line for each α whose interval is wider than ± ``within``."""
        lines = []
        for (name, lenience), found in self.estimates.items():
            whose = name if lenience == 1 else f"{name} at lenience {lenience:g}"
            if found is None:
                lines.append(f"{whose}: it drafted nothing, so its α is not known")
            elif found.half is None or found.max_error is None:
                lines.append(
                    f"{whose}: it drafted in one prompt of {len(self.texts)}, and α of a single one has no "
                    "interval; give more"
                )
            elif found.half > within:
                each = len(self.texts) / found.clusters  # some prompts may have no draft token
                lines.append(
                    f"{whose}: α is known to ±{found.max_error:.3f}, not to ±{within:g}: {len(self.texts)} "
                    f"prompts are too few, about {math.ceil((found.needed(within) or 0) * each)} would do"
                )
        return lines

    def _put(self, **parts: Any) -> None:
        self.results.put(**parts, drafts=list(self.entries.values()))


def _estimate_json(found: Estimate | None) -> dict[str, Any]:
    if found is None:
        return {"alpha": None, "interval": None, "draft_tokens": 0}
    return {"alpha": found.mean, "interval": found.interval, "draft_tokens": found.count}
