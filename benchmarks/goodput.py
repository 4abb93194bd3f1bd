"""Whether the default length is ever slower than plain decoding, how close it comes to the best fixed length,
and how soon it notices that acceptance has changed.

python benchmarks/goodput.py --device cpu --out benchmarks/results/goodput_cpu/all.json
python benchmarks/goodput.py --device cuda --rounds 2 --out benchmarks/results/goodput_h200/all.json

Models are synthetic (`outpace.bench.synthetic`): real shapes, every layer computed, a chosen acceptance.
Sides are timed in turn, in one process, after texts that are not counted; prompts are not counted. In the
grid rates are of as many tokens as the guesses bring on average, by the acceptance of all sides together: of
a hundred passes that keep ten tokens or none the luck would be larger than what is to be seen. Rows end one
after another: figures are of the iterations that all of them were in, and `whole` ones of all iterations.
Making a length ready, which is done once, is not counted, as fixed lengths had a text for it before; ratios
with it are there, too.
"""

from __future__ import annotations

import itertools
import json
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
from outpace.bench import cost as cost_of
from outpace.bench import theory
from outpace.bench.prediction import Parts
from outpace.bench.synthetic import STEEPNESS, Codes, acceptance, bigram, noise_for, shape_of
from outpace.engine.sequence import Step
from outpace.policy import DraftLengthPolicy, StepOutcome

# Of each device: shapes of the target and of drafts, by name; tokens of a text, by rows
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
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16)
GRID_ALPHAS = (0.3, 0.6, 0.8, 0.9)
GRID_DRAFTS = ("cheap", "middle")
WARM = 3  # texts that are not counted, of a fixed length one: lengths are made ready when first wanted
SOME = 4  # times as many rounds where one row is written at a time: they are short, and vary more
BEHIND = 0.7  # times the fastest: less cannot be the best
PLAIN = SamplingParams()
Side = tuple[Decoder, DraftLengthPolicy]
PREDICTED = 8  # rows up to which speeds are predicted, too
STAGES = ((0, 150), (1, 150), (0, 150))  # which head, and for how many iterations


@dataclass
class Texts:
    """What was written at a time.

    guesses  how many a row had in an iteration, and how often
    lost     iterations in which a guess was
    making   seconds of making something ready, that are not counted
    whole    the same until the last row's end, where this is until the first one's
    """

    seconds: float = 0.0
    tokens: int = 0
    proposals: Counter[int] = field(default_factory=Counter)
    kept: int = 0
    lost: int = 0
    making: float = 0.0
    whole: Texts | None = None

    def add(self, step: Step) -> None:
        self.tokens += len(step.token_ids)
        self.proposals[step.num_draft_tokens] += 1
        self.kept += step.num_accepted
        self.lost += step.num_accepted < step.num_draft_tokens

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / (self.seconds - self.making)

    @property
    def rate_with_making(self) -> float:
        return self.tokens / self.seconds

    def fair(self, alpha: float) -> float:
        """The same, with as many tokens as so many guesses bring on average: luck is not in it."""
        tokens = sum(n * float(theory.expected_tokens(alpha, g)) for g, n in self.proposals.items())
        return tokens / (self.seconds - self.making)


class Bench:
    """A target, and drafts for it."""

    def __init__(self, device: str, seed: int = 0) -> None:
        self.device, self.sizes = device, SIZES[device]
        self.codes = Codes.random(self.sizes["target"]["vocab_size"], seed, device)
        self.model = self._made("target", 0.0)
        self.plain = Decoder(self.model, pack=device == "cpu")

    def _made(self, name: str, sigma: float) -> Any:
        options = {"seed": len(name), "device": self.device, "dtype": self.sizes["dtype"]}
        return bigram(self.sizes[name], self.codes, sigma, **options)

    def draft(self, name: str, alpha: float) -> tuple[Any, float]:
        """A model, and its acceptance."""
        made = self._made(name, noise_for(self.codes, alpha))
        return made, acceptance(self.model, made, self.codes)

    def decoder(self, drafter: Any, length: Any = None) -> Decoder:
        made = Decoder(self.plain.scorer, drafter, num_draft_tokens=length)
        if self.device == "cpu" and isinstance(drafter, ModelDrafter):
            drafter.scorer.pack()
        return made

    def prompts(self, B: int, turn: int) -> list[list[int]]:
        noise = torch.Generator().manual_seed(turn)
        return torch.randint(len(self.codes.before), (B, 32), generator=noise).tolist()

    def write(self, decoder: Decoder, B: int, turn: int) -> Texts:
        """One of each of B rows, but for its prompt and first token."""
        begun, first, some_ended, made = 0.0, set[int](), False, 0.0
        found, whole = Texts(), Texts()
        options: Any = {"max_new_tokens": self.sizes["tokens"][B], "ignore_eos": True, "seed": turn}
        for step in decoder.stream(self.prompts(B, turn), PLAIN, **options):
            if len(first) < B:
                first.add(step.row)
                begun, made = time.perf_counter(), making(decoder.policy)
                continue
            whole.add(step)
            if found.seconds == 0.0:
                found.add(step)
                some_ended |= step.finish_reason is not None
                if some_ended and step.row == B - 1:  # an iteration's last
                    found.seconds = time.perf_counter() - begun
                    found.making = making(decoder.policy) - made
        whole.seconds, whole.making = time.perf_counter() - begun, making(decoder.policy) - made
        found.whole = whole
        return found

    def rounds(self, sides: dict[str, Side], B: int, rounds: int) -> dict[str, list[Texts]]:
        """What each side wrote in each round, in turn; of fixed lengths that are far behind after their
        warm-up, that alone, and nothing of longer ones."""
        found: dict[str, list[Texts]] = {name: [] for name in sides}
        warm: dict[str, Texts] = {}
        for turn, (name, (decoder, length)) in itertools.product(range(-WARM, rounds), sides.items()):
            if turn < -1 and isinstance(length, Fixed):
                continue
            best = max((one.rate for one in warm.values()), default=0.0)
            behind = [other for other, one in warm.items() if one.rate < BEHIND * best]
            fixed = [one.rate for other, one in warm.items() if other.isdecimal()]
            falling = turn < 0 and bool(fixed) and fixed[-1] < BEHIND * max(fixed)
            if isinstance(length, Fixed) and (name in behind or falling or (turn >= 0 and name not in warm)):
                found[name] = [warm[name]] if name in warm else []
                continue
            decoder.policy = length
            written = self.write(decoder, B, turn + WARM)
            if turn < 0:
                warm[name] = written
            else:
                found[name].append(written)
        return found


class Default(Goodput):
    """Says in how many seconds so far something was made ready."""

    making = 0.0

    def observe(self, done: StepOutcome) -> None:
        self.making += done.making + done.reading_made
        super().observe(done)


def making(length: DraftLengthPolicy) -> float:
    return length.making if isinstance(length, Default) else 0.0


def never_slower(bench: Bench, batches: Sequence[int], rounds: int) -> Iterator[dict[str, Any]]:
    """The default length over plain decoding, for drafters that cannot help."""
    bad, bad_alpha = bench.draft("middle", 0.05)
    costly, costly_alpha = bench.draft("costly", 0.6)
    drafters: dict[str, tuple[Any, float | None]] = {
        "random": (RandomDrafter(len(bench.codes.before)), None),
        "lookup": (LookupDrafter(min_ngram=1), None),
        "bad draft": (ModelDrafter(bad), bad_alpha),
        "costly draft": (ModelDrafter(costly), costly_alpha),
    }
    for name, (drafter, alpha) in drafters.items():
        decoder = bench.decoder(drafter, Default())
        for B in batches:
            sides: dict[str, Side] = {"plain": (bench.plain, Fixed(0)), "goodput": (decoder, decoder.policy)}
            texts = bench.rounds(sides, B, rounds * max(1, SOME // B))
            rates = {side: [one.rate for one in some] for side, some in texts.items()}
            ratios = [ours / plain for plain, ours in zip(rates["plain"], rates["goodput"], strict=True)]
            yield {
                "drafter": name,
                "alpha": alpha and round(alpha, 3),
                "B": B,
                "c": cost(decoder, B),
                "plain_tokens_per_second": round(statistics.median(rates["plain"]), 1),
                "ratio": round(sum(rates["goodput"]) / sum(rates["plain"]), 4),
                "ratio_with_making": round(
                    sum(one.rate_with_making for one in texts["goodput"]) / sum(rates["plain"]), 4
                ),
                "ratios": [round(one, 3) for one in ratios],
            }


def cost(decoder: Decoder, B: int) -> float | None:
    """c of a model, by what a step and a pass take by themselves."""
    if not isinstance(decoder.drafter, ModelDrafter):
        return None
    (plain,) = cost_of.curve(decoder, [1], [B])
    return round(cost_of.drafting(decoder, B).step / plain.ms, 3)


def timed(decoder: Decoder, B: int) -> Parts:
    passes = cost_of.curve(decoder, [g + 1 for g in LENGTHS], [B])
    return Parts(B, cost_of.drafting(decoder, B), passes, cost_of.verification(decoder, LENGTHS, [B]))


def predicted(parts: Parts, alpha: float) -> list[float]:
    """Speed over plain decoding of each length."""
    speeds = parts.speedups(alpha)
    return [round(float(speeds[g]), 3) for g in LENGTHS]


def grid(bench: Bench, options: Namespace, rounds: int) -> Iterator[dict[str, Any]]:
    """The default length over the best fixed one, by a sweep."""
    for name, wanted in itertools.product(options.drafts, options.alpha):
        model, alpha = bench.draft(name, wanted)
        drafter = ModelDrafter(model)
        decoder, policy = bench.decoder(drafter), Default()
        for B in options.batch:
            sides: dict[str, Side] = {str(g): (decoder, Fixed(g)) for g in LENGTHS}
            sides["goodput"] = (decoder, policy)
            texts = bench.rounds(sides, B, rounds * max(1, SOME // B))
            every = [one for some in texts.values() for one in some]
            kept = sum(one.kept for one in every)
            seen = kept / (kept + sum(one.lost for one in every))
            texts = {side: some for side, some in texts.items() if some}
            rates = {side: statistics.mean(one.fair(seen) for one in some) for side, some in texts.items()}
            ours = rates.pop("goodput")
            best = max(rates, key=lambda g: rates[g])
            with_making = statistics.mean(
                one.fair(seen) * (1 - one.making / one.seconds) for one in texts["goodput"]
            )
            written = {side: statistics.mean(one.rate for one in some) for side, some in texts.items()}
            whole = {
                side: statistics.mean(one.whole.fair(seen) for one in some if one.whole)
                for side, some in texts.items()
            }
            parts = timed(decoder, B) if B <= PREDICTED else None  # beside what they predict
            yield {
                "draft": name,
                "alpha": round(alpha, 3),
                "alpha_seen": round(seen, 3),
                "B": B,
                "best_g": int(best),
                "best_over_plain": round(rates[best] / rates["0"], 3),
                "goodput_over_plain": round(ours / rates["0"], 3),
                "ratio": round(ours / rates[best], 4),
                "ratio_with_luck": round(written["goodput"] / written[best], 4),
                "ratio_with_making": round(with_making / rates[best], 4),
                "whole_ratio": round(whole.pop("goodput") / max(whole.values()), 4),
                "chosen": dict(sum((one.proposals for one in texts["goodput"]), Counter[int]())),
                "tokens_per_second": {side: round(rate, 1) for side, rate in written.items()},
                "c": cost(decoder, B),
                "predicted": predicted(parts, alpha) if parts is not None else None,
                "measured": [
                    round(rates[g] / rates["0"], 3) if g in rates else None for g in map(str, LENGTHS)
                ],
            }
        del model, drafter, decoder


def reaction(bench: Bench, rounds: int) -> Iterator[dict[str, Any]]:
    """Iterations after a change of acceptance, 0.9 to 0.1 and back, until the length is as good as the best
    one there: 95 % of its rate, by what passes and steps take by themselves, for three iterations on end. The
    draft's head is written over while it drafts."""
    draft, high = bench.draft("cheap", 0.9)
    poor, low = bench.draft("cheap", 0.1)
    policy = Goodput()
    decoder = Decoder(bench.plain.scorer, ModelDrafter(draft), num_draft_tokens=policy)
    heads = [one.get_output_embeddings().weight.detach().clone() for one in (draft, poor)]
    del poor
    lengths = list(range(policy.max_draft_tokens + 1))
    passes = cost_of.curve(decoder, [g + 1 for g in lengths], [1])
    drafts = cost_of.drafting(decoder, 1).taken(lengths)
    costs = [round(one.ms + each, 3) for each, one in zip(drafts.tolist(), passes, strict=True)]
    for turn in range(rounds + 1):
        chosen: list[int] = []
        ends = list(itertools.accumulate(length for _, length in STAGES))
        options: Any = {"max_new_tokens": 4000, "ignore_eos": True, "seed": turn}
        last = None
        for step in decoder.stream(bench.prompts(1, turn)[0], PLAIN, **options):
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
            "down": settled(costs, chosen[ends[0] : ends[1]], low),
            "up": settled(costs, chosen[ends[1] :], high),
            "milliseconds": costs,
            "chosen": chosen,
        }


def settled(costs: Sequence[float], chosen: Sequence[int], alpha: float) -> int | None:
    """costs: of iterations with 0, 1, ... guesses."""
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
        print("never slower: worst", min(one["ratio"] for one in report["never"]))
    if "grid" in report:
        print("grid: worst of", len(report["grid"]), min(one["ratio"] for one in report["grid"]))
        pairs = [
            (theirs, ours)
            for one in report["grid"]
            if one["predicted"]
            for theirs, ours in zip(one["predicted"][1:], one["measured"][1:], strict=True)
            if ours is not None
        ]
        off = sorted(abs(theirs / ours - 1) for theirs, ours in pairs)
        print(f"predictions: {len(off)}, off by {statistics.median(off):.1%}, at most {off[-1]:.1%}")
    if "reaction" in report:
        for way in ("down", "up"):
            print(f"reaction, {way}:", [one[way] for one in report["reaction"]])
    print(json.dumps({name: report[name] for name in ("command", "machine", "device")}))


if __name__ == "__main__":
    main()
