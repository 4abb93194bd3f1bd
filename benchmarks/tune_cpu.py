"""Check whether `outpace tune` chooses the best of five drafts, by a sweep of all of them.

python benchmarks/tune_cpu.py --data spec_bench.jsonl --out benchmarks/results/tune_cpu.json

The drafts of SmolLM2-135M-Instruct are prompt lookup, n-grams of the prompts, its own first layers (a third
and two thirds of them), and itself. Both commands run as separate processes. The rows of the sweep are among
those of the tuning.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from report import arguments, machine, write

from outpace import NGramDrafter
from outpace.bench.prompts import tokenized_prompts
from outpace.models.hub import load_model

LAYERS = (10, 20)
LENGTHS = ("2", "5", "auto")
ALIKE = 0.97  # fraction of the best speedup that counts as equally good


def drafts(folder: Path, data: str) -> list[str]:
    """Save the drafts in a folder, and return their names for --draft."""
    model, tokenizer = load_model(None, dtype=torch.float32)
    texts = [one.ids for one in tokenized_prompts(tokenizer, (), data)]
    table = folder / "prompts.safetensors"
    NGramDrafter.fit(
        [token for text in texts for token in text], n=3, vocab_size=model.config.vocab_size
    ).save(table)
    names = ["lookup", f"ngram:{table}"]
    layers = list(model.model.layers)
    for count in (*LAYERS, len(layers)):
        model.model.layers = torch.nn.ModuleList(layers[:count])
        model.config.num_hidden_layers = count
        place = folder / (f"first-{count}" if count < len(layers) else "itself")
        model.save_pretrained(place)
        tokenizer.save_pretrained(place)
        names.append(str(place))
    return names


def run(*words: str) -> tuple[float, str]:
    """Run a command; return its seconds and its output."""
    started_at = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "outpace", *words], stdout=subprocess.PIPE, text=True, check=True
    )
    print(done.stdout, flush=True)
    return time.perf_counter() - started_at, done.stdout


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--budget", type=float, default=420.0)
    parser.add_argument("--every", type=int, default=20, help="take every n-th row in the sweep")
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        names = [word for name in drafts(folder, options.data) for word in ("--draft", name)]
        common = [*names, "--data", options.data, "-m", str(options.tokens), "--dtype", "float32"]
        config, found, swept = folder / "outpace.toml", folder / "tune.json", folder / "sweep.json"
        seconds, shown = run(
            "tune", *common, "--budget", f"{options.budget:g}", "--every", str(options.every // 4),
            "--temperature", "0", "--batch", "1", "-o", str(config), "--results", str(found),
        )  # fmt: skip
        lengths = [word for length in LENGTHS for word in ("--num-draft-tokens", length)]
        run("bench", "sweep", *common, *lengths, "--every", str(options.every), "-o", str(swept))
        tuned, sweep = (json.loads(path.read_text()) for path in (found, swept))
    chosen = tuned["chosen"]
    figures: list[dict[str, Any]] = sweep["figures"]
    best = max(figures, key=lambda one: one["speedup"])
    own = [one for one in figures if one["draft"] == chosen["draft"]]
    if chosen["draft"] == "none":
        own = [one for one in figures if one["num_draft_tokens"] == "0"]
    same = [one for one in own if one["num_draft_tokens"] == chosen["num_draft_tokens"]]
    # The chosen number may not be in the sweep.
    picked = (same or [one for one in own if one["num_draft_tokens"] == "auto"])[0]
    share = picked["speedup"] / best["speedup"]
    keys = ("draft", "num_draft_tokens", "speedup", "interval")
    report = {
        "command": "python " + " ".join(sys.argv),
        "machine": machine(),
        "budget_seconds": options.budget,
        "spent_seconds": round(seconds, 1),
        "verdict": tuned["verdict"],
        "candidates": tuned["candidates"],
        "best_by_sweep": {name: best[name] for name in keys},
        "chosen_in_sweep": {name: picked[name] for name in keys},
        "chosen_over_best": round(share, 4),
        "shown": shown,
        "sweep": figures,
    }
    write(report, options.out)
    print(f"tune: {tuned['verdict']} In {seconds:.0f} s of {options.budget:g}.")
    print(f"sweep: the best is {best['draft']}, g = {best['num_draft_tokens']}, {best['speedup']:.3f}")
    print(f"the choice is {share:.3f} of the best: {'as good' if share >= ALIKE else 'worse'}")


if __name__ == "__main__":
    main()
