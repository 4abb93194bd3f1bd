"""All measurements of a target and its drafts, part by part, so that partial results are of use.

The parts are α on the target's own texts, counts of real runs, costs, and what follows from them.
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
from outpace.bench.prompts import Asked
from outpace.bench.results import Results
from outpace.decoder import Decoder
from outpace.policy import Fixed
from outpace.sampling import SamplingParams

CHECKED = (1, 4, 8, 16)  # g that verification is timed at, beside 0
Tell = Callable[[str], None]


@dataclass(frozen=True)
class MeasurePlan:
    """Settings of a measurement.

    Attributes:
        sampling: Sampling of all texts.
        tokens: New tokens of each text.
        lenience: Values of l. Runs are counted at the strictest one.
        g: Draft tokens per step of counted runs.
        lengths: Tokens of the forward passes that are timed.
        batches: Numbers of sequences that are timed.
        context: Tokens before a timed forward pass.
        confidence: Confidence of intervals.
        seed: Seed of the first text.
    """

    sampling: SamplingParams
    tokens: int = 64
    lenience: Sequence[float] = (1.0, 0.5, 0.3, 0.1)
    g: int = 5
    lengths: Sequence[int] = cost.LENGTHS
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
        prompts: Sequence[Asked],
        plan: MeasurePlan,
        results: Results,
        tell: Tell = lambda line: None,
    ) -> None:
        if not prompts:
            raise ValueError("prompts: there are none to measure with")
        self.target, self.drafts, self.prompts, self.plan = target, drafts, prompts, plan
        self.results, self.tell = results, tell
        self.walked: list[alpha.TextAcceptance] = []
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
        walk = alpha.measure(
            self.target, self.drafts, self.prompts, plan.sampling,
            tokens=plan.tokens, lenience=plan.lenience, seed=plan.seed,
        )  # fmt: skip
        for one in walk:
            self.walked.append(one)
            if len(self.walked) % alpha.ROWS == 0:
                self.tell(f"α of {len(self.walked)} of {len(self.prompts)} prompts")
                self._estimate()
        if not self.walked:
            raise ValueError("prompts: not one of them could be written about")
        self._estimate()

    def _estimate(self) -> None:
        for name in self.drafts:
            for lenience in self.plan.lenience:
                self.entries[name, lenience] = self._entry(name, lenience)
        tokens = sum(one.tokens for one in self.walked)
        self._put(prompts=len(self.walked), tokens=tokens)

    def _entry(self, name: str, lenience: float) -> dict[str, Any]:
        """Return the results of one draft, from the texts so far."""
        beta = [one.beta[name][lenience] for one in self.walked]
        confidence = self.plan.confidence
        found = self.estimates[name, lenience] = estimate(beta, confidence)
        exact = estimate([one.beta[name][1.0] for one in self.walked], confidence)
        tokens = sum(one.tokens for one in self.walked)
        domains = {}
        for domain in dict.fromkeys(one.asked.domain for one in self.walked):
            some = [each for each, one in zip(beta, self.walked, strict=True) if one.asked.domain == domain]
            domains[domain] = _said(estimate(some, confidence))
        return {
            "draft": name,
            "lenience": lenience,
            **_said(found),
            "coverage": found.count / tokens if found is not None else 0.0,
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
        found = blocks.counted(decoder, self.prompts, plan.sampling, tokens=plan.tokens, seed=plan.seed)
        share = self.entries[name, plan.strictest]["alpha"]
        if found.passes and share is not None:
            observed, predicted = found.observed, found.predicted(share)
            places = found.by_position(plan.confidence)
            self.entries[name, plan.strictest] |= {
                "counted": found.acceptance,
                "by_position": [one and one.mean for one in places],
                "by_position_intervals": [one and one.interval for one in places],
                "blocks": {"observed": observed, "predicted": predicted},
                "tokens_per_pass": [1 + sum(k * one for k, one in enumerate(each))
                                    for each in (observed, predicted)],
            }  # fmt: skip
        cost.let_go(decoder)
        self._put()

    def time(self) -> None:
        """Time forward passes, verification and drafting, and predict the fastest g."""
        plan = self.plan
        self.tell("passes of the target")
        passes = cost.curve(self.target, plan.lengths, plan.batches, plan.context)
        cost.let_go(self.target)
        self._put(passes=[asdict(one) for one in passes])
        self.tell("verification")
        sizes = sorted({0, *(g for g in CHECKED if g < max(plan.lengths)), max(plan.lengths) - 1})
        kinds = sorted({cost.draws(decoder, plan.sampling) for decoder in self.drafts.values()})
        verify = [
            one
            for drawn in kinds
            for one in cost.verification(self.target, sizes, plan.batches, plan.sampling, drawn)
        ]
        self._put(verify=[asdict(one) for one in verify])
        for name, decoder in self.drafts.items():
            self.tell(f"steps of a draft: {name}")
            drafting = {B: cost.drafting(decoder, B, plan.context) for B in reversed(plan.batches)}
            cost.let_go(decoder)
            own = [one for one in verify if one.drawn == cost.draws(decoder, plan.sampling)]
            for lenience in plan.lenience:
                entry = self.entries[name, lenience]
                share, coverage, interval = entry["alpha"] or 0.0, entry["coverage"], entry["interval"]
                fastest = [
                    Parts(B, drafting[B], passes, own).best(share, coverage, interval) for B in plan.batches
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

        The trace has the draft's best g, or else that of the counted runs.
        """
        plan, (name, decoder) = self.plan, next(iter(self.drafts.items()))
        g = self.entries[name, plan.strictest]["best_g"] or plan.g
        self.tell(f"a trace with g = {g}: {name}")
        own = Decoder(
            decoder.scorer, decoder.drafter, decoder.tokenizer, rule=decoder.rule,
            lenience=decoder.lenience, num_draft_tokens=Fixed(g), engine=decoder.engines is not None,
        )  # fmt: skip
        tokens = min(plan.tokens, blocks.TRACED)
        trace = partial(blocks.trace, own, self.walked[0].asked, plan.sampling, tokens=tokens, seed=plan.seed)
        if own.engines is not None:  # warm-up: graphs are captured
            trace()
        found, parts = trace(), cost.inside(own, g, plan.context)
        if parts is not None:
            found |= {"iterations": blocks.divided(found["iterations"], parts), "divided": True}
        cost.let_go(own)
        self._put(trace={"draft": name, "g": g, **found})

    def wide(self, within: float) -> list[str]:
        """Return a line for each α that is known less precisely than ± ``within``, and what would help."""
        lines = []
        for (name, lenience), found in self.estimates.items():
            whose = name if lenience == 1 else f"{name} at lenience {lenience:g}"
            if found is None:
                lines.append(f"{whose}: it drafted nothing, so its α is not known")
            elif found.half is None or found.off is None:
                lines.append(
                    f"{whose}: it drafted in one prompt of {len(self.walked)}, and α of a single one has no "
                    "interval; give more"
                )
            elif found.half > within:
                each = len(self.walked) / found.clusters  # it may have no draft token in some
                lines.append(
                    f"{whose}: α is known to ±{found.off:.3f}, not to ±{within:g}: {len(self.walked)} "
                    f"prompts are too few, about {math.ceil((found.needed(within) or 0) * each)} would do"
                )
        return lines

    def _put(self, **parts: Any) -> None:
        self.results.put(**parts, drafts=list(self.entries.values()))


def _said(found: Estimate | None) -> dict[str, Any]:
    if found is None:
        return {"alpha": None, "interval": None, "tokens": 0}
    return {"alpha": found.mean, "interval": found.interval, "tokens": found.count}
