"""`outpace bench`: measurements that anyone can repeat."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

bench = typer.Typer(help="Measure, and compare with others in the same run.", no_args_is_help=True)


@bench.callback()
def group() -> None: ...


@bench.command()
def kernel(
    vocab: Annotated[list[int] | None, typer.Option(min=2, help="Vocabulary sizes; repeat it.")] = None,
    drafts: Annotated[list[int] | None, typer.Option(min=1, help="Drafted tokens, g; repeat it.")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Rows, B; repeat it.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu; by default a GPU if there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    peers: Annotated[
        Path | None,
        typer.Option(
            help="Folder of Python files to time too, each with "
            "verify(draft_tokens, draft_logits, target_logits)."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the figures to this JSON file.")] = None,
) -> None:
    """Time verification (rule token): our kernels, our eager path, Transformers' function, and peers."""
    import torch
    import transformers
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    import outpace
    from outpace.bench import kernel as timing

    if dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"dtype: got {dtype!r}; it must be bfloat16, float16 or float32")
    if peers is not None and not peers.is_dir():
        raise ValueError(f"peers: {peers} is no folder")
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: there is no CUDA device here")
    others = timing.peers(peers) if peers is not None else {}
    sizes = (vocab or timing.VOCABULARIES, drafts or timing.DRAFTS, batch or timing.BATCHES)
    total = len(sizes[0]) * len(sizes[1]) * sum(2 + (B <= 8) + len(others) for B in sizes[2])
    stderr = Console(file=sys.stderr)
    figures = list(
        track(
            timing.measure(place, getattr(torch, dtype), *sizes, others),
            total=total,
            description="measuring",
            console=stderr,
            disable=not stderr.is_terminal,
        )
    )
    table = Table(title=f"verification, {dtype}, µs a call")
    for name in ("side", "V", "g", "B", "graph cold", "graph hot", "eager", "floor", "GB/s", "peak KiB"):
        table.add_column(name, justify="left" if name == "side" else "right")
    for one in figures:
        kib = None if one.peak_bytes is None else round(one.peak_bytes / 1024)
        cells = (one.V, one.g, one.B, one.graph_cold, one.graph_hot, one.eager, one.floor)
        table.add_row(one.side, *map(said, (*cells, one.gigabytes_per_second, kib)))
    Console(width=110 if not sys.stdout.isatty() else None).print(table)
    if out is not None:
        report: dict[str, Any] = {
            "command": " ".join(
                ["outpace", *(Path(one).name if "/" in one else one for one in sys.argv[1:])]
            ),
            "machine": {
                "device": torch.cuda.get_device_name() if place.type == "cuda" else platform.processor(),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "outpace": outpace.__version__,
            },
            "figures": timing.rows(figures),
        }
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")


def said(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"
