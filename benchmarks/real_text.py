"""Real prompts with and without speculation, with everything counted that a user waits for.

    python benchmarks/real_text.py --model FOLDER --data spec_bench.jsonl --out real_text.json

FOLDER is a causal model with a chat template, such as SmolLM2-135M-Instruct in the cache of `outpace.load()`.
The data are JSON lines with `category` and `prompt`, such as the questions of Spec-Bench.

Each side of each order runs in a process of its own, with the prompts of all categories shuffled. Each prompt
is decoded greedily and at temperature 1. Loading the model is not counted; first calls, captures and growing
caches are. A process that is not counted runs first, so that compiled kernels are cached. Intervals come from
resampling prompts and orders.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from report import arguments, machine, write
from transformers import AutoModelForCausalLM, AutoTokenizer

import outpace
from outpace import Stats

LONGEST_PROMPT = 1500  # tokens
TEMPERATURES = (0.0, 1.0)
RESAMPLES = 1000
LEAST = 0.97  # a category whose interval is below this is slower


def run(options: argparse.Namespace, side: str, order: int, out: Path) -> None:
    """Decode every prompt on one side, and write the seconds and statistics of each text."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(options.device).eval()
    by_category = defaultdict(list)
    for line in options.data.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        by_category[row["category"]].append(row["prompt"])
    chosen = [
        (name, i, prompt)
        for name, prompts in by_category.items()
        for i, prompt in enumerate(prompts[: options.each])
    ]
    random.Random(order).shuffle(chosen)
    decoder = outpace.Decoder(model, options.draft if side == "with" else None, tokenizer)
    seconds: dict[str, float] = {}
    total = Stats()
    for category, index, prompt in chosen:
        chat = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)
        ids = list(encoded["input_ids"][-LONGEST_PROMPT:])
        for temperature in TEMPERATURES:
            started_at = time.perf_counter()
            output = decoder.generate(
                ids, temperature=temperature, max_new_tokens=options.new, ignore_eos=True
            )
            seconds[f"{category} {index} {temperature}"] = round(time.perf_counter() - started_at, 5)
            total += output.stats
    found = {
        "policy": decoder.policy.describe(),
        "acceptance_rate": round(total.acceptance_rate, 3),
        "speculative_share": round(total.speculative_share, 3),
        "exploration_seconds": round(total.exploration_seconds, 3),
        "seconds": seconds,
    }
    out.write_text(json.dumps(found))


def interval(
    seconds: dict[str, list[dict[str, float]]], chosen: Sequence[str], draws: random.Random
) -> dict[str, float]:
    """Return the ratio of total times, without over with speculation, and its 95 % interval."""

    def ratio(some: Sequence[str], orders: Sequence[int]) -> float:
        total = {side: sum(seconds[side][n][one] for n in orders for one in some) for side in seconds}
        return total["without"] / total["with"]

    orders = range(len(seconds["with"]))
    found = sorted(
        ratio(draws.choices(chosen, k=len(chosen)), draws.choices(orders, k=len(orders)))
        for _ in range(RESAMPLES)
    )
    low, high = found[RESAMPLES // 40], found[-1 - RESAMPLES // 40]
    return {"ratio": round(ratio(chosen, orders), 3), "low": round(low, 3), "high": round(high, 3)}


def fits(text: str, category: str, temperature: float) -> bool:
    """Return whether a text has this category, or any if that is empty, and this temperature."""
    own, _, at = text.split()
    return category in ("", own) and at == str(temperature)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", required=True, help="folder or hub id of the target")
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with category and prompt")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--draft", default="lookup", help="the draft (default lookup)")
    parser.add_argument("--each", type=int, default=10, help="prompts of each category (default 10)")
    parser.add_argument("--new", type=int, default=128, help="new tokens of each text (default 128)")
    parser.add_argument("--orders", type=int, default=5, help="orders of the prompts (default 5)")
    parser.add_argument("--run", nargs=3, metavar=("SIDE", "ORDER", "FILE"), help="run one side of one order")
    options = parser.parse_args()
    if options.run:
        side, order, file = options.run
        run(options, side, int(order), Path(file))
        return
    runs: dict[str, list[Any]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as folder:
        for order in range(-1 if options.device == "cuda" else 0, options.orders):
            for side in ("with", "without") if order % 2 else ("without", "with"):
                file = Path(folder, f"{side}{order}.json")
                command = [sys.executable, *sys.argv, "--run", side, str(order), str(file)]
                subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
                found = json.loads(file.read_text())
                if order >= 0:
                    runs[side].append(found)
                rate = len(found["seconds"]) * options.new / sum(found["seconds"].values())
                longest = max(found["seconds"].values())
                print(f"order {order}, {side}: {rate:.1f} tokens/s, longest text {longest:.2f} s", flush=True)
    seconds = {side: [each["seconds"] for each in some] for side, some in runs.items()}
    every, draws = sorted(seconds["with"][0]), random.Random(0)
    ratios = {"all": interval(seconds, every, draws)}
    for temperature in TEMPERATURES:
        for name in ["", *sorted({one.split()[0] for one in every})]:
            chosen = [one for one in every if fits(one, name, temperature)]
            ratios[f"{name or 'all'}, temperature {temperature:g}"] = interval(seconds, chosen, draws)
    for name, one in ratios.items():
        slower = "  SLOWER" if one["high"] < LEAST else ""
        print(f"{name:30} {one['ratio']:.3f} ({one['low']:.3f} to {one['high']:.3f}){slower}")
    report = {
        "command": "python " + " ".join(sys.argv),
        "machine": machine(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "ratios": ratios,
        "runs": runs,
    }
    write(report, options.out)


if __name__ == "__main__":
    main()
