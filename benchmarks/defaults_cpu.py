"""Speedup of `outpace.load()` with default settings over the baseline, on prompts of many kinds.

    python benchmarks/defaults_cpu.py --data spec_bench.jsonl --out benchmarks/results/defaults_cpu.json

`--data` has one JSON object per line, with `category` and `prompt`. Both decoders have the default model and
its default settings: greedy, chat template, texts end where the model ends them. Only the drafter differs.
They take turns, prompt by prompt, and each is first equally often. KV caches are dropped between prompts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from report import arguments, machine, write

import outpace
from outpace import Decoder, Stats

COPY_HEAVY = ("summarization", "rag")


def measure(decoders: dict[str, Decoder], prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    stats = {name: Stats() for name in decoders}
    prefill_seconds = dict.fromkeys(decoders, 0.0)
    same, ratios = 0, []
    for i, ids in enumerate(prompts):
        texts, rates = {}, {}
        for name, decoder in list(decoders.items())[:: 1 if i % 2 else -1]:
            decoder.scorer.forget()
            out = decoder.generate(ids, max_new_tokens=tokens)
            texts[name], rates[name] = out.token_ids, out.stats.tokens_per_second
            stats[name] += out.stats
            prefill_seconds[name] += time_prefill(decoder, ids)
        same += texts["baseline"] == texts["default"]
        ratios.append(rates["default"] / rates["baseline"])
    seconds = {name: one.seconds for name, one in stats.items()}
    rates = {name: one.tokens_per_second for name, one in stats.items()}
    decode_rates = {
        name: one.new_tokens / (seconds[name] - prefill_seconds[name]) for name, one in stats.items()
    }
    return {
        "prompts": len(prompts),
        "baseline_tokens_per_second": round(rates["baseline"], 2),
        "default_tokens_per_second": round(rates["default"], 2),
        "default_over_baseline": round(rates["default"] / rates["baseline"], 3),
        "without_the_prompts_pass": round(decode_rates["default"] / decode_rates["baseline"], 3),
        "by_prompt": [round(ratio, 3) for ratio in ratios],
        "tokens_per_pass": round(stats["default"].tokens_per_pass, 3),
        "acceptance": round(stats["default"].acceptance_rate, 3),
        "same_texts": same,
    }


def time_prefill(decoder: Decoder, ids: list[int]) -> float:
    """Return the seconds of the prefill."""
    decoder.scorer.forget()
    return decoder.generate(ids, max_new_tokens=1).stats.seconds


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with category and prompt")
    parser.add_argument("--prompts", type=int, default=4, help="prompts per category (default 4)")
    parser.add_argument(
        "--copying", type=int, default=10, help="prompts per copy-heavy category (default 10)"
    )
    parser.add_argument("--tokens", type=int, default=128, help="most new tokens (default 128)")
    parser.add_argument("--only", help="measure only this category")
    options = parser.parse_args()
    default = outpace.load()
    baseline = Decoder(default.scorer.model, None, default.tokenizer, pack=True)
    decoders = {"baseline": baseline, "default": default}
    prompts: dict[str, list[list[int]]] = {}
    for line in options.data.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        chat = [{"role": "user", "content": row["prompt"]}]
        ids = default.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        prompts.setdefault(row["category"], []).append(ids)
    figures = []
    for decoder in decoders.values():  # warm-up
        decoder.generate(prompts["writing"][0], max_new_tokens=8)
    for category, rows in prompts.items():
        if options.only in (None, category):
            heavy = category in COPY_HEAVY
            found = measure(decoders, rows[: options.copying if heavy else options.prompts], options.tokens)
            bar = ">= 1.5" if heavy else ">= 0.85"
            figures.append({"category": category, **found, "bar": bar})
            print(json.dumps(figures[-1]), file=sys.stderr, flush=True)
    command = f"python benchmarks/defaults_cpu.py --data {options.data.name} --prompts {options.prompts}"
    command += f" --copying {options.copying} --tokens {options.tokens}"
    report = {
        "command": command,
        "machine": machine(),
        "settings": default.describe().splitlines(),
        "figures": figures,
    }
    print(json.dumps(report, indent=2))
    write(report, options.out)


if __name__ == "__main__":
    main()
