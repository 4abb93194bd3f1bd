"""What a pass over n tokens costs on a CPU, beside a pass over one: Transformers' forward, ours, ours with
packed weights, and the rearranged model of the engine, in the same run.

    python benchmarks/pass_cpu.py --model SmolLM2-135M-Instruct --out benchmarks/results/pass_cpu.json

All sides take turns; medians; absolute times are this machine's.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import arguments, machine, write
from transformers import AutoModelForCausalLM, DynamicCache

from outpace.models.causal import CausalScorer
from outpace.models.fused import FusedModel

CONTEXT = 128
TOKENS = (1, 2, 4, 6, 8, 16)
Pass = Callable[[int], Any]


def transformers_pass(model: Any, text: torch.Tensor) -> Pass:
    cache = DynamicCache()
    model(input_ids=text[:, :CONTEXT], past_key_values=cache, use_cache=True)

    def run(n: int) -> None:
        model(input_ids=text[:, CONTEXT : CONTEXT + n], past_key_values=cache, use_cache=True)
        cache.crop(-n)

    return run


def scorer_pass(model: Any, text: torch.Tensor, packed: bool) -> Pass:
    scorer = CausalScorer(model)
    if packed:
        scorer.pack()
    scorer.reserve(1, 2 * CONTEXT)
    scorer.prefill([0], [text[0, :CONTEXT].tolist()])
    return lambda n: scorer.score([0], text[:, CONTEXT : CONTEXT + n])


def fused_pass(model: Any, text: torch.Tensor) -> Pass:
    fused = FusedModel(model)
    cache = fused.room(1, 2 * CONTEXT)
    fused.read(text[:, :CONTEXT], torch.arange(CONTEXT)[None], cache)
    places = torch.arange(CONTEXT, 2 * CONTEXT)[None]
    return lambda n: fused.logits(text[:, CONTEXT : CONTEXT + n], places[:, :n], cache)


def load(name: str, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False).eval()


@torch.inference_mode()
def measure(name: str, dtype: torch.dtype, repeats: int) -> list[dict[str, Any]]:
    text = torch.randint(1000, (1, 2 * CONTEXT), generator=torch.Generator().manual_seed(1))
    sides = {
        "transformers": transformers_pass(load(name, dtype), text),
        "outpace": scorer_pass(load(name, dtype), text, packed=False),
        "outpace, packed": scorer_pass(load(name, dtype), text, packed=True),
        "outpace, rearranged": fused_pass(load(name, dtype), text),
    }
    times: dict[tuple[str, int], list[float]] = {(side, n): [] for side in sides for n in TOKENS}
    for turn in range(-2, repeats):
        print(f"\r{dtype}: {max(turn, 0)} of {repeats}", end="", file=sys.stderr)
        for n in TOKENS:
            for side, run in sides.items():
                begun = time.perf_counter()
                run(n)
                if turn >= 0:
                    times[side, n].append(1e3 * (time.perf_counter() - begun))
    print(file=sys.stderr)
    middle = {key: statistics.median(spent) for key, spent in times.items()}
    return [
        {
            "side": side,
            "dtype": str(dtype).removeprefix("torch."),
            "tokens": n,
            "milliseconds": round(middle[side, n], 2),
            "of_one": round(middle[side, n] / middle[side, 1], 2),
        }
        for side, n in times
    ]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", required=True, help="a folder or hub id")
    parser.add_argument("--repeats", type=int, default=30)
    given = parser.parse_args()
    figures = [
        figure
        for dtype in (torch.float32, torch.bfloat16)
        for figure in measure(given.model, dtype, given.repeats)
    ]
    for one in figures:
        print(
            f"{one['dtype']:9} {one['side']:20} {one['tokens']:3} {one['milliseconds']:8.2f} ms "
            f"{one['of_one']:5.2f} x one"
        )
    command = f"python benchmarks/pass_cpu.py --model {Path(given.model).name} --repeats {given.repeats}"
    write({"command": command, "machine": machine(), "context": CONTEXT, "figures": figures}, given.out)


if __name__ == "__main__":
    main()
