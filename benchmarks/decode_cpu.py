"""The decoder on a CPU and Transformers' own generation, with the same models in the same run.

    python benchmarks/decode_cpu.py --model SmolLM2-135M-Instruct --out benchmarks/results/decode_cpu.json

`--model` is a folder or hub id of a causal model with a chat template. Both implementations take turns.
Compare ratios: absolute times depend on the machine. defaults_cpu.py measures prompt lookup.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from report import arguments, machine, write
from transformers import AutoModelForCausalLM, AutoTokenizer

from outpace import Decoder, Fixed, LookupDrafter, ModelDrafter, SamplingParams
from outpace.draft.base import State

DRAFT_LAYERS = 4


class Passes:
    """Seconds of the models' forward passes, and their number by model."""

    def __init__(self, **models: Any) -> None:
        self.seconds, self.count = 0.0, dict.fromkeys(models, 0)
        self._hooks = []
        for name, model in models.items():
            self._hooks.append(model.register_forward_pre_hook(self._begin))
            self._hooks.append(model.register_forward_hook(lambda *_, name=name: self._end(name)))

    def _begin(self, *_: Any) -> None:
        self._started_at = time.perf_counter()

    def _end(self, name: str) -> None:
        self.seconds += time.perf_counter() - self._started_at
        self.count[name] += 1

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def outside(call: Callable[[], Any], target: Any, draft: Any) -> float:
    """Return the milliseconds per step that a generation spends outside the models' forward passes."""
    passes = Passes(target=target, draft=draft)
    started_at = time.perf_counter()
    call()
    seconds = time.perf_counter() - started_at - passes.seconds
    passes.close()
    return 1e3 * seconds / passes.count["target"]


def overhead(target: Any, draft: Any, repeats: int) -> dict[str, Any]:
    """Measure the overhead of a step with g = 5 outside the forward passes, with sampling."""
    g, tokens = 5, 60
    for model in (target, draft):
        model.generation_config.eos_token_id = None
    draft.generation_config.update(
        num_assistant_tokens=g, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    prompt = torch.randint(target.config.vocab_size, (1, 50))
    decoder = Decoder(target, ModelDrafter(draft), rule="token", num_draft_tokens=Fixed(g))

    def run_transformers() -> None:
        target.generate(
            prompt, assistant_model=draft, do_sample=True, top_k=0, max_new_tokens=tokens, pad_token_id=0
        )

    def run_outpace(B: int) -> None:
        rows = [prompt[0].tolist()] * B
        decoder.generate(rows, SamplingParams(), max_new_tokens=tokens, seed=list(range(B)))

    runners: list[Callable[[], None]] = [run_transformers, lambda: run_outpace(1), lambda: run_outpace(8)]
    times: list[list[float]] = [[], [], []]
    for turn in range(-1, repeats):
        for run, times_ms in zip(runners, times, strict=True):
            one = outside(run, target, draft)
            if turn >= 0:
                times_ms.append(one)
        say(f"outside the passes: {turn + 1} of {repeats}")
    transformers_ms, outpace_ms, batch_ms = (statistics.median(times_ms) for times_ms in times)
    return {
        "what": f"ms per iteration outside the passes, g = {g}, temperature 1",
        "transformers_assisted": round(transformers_ms, 3),
        "outpace_B1": round(outpace_ms, 3),
        "outpace_B8_per_row": round(batch_ms / 8, 3),
        "B1_over_transformers": round(outpace_ms / transformers_ms, 3),
        "B8_per_row_over_B1": round(batch_ms / 8 / outpace_ms, 3),
        "runs": {
            "transformers": rounded(times[0]),
            "outpace_B1": rounded(times[1]),
            "outpace_B8": rounded(times[2]),
        },
        "bars": "B1_over_transformers <= 0.25, B8_per_row_over_B1 <= 0.5",
    }


def lookup(vocab_size: int) -> dict[str, Any]:
    """Time prompt lookup in a growing context of 32k tokens."""
    text = torch.randint(vocab_size, (32_768,)).tolist()
    drafter, times_ms = LookupDrafter(), []
    seed, device = torch.tensor([1]), torch.device("cpu")
    for turn in range(-1, 500):
        state = State([0], [text], [1], [SamplingParams()], seed, [16], vocab_size, device)
        started_at = time.perf_counter()
        drafter.propose(state, 16)
        if turn >= 0:
            times_ms.append(1e3 * (time.perf_counter() - started_at))
        else:
            first = 1e3 * (time.perf_counter() - started_at)
        text.extend(text[40 * turn + 50 : 40 * turn + 54])
    return {
        "what": "LookupDrafter, ms per proposal of 16 tokens from 32768",
        "median": round(statistics.median(times_ms), 4),
        "p99": round(sorted(times_ms)[494], 4),
        "first_with_indexing": round(first, 2),
        "bar": "< 1",
    }


def baseline(target: Any, prompts: list[list[int]], tokens: int, repeats: int) -> dict[str, Any]:
    """Measure greedy throughput without speculation, and that of `generate`."""
    decoder = Decoder(target)
    rates: dict[str, list[float]] = {"transformers": [], "outpace": []}
    texts: dict[str, list[int]] = {}

    def run_transformers(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        out = target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
        return list(out[0, len(prompt) :].tolist())

    def run_outpace(prompt: list[int]) -> list[int]:
        return decoder.generate(prompt, temperature=0, max_new_tokens=tokens, ignore_eos=True).token_ids

    runners = {"transformers": run_transformers, "outpace": run_outpace}
    for turn in range(-1, repeats):
        for i, prompt in enumerate(prompts):
            seconds: dict[str, float] = {}
            for name in ("transformers", "outpace") if (turn + i) % 2 else ("outpace", "transformers"):
                decoder.scorer.reset([0])  # drops the KV cache
                started_at = time.perf_counter()
                texts[name] = runners[name](prompt)
                seconds[name] = time.perf_counter() - started_at
            if turn >= 0:
                for name in rates:
                    rates[name].append(tokens / seconds[name])
            elif texts["transformers"] != texts["outpace"]:
                print("note: a text differs from that of Transformers", file=sys.stderr)
        say(f"without speculation: {turn + 1} of {repeats}")
    ratios = [b / a for a, b in zip(rates["transformers"], rates["outpace"], strict=True)]
    return {
        "what": f"greedy decoding without speculation of {tokens} tokens, tokens/s",
        "transformers": round(statistics.median(rates["transformers"]), 2),
        "outpace": round(statistics.median(rates["outpace"]), 2),
        "outpace_over_transformers": round(statistics.median(ratios), 3),
        "runs": rounded(ratios),
        "bar": ">= 1.0",
    }


def rounded(values: list[float]) -> list[float]:
    return [round(value, 3) for value in values]


def say(what: str) -> None:
    print(f"\r{what:60}", end="", file=sys.stderr, flush=True)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", required=True, help="folder or hub id of the target")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each implementation (default 5)")
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help="dtype of the models"
    )
    parser.add_argument("--only", choices=["overhead", "lookup", "baseline"], help="measure only this part")
    options = parser.parse_args()
    torch.manual_seed(0)
    named = {"pretrained_model_name_or_path": options.model, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(**named)
    dtype = getattr(torch, options.dtype)
    target = AutoModelForCausalLM.from_pretrained(**named, dtype=dtype)
    draft = AutoModelForCausalLM.from_pretrained(**named, dtype=dtype, num_hidden_layers=DRAFT_LAYERS)

    def selected(part: str) -> bool:
        return options.only in (None, part)

    def encode(text: str) -> list[int]:
        chat = [{"role": "user", "content": text}]
        ids: list[int] = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        return ids

    figures: list[dict[str, Any]] = []
    if selected("overhead"):
        figures.append(overhead(target, draft, options.repeats))
    if selected("lookup"):
        figures.append(lookup(target.config.vocab_size))
    if selected("baseline"):
        questions = (
            "Why is the sky blue?",
            "Write a short story about a lighthouse keeper and a lost whale.",
        )
        figures.append(baseline(target, [encode(one) for one in questions], 64, options.repeats))
    print(file=sys.stderr)
    command = f"python benchmarks/decode_cpu.py --model {Path(options.model).name}"
    command += f" --dtype {options.dtype} --repeats {options.repeats}"
    report = {"command": command, "machine": machine(), "figures": figures}
    print(json.dumps(report, indent=2))
    write(report, options.out)


if __name__ == "__main__":
    main()
