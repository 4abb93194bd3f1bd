"""Throughput of encoder-decoder models on a GPU, with and without speculation, beside Transformers.

    python benchmarks/encoder_decoder.py --out benchmarks/results/encoder_decoder_h200/whisper.json
    python benchmarks/encoder_decoder.py --shapes t5-large marian --out .../text.json

Models are synthetic (`outpace.bench.synthetic`): the sizes of real models, every layer computed, a chosen
acceptance rate. The draft has two layers of decoder and shares the encoder. Every method decodes the same
inputs, in bfloat16 and at temperature 1 (Transformers' own methods greedily). A figure is the median of whole
calls, encoder included. First calls are reported apart. The logits of the fused decoder are compared with
those of Transformers' forward pass in float32, with random weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from report import arguments, machine, write

from outpace import Decoder, Fixed
from outpace.bench.synthetic import Codes, bigram, noise_for
from outpace.models.auto import auto_class
from outpace.models.fused_seq2seq import FusedSeq2SeqScorer

SHAPES: dict[str, dict[str, Any]] = {
    "whisper-large-v3": {
        "model_type": "whisper", "vocab_size": 51866, "d_model": 1280, "encoder_layers": 32,
        "decoder_layers": 32, "encoder_attention_heads": 20, "decoder_attention_heads": 20,
        "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "num_mel_bins": 128,
    },
    "t5-large": {
        "model_type": "t5", "vocab_size": 32128, "d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24,
        "num_decoder_layers": 24, "num_heads": 16,
    },
    "marian": {
        "model_type": "marian", "vocab_size": 58101, "d_model": 512, "encoder_layers": 6, "decoder_layers": 6,
        "encoder_attention_heads": 8, "decoder_attention_heads": 8, "encoder_ffn_dim": 2048,
        "decoder_ffn_dim": 2048, "activation_function": "swish", "scale_embedding": True,
    },
}  # fmt: skip
TINY: dict[str, Any] = {
    "vocab_size": 512, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_decoder_layers": 3,
    "num_heads": 4, "encoder_layers": 1, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_mel_bins": 16,
}  # fmt: skip
SPECIAL = {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
DRAFT_LAYERS = {"decoder_layers": 2, "num_decoder_layers": 2}
SOURCE_TOKENS = 128  # of a text model's input
WARM_UPS = 2  # calls before those that count


class Bench:
    """A target and a draft that shares its encoder.

    Args:
        name: Name of a shape.
        options: The program's arguments.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.options, self.device = name, options, options.device
        shape = SHAPES[name] | (TINY if options.tiny else {}) | SPECIAL | {"decoder_start_token_id": 1}
        shape = {key: value for key, value in shape.items() if key in SHAPES[name] or key not in TINY}
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        codes = Codes.random(shape["vocab_size"], 0, self.device)
        sigma = noise_for(codes, options.alpha)
        made = {"device": self.device, "dtype": self.dtype}
        self.target = bigram(shape, codes, 0.0, **made)
        layers = {key: value for key, value in DRAFT_LAYERS.items() if key in shape}
        self.draft = bigram(shape | layers, codes, sigma, seed=1, **made)
        self.draft.get_encoder().load_state_dict(self.target.get_encoder().state_dict())
        self.speech = self.target.config.model_type == "whisper"

    def inputs(self, B: int) -> list[Any]:
        """Return encoder inputs: features of speech, or token ids."""
        noise = torch.Generator().manual_seed(B)
        config = self.target.config
        if self.speech:
            shape = B, config.num_mel_bins, 2 * config.max_source_positions
            return list(torch.randn(shape, generator=noise))
        return torch.randint(2, config.vocab_size, (B, SOURCE_TOKENS), generator=noise).tolist()

    def timed(self, call: Callable[[], float]) -> dict[str, Any]:
        """Return the seconds of calls, and the mean of what they return."""
        seconds, returned = [], []
        for _ in range(WARM_UPS + self.options.repeats):
            started_at = time.perf_counter()
            returned.append(call())
            if self.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started_at)
        median = statistics.median(seconds[WARM_UPS:])
        return {
            "first_call_seconds": round(seconds[0], 3),
            "seconds": round(median, 5),
            "tokens_per_pass": round(statistics.mean(returned[WARM_UPS:]), 3),
        }

    def ours(self, B: int, draft: Any, policy: Any, engine: bool) -> dict[str, Any]:
        """Time the library."""
        decoder = Decoder(self.target, draft, num_draft_tokens=policy, rule="token", engine=engine)
        inputs, seeds = self.inputs(B), iter(range(10**6))
        accepted: list[float] = []

        def call() -> float:
            outs = decoder.generate(
                inputs, temperature=1.0, max_new_tokens=self.options.new, ignore_eos=True,
                seed=[B * next(seeds) + i for i in range(B)],
            )  # fmt: skip
            accepted.append(sum(out.stats.acceptance_rate for out in outs) / B)
            return float(statistics.mean(out.stats.tokens_per_pass for out in outs))

        found = self.timed(call) | {"acceptance_rate": round(accepted[-1], 3)}
        encode = decoder.generate(inputs, temperature=1.0, max_new_tokens=2)[0].stats.encode_seconds
        return found | {"encode_seconds_on_the_host": round(encode, 5)}

    def transformers(self, B: int, **options: Any) -> dict[str, Any]:
        """Time Transformers' own ``generate``."""
        stacked = torch.stack if self.speech else torch.tensor
        inputs: Any = stacked(self.inputs(B)).to(self.device)
        inputs = inputs.to(self.dtype) if self.speech else inputs
        named = {"input_features" if self.speech else "input_ids": inputs}

        def call() -> float:
            tokens = self.options.new
            with torch.inference_mode():
                out = self.target.generate(
                    **named, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, **options
                )
            assert out.shape[1] > tokens // 2
            return 1.0

        return self.timed(call)

    def error(self) -> dict[str, float]:
        """Return the relative error of fused logits, and of Transformers' own in the same dtype.

        The model has this shape and Transformers' own random weights, whose layers are not faint.
        """
        torch.manual_seed(0)
        with torch.device(self.device):
            model = auto_class(self.target.config).from_config(self.target.config, dtype=torch.float32).eval()
        source = self.inputs(1)[0]
        ids = torch.randint(2, model.config.vocab_size, (1, 24), device=self.device)
        batch = torch.as_tensor(source)[None].to(self.device)

        def own() -> torch.Tensor:
            named = {"input_features": batch.to(model.dtype)} if self.speech else {"input_ids": batch}
            with torch.inference_mode():
                logits: torch.Tensor = model(**named, decoder_input_ids=ids, use_cache=False).logits
            return logits[:, 16:].float()

        expected = own()
        model.to(self.dtype)
        theirs, scorer = own(), FusedSeq2SeqScorer(model)
        scorer.prefill([0], [ids[0, :16].tolist()], [scorer.source(source)])
        found = scorer.score([0], ids[:, 16:]).float()
        return {
            "fused": float((found - expected).norm() / expected.norm()),
            "transformers": float((theirs - expected).norm() / expected.norm()),
        }

    def methods(self, B: int) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        """Iterate over the methods to measure."""
        g = self.options.draft_tokens
        yield "ours", lambda: self.ours(B, None, None, True)
        yield "ours, draft", lambda: self.ours(B, self.draft, Fixed(g), True)
        yield "ours, draft, auto", lambda: self.ours(B, self.draft, None, True)
        if B == 1:
            yield "ours, without graphs", lambda: self.ours(B, None, None, False)
            yield "Transformers", lambda: self.transformers(B)
            yield "Transformers, assisted", lambda: self.transformers(B, assistant_model=self.draft)
        if B == 1 and self.options.static:
            yield "Transformers, static cache", lambda: self.transformers(B, cache_implementation="static")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", default=["whisper-large-v3"], choices=list(SHAPES))
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the program")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--new", type=int, default=200, help="new tokens of each text (default 200)")
    parser.add_argument("--alpha", type=float, default=0.8, help="acceptance rate of the draft (default 0.8)")
    parser.add_argument("--draft-tokens", type=int, default=4, help="of a step with a draft (default 4)")
    parser.add_argument("--repeats", type=int, default=3, help="calls that count (default 3)")
    parser.add_argument("--static", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    report: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "machine": machine(),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "figures": [],
    }
    for name in options.shapes:
        bench = Bench(name, options)
        for B in options.batch:
            for method, measure in bench.methods(B):
                try:
                    found = measure()
                except Exception as error:  # of Transformers: not every method takes every family
                    found = {"error": f"{type(error).__name__}: {error}"[:300]}
                rate = round(B * options.new / found["seconds"], 1) if "seconds" in found else None
                row = {"shape": name, "B": B, "method": method, "tokens_per_second": rate, **found}
                report["figures"].append(row)
                print(json.dumps(row), flush=True)
                write(report, options.out)
        report[f"relative error, {name}"] = bench.error()
        print(name, "relative error:", report[f"relative error, {name}"], flush=True)
        write(report, options.out)
        del bench, measure
        gc.collect()


if __name__ == "__main__":
    main()
