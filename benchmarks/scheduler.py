"""The scheduler: throughput against an earlier checkout, first requests, real prompts, many requests.

    python benchmarks/scheduler.py compare --before OTHER/src --out engine.json
    python benchmarks/scheduler.py first --out first.json
    python benchmarks/scheduler.py prompts --model FOLDER --data spec_bench.jsonl --out prompts.json
    python benchmarks/scheduler.py requests --model FOLDER --data spec_bench.jsonl --out requests.json

Every measurement runs in a process of its own. ``compare`` alternates between two checkouts. FOLDER is
SmolLM2-135M-Instruct, as ``outpace.load()`` leaves it in the user's cache. All but ``requests`` need a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

ALPHA, G, NEW_TOKENS = 0.83, 5, 256
PAIR = "llama2-7b/1.3b"
CASES = [(G, 1, 128), (2, 32, 128), (G, 1, 4096)]  # draft tokens, sequences, context
PREDICTED = (0, 2, 4, 8)  # draft tokens of prompt lookup
FEWER_PROMPTS = 12  # prompts for n-gram tables and text drafters
SHORT = 128  # tokens of a short prompt


def child(source: str, name: str, environment: dict[str, str] | None = None, **options: Any) -> Any:
    """Run a measurement in a new process, with the package of a checkout; return its result."""
    command = [sys.executable, __file__, "child", name, json.dumps(options)]
    paths = {**os.environ, "PYTHONPATH": source, **(environment or {})}
    done = subprocess.run(command, env=paths, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# Measurements


def measure_engine() -> Any:
    import torch

    from outpace.bench import engine

    methods = [engine.BASELINE, "outpace"]
    engine.METHODS = {name: engine.METHODS[name] for name in methods}
    cases = [engine.Case(PAIR, ALPHA, g, B, context) for g, B, context in CASES]
    found = engine.measure(torch.device("cuda"), torch.bfloat16, cases)
    return [vars(one) for one in found]


def measure_generate() -> Any:
    """Seconds of requests through the public interface, the first one included."""
    import torch

    from outpace import Decoder, Fixed
    from outpace.bench.synthetic import PAIRS, pair

    models = pair(*PAIRS[PAIR], ALPHA, device=torch.device("cuda"), dtype=torch.bfloat16)
    prompt = list(range(1, 101))

    def timed(run: Callable[[], Any]) -> tuple[float, Any]:
        torch.cuda.synchronize()
        started_at = time.perf_counter()
        out = run()
        torch.cuda.synchronize()
        return time.perf_counter() - started_at, out

    found: dict[str, Any] = {}
    for name, draft, g in (("speculative", models.draft, G), ("baseline", None, 0)):
        decoder = Decoder(models.target, draft, rule="token", num_draft_tokens=Fixed(g))
        seconds, tokens = [], []
        for seed in range(8):
            options: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_new_tokens": NEW_TOKENS}
            took, out = timed(lambda: decoder.generate(prompt, ignore_eos=True, **options))  # noqa: B023
            seconds.append(took)
            tokens.append(len(out.token_ids))
        later = statistics.median(n / s for n, s in zip(tokens[2:], seconds[2:], strict=True))
        found[name] = {"seconds": seconds, "tokens": tokens, "later_tokens_per_second": later}
        found[name]["first_extra_seconds"] = seconds[0] - statistics.median(seconds[2:])
    return found


def real_prompts(folder: str, data: str, count: int, order: int) -> tuple[Any, Any, list[list[int]]]:
    """Return a model on the GPU, its tokenizer, and token ids of prompts of every category."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    with open(data) as file:
        rows = [json.loads(line) for line in file]
    chosen = random.Random(order).sample(rows, count)
    prompts = []
    for row in chosen:
        chat = [{"role": "user", "content": row["prompt"]}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        prompts.append(list(ids[-1500:]))
    return model, tokenizer, prompts


def padded_target(model: str, parameters: int) -> Any:
    """Return the model with MLPs padded with zeros: the same texts, at the cost of a larger model."""
    import torch
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    layers, hidden = target.model.layers, target.config.hidden_size
    missing = parameters - sum(one.numel() for one in target.parameters())
    size = target.config.intermediate_size + missing // (3 * hidden * len(layers)) // 128 * 128
    for layer in layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            product = getattr(layer.mlp, name)
            padded = product.weight.new_zeros((hidden, size) if name == "down_proj" else (size, hidden))
            padded[tuple(map(slice, product.weight.shape))] = product.weight.detach()
            product.weight = torch.nn.Parameter(padded, requires_grad=False)
            product.out_features, product.in_features = padded.shape
    target.config.intermediate_size = size
    return target.to("cuda" if torch.cuda.is_available() else "cpu")


def measure_prompts(model: str, data: str, count: int, order: int, padded: int) -> Any:
    """Throughput of single requests in random order, without speculation and with fixed draft lengths.

    A prediction is the time of the first token, and for each later step its time on the device. What the host
    adds is the difference. A second prediction has the time of prompt lookup's step for every drafter. So
    drafting on the device does not count there, apart from forward passes.

    The last cases have a target that is padded to ``padded`` parameters.
    """
    from outpace import Decoder, Fixed, NGramDrafter, TextDrafter

    weights, tokenizer, prompts = real_prompts(model, data, count, order)
    found: dict[str, Any] = {"prompt_tokens": [len(one) for one in prompts], "order": order}
    fitted = NGramDrafter.fit(prompts, n=4, vocab_size=weights.config.vocab_size)
    # The model drafts as if the target's tokenizer were another one
    text = TextDrafter(weights, tokenizer, tokenizer)
    fewer, large = prompts[:FEWER_PROMPTS], padded_target(model, padded)
    cases: dict[str, tuple[Any, Any, int, list[list[int]]]] = {
        f"g={g}": (weights, "lookup" if g else None, g, prompts) for g in PREDICTED
    }
    cases["n-gram, g=4"] = (weights, fitted, 4, fewer)
    cases["text, g=4"] = (weights, text, 4, fewer)
    cases["padded target, g=0"] = (large, None, 0, fewer)
    cases["padded target, lookup, g=4"] = (large, "lookup", 4, fewer)
    cases["padded target, n-gram, g=4"] = (large, fitted, 4, fewer)
    cases["padded target, text, g=4"] = (large, text, 4, fewer)
    short = min(prompts, key=len)
    baselines, device_seconds = dict[int, list[list[int]]](), dict[tuple[int, int], float]()
    for name, (target, draft, g, some) in cases.items():
        decoder = Decoder(target, draft, tokenizer, num_draft_tokens=Fixed(g))
        runs, texts, changes = timed_requests(decoder, some)
        step_seconds = step_time(decoder, short, g)
        baseline_texts = baselines.setdefault(id(target), texts)
        passes_seconds = device_seconds.setdefault((id(target), g), step_seconds)
        if draft is text:  # the last draft token may be incomplete, and is dropped
            draft_seconds = (g + 1) * device_seconds[id(weights), 0]
            step_seconds, passes_seconds = step_seconds + draft_seconds, passes_seconds + draft_seconds
        later = runs[2:]
        firsts, later_steps = sum(one["first"] for one in later), sum(one["steps"] - 1 for one in later)
        seconds = sum(one["seconds"] for one in later)
        brief = [one for one in later if one["prompt"] <= SHORT] or later
        brief_seconds = sum(one["seconds"] - one["first"] for one in brief)
        brief_steps = sum(one["steps"] - 1 for one in brief)
        found[name] = {
            "tokens_per_second_all": sum(one["tokens"] for one in runs) / sum(one["seconds"] for one in runs),
            "tokens_per_second_later": sum(one["tokens"] for one in later) / seconds,
            "step_milliseconds": 1e3 * step_seconds,
            "measured_over_predicted_seconds": seconds / (firsts + later_steps * step_seconds),
            "measured_over_passes_seconds": seconds / (firsts + later_steps * passes_seconds),
            "steady_measured_over_predicted_seconds": (seconds - firsts) / (later_steps * step_seconds),
            "steady_measured_over_passes_seconds": (seconds - firsts) / (later_steps * passes_seconds),
            "steady_tokens_per_second_short": sum(r["tokens"] - r["head"] for r in brief) / brief_seconds,
            "microseconds_beyond_the_device": 1e6 * (brief_seconds / brief_steps - step_seconds),
            "texts_equal_to_no_speculation": [
                sum(a == b for a, b in zip(texts, baseline_texts, strict=False)), len(texts)
            ],
            "recaptures": changes,
            "runs": runs,
        }  # fmt: skip
        decoder.release()
    return found


def timed_requests(decoder: Any, prompts: list[list[int]]) -> tuple[list[Any], list[list[int]], int]:
    """Decode prompts greedily, one after another.

    Returns:
        Times of each request, the texts, and how many graphs were captured or discarded beyond the first
        capture of each size.
    """
    import torch

    executor: Any = decoder.executor
    runs, texts, changes = [], [], 0
    for prompt in prompts:
        keys, version = set(executor.graphs), executor.graphs.version
        torch.cuda.synchronize()
        started_at, firsts, steps = time.perf_counter(), list[float](), list[int]()
        text = []
        for step in decoder.stream(prompt, temperature=0.0, max_new_tokens=128, ignore_eos=True):
            firsts.append(time.perf_counter() - started_at)
            steps.append(len(step.token_ids))
            text += step.token_ids
        runs.append(
            {
                "prompt": len(prompt), "seconds": firsts[-1], "first": firsts[0], "steps": len(steps),
                "head": steps[0], "tokens": len(text),
            }
        )  # fmt: skip
        texts.append(text)
        changes += executor.graphs.version - version - len(set(executor.graphs) - keys)
    return runs, texts, changes


def step_time(decoder: Any, prompt: list[int], g: int) -> float:
    """Return the median seconds of a step with g draft tokens, timed by the device.

    If the drafter runs on the host, its time does not count.
    """
    import torch

    from outpace import SamplingParams
    from outpace.draft.base import Draft
    from outpace.engine.stats import Clock

    executor = decoder.executor
    row = decoder.requests(prompt, SamplingParams(temperature=0.0), max_new_tokens=512, seed=1)[0]
    row.slot = 0
    prefilling = executor.prefill([row], Clock())
    while not prefilling.advance():
        pass
    seconds = []
    for _ in range(40):
        draft = None if executor.drafts else Draft(torch.zeros(1, g, dtype=torch.int64), None)
        pending = executor.start({0: row}, g, draft, Clock())
        outcome = pending.read()
        executor.commit(row, g, outcome.accepted[0])
        seconds.append(pending.seconds or 0.0)
    executor.release(row, keep=False)
    return statistics.median(seconds[5:])


def memory_in_use(decoder: Any) -> list[int]:
    """Return the bytes of the KV cache, and those of the process or of the GPU's allocator."""
    import torch

    if torch.cuda.is_available():
        return [decoder.scorer.cache.nbytes, torch.cuda.memory_reserved()]
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return [decoder.scorer.cache.nbytes, int(fields["VmRSS"].split()[0]) * 1024]


def measure_requests(model: str, data: str, count: int, requests: int, order: int, longest: int) -> Any:
    """Many requests of random length and arrival through one scheduler; memory, and texts as one by one."""
    from outpace import Decoder, SamplingParams

    weights, tokenizer, prompts = real_prompts(model, data, count, order)
    weights.float()
    draw, sampling = random.Random(order), SamplingParams(temperature=0.8)
    decoder = Decoder(weights, "lookup", tokenizer, rule="match", num_draft_tokens=3)
    wanted = []
    for number in range(requests):
        prompt = draw.choice(prompts)
        start = draw.randrange(len(prompt) // 2)
        part = prompt[start : start + draw.randrange(4, longest)]
        wanted.append((part, draw.randrange(1, longest // 6), number, draw.randrange(3 * requests)))
    wanted.sort(key=lambda one: one[3])  # by arrival, in scheduler steps
    texts: dict[int, list[int]] = {}
    memory, started_at, step, added, ids = [], time.perf_counter(), 0, 0, {}
    with decoder.scheduler(batch_size=16) as scheduler:
        while added < len(wanted) or scheduler.unfinished:
            while added < len(wanted) and (wanted[added][3] <= step or not scheduler.unfinished):
                part, new, seed, _ = wanted[added]
                request = decoder.requests(part, sampling, max_new_tokens=new, seed=seed, ignore_eos=True)
                ids[scheduler.add(request[0])] = added
                added += 1
            for done in scheduler.step():
                if done.output is not None:
                    texts[ids[done.index]] = done.output.token_ids
            step += 1
            if step % 100 == 0:
                memory.append(memory_in_use(decoder))
    seconds = time.perf_counter() - started_at
    alone = Decoder(weights, None, tokenizer, rule="match")
    different = []
    for index, (part, new, seed, _) in enumerate(wanted):
        out = alone.generate(part, sampling, max_new_tokens=new, seed=seed, ignore_eos=True)
        if out.token_ids != texts[index]:
            at = next(i for i, (a, b) in enumerate(zip(out.token_ids, texts[index], strict=True)) if a != b)
            single = alone.requests(part, sampling, max_new_tokens=new, seed=seed)[0]
            tokens = out.token_ids[at], texts[index][at]
            prefix = [*part, *out.token_ids[:at]]
            different.append({"request": index, "position": at, "gap": gap(alone, single, tokens, prefix)})
    return {
        "requests": len(texts), "seconds": seconds, "steps": step, "memory": memory,
        "different": different,
    }  # fmt: skip


def gap(decoder: Any, request: Any, tokens: tuple[int, int], prefix: list[int]) -> float:
    """Return by how much the scores of two tokens differ, of which the larger one decides the next token.

    Under rule ``match``, a token's score is its logit over the temperature, plus noise.
    """
    import torch

    from outpace.sampling import random as noise

    out = decoder.generate(prefix, temperature=1.0, max_new_tokens=1, logits=True, seed=0)
    seed, position = torch.tensor([request.seed]), torch.tensor([len(prefix)])
    logits = out.logits[0].cpu().double()
    scores = logits / request.sampling.temperature + noise.gumbel(seed, position, len(logits))[0]
    return float((scores[tokens[0]] - scores[tokens[1]]).abs())


MEASUREMENTS = {
    "engine": measure_engine,
    "generate": measure_generate,
    "prompts": measure_prompts,
    "requests": measure_requests,
}


# Commands


def compare(args: argparse.Namespace) -> Any:
    found: dict[str, list[Any]] = {"before": [], "after": []}
    for _ in range(args.rounds):
        for name, source in (("before", args.before), ("after", args.source)):
            found[name].append(child(source, "engine"))
    print(f"{'case':<40}{'before':>12}{'after':>12}{'ratio':>8}")
    for i, one in enumerate(found["before"][0]):
        rates = {
            name: statistics.median(runs[i]["tokens_per_second"] for runs in found[name]) for name in found
        }
        label = f"{one['method']}, g={one['g']}, B={one['B']}, context {one['context']}"
        ratio = rates["after"] / rates["before"]
        print(f"{label:<40}{rates['before']:>12.1f}{rates['after']:>12.1f}{ratio:>8.3f}")
    return found


def first(args: argparse.Namespace) -> Any:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "warm"):
            found[name] = child(args.source, "generate", {"TRITON_CACHE_DIR": folder})
            for mode, one in found[name].items():
                print(
                    f"{name} {mode}: first request {one['first_extra_seconds']:+.2f} s, then "
                    f"{one['later_tokens_per_second']:.1f} tokens/s"
                )
    return found


def prompts(args: argparse.Namespace) -> Any:
    found = child(
        args.source, "prompts", model=args.model, data=args.data, count=args.count, order=args.order,
        padded=args.padded,
    )  # fmt: skip
    for name, one in found.items():
        if isinstance(one, dict):
            print(f"{name}: { ({key: value for key, value in one.items() if key != 'runs'}) }")
    return found


def requests(args: argparse.Namespace) -> Any:
    found = child(
        args.source, "requests", model=args.model, data=args.data, count=args.count,
        requests=args.requests, order=args.order, longest=args.longest,
    )  # fmt: skip
    print(
        {key: value for key, value in found.items() if key != "memory"},
        found["memory"][:2],
        found["memory"][-2:],
    )
    return found


def main() -> None:
    if sys.argv[1] == "child":
        print(json.dumps(MEASUREMENTS[sys.argv[2]](**json.loads(sys.argv[3]))))  # type: ignore[operator]
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = {"compare": compare, "first": first, "prompts": prompts, "requests": requests}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--source", default="src", help="package of this checkout")
    parser.add_argument("--before", help="package of the earlier checkout")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--data", help="spec_bench.jsonl")
    parser.add_argument("--count", type=int, default=40, help="prompts")
    parser.add_argument("--padded", type=int, default=7_000_000_000, help="parameters of the padded target")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--longest", type=int, default=400, help="tokens of the longest prompt, about")
    parser.add_argument("--order", type=int, default=1, help="seed of the random order")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    result = commands[args.command](args)
    with open(args.out, "w") as file:
        json.dump({"command": sys.argv[1:], "machine": machine(), "result": result}, file, indent=1)


def machine() -> dict[str, str]:
    import torch
    import transformers

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}


if __name__ == "__main__":
    main()
