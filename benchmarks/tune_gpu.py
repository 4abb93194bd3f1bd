"""Which shapes of blocks make a whole pass fastest: each product's in turn, the others as they are.

    python benchmarks/tune_gpu.py --model llama2-1.3b --tokens 1 --out tune.json

Products are not timed alone: in a pass each begins while the one before it ends, and finds its weights in no
cache. What `outpace.models.kernels.product.shape_of` says was found so on an H200, for llama2-7b with 6
tokens and llama2-1.3b with one. The first round starts from it, and shows what is gained.
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
    """What there is in a pass, by what `shape_of` is told of it."""
    layer = fused.layers[0]
    return {
        (fused.head.weight.shape[0], False): "head",
        (layer.gate_up.weight.shape[0] // 2, True): "gate_up",
        (layer.down.weight.shape[0], False): "out, down",
        (layer.qkv.weight.shape[0], False): "qkv",
    }


def pass_of(fused: FusedModel, rows: int, tokens: int, context: int) -> Callable[[], float]:
    """Microseconds of a pass, in a graph, whenever it is called."""
    cache = fused.room(rows, context + tokens)
    ids = torch.zeros(rows, tokens, dtype=torch.int64, device=fused.device)
    places = (context + torch.arange(tokens, device=fused.device)).expand(rows, tokens).contiguous()

    def taken() -> float:
        for _ in range(2):
            fused.logits(ids, places, cache)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = fused.logits(ids, places, cache)
        spent = statistics.median(timed(graph.replay, fused.device, REPEATS) for _ in range(3))
        del kept
        return spent

    return taken


def tuned(fused: FusedModel, taken: Callable[[], float], least: float = 0.001) -> list[dict[str, Any]]:
    """Every shape that was tried, with what the pass took; the best so far is kept."""
    own: dict[Key, product.Shape] = {}
    default = product.shape_of

    def shape_of(BM: int, N: int, dtype: torch.dtype, gate: bool) -> product.Shape:
        return own.get((N, gate)) or default(BM, N, dtype, gate)

    product.shape_of = shape_of
    best = taken()
    tried: list[dict[str, Any]] = [{"product": "all", "shape": None, "microseconds": round(best, 1)}]
    for _ in range(ROUNDS):
        for (N, gate), name in products(fused).items():
            start = shape_of(product.LEAST_ROWS, N, fused.dtype, gate)
            shapes = [(*block, start[4]) for block in BLOCKS] + [(*start[:4], ahead) for ahead in AHEAD]
            for shape in shapes:
                before = own.get((N, gate))
                own[N, gate] = shape
                spent = taken()
                tried.append({"product": name, "shape": list(shape), "microseconds": round(spent, 1)})
                if spent < best * (1 - least):
                    best = spent
                elif before is None:
                    del own[N, gate]
                else:
                    own[N, gate] = before
            print(f"{name:10} {own.get((N, gate)) or start}: {best:.0f} µs", file=sys.stderr)
    product.shape_of = default
    return tried


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", default="llama2-1.3b", choices=SHAPES, help="whose shapes")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    shape = SHAPES[given.model]
    fused = FusedModel(bigram(shape, Codes.random(shape["vocab_size"], 0, "cuda"), 0.0, device="cuda"))
    with torch.inference_mode():
        tried = tuned(fused, pass_of(fused, given.rows, given.tokens, given.context))
    print(f"{tried[0]['microseconds']} µs before, {min(one['microseconds'] for one in tried)} at best")
    command = f"python benchmarks/tune_gpu.py --model {given.model} --rows {given.rows}"
    command += f" --tokens {given.tokens} --context {given.context}"
    here = {**machine(), "gpu": torch.cuda.get_device_name()}
    write({"command": command, "machine": here, "tried": tried}, given.out)


if __name__ == "__main__":
    main()
