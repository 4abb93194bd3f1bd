"""Small complete results, as the measuring commands write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outpace.bench import theory

MACHINE = {
    "device": "Some GPU <80 GB>",
    "python": "3.12.1",
    "torch": "2.12.0",
    "transformers": "5.17.0",
    "triton": None,
    "outpace": "0.1.0",
}
TARGET = "org/Target-7B"
DRAFTS = {"org/Draft-0.5B": (0.812, 1.9), "ngram:texts.arpa": (0.297, 0.02)}  # α, ms of a step
NUM_DRAFT_TOKENS = (*range(9), 12)
TEXT = "The lighthouse keeper counted the ships that passed before dawn, and wrote down every one of them.\n"


def common_fields(kind: str, command: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "date": "2026-11-02T09:30:00+00:00",
        "command": command,
        "machine": MACHINE,
        "target": TARGET,
        "models": ["target            LlamaForCausalLM, torch.bfloat16, cuda, attention sdpa"],
        "data": {"name": "questions.jsonl", "rows": 40, "left_out": 0},
        "complete": True,
    }


def measured() -> dict[str, Any]:
    drafts = [
        {
            "draft": name,
            "lenience": 1.0,
            "alpha": alpha,
            "interval": [alpha - 0.011, alpha + 0.012],
            "draft_tokens": 10240,
            "coverage": 0.987,
            "divergence": 1 - alpha,
            "by_domain": {
                "code": {"alpha": alpha + 0.051, "interval": [alpha, alpha + 0.1], "draft_tokens": 5120},
                "chat": {"alpha": alpha - 0.053, "interval": None, "draft_tokens": 5120},
            },
            "autocorrelation": [0.21, 0.12, None, 0.04, 0.03],
            "chance": 0.05,
            "counted": alpha - 0.006,
            "by_position": [alpha - 0.01 * i for i in range(4)],
            "by_position_intervals": [[alpha - 0.05, alpha + 0.01], [alpha - 0.06, alpha + 0.01], None, None],
            "blocks": {
                "observed": [0.22, 0.15, 0.12, 0.11, 0.4],
                "predicted": theory.accepted_probabilities(alpha, 4).tolist(),
            },
            "step_ms": step,
            "best_g": 5 if step > 1 else 3,
            "predicted": 2.13 if step > 1 else 1.31,
            "predicted_interval": [2.08, 2.19] if step > 1 else [1.29, 1.34],
            "by_batch": [{"B": B, "step_ms": step, "best_g": 4, "predicted": 1.77} for B in (1, 8)],
        }
        for name, (alpha, step) in DRAFTS.items()
    ]
    phases = {"draft": 0.0080, "target": 0.0201, "verify": 0.0004, "other": 0.0011}
    num_accepted = (4, 2, 0, 4, 1, 3, 4, 0, 2, 4, 3, 1, 4, 2)
    iterations = [
        {
            "phases": {name: seconds * (1 + 0.05 * (i % 3)) for name, seconds in phases.items()},
            "num_draft_tokens": 4,
            "num_accepted": n,
        }
        for i, n in enumerate(num_accepted)
    ]
    words = iter([f"{word} " for word in (TEXT * 4).split(" ")])
    pieces = []
    for n in num_accepted:
        pieces += [[next(words), "accepted"] for _ in range(n)]
        pieces.append([next(words), "bonus" if n == 4 else "correction"])
    return common_fields(
        "alpha", "outpace bench alpha -t org/Target-7B -d org/Draft-0.5B -d ngram:texts.arpa"
    ) | {
        "sampling": {"temperature": 0.8, "top_k": 0, "top_p": 0.95},
        "prompts": 40,
        "new_tokens": 10240,
        "drafts": drafts,
        "passes": [{"B": B, "n": n, "ms": 20.25 + 0.13 * n * B} for B in (1, 8) for n in (1, 2, 5, 9, 17)],
        "verify": [
            {"B": B, "g": g, "ms": 0.31 + 0.01 * g * B, "sampled": sampled}
            for sampled in (False, True)
            for B in (1, 8)
            for g in (1, 4, 8, 16)
        ],
        "trace": {"draft": "org/Draft-0.5B", "g": 4, "iterations": iterations, "pieces": pieces},
    }


def swept() -> dict[str, Any]:
    figures = []
    for temperature in (0.0, 1.0):
        for draft, (alpha, step) in DRAFTS.items():
            for g in (*NUM_DRAFT_TOKENS, "auto", "heuristic"):
                n = 5 if isinstance(g, str) else g
                tokens, loop = theory.expected_tokens(alpha, n), 20.5 + n * step
                mean = 128 * loop / tokens
                speed = theory.speedup(alpha, n, step / 20.5)
                figures.append(
                    {
                        "draft": draft,
                        "temperature": temperature,
                        "top_k": 0,
                        "top_p": 1.0,
                        "num_draft_tokens": str(g),
                        "texts": 40,
                        "new_tokens": 5120,
                        "mean_ms": mean,
                        "p50_ms": 0.98 * mean,
                        "p90_ms": 1.2 * mean,
                        "p99_ms": 1.43 * mean,
                        "deviation_ms": 0.02 * (n + 1) * mean,
                        "tokens_per_second": 128e3 / mean,
                        "acceptance": alpha if n else None,
                        "alpha": alpha + 0.01 if n else None,
                        "c": step / 20.5,
                        "tokens_per_pass": tokens,
                        "loop_ms": loop,
                        "speedup": speed,
                        "interval": [0.95 * speed, 1.06 * speed] if n else None,
                        "predicted": None if isinstance(g, str) else 1.04 * speed,
                        "predicted_simple": None if isinstance(g, str) else 1.1 * speed,
                    }
                )
    return common_fields("sweep", "outpace bench sweep -t org/Target-7B --num-draft-tokens 2") | {
        "prompts": 40,
        "batch": 1,
        "settings": {"max_new_tokens": 64},
        "figures": figures,
    }


def tuned() -> dict[str, Any]:
    candidates = [
        {
            "draft": draft,
            "num_draft_tokens": num_draft_tokens,
            "dtype": "bfloat16",
            "rule": "block",
            "batch": 1,
            "expected": expected,
            "interval": interval,
            "verified": verified,
            "why": why,
        }
        for draft, num_draft_tokens, expected, verified, interval, why in (
            ("org/Draft-0.5B", "auto", 2.21, 2.07, [1.98, 2.15], "fastest"),
            ("org/Draft-0.5B", "5", 2.3, 2.02, [1.95, 2.09], "close, but not as fast"),
            (
                "ngram:texts.arpa",
                "3",
                0.81,
                None,
                [0.7, 0.95],
                "cannot pay, because its draft tokens cost too much",
            ),
        )
    ]
    return common_fields("tune", "outpace tune -t org/Target-7B --budget 600") | {
        "sampling": {"temperature": 0.0, "top_k": 0, "top_p": 1.0},
        "prompts": 40,
        "max_new_tokens": 64,
        "budget_seconds": 600,
        "spent_seconds": 412.5,
        "candidates": candidates,
        "chosen": candidates[0],
        "verdict": "Draft with org/Draft-0.5B, g = auto: 2.07 times as fast as the baseline.",
        "config": '{"target": "org/Target-7B", "draft": "org/Draft-0.5B"}',
        "transformers": "model.generate(**inputs, custom_generate=outpace.generate, draft=small)",
        "vllm": "vllm serve org/Target-7B --speculative-config '{\"num_speculative_tokens\": 5}'",
    }


def evaluated(temperature: float = 0.0, rows: int = 4) -> list[dict[str, Any]]:
    """Return the lines of an `outpace eval summarize` journal; `exact` is twice as fast as `baseline`."""
    header = {
        "task": "summarize",
        "target": "org/Target-7B",
        "draft": "org/Draft-0.5B",
        "settings": {
            "models": [
                *common_fields("eval", "")["models"],
                "drafter           ModelDrafter",
                "num_draft_tokens  Fixed(5)",
            ],
            "max_new_tokens": 64, "temperature": temperature, "samples": 1, "seed": 3,
        },
        "every": 1,
        "data": {"name": "articles.jsonl", "sha256": "0" * 64, "rows": rows},
        "machine": MACHINE,
        "command": "outpace eval summarize -t org/Target-7B --data articles.jsonl",
    }  # fmt: skip
    lines: list[dict[str, Any]] = [header]
    for row in range(rows):
        for runner, speedup in (("baseline", 1.0), ("exact", 2.0 + 0.1 * (row % 2))):
            text = f"A summary of article {row}." if row or runner == "baseline" else "Another summary."
            lines.append(
                {
                    "runner": runner,
                    "row": row,
                    "id": f"article/{row}",
                    "texts": [text],
                    "token_ids": [[1, 2, 3]],
                    "seconds": (2.0 + row) / speedup,
                    "stats": {
                        "new_tokens": 60, "target_passes": 60 if runner == "baseline" else 25,
                        "draft_tokens": 0 if runner == "baseline" else 100,
                        "accepted_tokens": 0 if runner == "baseline" else 35,
                        "draft_tokens_by_position": [], "accepted_by_position": [],
                    },
                    "judged": [{"ROUGE-1": 30.0 + row, "ROUGE-2": 10.0 + row, "ROUGE-L": 20.0 + row}],
                }
            )  # fmt: skip
    return lines


def save_journal(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def save(folder: Path, **contents: dict[str, Any]) -> list[str]:
    """Write each content to a JSON file of its name, and return the paths."""
    paths = []
    for name, content in contents.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(content))
        paths.append(str(path))
    return paths
