"""Throughput of each kind of request on a GPU: parameters, mixed batches, and calls inside Transformers.

    python benchmarks/requests_gpu.py --out requests.json

The pair is synthetic: a 7B Llama shape with a 1.3B draft model, α = 0.83. Prompts have 128 tokens, and each
sequence gets 256 new ones. A figure is the median of seven calls after the second one. It counts everything
that a caller waits for. The first call, with compilation and captures, is a figure of its own. Each kind of
request has a ``Decoder`` of its own. The file is written after each line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from report import source

import outpace
from outpace import Decoder, SamplingParams
from outpace.bench.synthetic import PAIRS, pair

PAIR, ALPHA, WORDS, CONTEXT, NEW_TOKENS, CALLS = "llama2-7b/1.3b", 0.83, 32000, 128, 256, 7
PLAIN = SamplingParams()
EIGHT_KINDS = [
    SamplingParams(temperature=0.8, top_k=50),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(min_p=0.05),
    SamplingParams(temperature=0.0),
    SamplingParams(frequency_penalty=0.5),
    SamplingParams(presence_penalty=0.5),
    SamplingParams(logit_bias={5: 2.0}),
    SamplingParams(repetition_penalty=1.1),
]
# Name, sampling parameters, number of sequences, further options
REQUESTS: list[tuple[str, Any, int, dict[str, Any]]] = [
    ("one sequence", PLAIN, 1, {}),
    ("one sequence, a seed", PLAIN, 1, {"seed": 0}),
    ("repetition penalty 1.1", SamplingParams(repetition_penalty=1.1), 1, {}),
    ("logprobs=5", PLAIN, 1, {"logprobs": 5}),
    ("top-k 50, top-p 0.95", SamplingParams(temperature=0.8, top_k=50, top_p=0.95), 1, {}),
    ("a processor that does nothing", SamplingParams(processors=(lambda ids, scores: scores,)), 1, {}),
    ("8 sequences, same parameters", PLAIN, 8, {}),
    ("8 sequences, eight temperatures", [SamplingParams(0.7 + 0.1 * i) for i in range(8)], 8, {}),
    ("8 sequences, eight kinds of parameters", EIGHT_KINDS, 8, {}),
]


def prompts(count: int, number: int) -> list[list[int]]:
    """Return prompts of a call, other ones for each call."""
    noise = torch.Generator().manual_seed(number)
    texts: list[list[int]] = torch.randint(WORDS, (count, CONTEXT), generator=noise).tolist()
    return texts


def timed(call: Callable[[int], int]) -> dict[str, Any]:
    """Time calls, which take their number and return how many tokens they generated."""
    rates, seconds = [], []
    for number in range(2 + CALLS):
        torch.cuda.synchronize()
        started_at = time.perf_counter()
        tokens = call(number)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started_at)
        rates.append(round(tokens / seconds[-1], 1))
    return {
        "tokens_per_second": statistics.median(rates[2:]),
        "calls": rates,
        "first_call_seconds": round(seconds[0], 1),
    }


def with_decoder(decoder: Decoder, sampling: Any, count: int, options: dict[str, Any]) -> dict[str, Any]:
    """Time calls of a decoder."""

    def call(number: int) -> int:
        seeds = {"seed": number} if "seed" in options else {}
        outs = decoder.generate(
            prompts(count, number),
            sampling,
            max_new_tokens=NEW_TOKENS,
            ignore_eos=True,
            **{**options, **seeds},
        )
        return sum(len(out.token_ids) for out in outs)

    try:
        return timed(call)
    finally:
        decoder.release()


def inside_transformers(
    target: Any, new: int = NEW_TOKENS, seeded: bool = False, **options: Any
) -> dict[str, Any]:
    """Time calls of Transformers' ``generate``."""

    def call(number: int) -> int:
        ids = torch.tensor(prompts(1, number), device=target.device)
        if seeded:
            torch.manual_seed(number)
        out = target.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, temperature=1.0,
            max_new_tokens=new, **options,
        )  # fmt: skip
        return int(out.shape[1] - ids.shape[1])

    return timed(call)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    device = torch.device("cuda")
    models = pair(*PAIRS[PAIR], ALPHA, device=device, dtype=torch.bfloat16)
    models.target.generation_config.eos_token_id = None
    report: dict[str, Any] = {
        "command": "python benchmarks/requests_gpu.py",
        "machine": {
            "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            "transformers": transformers.__version__, "source": source(),
        },
        "figures": [],
    }  # fmt: skip

    def note(name: str, draft: str, found: dict[str, Any]) -> None:
        report["figures"].append({"request": name, "draft": draft, **found})
        first = found["first_call_seconds"]
        rate = found["tokens_per_second"]
        print(f"{draft:<14}{name:<42}{rate:>9.1f} tokens/s, first call {first:.1f} s", flush=True)
        with open(args.out, "w") as file:
            json.dump(report, file, indent=1)

    for label, draft in (("model", models.draft), ("none", None)):
        for name, sampling, count, options in REQUESTS:
            note(name, label, with_decoder(Decoder(models.target, draft), sampling, count, options))
        if draft is not None:
            ours = {"custom_generate": outpace.generate, "draft": draft}
            note("inside Transformers", label, inside_transformers(models.target, **ours))
            seeded = inside_transformers(models.target, seeded=True, **ours)
            note("inside Transformers, after torch.manual_seed", label, seeded)
            outpace.integrations.transformers.forget()
    note("Transformers", "none", inside_transformers(models.target, 64))
    assisted = inside_transformers(models.target, 64, assistant_model=models.draft)
    note("Transformers, assisted generation", "model", assisted)
    static = inside_transformers(models.target, cache_implementation="static")
    note("Transformers, static cache", "none", static)


if __name__ == "__main__":
    main()
