"""Eager verification on the CPU and Transformers' functions, on the same tensors in the same run.

    python benchmarks/verify_cpu.py --out benchmarks/results/verify_cpu.json

Each line times both methods alternately, call by call, and compares medians. Absolute times depend on the
machine.
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
INPUTS = 8  # different blocks, used in turn


def blocks(B: int, g: int, V: int) -> list[Block]:
    """Return blocks with an acceptance rate of about 0.8."""
    inputs = []
    for _ in range(INPUTS):
        target = 2 * torch.randn(B, g + 1, V)
        draft = target[:, :g] + 0.5 * torch.randn(B, g, V)
        tokens = torch.multinomial(draft.softmax(-1).flatten(0, 1), 1).view(B, g)
        inputs.append((tokens, draft, target))
    return inputs


def alpha(inputs: list[Block]) -> float:
    overlap = [torch.minimum(p[:, :-1].softmax(-1), q.softmax(-1)).sum(-1).mean() for _, q, p in inputs]
    return float(torch.stack(overlap).mean())


def median_ms(methods: list[Callable[[Block], Any]], inputs: list[Block], repeats: int) -> list[float]:
    """Return median milliseconds of each method on the same inputs; each is first equally often."""
    times: list[list[float]] = [[] for _ in methods]
    for turn in range(-INPUTS, repeats):
        block = inputs[turn % len(inputs)]
        pairs = list(zip(methods, times, strict=True))
        for method, milliseconds in pairs if turn // len(inputs) % 2 else reversed(pairs):
            started_at = time.perf_counter()
            method(block)
            if turn >= 0:
                milliseconds.append(1e3 * (time.perf_counter() - started_at))
    return [statistics.median(milliseconds) for milliseconds in times]


def outpace_verify(**arguments: Any) -> Callable[[Block], Any]:
    return lambda block: outpace.verify(*block, seed=1, position=100, **arguments)


def transformers_rows(block: Block) -> None:
    """Verify with Transformers, which takes one row per call."""
    for tokens, draft, target in zip(*block, strict=True):
        _speculative_sampling(tokens[None], draft[None], tokens.shape[0], target[None])


def transformers_top_p(block: Block) -> None:
    """Apply Transformers' warper to the rows that outpace adjusts: g of the draft, g+1 of the target."""
    _, draft, target = block
    warper = TopPLogitsWarper(0.95)
    warper(None, draft.flatten(0, 1))
    warper(None, target.flatten(0, 1))


def measure(V: int, g: int, repeats: int) -> list[dict[str, Any]]:
    rows = []

    def compare(
        what: str,
        B: int,
        bar: str,
        transformers_method: Callable[[Block], Any],
        outpace_method: Callable[[Block], Any],
    ) -> None:
        inputs = blocks(B, g, V)
        outpace_ms, transformers_ms = median_ms([outpace_method, transformers_method], inputs, repeats)
        rows.append(
            {
                "what": what,
                "B": B,
                "outpace_ms": round(outpace_ms, 3),
                "transformers_ms": round(transformers_ms, 3),
                "outpace_over_transformers": round(outpace_ms / transformers_ms, 3),
                "bar": bar,
                "alpha": round(alpha(inputs), 3),
            }
        )
        print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
        print(f"measured: {what}, B = {B}", end="", file=sys.stderr, flush=True)

    top_p = outpace.SamplingParams(top_p=0.95)
    compare("verify, rule token", 1, "<= 1", transformers_rows, outpace_verify())
    compare("verify, rule token", 8, "<= 1/3", transformers_rows, outpace_verify())
    for B in (1, 8):
        both = outpace_verify(sampling=top_p, draft_sampling=top_p)
        compare("verify with top-p 0.95 / top-p warper alone", B, "<= 2", transformers_top_p, both)
    for rule in ("block", "match", "rejection", "sigmoid(-1e4, 1e4)"):
        compare(f"verify, rule {rule}", 1, "", transformers_rows, outpace_verify(rule=rule))
        compare(f"verify, rule {rule}", 8, "", transformers_rows, outpace_verify(rule=rule))

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
    parser.add_argument("--drafts", type=int, default=5, help="g, draft tokens per row (default 5)")
    parser.add_argument("--repeats", type=int, default=100, help="timed calls of each method (default 100)")
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
