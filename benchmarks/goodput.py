"""The default draft-length policy, Goodput, against the baseline and against fixed numbers of draft tokens.

    python benchmarks/goodput.py --device cpu --parts never --seconds 60 --out never.json
    python benchmarks/goodput.py --device cpu --parts grid --seconds 10 --out grid.json

The parts are:

- `never`: throughput over the baseline, with drafters that cannot help.
- `grid`: throughput over the best fixed number of draft tokens. A short sweep picks the three best numbers.
  They and the policy then decode other texts.
- `reaction`: steps until the policy has adapted to another acceptance rate.

Models are synthetic (`outpace.bench.synthetic`): real shapes, every layer computed, a chosen acceptance rate.
Methods take turns in one process, until each has decoded for a number of seconds. The time of whole calls
counts. The policy has a new decoder in every cell, so that all that drafting captures counts. Every decoder
has decoded one warm-up text, that of the policy without speculation. In the grid, rates use the expected
tokens of the proposed draft tokens. The tokens that were really accepted vary more than the differences
between methods. Intervals are of 95 %, from resampling texts.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from report import arguments, machine, write

from outpace import (
    Decoder,
    Fixed,
    Goodput,
    LookupDrafter,
    ModelDrafter,
    RandomDrafter,
    SamplingParams,
)
from outpace.bench import cost, theory
from outpace.bench.prediction import Parts
from outpace.bench.synthetic import STEEPNESS, Codes, acceptance, bigram, noise_for, shape_of
from outpace.engine.sequence import Step
from outpace.policy import DraftLengthPolicy, StepOutcome

# By device: shapes of the target and of drafts, and the tokens of a text by batch size
SIZES: dict[str, Any] = {
    "cuda": {
        "target": shape_of("llama", 32000, 4096, 11008, 32, 32, 32),
        "dtype": torch.bfloat16,
        "cheap": shape_of("llama", 32000, 1024, 2816, 8, 8, 8),
        "middle": shape_of("llama", 32000, 2048, 5504, 24, 16, 16),
        "costly": shape_of("llama", 32000, 4096, 11008, 28, 32, 32),
        "tokens": {1: 256, 8: 256, 64: 192},
    },
    "cpu": {
        "target": shape_of("llama", 4096, 384, 1024, 8, 6, 6),
        "dtype": torch.float32,
        "cheap": shape_of("llama", 4096, 128, 256, 1, 2, 2),
        "middle": shape_of("llama", 4096, 192, 512, 3, 3, 3),
        "costly": shape_of("llama", 4096, 384, 1024, 7, 6, 6),
        "tokens": {1: 128, 8: 128, 64: 64},
    },
}
BATCHES = (1, 8, 64)
NUM_DRAFT_TOKENS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16)
GRID_ALPHAS = (0.3, 0.6, 0.8, 0.9)
GRID_DRAFTS = ("cheap", "middle")
LEAST = {"never": 0.97, "grid": 0.93}  # a cell whose interval is below this is slower
SWEEP_SHARE = 0.1  # of the seconds of a method, for each number of draft tokens of a sweep
FINALISTS = 3  # best fixed numbers of a sweep, which decode the other texts
SLOW = 0.7  # fraction of the best rate; a sweep ends at a number below it
DEFAULT_SAMPLING = SamplingParams()
Method = tuple[Decoder, DraftLengthPolicy]
RESAMPLES = 1000
WARM_UP_TOKENS = 24
WARM_UP, SWEEP, SCORED = 0, 1, 1001  # first seeds of texts
PREDICTED = 8  # largest batch size with predicted speedups
STAGES = ((0, 150), (1, 150), (0, 150))  # index of the draft's head, and number of steps


@dataclass
class Texts:
    """Counts of a batch of texts.

    Attributes:
        seconds: Duration of the whole call.
        tokens: New tokens.
        proposals: How often a sequence had each number of draft tokens in a step.
        accepted: Accepted draft tokens.
        rejected: Steps of a sequence with a rejected draft token.
        capture_seconds: Seconds of capturing graphs, which are part of the duration.
    """

    seconds: float = 0.0
    tokens: int = 0
    proposals: Counter[int] = field(default_factory=Counter)
    accepted: int = 0
    rejected: int = 0
    capture_seconds: float = 0.0

    def add(self, step: Step) -> None:
        self.tokens += len(step.token_ids)
        self.proposals[step.num_draft_tokens] += 1
        self.accepted += step.num_accepted
        self.rejected += step.num_accepted < step.num_draft_tokens

    def expected_tokens(self, alpha: float | None) -> float:
        """Return the new tokens that are expected of the steps; the counted ones if α is not known."""
        if alpha is None:
            return self.tokens
        return sum(n * float(theory.expected_tokens(alpha, g)) for g, n in self.proposals.items())


@dataclass
class Total:
    """Texts of a method."""

    texts: list[Texts] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.texts)

    @property
    def capture_seconds(self) -> float:
        return sum(one.capture_seconds for one in self.texts)

    def rate(self, alpha: float | None, captures: bool = True) -> float:
        """Return the tokens per second, with captures or without."""
        tokens = sum(one.expected_tokens(alpha) for one in self.texts)
        return tokens / (self.seconds - (0.0 if captures else self.capture_seconds))


class Bench:
    """A target, and drafts for it."""

    def __init__(self, device: str, seed: int = 0) -> None:
        self.device, self.sizes = device, SIZES[device]
        self.codes = Codes.random(self.sizes["target"]["vocab_size"], seed, device)
        self.model = self._make_model("target", 0.0)
        self.baseline = Decoder(self.model, pack=device == "cpu")

    def _make_model(self, name: str, sigma: float) -> Any:
        options = {"seed": len(name), "device": self.device, "dtype": self.sizes["dtype"]}
        return bigram(self.sizes[name], self.codes, sigma, **options)

    def draft(self, name: str, alpha: float) -> tuple[Any, float]:
        """Return a draft model and its acceptance rate."""
        model = self._make_model(name, noise_for(self.codes, alpha))
        return model, acceptance(self.model, model, self.codes)

    def decoder(self, drafter: Any, policy: Any = None) -> Decoder:
        decoder = Decoder(self.baseline.scorer, drafter, rule="token", num_draft_tokens=policy)
        if self.device == "cpu" and isinstance(drafter, ModelDrafter):
            drafter.scorer.pack()
        return decoder

    def prompts(self, B: int, turn: int) -> list[list[int]]:
        noise = torch.Generator().manual_seed(turn)
        return torch.randint(len(self.codes.before), (B, 32), generator=noise).tolist()

    def generate(self, method: Method, B: int, turn: int, tokens: int | None = None) -> Texts:
        """Generate a batch of texts, by default as long as the batch size allows."""
        decoder, policy = method
        decoder.policy = policy
        found, captured_before = Texts(), capture_seconds(policy)
        tokens = tokens or self.sizes["tokens"][B]
        options: Any = {"max_new_tokens": tokens, "ignore_eos": True, "seed": turn}
        started_at = time.perf_counter()
        for step in decoder.stream(self.prompts(B, turn), DEFAULT_SAMPLING, **options):
            found.add(step)
        found.seconds = time.perf_counter() - started_at
        found.capture_seconds = capture_seconds(policy) - captured_before
        return found

    def texts(self, methods: dict[str, Method], B: int, seconds: float, turn: int) -> dict[str, Total]:
        """Return the texts of each method, which take turns, until each has decoded for these seconds."""
        found = {name: Total() for name in methods}
        while min(one.seconds for one in found.values()) < seconds:
            names = list(methods) if turn % 2 else list(methods)[::-1]
            for name in names:
                found[name].texts.append(self.generate(methods[name], B, turn))
            turn += 1
        return found

    def sweep(self, decoder: Decoder, B: int, seconds: float, alpha: float) -> dict[int, float]:
        """Return the throughput of fixed numbers of draft tokens, from few texts.

        It ends at the first number that is much slower than the best one.
        """
        rates: dict[int, float] = {}
        for g in NUM_DRAFT_TOKENS:
            if rates and rates[max(rates)] < SLOW * max(rates.values()):
                break
            method: dict[str, Method] = {"fixed": (decoder, Fixed(g))}
            self.generate(method["fixed"], B, WARM_UP, WARM_UP_TOKENS)
            rates[g] = self.texts(method, B, seconds, SWEEP)["fixed"].rate(alpha)
        return rates


class MeasuredGoodput(Goodput):
    """The default policy, which also adds up the seconds of capturing graphs."""

    capture_seconds = 0.0

    def observe(self, done: StepOutcome) -> None:
        self.capture_seconds += done.capture_seconds
        super().observe(done)


def capture_seconds(policy: DraftLengthPolicy) -> float:
    return policy.capture_seconds if isinstance(policy, MeasuredGoodput) else 0.0


def interval(one: Total, other: Total, alpha: float | None) -> list[float]:
    """Return the 95 % interval of the ratio of two rates, by resampling the texts of each."""
    draws = random.Random(0)

    def rate(of: Total) -> float:
        return Total(draws.choices(of.texts, k=len(of.texts))).rate(alpha)

    found = sorted(rate(one) / rate(other) for _ in range(RESAMPLES))
    return [round(found[RESAMPLES // 40], 4), round(found[-1 - RESAMPLES // 40], 4)]


def compared(one: Total, other: Total, alpha: float | None) -> dict[str, Any]:
    """Return the ratio of two rates, its interval, and what captures took."""
    return {
        "ratio": round(one.rate(alpha) / other.rate(alpha), 4),
        "interval": interval(one, other, alpha),
        "ratio_without_captures": round(one.rate(alpha, captures=False) / other.rate(alpha), 4),
        "capture_seconds": round(one.capture_seconds, 3),
        "seconds": round(one.seconds, 1),
        "texts": len(one.texts),
    }


def never_slower(bench: Bench, options: Namespace) -> Iterator[dict[str, Any]]:
    """Measure the default policy over the baseline, with drafters that cannot help."""
    bad, bad_alpha = bench.draft("middle", 0.05)
    costly, costly_alpha = bench.draft("costly", 0.6)
    drafters: dict[str, tuple[Callable[[], Any], float | None]] = {
        "random": (lambda: RandomDrafter(len(bench.codes.before)), None),
        "lookup": (LookupDrafter, None),
        "bad draft": (lambda: ModelDrafter(bad), bad_alpha),
        "costly draft": (lambda: ModelDrafter(costly), costly_alpha),
    }
    for B, (name, (drafter, alpha)) in itertools.product(options.batch, drafters.items()):
        baseline: Method = bench.baseline, Fixed(0)
        bench.generate(baseline, B, WARM_UP)
        decoder, policy = bench.decoder(drafter()), MeasuredGoodput()
        bench.generate((decoder, Fixed(0)), B, WARM_UP)
        texts = bench.texts({"baseline": baseline, "goodput": (decoder, policy)}, B, options.seconds, SCORED)
        yield {
            "drafter": name,
            "alpha": alpha and round(alpha, 3),
            "B": B,
            **compared(texts["goodput"], texts["baseline"], None),
            "baseline_tokens_per_second": round(texts["baseline"].rate(None), 1),
            "exploration_seconds": round(policy.exploration_seconds, 3),
            "c": relative_draft_time(decoder, B),
        }


def relative_draft_time(decoder: Decoder, B: int) -> float | None:
    """Return c of a draft model, from separately timed draft steps and target passes; else None."""
    if not isinstance(decoder.drafter, ModelDrafter):
        return None
    (baseline,) = cost.curve(decoder, [1], [B])
    return round(cost.drafting(decoder, B).step / baseline.ms, 3)


def time_parts(decoder: Decoder, B: int) -> Parts:
    passes = cost.curve(decoder, [g + 1 for g in NUM_DRAFT_TOKENS], [B])
    return Parts(B, cost.drafting(decoder, B), passes, cost.verification(decoder, NUM_DRAFT_TOKENS, [B]))


def predicted(parts: Parts, alpha: float) -> list[float]:
    """Return the predicted speedup over the baseline for each number of draft tokens."""
    speeds = parts.speedups(alpha)
    return [round(float(speeds[g]), 3) for g in NUM_DRAFT_TOKENS]


def grid(bench: Bench, options: Namespace) -> Iterator[dict[str, Any]]:
    """Measure the default policy over the best fixed number of draft tokens."""
    for name, requested in itertools.product(options.drafts, options.alpha):
        model, alpha = bench.draft(name, requested)
        fixed = bench.decoder(ModelDrafter(model))
        for B in options.batch:
            rates = bench.sweep(fixed, B, SWEEP_SHARE * options.seconds, alpha)
            finalists = sorted(rates, key=lambda g: -rates[g])[:FINALISTS]
            methods: dict[str, Method] = {str(g): (fixed, Fixed(g)) for g in finalists}
            methods["goodput"] = bench.decoder(ModelDrafter(model)), MeasuredGoodput()
            bench.generate((methods["goodput"][0], Fixed(0)), B, WARM_UP, WARM_UP_TOKENS)
            texts = bench.texts(methods, B, options.seconds, SCORED)
            best = max(finalists, key=lambda g: texts[str(g)].rate(alpha))
            chosen = sum((one.proposals for one in texts["goodput"].texts), Counter[int]())
            parts = time_parts(fixed, B) if options.predict and B <= PREDICTED else None
            yield {
                "draft": name,
                "alpha": round(alpha, 3),
                "B": B,
                "best_g": best,
                "finalists": {g: round(texts[str(g)].rate(alpha), 1) for g in finalists},
                **compared(texts["goodput"], texts[str(best)], alpha),
                "best_over_baseline": round(rates[best] / rates[0], 3),
                "chosen": dict(sorted(chosen.items())),
                "c": relative_draft_time(fixed, B),
                "predicted": None if parts is None else predicted(parts, alpha),
                "measured": [round(rate / rates[0], 3) for rate in rates.values()],
            }
        del model, fixed, methods


def reaction(bench: Bench, rounds: int) -> Iterator[dict[str, Any]]:
    """Count the steps until the policy has adapted to another acceptance rate, from 0.9 to 0.1 and back.

    It has adapted after three steps in a row with at least 95 % of the best rate, by separately timed passes
    and draft steps. The acceptance rate changes because the draft's head is overwritten while it drafts.
    """
    draft, high = bench.draft("cheap", 0.9)
    poor, low = bench.draft("cheap", 0.1)
    policy = Goodput()
    decoder = Decoder(bench.baseline.scorer, ModelDrafter(draft), rule="token", num_draft_tokens=policy)
    heads = [one.get_output_embeddings().weight.detach().clone() for one in (draft, poor)]
    del poor
    num_draft_tokens = list(range(policy.max_draft_tokens + 1))
    passes = cost.curve(decoder, [g + 1 for g in num_draft_tokens], [1])
    drafts = cost.drafting(decoder, 1).milliseconds(num_draft_tokens)
    costs = [round(one.ms + each, 3) for each, one in zip(drafts.tolist(), passes, strict=True)]
    for turn in range(rounds + 1):
        chosen: list[int] = []
        ends = list(itertools.accumulate(steps for _, steps in STAGES))
        options: Any = {"max_new_tokens": 4000, "ignore_eos": True, "seed": turn}
        last = None
        for step in decoder.stream(bench.prompts(1, turn)[0], DEFAULT_SAMPLING, **options):
            chosen.append(step.num_draft_tokens)
            stage = next((i for i, end in enumerate(ends) if len(chosen) < end), None)
            if stage is None:
                break
            if stage != last:
                with torch.no_grad():
                    draft.get_output_embeddings().weight.copy_(heads[STAGES[stage][0]])
                last = stage
        if turn == 0:  # a warm-up
            continue
        yield {
            "alpha": [round(high, 3), round(low, 3)],
            "down": steps_to_adapt(costs, chosen[ends[0] : ends[1]], low),
            "up": steps_to_adapt(costs, chosen[ends[1] :], high),
            "milliseconds": costs,
            "chosen": chosen,
        }


def steps_to_adapt(costs: Sequence[float], chosen: Sequence[int], alpha: float) -> int | None:
    """Return the number of steps before the policy has adapted; None if it never does.

    Args:
        costs: Milliseconds of steps with 0, 1, ... draft tokens.
        chosen: Number of draft tokens of each step.
        alpha: Acceptance rate.
    """
    rates = [float(theory.expected_tokens(alpha, g)) / one for g, one in enumerate(costs)]
    good = [rates[g] >= 0.95 * max(rates) for g in chosen]
    return next((i for i in range(len(good) - 2) if all(good[i : i + 3])), None)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--device", default="cpu", choices=list(SIZES))
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--seconds", type=float, default=10.0, help="of decoding per method and cell (10)")
    parser.add_argument("--rounds", type=int, default=4, help="texts of the part reaction (4)")
    parser.add_argument("--drafts", nargs="+", default=list(GRID_DRAFTS), choices=list(GRID_DRAFTS))
    parser.add_argument("--alpha", type=float, nargs="+", default=list(GRID_ALPHAS))
    parser.add_argument("--predict", action="store_true", help="in the grid, predict speedups as well")
    parser.add_argument("--parts", nargs="+", default=["never", "grid", "reaction"])
    options = parser.parse_args()
    bench = Bench(options.device)
    report: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "machine": machine(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "steepness": STEEPNESS,
    }
    parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
        "never": lambda: never_slower(bench, options),
        "grid": lambda: grid(bench, options),
        "reaction": lambda: reaction(bench, options.rounds),
    }
    for name in options.parts:
        report[name] = []
        for one in parts[name]():
            report[name].append(one)
            print(name, {key: value for key, value in one.items() if key != "chosen"}, flush=True)
            write(report, options.out)
    for name in ("never", "grid"):
        if cells := report.get(name):
            for ratio in ("ratio", "ratio_without_captures"):
                mean = statistics.geometric_mean(one[ratio] for one in cells)
                print(
                    f"{name}, {ratio}: geometric mean {mean:.4f}, lowest {min(one[ratio] for one in cells)}"
                )
            below = [one for one in cells if one["interval"][1] < LEAST[name]]
            print(f"{name}: {len(below)} of {len(cells)} intervals wholly below {LEAST[name]}")
    if options.predict:
        pairs = [
            (predicted_speedup, speedup)
            for one in report["grid"]
            if one["predicted"]
            for predicted_speedup, speedup in zip(one["predicted"][1:], one["measured"][1:], strict=False)
        ]
        errors = sorted(abs(predicted_speedup / speedup - 1) for predicted_speedup, speedup in pairs)
        median = statistics.median(errors)
        print(f"predictions: {len(errors)}, median error {median:.1%}, at most {errors[-1]:.1%}")
    if "reaction" in report:
        for direction in ("down", "up"):
            print(f"reaction, {direction}:", [one[direction] for one in report["reaction"]])
    print(json.dumps({name: report[name] for name in ("command", "machine", "device")}))


if __name__ == "__main__":
    main()
