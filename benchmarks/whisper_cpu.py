"""What drafting and batches bring Whisper on a CPU: passes, time, and that texts stay the same.

    python benchmarks/whisper_cpu.py --target whisper/base --draft whisper/tiny --speech speech

The folder of speech holds manifest.jsonl, lines with `audio`, a file beside it, and `text`, what is said. All
sides take turns, greedy, float32, without fallback. Time after the encoders is drafting, the target's passes
and verification; the total has features, encoders, the draft's among them, and the keys and values that the
decoders take from those.
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
    """Texts, passes and seconds of all files."""
    one.stats, one.seconds = Stats(), 0.0
    texts = [found.text for found in one(files, language="en", fallback=False, batch_size=batch_size)]
    after = one.stats.seconds - one.stats.encode_seconds
    return {
        "texts": texts,
        "passes": one.stats.target_passes,
        "tokens": one.stats.new_tokens,
        "acceptance": round(one.stats.acceptance_rate, 4),
        "after_encoders": after,
        "total": one.seconds,
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--target", required=True, help="a folder with a Whisper model")
    parser.add_argument("--draft", required=True, help="a folder with a smaller one")
    parser.add_argument("--speech", type=Path, required=True, help="a folder with manifest.jsonl")
    parser.add_argument("--draft-dtype", default="float32", help="of the draft; the target's is float32")
    parser.add_argument("--lengths", type=int, nargs="+", default=[3, 4, 5], help="drafts a pass")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    lines = [json.loads(line) for line in (given.speech / "manifest.jsonl").read_text().splitlines()]
    files = [given.speech / line["audio"] for line in lines]
    target, draft = (
        WhisperForConditionalGeneration.from_pretrained(name, trust_remote_code=False).float().eval()
        for name in (given.target, given.draft)
    )
    draft = draft.to(getattr(torch, given.draft_dtype))
    processor = WhisperProcessor.from_pretrained(given.target, trust_remote_code=False)
    sides = {"plain": Transcriber(Decoder(target, pack=True), processor)}
    for g in given.lengths:
        decoder = Decoder(target, draft, num_draft_tokens=Fixed(g), pack=True)
        sides[f"g = {g}"] = Transcriber(decoder, processor)
    batches = {1: files, 8: files[:8], -1: files[:8]}  # the last is one by one of the same eight
    found: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for _ in range(given.repeats):
        for name, side in sides.items():
            for key, some in batches.items():
                found.setdefault((name, key), []).append(run(side, some, abs(key)))
    normal = processor.tokenizer.normalize
    truth = [normal(line["text"]) for line in lines]
    report: list[dict[str, Any]] = []
    for (name, key), runs in found.items():
        plain, alike, count = found["plain", key], found["plain", 1][0]["texts"], len(batches[key])
        ratios = {
            what: round(statistics.median(a[what] / b[what] for a, b in zip(runs, plain, strict=True)), 3)
            for what in ("after_encoders", "total")
        }
        figures: dict[str, Any] = {
            "side": name,
            "files": count,
            "batch_size": abs(key),
            "texts_equal_plain_one_by_one": runs[0]["texts"] == alike[:count],
            "wer": round(jiwer.wer(truth[:count], [normal(text) for text in runs[0]["texts"]]), 4),
            "passes": runs[0]["passes"],
            "passes_fewer": round(plain[0]["passes"] / runs[0]["passes"], 3),
            "tokens": runs[0]["tokens"],
            "acceptance": runs[0]["acceptance"],
            **{f"{what}_seconds": round(statistics.median(r[what] for r in runs), 3) for what in ratios},
            **{f"{what}_of_plain": ratio for what, ratio in ratios.items()},
        }
        if key == 8:
            alone = found[name, -1]
            for what in ratios:
                speed = statistics.median(a[what] / b[what] for a, b in zip(alone, runs, strict=True))
                figures[f"{what}_speedup_of_batch"] = round(speed, 3)
        report.append(figures)
        print(json.dumps(figures), flush=True)
    command = f"python benchmarks/whisper_cpu.py --draft-dtype {given.draft_dtype}"
    command += f" --lengths {' '.join(map(str, given.lengths))}"
    command += f" --repeats {given.repeats} (Whisper {Path(given.target).name}, {Path(given.draft).name})"
    write({"command": command, "machine": machine(), "figures": report}, given.out)


if __name__ == "__main__":
    main()
