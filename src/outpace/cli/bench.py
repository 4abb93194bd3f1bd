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
from outpace.checks.files import check_distinct, check_folder, check_output, write_atomic
from outpace.cli import checks
from outpace.cli.options import (
    SHOW,
    BatchSizes,
    BenchDevice,
    BenchDtype,
    BenchResultFile,
    DraftLengths,
    Plot,
    VocabSizes,
)
from outpace.cli.show import screen

if TYPE_CHECKING:
    import torch

    from outpace.bench.profile import Bounds, StepTiming

bench = typer.Typer(
    help="Measure outpace beside other implementations, in the same run.", no_args_is_help=True
)

Figure = TypeVar("Figure")


@bench.callback()
def group() -> None:
    """Group the commands of ``outpace bench``."""


@bench.command()
def kernel(
    vocab: VocabSizes = None,
    num_draft_tokens: DraftLengths = None,
    batch: BatchSizes = None,
    device: BenchDevice = None,
    dtype: BenchDtype = "bfloat16",
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
            "--filtered",
            help="Use temperature 0.8, top-k 50 and top-p 0.95. Then verify_filtered of the files in --peers "
            "is timed; files without it are left out.",
        ),
    ] = False,
    out: BenchResultFile = None,
) -> None:
    """Time verification with rule token, in outpace, Transformers and other projects (--peers).

    outpace is timed twice: outpace.verify, with Triton kernels on a GPU, and
    outpace eager, in plain PyTorch.
    """
    if peers is not None and not peers.is_dir():
        raise ValueError(f"--peers: {peers} is not a folder")
    check_files(out)
    torch_device, torch_dtype = parse_device(device, dtype)
    from outpace.bench import kernel as timing

    peer_methods = timing.peers(peers, filtered) if peers is not None else {}
    sizes = (vocab or timing.VOCABULARIES, num_draft_tokens or timing.DRAFT_LENGTHS, batch or timing.BATCHES)
    methods_per_batch = (
        len(timing.own_methods(B, torch_device, filtered)) + len(peer_methods) for B in sizes[2]
    )
    total = len(sizes[0]) * len(sizes[1]) * sum(methods_per_batch)
    figures = with_progress(timing.measure(torch_device, torch_dtype, *sizes, peer_methods, filtered), total)
    names = ("method", "V", "g", "B", "graph cold", "graph hot", "eager", "floor", "GB/s", "peak KiB")
    cells = [
        (
            *(one.method, one.V, one.g, one.B, one.graph_cold, one.graph_hot, one.eager, one.floor),
            *(one.gigabytes_per_second, kib(one.peak_bytes)),
        )
        for one in figures
    ]
    show(f"verification, {dtype}, µs per call", names, cells)
    write(out, torch_device, figures=figures)


@bench.command()
def profile(
    vocab: VocabSizes = None,
    num_draft_tokens: DraftLengths = None,
    device: BenchDevice = None,
    dtype: BenchDtype = "float32",  # of the logits in Transformers' assisted generation
    out: BenchResultFile = None,
) -> None:
    """Time the sampling step (B = 1) of Transformers, of the exact rule and of the sigmoid rule.

    The default sizes are the vocabularies of Llama 2, Whisper, Llama 3, Qwen and
    Gemma, and g from 1 to 20. Logits are synthetic. Their default dtype is that of
    Transformers' assisted generation.

    B is the number of sequences, and g the number of draft tokens.

    Methods: "transformers" is Transformers' function. "exact" is outpace's
    verification. "drop-in" is outpace's function that patch() installs in
    Transformers; the CPU waits for its result. "sigmoid" is the approximation of
    Wagner et al. 2024.

    Times: "eager" is a call from Python. "graph" is a call inside a CUDA graph.
    "device" is the time that the GPU was busy. A CPU has only "eager".

    The column "saved" is the part of Transformers' time that a method saves. A CUDA
    graph cannot record Transformers' function. So the saving in a graph is relative
    to Transformers' eager time.

    The column "accepted" is the probability that a draft token is accepted. The
    column "distance" is the total variation between the distribution of the output
    token and the target's. The column "bonus" is this distance for the bonus token,
    which follows when all draft tokens are accepted. The last table has these
    figures for several scales S: the rule sigmoid(-S,S) uses the sigmoid of
    (logit + S)/(2 S) instead of a probability.
    """
    check_files(out)
    torch_device, torch_dtype = parse_device(device, dtype)
    from outpace.bench import distance, vocabulary
    from outpace.bench import profile as timing

    vocabularies = [vocabulary.of_size(V) for V in vocab] if vocab else vocabulary.VOCABULARIES
    lengths = num_draft_tokens or timing.DRAFT_LENGTHS
    # `main` disables garbage collection, but the profiler's events are reference cycles and would pile up.
    gc.freeze()
    gc.enable()
    total = sum(len(lengths) * len(timing.methods(one)) for one in vocabularies)
    figures = with_progress(timing.measure(torch_device, torch_dtype, vocabularies, lengths), total)
    worst, scales = timing.bounds(figures), distance.scaling(torch_device, torch_dtype, vocabularies)

    names = ("eager", "saved", "graph", "saved", "device", "saved")
    show(
        f"sampling step, {dtype}, µs, and % saved against Transformers",
        ("vocabulary", "g", "method", *names, "GB/s", "peak KiB", "accepted", "distance"),
        [
            (
                *(one.vocabulary, one.g, one.method, *spread(one, "microseconds", "saved")),
                *(one.gigabytes_per_second, kib(one.peak_bytes)),
                *(one.quality.acceptance, one.quality.distance),
            )
            for one in figures
        ],
    )
    show(
        "over all g: least % saved against Transformers, most by sigmoid on exact",
        ("vocabulary", "method", "eager", "on exact", "graph", "on exact", "device", "on exact", "distance"),
        [
            (one.vocabulary, one.method, *spread(one, "saved", "saved_on_exact"), one.quality.distance)
            for one in worst
            if one.method != "transformers"
        ],
    )
    show(
        "scale of the sigmoid",
        ("vocabulary", "rule", "accepted", "distance", "bonus"),
        [(one.vocabulary, one.rule, *dataclasses.astuple(one.quality)) for one in scales],
    )
    write(out, torch_device, figures=figures, bounds=worst, scaling=scales)


@bench.command()
def engine(
    pair: Annotated[
        list[str] | None, typer.Option(help="Pairs of shapes, such as llama2-7b/1.3b; may be repeated.")
    ] = None,
    alpha: Annotated[
        list[float] | None, typer.Option(min=0.0, max=1.0, help="Acceptance rates; may be repeated.")
    ] = None,
    num_draft_tokens: DraftLengths = None,
    batch: BatchSizes = None,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Prompt lengths in tokens; may be repeated.")
    ] = None,
    device: BenchDevice = None,
    dtype: BenchDtype = "bfloat16",
    full: Annotated[bool, typer.Option("--full", help="Measure the whole grid, which takes hours.")] = False,
    # Unlike in the other commands, a stopped run continues with the same file.
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Write results to this JSON file; those already in it are not measured again.",
            rich_help_panel=SHOW,
        ),
    ] = None,
    plot: Plot = None,
) -> None:
    """Measure throughput on whole texts: outpace's engine and Transformers, with and without speculation.

    Models are synthetic pairs with the layer sizes of real models and a chosen
    acceptance rate. Transformers is measured in three ways: generate, generate with a
    static cache and torch.compile, and assisted generation.

    Without flags, a selection of cases is measured; it includes every pair. With
    --pair, --alpha, --num-draft-tokens, --batch or --context, all combinations of
    the given values are measured. The others have one value each: --pair
    llama2-7b/1.3b, --alpha 0.8, --num-draft-tokens 5, --batch 1, --context 128.

    The column "predicted" is the throughput by Theorem 3.8 of Leviathan et al. 2023.
    It uses the measured throughput without speculation and the measured time to draft
    one token. The column "floor" is the time to read a step's weights and KV caches at
    the GPU's measured copy bandwidth.
    """
    check_files(out, plot)
    torch_device, torch_dtype = parse_device(device, dtype)
    from outpace.bench import engine as timing
    from outpace.bench.synthetic import PAIRS

    unknown = sorted(set(pair or ()) - set(PAIRS))
    if unknown:
        raise ValueError(
            f"--pair: got {unknown[0]!r}; there are {', '.join(PAIRS)}{suggestion(unknown[0], PAIRS)}"
        )
    cases = timing.select_cases(full)
    if pair or alpha or num_draft_tokens or batch or context:
        cases = [
            timing.Case(name, one, g, B, T)
            for name in pair or [next(iter(PAIRS))]
            for one in alpha or [0.8]
            for T in context or [timing.CONTEXTS[0]]
            for B in batch or [1]
            for g in num_draft_tokens or [5]
        ]
    known, earlier_commands = list[timing.Throughput](), ""
    if out is not None and out.exists():
        from outpace.bench.machine import machine

        try:
            previous = json.loads(out.read_text(encoding="utf-8"))
            known = [timing.Throughput(**one) for one in previous["figures"]]
            earlier_commands = previous["command"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"--out: {out}: it was not written by `outpace bench engine`") from None
        if (previous.get("machine"), previous.get("dtype")) != (machine(torch_device), dtype):
            raise ValueError(
                f"--out: {out} has figures of another machine, version or dtype; name another file"
            )
    figures = {one.key: one for one in known}

    def measure_and_save() -> Iterable[timing.Throughput]:
        for one in timing.measure(torch_device, torch_dtype, cases, known):
            figures[one.key] = one
            write(out, torch_device, {"dtype": dtype}, earlier_commands, figures=[*figures.values()])
            yield one

    with_progress(measure_and_save(), len(cases) * len(timing.METHODS))
    show(
        f"whole texts, {dtype}",
        ("method", "pair", "α", "g", "B", "context", "tokens/s", "per step", "ms", "draft", "target", "idle",
         "floor", "predicted"),
        [dataclasses.astuple(one) for one in figures.values()],
    )  # fmt: skip
    if plot is not None:
        from outpace.bench.engine_plot import save_plot

        save_plot([*figures.values()], plot)


def check_files(out: Path | None, plot: Path | None = None) -> None:
    """Refuse files that cannot be written, before anything is measured."""
    if out is not None:
        check_folder("--out", out.parent)  # created if missing
        if out.parent.exists():
            check_output("--out", out)
    if plot is not None:
        from outpace.bench.curves import backend

        backend(plot)
    check_distinct(("--out", out), ("--plot", plot))


def parse_device(device: str | None, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Return the device and dtype that the flags name. No device is CUDA if the machine has it, else the CPU.

    Raises:
        ValueError: A flag does not fit, or there is no such device.
    """
    dtype = checks.dtype(dtype)
    if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"--device: got {device!r}; it must be auto, cpu or cuda")
    import torch

    torch_device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if torch_device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device: this machine has no CUDA device; use cpu")
    return torch_device, getattr(torch, dtype)


def with_progress(figures: Iterable[Figure], total: int) -> list[Figure]:
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
        table.add_row(*map(format_cell, row))
    console = screen(sys.stdout)
    if not sys.stdout.isatty():
        console.width = 160
    console.print(table)


def format_cell(value: str | float | None) -> str:
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
    torch_device: torch.device,
    settings: Mapping[str, Any] | None = None,
    earlier_commands: str = "",
    **figures: Sequence[Any],
) -> None:
    """Write figures with command, machine and settings to a JSON file.

    Args:
        out: The file; None writes nothing.
        torch_device: Device of the measurement.
        settings: Settings of the measurement.
        earlier_commands: Commands that measured earlier figures in the file.
        **figures: Figures, by the name of their part.
    """
    if out is None:
        return
    from outpace.bench.machine import machine

    commands = dict.fromkeys([*filter(None, earlier_commands.split("; ")), command()])
    report: dict[str, Any] = {
        "command": "; ".join(commands),
        "machine": machine(torch_device),
        **(settings or {}),
    }
    report |= {name: [dataclasses.asdict(one) for one in some] for name, some in figures.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, json.dumps(report, indent=1) + "\n")


def command() -> str:
    """Return the command line, without the folders of files on this machine."""
    return shlex.join(["outpace", *map(bare, sys.argv[1:])])


def bare(name: str) -> str:
    """Return the last part of an absolute path; any other name as it is."""
    kind, colon, path = name.partition(":")  # ngram:FILE
    if colon and Path(path).is_absolute():
        return f"{kind}:{Path(path).name}"
    return Path(name).name if Path(name).is_absolute() else name
