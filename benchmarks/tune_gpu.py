"""Search the block shapes of matrix products that make a whole forward pass fastest, one product at a time.

    python benchmarks/tune_gpu.py --model llama2-1.3b --tokens 1 --out tune.json

Products are not timed alone. In a pass, a product starts while the one before it ends, and its weights are in
no cache. The shapes in `outpace.models.kernels.product.shape_of` were found in this way on an H200, for
llama2-7b with 6 tokens and llama2-1.3b with one. The first round starts from them, and shows the gain.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from report import arguments, machine, write

from outpace.bench.kernel import timed
from outpace.bench.synthetic import SHAPES, Codes, bigram
from outpace.models.fused import FusedModel
from outpace.models.fused_scorer import FusedScorer, fused_model
from outpace.models.kernels import product

BLOCKS = [
    (16, 256, 1, 4), (16, 256, 2, 4), (16, 512, 2, 4), (32, 128, 2, 4), (32, 256, 2, 3), (32, 256, 2, 4),
    (32, 512, 4, 4), (64, 128, 4, 3), (64, 128, 4, 6), (64, 256, 4, 4), (128, 128, 8, 4),
]  # fmt: skip
AHEAD = (0, 512, 1024, 2048, 4096)
ROUNDS = 2
REPEATS = 20
Key = tuple[int, bool]  # columns, and whether there is a gate


def products(fused: FusedModel) -> dict[Key, str]:
    """Return the names of the products of a pass, by their key in `shape_of`."""
    layer = fused.layers[0]
    return {
        (fused.head.weight.shape[0], False): "head",
        (layer.gate_up.weight.shape[0] // 2, True): "gate_up",
        (layer.down.weight.shape[0], False): "out, down",
        (layer.qkv.weight.shape[0], False): "qkv",
    }


def time_pass(scorer: FusedScorer, rows: int, tokens: int, context: int) -> Callable[[], float]:
    """Return a function that measures the microseconds of a pass as a CUDA graph."""
    slots, generator = range(rows), torch.Generator().manual_seed(0)
    scorer.prefill(slots, torch.randint(scorer.vocab_size, (rows, context), generator=generator).tolist())
    scorer.cache.reserve(slots, [context + tokens] * rows)
    ids = torch.zeros(rows, tokens, dtype=torch.int64, device=scorer.device)
    positions = (context + torch.arange(tokens, device=scorer.device)).expand(rows, tokens).contiguous()

    def measure() -> float:
        for _ in range(2):
            scorer.forward(ids, positions)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = scorer.forward(ids, positions)
        microseconds = statistics.median(timed(graph.replay, scorer.device, REPEATS) for _ in range(3))
        del outputs
        return microseconds

    return measure


def tune_shapes(
    fused: FusedModel, measure: Callable[[], float], least: float = 0.001
) -> list[dict[str, Any]]:
    """Return every measured shape with the microseconds of the pass. The best so far stays in use."""
    chosen: dict[Key, product.Shape] = {}
    default = product.shape_of

    def shape_of(BM: int, N: int, dtype: torch.dtype, gate: bool) -> product.Shape:
        return chosen.get((N, gate)) or default(BM, N, dtype, gate)

    product.shape_of = shape_of
    best = measure()
    trials: list[dict[str, Any]] = [{"product": "all", "shape": None, "microseconds": round(best, 1)}]
    for _ in range(ROUNDS):
        for (N, gate), name in products(fused).items():
            start = shape_of(product.MIN_ROWS, N, fused.dtype, gate)
            shapes = [(*block, start[4]) for block in BLOCKS] + [(*start[:4], ahead) for ahead in AHEAD]
            for shape in shapes:
                before = chosen.get((N, gate))
                chosen[N, gate] = shape
                microseconds = measure()
                trials.append({"product": name, "shape": list(shape), "microseconds": round(microseconds, 1)})
                if microseconds < best * (1 - least):
                    best = microseconds
                elif before is None:
                    del chosen[N, gate]
                else:
                    chosen[N, gate] = before
            print(f"{name:10} {chosen.get((N, gate)) or start}: {best:.0f} µs", file=sys.stderr)
    product.shape_of = default
    return trials


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="llama2-1.3b", choices=SHAPES, help="model whose shapes are used")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device")
    shape = SHAPES[options.model]
    scorer = FusedScorer(bigram(shape, Codes.random(shape["vocab_size"], 0, "cuda"), 0.0, device="cuda"))
    with torch.inference_mode():
        trials = tune_shapes(
            fused_model(scorer.base), time_pass(scorer, options.rows, options.tokens, options.context)
        )
    print(f"{trials[0]['microseconds']} µs before, {min(one['microseconds'] for one in trials)} at best")
    command = f"python benchmarks/tune_gpu.py --model {options.model} --rows {options.rows}"
    command += f" --tokens {options.tokens} --context {options.context}"
    here = {**machine(), "gpu": torch.cuda.get_device_name()}
    write({"command": command, "machine": here, "tried": trials}, options.out)


if __name__ == "__main__":
    main()
