"""``outpace bench``: measurements that anyone can repeat."""

from __future__ import annotations

import dataclasses
import gc
import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from outpace.checks.errors import suggestion
from outpace.checks.files import check_apart, check_folder, check_out, write_whole
from outpace.cli import checks
from outpace.cli.options import MOST_ROWS
from outpace.cli.show import screen

if TYPE_CHECKING:
    import torch

    from outpace.bench.profile import Bounds, StepTiming

bench = typer.Typer(help="Measure, and compare with others in the same run.", no_args_is_help=True)

Vocab = Annotated[list[int] | None, typer.Option(min=2, help="Vocabulary sizes; may be repeated.")]
NumDraftTokens = Annotated[
    list[int] | None, typer.Option(min=1, help="Draft tokens per step, g; may be repeated.")
]
Device = Annotated[str, typer.Option(help="cuda or cpu. Default: CUDA where there is one.")]
Dtype = Annotated[str, typer.Option(callback=checks.dtype, help="bfloat16, float16 or float32.")]
Out = Annotated[Path | None, typer.Option(help="Write results to this JSON file.")]

One = TypeVar("One")


@bench.callback()
def group() -> None:
    """Group the commands of ``outpace bench``."""


@bench.command()
def kernel(
    vocab: Vocab = None,
    num_draft_tokens: NumDraftTokens = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, max=MOST_ROWS, help="Batch sizes, B; may be repeated.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "bfloat16",
    peers: Annotated[
        Path | None,
        typer.Option(
            help="Folder of Python files to time too, each with "
            "verify(draft_tokens, draft_logits, target_logits)."
        ),
    ] = None,
    filtered: Annotated[
        bool,
        typer.Option(
            "--filtered", help="Use temperature 0.8, top-k 50, top-p 0.95; of peers, call verify_filtered."
        ),
    ] = False,
    out: Out = None,
) -> None:
    """Time verification (rule token): our kernels, our eager path, Transformers' function, and peers."""
    if peers is not None and not peers.is_dir():
        raise ValueError(f"peers: {peers} is no folder")
    check_files(out)
    place, kind = where(device, dtype)
    from outpace.bench import kernel as timing

    others = timing.peers(peers, filtered) if peers is not None else {}
    sizes = (vocab or timing.VOCABULARIES, num_draft_tokens or timing.DRAFTS, batch or timing.BATCHES)
    at_each = (len(timing.own_sides(B, place, filtered)) + len(others) for B in sizes[2])
    total = len(sizes[0]) * len(sizes[1]) * sum(at_each)
    figures = watched(timing.measure(place, kind, *sizes, others, filtered), total)
    names = ("side", "V", "g", "B", "graph cold", "graph hot", "eager", "floor", "GB/s", "peak KiB")
    cells = [
        (
            *(one.side, one.V, one.g, one.B, one.graph_cold, one.graph_hot, one.eager, one.floor),
            *(one.gigabytes_per_second, kib(one.peak_bytes)),
        )
        for one in figures
    ]
    show(f"verification, {dtype}, µs a call", names, cells)
    write(out, place, figures=figures)


@bench.command()
def profile(
    vocab: Vocab = None,
    num_draft_tokens: NumDraftTokens = None,
    device: Device = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            callback=checks.dtype,
            help="bfloat16, float16 or float32, which is what Transformers' assisted generation has its "
            "logits in.",
        ),
    ] = "float32",
    out: Out = None,
) -> None:
    """Time one sampling step (B = 1) beside Transformers', exact and sigmoid.

    By default for the vocabularies of Llama 2, Whisper, Llama 3, Qwen and
    Gemma and g from 1 to 20, on synthetic logits.

    Sides: Transformers' function; exact, our verification; drop-in, the same
    as patch() puts it into Transformers, waiting for the outcome; sigmoid, the
    approximation of Wagner et al. 2024.

    Times: eager is from Python; graph inside a CUDA graph, where Transformers'
    function cannot be, so that its saving is against eager; device what the
    GPU itself was at work. On a CPU there is eager alone.

    kept is the probability that a draft is kept; distance the total variation
    between the token that comes out and the target's distribution; bonus that
    of the token after drafts that were all kept. The last table has them for
    several scales of the sigmoid.
    """
    check_files(out)
    place, kind = where(device, dtype)
    from outpace.bench import distance, vocabulary
    from outpace.bench import profile as timing

    vocabularies = [vocabulary.of_size(V) for V in vocab] if vocab else vocabulary.VOCABULARIES
    lengths = num_draft_tokens or timing.DRAFTS
    # `main` disables garbage collection, and the profiler's events refer to one another: they would pile up.
    gc.freeze()
    gc.enable()
    total = sum(len(lengths) * len(timing.sides(one)) for one in vocabularies)
    figures = watched(timing.measure(place, kind, vocabularies, lengths), total)
    worst, scales = timing.bounds(figures), distance.scaling(place, kind, vocabularies)

    names = ("eager", "saved", "graph", "saved", "device", "saved")
    show(
        f"sampling step, {dtype}, µs, and % saved against Transformers",
        ("vocabulary", "g", "side", *names, "GB/s", "peak KiB", "kept", "distance"),
        [
            (
                *(one.vocabulary, one.g, one.side, *spread(one, "microseconds", "saved")),
                *(one.gigabytes_per_second, kib(one.peak_bytes)),
                *(one.quality.acceptance, one.quality.distance),
            )
            for one in figures
        ],
    )
    show(
        "over all g: least % saved against Transformers, most by sigmoid on exact",
        ("vocabulary", "side", "eager", "on exact", "graph", "on exact", "device", "on exact", "distance"),
        [
            (one.vocabulary, one.side, *spread(one, "saved", "saved_on_exact"), one.quality.distance)
            for one in worst
            if one.side != "transformers"
        ],
    )
    show(
        "scale of the sigmoid",
        ("vocabulary", "rule", "kept", "distance", "bonus"),
        [(one.vocabulary, one.rule, *dataclasses.astuple(one.quality)) for one in scales],
    )
    write(out, place, figures=figures, bounds=worst, scaling=scales)


@bench.command()
def engine(
    pair: Annotated[
        list[str] | None, typer.Option(help="Pairs of shapes, such as llama2-7b/1.3b; may be repeated.")
    ] = None,
    alpha: Annotated[
        list[float] | None, typer.Option(min=0.0, max=1.0, help="Acceptance rates; may be repeated.")
    ] = None,
    num_draft_tokens: NumDraftTokens = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, max=MOST_ROWS, help="Batch sizes, B; may be repeated.")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Prompt lengths in tokens; may be repeated.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "bfloat16",
    full: Annotated[bool, typer.Option("--full", help="Measure the whole grid, which takes hours.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write results to this JSON file; those already in it are not measured again."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot them to this file (.svg, .png, .pdf); needs matplotlib.")
    ] = None,
) -> None:
    """Time whole texts: Transformers' generation beside our engine, with and without speculation.

    Models are synthetic pairs with real shapes and a chosen acceptance rate.
    Transformers runs plain, with a static compiled cache, and assisted.

    By default a selection that has every pair and column; naming any size
    takes all combinations of those that are named with the first of the others.

    predicted is Theorem 3.8 of Leviathan et al. 2023 with our plain speed and
    the measured time of a draft's step; floor what reading all weights and
    caches of an iteration takes at a large copy's bandwidth.
    """
    check_files(out, plot)
    place, kind = where(device, dtype)
    from outpace.bench import engine as timing
    from outpace.bench.synthetic import PAIRS

    unknown = sorted(set(pair or ()) - set(PAIRS))
    if unknown:
        raise ValueError(
            f"pair: got {unknown[0]!r}; there are {', '.join(PAIRS)}{suggestion(unknown[0], PAIRS)}"
        )
    cases = timing.chosen(full)
    if pair or alpha or num_draft_tokens or batch or context:
        cases = [
            timing.Case(name, one, g, B, T)
            for name in pair or [next(iter(PAIRS))]
            for one in alpha or [0.8]
            for T in context or [timing.CONTEXTS[0]]
            for B in batch or [1]
            for g in num_draft_tokens or [5]
        ]
    known, earlier = [], ""
    if out is not None and out.exists():
        from outpace.bench.machine import machine

        try:
            before = json.loads(out.read_text(encoding="utf-8"))
            before["figures"], before["command"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"--out: {out}: it was not written by `outpace bench engine`") from None
        if (before.get("machine"), before.get("dtype")) != (machine(place), dtype):
            raise ValueError(f"out: the figures in {out} are of another machine, version or dtype")
        known, earlier = [timing.Throughput(**one) for one in before["figures"]], before["command"]
    figures = {one.key: one for one in known}

    def kept() -> Iterable[timing.Throughput]:
        for one in timing.measure(place, kind, cases, known):
            figures[one.key] = one
            write(out, place, {"dtype": dtype}, earlier, figures=[*figures.values()])
            yield one

    watched(kept(), len(cases) * len(timing.SIDES))
    show(
        f"whole texts, {dtype}",
        ("side", "pair", "α", "g", "B", "context", "tokens/s", "a pass", "ms", "draft", "target", "idle",
         "floor", "predicted"),
        [dataclasses.astuple(one) for one in figures.values()],
    )  # fmt: skip
    if plot is not None:
        from outpace.bench.plot import draw

        draw([*figures.values()], plot)


def check_files(out: Path | None, plot: Path | None = None) -> None:
    """Refuse files that cannot be written, before anything is measured."""
    if out is not None:
        check_folder("--out", out.parent)  # it is made if it is missing
        if out.parent.exists():
            check_out("--out", out)
    if plot is not None:
        from outpace.bench.curves import backend

        backend(plot)
    check_apart(("--out", out), ("--plot", plot))


def where(device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Return the device and dtype that the flags name.

    Raises:
        ValueError: A flag does not fit, or there is no such device.
    """
    dtype = checks.dtype(dtype)
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ValueError(f"--device: got {device!r}; it must be cpu or cuda")
    import torch

    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: there is no CUDA device here")
    return place, getattr(torch, dtype)


def watched(figures: Iterable[One], total: int) -> list[One]:
    """Return all figures, with a progress bar on a terminal while they are measured."""
    from rich.console import Console
    from rich.progress import track

    stderr = Console(file=sys.stderr)
    hidden = not stderr.is_terminal
    return list(track(figures, total=total, description="measuring", console=stderr, disable=hidden))


def show(title: str, names: Sequence[str], rows: Iterable[Sequence[str | float | None]]) -> None:
    """Print a table on stdout, numbers aligned to the right."""
    from rich.table import Table

    made, table = [*rows], Table(title=title)
    for name, first in zip(names, made[0], strict=True):
        table.add_column(name, justify="left" if isinstance(first, str) else "right")
    for row in made:
        table.add_row(*map(said, row))
    console = screen(sys.stdout)
    if not sys.stdout.isatty():
        console.width = 160
    console.print(table)


def said(value: str | float | None) -> str:
    """Return a cell of the table."""
    if isinstance(value, str):
        return value
    return "–" if value is None else f"{value:g}"


def spread(one: StepTiming | Bounds, *fields: str) -> list[float | None]:
    """Return these fields of the eager, graph and device times, one after the other."""
    return [getattr(time, field) for time in (one.eager, one.graph, one.device) for field in fields]


def kib(count: int | None) -> int | None:
    """Return bytes as KiB; None stays None."""
    return None if count is None else round(count / 1024)


def write(
    out: Path | None,
    place: torch.device,
    settings: Mapping[str, Any] | None = None,
    earlier: str = "",
    **figures: Sequence[Any],
) -> None:
    """Write figures with command, machine and settings to a JSON file.

    Args:
        out: The file; None writes nothing.
        place: Device that was measured on.
        settings: Settings of the measurement.
        earlier: Commands that earlier figures in the file came from.
        **figures: Figures, by the name of their part.
    """
    if out is None:
        return
    from outpace.bench.machine import machine

    commands = dict.fromkeys([*filter(None, earlier.split("; ")), command()])
    report: dict[str, Any] = {"command": "; ".join(commands), "machine": machine(place), **(settings or {})}
    report |= {name: [dataclasses.asdict(one) for one in some] for name, some in figures.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, json.dumps(report, indent=1) + "\n")


def command() -> str:
    """Return the command line, without the folders of files on this machine."""
    return shlex.join(["outpace", *map(bare, sys.argv[1:])])


def bare(name: str) -> str:
    """Return the last part of an absolute path; any other name as it is."""
    kind, colon, path = name.partition(":")  # ngram:FILE
    if colon and Path(path).is_absolute():
        return f"{kind}:{Path(path).name}"
    return Path(name).name if Path(name).is_absolute() else name
