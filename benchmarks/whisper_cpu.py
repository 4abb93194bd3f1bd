"""Forward passes and time of Whisper on a CPU, with speculation and with batches.

    python benchmarks/whisper_cpu.py --target whisper/base --draft whisper/tiny --speech speech

The folder of speech holds manifest.jsonl. Each line has `audio`, a file in the folder, and `text`, the
transcript. All settings take turns: greedy, float32, without fallback. The time after the encoder is that of
drafting, target passes and verification; the draft model's encoder is part of drafting. The total also has
features, the target's encoder, and its keys and values of cross-attention. Texts must be the same with and
without speculation.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import jiwer
import torch
from report import arguments, machine, write
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from outpace import Decoder, Fixed, Stats
from outpace.tasks.transcribe import Transcriber


def run(one: Transcriber, files: list[Path], batch_size: int) -> dict[str, Any]:
    """Return texts, passes and seconds of all files."""
    one.stats, one.seconds = Stats(), 0.0
    texts = [found.text for found in one(files, language="en", fallback=False, batch_size=batch_size)]
    decode_seconds = one.stats.seconds - one.stats.encode_seconds
    return {
        "texts": texts,
        "passes": one.stats.target_passes,
        "tokens": one.stats.new_tokens,
        "acceptance": round(one.stats.acceptance_rate, 4),
        "after_encoder": decode_seconds,
        "total": one.seconds,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--target", required=True, help="folder with a Whisper model")
    parser.add_argument("--draft", required=True, help="folder with a smaller Whisper model")
    parser.add_argument("--speech", type=Path, required=True, help="folder with manifest.jsonl")
    parser.add_argument("--draft-dtype", default="float32", help="dtype of the draft; the target is float32")
    parser.add_argument("--lengths", type=int, nargs="+", default=[3, 4, 5], help="draft tokens per step")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    lines = [json.loads(line) for line in (options.speech / "manifest.jsonl").read_text().splitlines()]
    files = [options.speech / line["audio"] for line in lines]
    target, draft = (
        WhisperForConditionalGeneration.from_pretrained(name, trust_remote_code=False).float().eval()
        for name in (options.target, options.draft)
    )
    draft = draft.to(getattr(torch, options.draft_dtype))
    processor = WhisperProcessor.from_pretrained(options.target, trust_remote_code=False)
    transcribers = {"baseline": Transcriber(Decoder(target, pack=True), processor)}
    transcribers["auto"] = Transcriber(Decoder(target, draft, pack=True), processor)
    for g in options.lengths:
        decoder = Decoder(target, draft, num_draft_tokens=Fixed(g), pack=True)
        transcribers[f"g = {g}"] = Transcriber(decoder, processor)
    batches = {1: files, 8: files[:8], -1: files[:8]}  # -1: the same eight files one by one
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for _ in range(options.repeats):
        for name, transcriber in transcribers.items():
            for key, some in batches.items():
                found.setdefault((name, key), []).append(run(transcriber, some, abs(key)))
    normal = processor.tokenizer.normalize
    truth = [normal(line["text"]) for line in lines]
    report: list[dict[str, Any]] = []
    for (name, key), runs in found.items():
        baseline, count = found["baseline", key], len(batches[key])
        baseline_texts = found["baseline", 1][0]["texts"]
        ratios = {
            what: round(statistics.median(a[what] / b[what] for a, b in zip(runs, baseline, strict=True)), 3)
            for what in ("after_encoder", "total")
        }
        figures: dict[str, Any] = {
            "method": name,
            "files": count,
            "batch_size": abs(key),
            "texts_equal_baseline_one_by_one": runs[0]["texts"] == baseline_texts[:count],
            "wer": round(jiwer.wer(truth[:count], [normal(text) for text in runs[0]["texts"]]), 4),
            "passes": runs[0]["passes"],
            "passes_fewer": round(baseline[0]["passes"] / runs[0]["passes"], 3),
            "tokens": runs[0]["tokens"],
            "acceptance": runs[0]["acceptance"],
            **{f"{what}_seconds": round(statistics.median(r[what] for r in runs), 3) for what in ratios},
            **{f"{what}_of_baseline": ratio for what, ratio in ratios.items()},
        }
        if key == 8:
            alone = found[name, -1]
            for what in ratios:
                speed = statistics.median(a[what] / b[what] for a, b in zip(alone, runs, strict=True))
                figures[f"{what}_speedup_of_batch"] = round(speed, 3)
        report.append(figures)
        print(json.dumps(figures), flush=True)
    command = f"python benchmarks/whisper_cpu.py --draft-dtype {options.draft_dtype}"
    command += f" --lengths {' '.join(map(str, options.lengths))}"
    command += f" --repeats {options.repeats}"
    command += f" (Whisper {Path(options.target).name}, {Path(options.draft).name})"
    write({"command": command, "machine": machine(), "figures": report}, options.out)


if __name__ == "__main__":
    main()
