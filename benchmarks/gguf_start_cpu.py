"""Time and peak memory of the first command with a GGUF file, and of later ones.

    python benchmarks/gguf_start_cpu.py --out benchmarks/results/gguf_start_cpu.json

The benchmark writes the file: random weights in the shape of Qwen2.5-0.5B, Q8_0, with a vocabulary of the
same size. Each start is a process that runs `outpace generate` for one token in float32. The first one
converts the file into an empty cache. Peak memory is the largest resident set of the process.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from report import arguments, machine, write

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCABULARY = 896, 4864, 24, 14, 2, 151_936
SPECIAL = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def make(path: Path) -> int:
    """Write a GGUF file; return the number of its weights."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    file = GGUFWriter(path, "qwen2")
    file.add_context_length(32_768)
    file.add_embedding_length(HIDDEN)
    file.add_block_count(LAYERS)
    file.add_feed_forward_length(INNER)
    file.add_head_count(HEADS)
    file.add_head_count_kv(KV_HEADS)
    file.add_rope_freq_base(1e6)
    file.add_layer_norm_rms_eps(1e-6)
    add_tokenizer(file)
    rng, weights = np.random.default_rng(0), 0
    for name, shape in tensors():
        weights += int(np.prod(shape))
        if name.endswith("norm.weight"):
            file.add_tensor(name, np.ones(shape, np.float32))
            continue
        values = 0.05 * rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            file.add_tensor(name, values)
        else:
            kind = GGMLQuantizationType.Q8_0
            file.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return weights


def tensors() -> list[tuple[str, tuple[int, ...]]]:
    """Return the names and shapes of all weights."""
    kv = KV_HEADS * HIDDEN // HEADS
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("token_embd.weight", (VOCABULARY, HIDDEN)),
        ("output_norm.weight", (HIDDEN,)),
    ]
    for layer in range(LAYERS):
        for name, rows in (("attn_q", HIDDEN), ("attn_k", kv), ("attn_v", kv)):
            shapes += [(f"blk.{layer}.{name}.weight", (rows, HIDDEN)), (f"blk.{layer}.{name}.bias", (rows,))]
        shapes += [
            (f"blk.{layer}.attn_norm.weight", (HIDDEN,)),
            (f"blk.{layer}.ffn_norm.weight", (HIDDEN,)),
            (f"blk.{layer}.attn_output.weight", (HIDDEN, HIDDEN)),
            (f"blk.{layer}.ffn_gate.weight", (INNER, HIDDEN)),
            (f"blk.{layer}.ffn_up.weight", (INNER, HIDDEN)),
            (f"blk.{layer}.ffn_down.weight", (HIDDEN, INNER)),
        ]
    return shapes


def add_tokenizer(file: Any) -> None:
    """Add a byte-pair tokenizer: bytes, pairs of bytes, and triples until the vocabulary is full."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    pairs = list(itertools.product(letters, letters))
    triples = ((a + b, c) for (a, b), c in itertools.product(pairs, letters))
    count = VOCABULARY - len(SPECIAL) - len(letters)
    merges = list(itertools.islice(itertools.chain(pairs, triples), count))
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("qwen2")
    file.add_token_list([*letters, *(a + b for a, b in merges), *SPECIAL])
    file.add_token_types([1] * (VOCABULARY - len(SPECIAL)) + [3] * len(SPECIAL))
    file.add_token_merges([f"{a} {b}" for a, b in merges])
    file.add_bos_token_id(VOCABULARY - 3)
    file.add_pad_token_id(VOCABULARY - 3)
    file.add_eos_token_id(VOCABULARY - 1)
    file.add_chat_template(TEMPLATE)


def start(model: Path, cache: Path) -> tuple[float, int]:
    """Return the seconds and the peak memory, in bytes, of one command."""
    outpace = str(Path(sys.executable).with_name("outpace"))
    command = [outpace, "generate", "Why?", "-m", "1", "--dtype", "float32", "-t", str(model)]
    started_at = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OUTPACE_CACHE": str(cache)},
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return time.perf_counter() - started_at, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="later starts (default 3)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "random-0.5b.Q8_0.gguf"
        weights = 4 * make(model)  # bytes in float32
        first = start(model, folder / "cache")
        later = [start(model, folder / "cache") for _ in range(options.repeats)]
        size = model.stat().st_size
    report = {
        "command": f"python benchmarks/gguf_start_cpu.py --repeats {options.repeats}",
        "machine": machine(),
        "file_bytes": size,
        "weights_bytes": weights,
        "first_start": {"seconds": round(first[0], 1), "peak_bytes": first[1]},
        "later_starts": [{"seconds": round(one[0], 1), "peak_bytes": one[1]} for one in later],
        "later_seconds": round(statistics.median(one[0] for one in later), 1),
        "later_peak_over_weights": round(max(one[1] for one in later) / weights, 2),
        "bars": "a later start: at most 15 s and 1.3 times the weights",
    }
    print(json.dumps(report, indent=2))
    write(report, options.out)


if __name__ == "__main__":
    main()
