"""The default draft-length policy, Goodput, against the baseline and against fixed numbers of draft tokens.

    python benchmarks/goodput.py --device cpu --out benchmarks/results/goodput_cpu/all.json
    python benchmarks/goodput.py --device cuda --rounds 2 --out benchmarks/results/goodput_h200/all.json

The parts are:

- `never`: throughput over the baseline, with drafters that cannot help.
- `grid`: throughput over the best fixed number of draft tokens.
- `reaction`: steps until the policy has adapted to another acceptance rate.

Models are synthetic (`outpace.bench.synthetic`): real shapes, every layer computed, a chosen acceptance rate.
Methods take turns in one process, after warm-up texts. Prefill is not counted. In the grid, rates use the
expected tokens of the proposed draft tokens, by the acceptance rate of all methods together. The tokens that
were really accepted vary more than the differences between methods. Sequences of a batch end one after
another. Figures are of the steps with all sequences, and `whole` ones of all steps. The capture of a graph
for a number of draft tokens happens once and is not counted. Fixed numbers capture graphs in the warm-up.
Ratios that include the captures are in the report, too, with 95 % intervals by resampling rounds.
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
WARM_UP_TEXTS = 3  # per method; one with a fixed number of draft tokens
MORE_ROUNDS = 4  # factor for batches of one sequence, which are short and vary more
SLOW = 0.7  # fraction of the best rate; a fixed number below it is dropped
DEFAULT_SAMPLING = SamplingParams()
Method = tuple[Decoder, DraftLengthPolicy]
RESAMPLES = 1000
PREDICTED = 8  # largest batch size with predicted speedups
STAGES = ((0, 150), (1, 150), (0, 150))  # index of the draft's head, and number of steps


@dataclass
class Texts:
    """Counts of a batch of texts, until the first of them ends.

    Attributes:
        seconds: Duration.
        tokens: New tokens.
        proposals: How often a sequence had each number of draft tokens in a step.
        accepted: Accepted draft tokens.
        rejected: Steps of a sequence with a rejected draft token.
        capture_seconds: Seconds of capturing graphs, which are not counted.
        whole: The same counts until the last text ends.
    """

    seconds: float = 0.0
    tokens: int = 0
    proposals: Counter[int] = field(default_factory=Counter)
    accepted: int = 0
    rejected: int = 0
    capture_seconds: float = 0.0
    whole: Texts | None = None

    def add(self, step: Step) -> None:
        self.tokens += len(step.token_ids)
        self.proposals[step.num_draft_tokens] += 1
        self.accepted += step.num_accepted
        self.rejected += step.num_accepted < step.num_draft_tokens

    @property
    def rate(self) -> float:
        """Tokens per second, without capture."""
        return self.tokens / (self.seconds - self.capture_seconds)

    @property
    def rate_with_capture(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    def expected_rate(self, alpha: float) -> float:
        """Return the tokens per second with the expected tokens of each step instead of the counted ones."""
        tokens = sum(n * float(theory.expected_tokens(alpha, g)) for g, n in self.proposals.items())
        return tokens / (self.seconds - self.capture_seconds)


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

    def generate(self, decoder: Decoder, B: int, turn: int) -> Texts:
        """Generate a batch of texts, and count its steps without prefill."""
        started_at, first, any_ended, captured_before = 0.0, set[int](), False, 0.0
        found, whole = Texts(), Texts()
        options: Any = {"max_new_tokens": self.sizes["tokens"][B], "ignore_eos": True, "seed": turn}
        for step in decoder.stream(self.prompts(B, turn), DEFAULT_SAMPLING, **options):
            if len(first) < B:
                first.add(step.index)
                started_at, captured_before = time.perf_counter(), capture_seconds(decoder.policy)
                continue
            whole.add(step)
            if found.seconds == 0.0:
                found.add(step)
                any_ended |= step.finish_reason is not None
                if any_ended and step.index == B - 1:  # the last sequence of a step
                    found.seconds = time.perf_counter() - started_at
                    found.capture_seconds = capture_seconds(decoder.policy) - captured_before
        whole.seconds = time.perf_counter() - started_at
        whole.capture_seconds = capture_seconds(decoder.policy) - captured_before
        found.whole = whole
        return found

    def rounds(self, methods: dict[str, Method], B: int, rounds: int) -> dict[str, list[Texts]]:
        """Return the texts of each method in each round. Methods take turns.

        A fixed number of draft tokens that is slow in the warm-up has only its warm-up text. Larger numbers
        have none.
        """
        found: dict[str, list[Texts]] = {name: [] for name in methods}
        warm: dict[str, Texts] = {}
        for turn, (name, (decoder, policy)) in itertools.product(
            range(-WARM_UP_TEXTS, rounds), methods.items()
        ):
            if turn < -1 and isinstance(policy, Fixed):
                continue
            best = max((one.rate for one in warm.values()), default=0.0)
            behind = [other for other, one in warm.items() if one.rate < SLOW * best]
            fixed = [one.rate for other, one in warm.items() if other.isdecimal()]
            falling = turn < 0 and bool(fixed) and fixed[-1] < SLOW * max(fixed)
            if isinstance(policy, Fixed) and (name in behind or falling or (turn >= 0 and name not in warm)):
                found[name] = [warm[name]] if name in warm else []
                continue
            decoder.policy = policy
            texts = self.generate(decoder, B, turn + WARM_UP_TEXTS)
            if turn < 0:
                warm[name] = texts
            else:
                found[name].append(texts)
        return found


class MeasuredGoodput(Goodput):
    """The default policy, which also adds up the seconds of capturing graphs."""

    capture_seconds = 0.0

    def observe(self, done: StepOutcome) -> None:
        self.capture_seconds += done.capture_seconds
        super().observe(done)


def capture_seconds(policy: DraftLengthPolicy) -> float:
    return policy.capture_seconds if isinstance(policy, MeasuredGoodput) else 0.0


def interval(rates: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the 95 % interval of the ratio of two mean rates, by resampling the rounds of each."""
    draws = random.Random(0)
    found = sorted(
        statistics.mean(draws.choices(rates, k=len(rates)))
        / statistics.mean(draws.choices(others, k=len(others)))
        for _ in range(RESAMPLES)
    )
    return [round(found[RESAMPLES // 40], 4), round(found[-1 - RESAMPLES // 40], 4)]


def never_slower(bench: Bench, batches: Sequence[int], rounds: int) -> Iterator[dict[str, Any]]:
    """Measure the default policy over the baseline, with drafters that cannot help."""
    bad, bad_alpha = bench.draft("middle", 0.05)
    costly, costly_alpha = bench.draft("costly", 0.6)
    drafters: dict[str, tuple[Any, float | None]] = {
        "random": (RandomDrafter(len(bench.codes.before)), None),
        "lookup": (LookupDrafter(), None),
        "bad draft": (ModelDrafter(bad), bad_alpha),
        "costly draft": (ModelDrafter(costly), costly_alpha),
    }
    for name, (drafter, alpha) in drafters.items():
        decoder = bench.decoder(drafter, MeasuredGoodput())
        for B in batches:
            methods: dict[str, Method] = {
                "baseline": (bench.baseline, Fixed(0)),
                "goodput": (decoder, decoder.policy),
            }
            texts = bench.rounds(methods, B, rounds * max(1, MORE_ROUNDS // B))
            rates = {method: [one.rate for one in some] for method, some in texts.items()}
            ratios = [rate / base for base, rate in zip(rates["baseline"], rates["goodput"], strict=True)]
            yield {
                "drafter": name,
                "alpha": alpha and round(alpha, 3),
                "B": B,
                "c": relative_draft_time(decoder, B),
                "baseline_tokens_per_second": round(statistics.median(rates["baseline"]), 1),
                "ratio": round(sum(rates["goodput"]) / sum(rates["baseline"]), 4),
                "ratio_with_capture": round(
                    sum(one.rate_with_capture for one in texts["goodput"]) / sum(rates["baseline"]), 4
                ),
                "interval_with_capture": interval(
                    [one.rate_with_capture for one in texts["goodput"]], rates["baseline"]
                ),
                "ratios": [round(one, 3) for one in ratios],
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


def grid(bench: Bench, options: Namespace, rounds: int) -> Iterator[dict[str, Any]]:
    """Measure the default policy over the best fixed number of draft tokens."""
    for name, requested in itertools.product(options.drafts, options.alpha):
        model, alpha = bench.draft(name, requested)
        drafter = ModelDrafter(model)
        decoder, policy = bench.decoder(drafter), MeasuredGoodput()
        for B in options.batch:
            methods: dict[str, Method] = {str(g): (decoder, Fixed(g)) for g in NUM_DRAFT_TOKENS}
            methods["goodput"] = (decoder, policy)
            texts = bench.rounds(methods, B, rounds * max(1, MORE_ROUNDS // B))
            every = [one for some in texts.values() for one in some]
            accepted = sum(one.accepted for one in every)
            seen = accepted / (accepted + sum(one.rejected for one in every))
            texts = {method: some for method, some in texts.items() if some}
            rates = {
                method: statistics.mean(one.expected_rate(seen) for one in some)
                for method, some in texts.items()
            }
            goodput_rate = rates.pop("goodput")
            best = max(rates, key=lambda g: rates[g])
            with_capture = statistics.mean(
                one.expected_rate(seen) * (1 - one.capture_seconds / one.seconds) for one in texts["goodput"]
            )
            counted = {method: statistics.mean(one.rate for one in some) for method, some in texts.items()}
            whole = {
                method: statistics.mean(one.whole.expected_rate(seen) for one in some if one.whole)
                for method, some in texts.items()
            }
            parts = time_parts(decoder, B) if B <= PREDICTED else None
            yield {
                "draft": name,
                "alpha": round(alpha, 3),
                "alpha_seen": round(seen, 3),
                "B": B,
                "best_g": int(best),
                "best_over_baseline": round(rates[best] / rates["0"], 3),
                "goodput_over_baseline": round(goodput_rate / rates["0"], 3),
                "ratio": round(goodput_rate / rates[best], 4),
                "ratio_with_luck": round(counted["goodput"] / counted[best], 4),
                "ratio_with_capture": round(with_capture / rates[best], 4),
                "interval_with_capture": interval(
                    [
                        one.expected_rate(seen) * (1 - one.capture_seconds / one.seconds)
                        for one in texts["goodput"]
                    ],
                    [one.expected_rate(seen) for one in texts[best]],
                ),
                "whole_ratio": round(whole.pop("goodput") / max(whole.values()), 4),
                "chosen": dict(sum((one.proposals for one in texts["goodput"]), Counter[int]())),
                "tokens_per_second": {method: round(rate, 1) for method, rate in counted.items()},
                "c": relative_draft_time(decoder, B),
                "predicted": predicted(parts, alpha) if parts is not None else None,
                "measured": [
                    round(rates[g] / rates["0"], 3) if g in rates else None
                    for g in map(str, NUM_DRAFT_TOKENS)
                ],
            }
        del model, drafter, decoder


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
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--drafts", nargs="+", default=list(GRID_DRAFTS), choices=list(GRID_DRAFTS))
    parser.add_argument("--alpha", type=float, nargs="+", default=list(GRID_ALPHAS))
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
        "never": lambda: never_slower(bench, options.batch, options.rounds),
        "grid": lambda: grid(bench, options, max(1, options.rounds // 2)),
        "reaction": lambda: reaction(bench, options.rounds),
    }
    for name in options.parts:
        report[name] = []
        for one in parts[name]():
            report[name].append(one)
            print(name, {key: value for key, value in one.items() if key != "chosen"}, flush=True)
            write(report, options.out)
    if "never" in report:
        print("never slower: lowest ratio", min(one["ratio"] for one in report["never"]))
        mean = statistics.geometric_mean(one["ratio_with_capture"] for one in report["never"])
        highs = [one["interval_with_capture"][1] for one in report["never"]]
        print(f"with captures: geometric mean {mean:.4f}, {sum(high < 0.97 for high in highs)} below 0.97")
    if "grid" in report:
        print("grid: worst of", len(report["grid"]), min(one["ratio"] for one in report["grid"]))
        mean = statistics.geometric_mean(one["ratio_with_capture"] for one in report["grid"])
        highs = [one["interval_with_capture"][1] for one in report["grid"]]
        print(f"with captures: geometric mean {mean:.4f}, {sum(high < 0.93 for high in highs)} below 0.93")
        pairs = [
            (predicted_speedup, speedup)
            for one in report["grid"]
            if one["predicted"]
            for predicted_speedup, speedup in zip(one["predicted"][1:], one["measured"][1:], strict=True)
            if speedup is not None
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
