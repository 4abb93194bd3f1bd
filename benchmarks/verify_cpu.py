"""Eager verification on the CPU beside Transformers' own functions, on the same tensors in the same run.

    python benchmarks/verify_cpu.py --out benchmarks/results/verify_cpu.json

Each line times both sides alternately, call by call, and compares medians; absolute times are this machine's.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from report import arguments, machine, write
from torch import Tensor
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, TopPLogitsWarper
from transformers.generation.utils import _speculative_sampling

import outpace
from outpace.sampling import adjust

Block = tuple[Tensor, Tensor, Tensor]
INPUTS = 8  # different blocks, taken in turn


def blocks(B: int, g: int, V: int) -> list[Block]:
    """Drafts from a draft that agrees with its target about four times in five."""
    made = []
    for _ in range(INPUTS):
        target = 2 * torch.randn(B, g + 1, V)
        draft = target[:, :g] + 0.5 * torch.randn(B, g, V)
        tokens = torch.multinomial(draft.softmax(-1).flatten(0, 1), 1).view(B, g)
        made.append((tokens, draft, target))
    return made


def alpha(made: list[Block]) -> float:
    overlap = [torch.minimum(p[:, :-1].softmax(-1), q.softmax(-1)).sum(-1).mean() for _, q, p in made]
    return float(torch.stack(overlap).mean())


def median_ms(sides: list[Callable[[Block], Any]], made: list[Block], repeats: int) -> list[float]:
    """Median milliseconds of each side, called on the same inputs, each as often first as second."""
    times: list[list[float]] = [[] for _ in sides]
    for turn in range(-INPUTS, repeats):
        block = made[turn % len(made)]
        pairs = list(zip(sides, times, strict=True))
        for side, spent in pairs if turn // len(made) % 2 else reversed(pairs):
            begun = time.perf_counter()
            side(block)
            if turn >= 0:
                spent.append(1e3 * (time.perf_counter() - begun))
    return [statistics.median(spent) for spent in times]


def ours(**arguments: Any) -> Callable[[Block], Any]:
    return lambda block: outpace.verify(*block, seed=1, position=100, **arguments)


def transformers_rows(block: Block) -> None:
    """Transformers verifies one row a call."""
    for tokens, draft, target in zip(*block, strict=True):
        _speculative_sampling(tokens[None], draft[None], tokens.shape[0], target[None])


def transformers_top_p(block: Block) -> None:
    """Transformers' warper on the rows that our side adjusts: g of the draft, g+1 of the target."""
    _, draft, target = block
    warper = TopPLogitsWarper(0.95)
    warper(None, draft.flatten(0, 1))
    warper(None, target.flatten(0, 1))


def measure(V: int, g: int, repeats: int) -> list[dict[str, Any]]:
    rows = []

    def compare(
        what: str, B: int, bar: str, theirs: Callable[[Block], Any], our: Callable[[Block], Any]
    ) -> None:
        made = blocks(B, g, V)
        our_ms, their_ms = median_ms([our, theirs], made, repeats)
        rows.append(
            {
                "what": what,
                "B": B,
                "outpace_ms": round(our_ms, 3),
                "transformers_ms": round(their_ms, 3),
                "outpace_over_transformers": round(our_ms / their_ms, 3),
                "bar": bar,
                "alpha": round(alpha(made), 3),
            }
        )
        print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
        print(f"measured: {what}, B = {B}", end="", file=sys.stderr, flush=True)

    top_p = outpace.SamplingParams(top_p=0.95)
    compare("verify, rule token", 1, "<= 1", transformers_rows, ours())
    compare("verify, rule token", 8, "<= 1/3", transformers_rows, ours())
    for B in (1, 8):
        both = ours(sampling=top_p, draft_sampling=top_p)
        compare("verify with top-p 0.95 / top-p warper alone", B, "<= 2", transformers_top_p, both)
    for rule in ("block", "match", "rejection", "sigmoid(-1e4, 1e4)"):
        compare(f"verify, rule {rule}", 1, "", transformers_rows, ours(rule=rule))
        compare(f"verify, rule {rule}", 8, "", transformers_rows, ours(rule=rule))

    prefix = torch.randint(V, (8, 1000))
    penalty = outpace.SamplingParams(repetition_penalty=1.1)
    processor = RepetitionPenaltyLogitsProcessor(1.1)
    compare(
        "repetition penalty, 1000 tokens before",
        8,
        "",
        lambda block: [processor(prefix, block[2][:, i]) for i in range(g + 1)],
        lambda block: adjust(block[2], penalty, outpace.Prefix(prefix), block[0]),
    )
    print(file=sys.stderr)
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--vocab", type=int, default=49152, help="V, tokens in the vocabulary (default 49152)"
    )
    parser.add_argument("--drafts", type=int, default=5, help="g, drafted tokens a row (default 5)")
    parser.add_argument("--repeats", type=int, default=100, help="timed calls of each side (default 100)")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    report = {
        "command": "python " + " ".join(sys.argv),
        "machine": machine(),
        "V": options.vocab,
        "g": options.drafts,
        "repeats": options.repeats,
        "figures": measure(options.vocab, options.drafts, options.repeats),
    }
    print(f"{'':45} {'B':>2} {'outpace':>10} {'transformers':>13} {'ratio':>7}  bar")
    for row in report["figures"]:
        print(
            f"{row['what']:45} {row['B']:>2} {row['outpace_ms']:>7.3f} ms {row['transformers_ms']:>10.3f} ms "
            f"{row['outpace_over_transformers']:>7.3f}  {row['bar']}"
        )
    write(report, options.out)


if __name__ == "__main__":
    main()
