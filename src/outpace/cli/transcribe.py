"""``outpace transcribe``: speech in files to text."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.checks.files import check_folder, check_output, write_atomic
from outpace.cli import checks
from outpace.cli.config import drop_num_draft_tokens
from outpace.cli.models import check_models, parse_policy
from outpace.cli.options import (
    MAX_SEQUENCES,
    MODELS,
    SHOW,
    Config,
    Device,
    Dtype,
    NumDraftTokens,
    Revision,
    RuleName,
    TrustRemoteCode,
)
from outpace.cli.show import note

if TYPE_CHECKING:
    from outpace.tasks.transcribe import Transcriber, Transcript

SPEECH = "Speech"


Format = StrEnum("Format", ["txt", "srt", "vtt", "json"])
Task = StrEnum("Task", {"TRANSCRIBE": "transcribe", "TRANSLATE": "translate"})


def transcribe(
    files: Annotated[list[Path], typer.Argument(help="Sound: wav, flac, mp3, ogg, ... of any length.")],
    config: Config = None,
    target: Annotated[
        str,
        typer.Option(
            "--target",
            "-t",
            metavar="MODEL",
            help="A Whisper model: hub id or folder.",
            rich_help_panel=MODELS,
        ),
    ] = "openai/whisper-base",
    draft: Annotated[
        str,
        typer.Option(
            "--draft",
            "-d",
            callback=drop_num_draft_tokens,
            metavar="MODEL|lookup|none",
            help="The drafter: a smaller Whisper model, prompt lookup, or none.",
            rich_help_panel=MODELS,
        ),
    ] = "none",
    rule: RuleName = "token",
    num_draft_tokens: NumDraftTokens = None,
    device: Device = None,
    dtype: Dtype = None,
    draft_dtype: Annotated[
        str | None,
        typer.Option(
            callback=checks.dtype,
            help="Dtype of the draft model. Default: the target's.",
            metavar="DTYPE",
            rich_help_panel=MODELS,
        ),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    revision: Revision = None,
    language: Annotated[
        str | None,
        typer.Option(
            "--language",
            "-l",
            help="A code or a name, such as en or german. Default: detected in each file.",
            rich_help_panel=SPEECH,
        ),
    ] = None,
    task: Annotated[
        Task, typer.Option(help="transcribe, or translate into English.", rich_help_panel=SPEECH)
    ] = Task.TRANSCRIBE,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="Add timestamps to the text.", rich_help_panel=SPEECH)
    ] = False,
    fallback: Annotated[
        bool,
        typer.Option(
            help="Try higher temperatures where a text repeats itself or is unlikely.", rich_help_panel=SPEECH
        ),
    ] = True,
    seed: Annotated[
        int | None,
        typer.Option(
            callback=checks.number("seed"),
            help="Seed for sampling at higher temperatures.",
            rich_help_panel=SPEECH,
        ),
    ] = None,
    batch: Annotated[
        int,
        typer.Option(
            min=1, max=MAX_SEQUENCES, help="Files that are transcribed at a time.", rich_help_panel=SPEECH
        ),
    ] = 8,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Write one text file per sound file into this folder.",
            rich_help_panel=SHOW,
        ),
    ] = None,
    format: Annotated[
        Format, typer.Option("--format", help="Format of the output.", rich_help_panel=SHOW)
    ] = Format.txt,
) -> None:
    """Transcribe speech. Texts go to stdout, or into files; progress and statistics to stderr.

    Audio windows, timestamps, skipping of silence and temperature fallback work
    as in Transformers' Whisper.
    """
    if out is not None:
        check_folder("--out", out)
    names = [path.stem for path in files]
    if out is not None and len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"--out: several files are named {twice}, and would be written over each other")
    if out is not None and out.is_dir():
        for path in files:
            check_output("--out", file_of(out, path, format))
    if out is None and len(files) > 1 and format in (Format.srt, Format.vtt):
        raise ValueError(f"--format: {format} of several files needs a folder for them; give --out")
    check_models(target, draft, rule, num_draft_tokens=num_draft_tokens)
    if not any(path.is_file() for path in files):
        raise ValueError(f"{files[0]}: no such file")
    from outpace.tasks.transcribe import Transcriber, language_code

    if language is not None:
        language_code(language)
    policy = parse_policy(num_draft_tokens)
    options: dict[str, Any] = {} if policy is None else {"num_draft_tokens": policy}
    transcriber = Transcriber.load(
        target,
        draft,
        device=device,
        dtype=dtype,
        draft_dtype=draft_dtype,
        tell=note,
        trust_remote_code=trust_remote_code,
        revision=revision,
        rule=rule,
        **options,
    )
    failed, sound = 0, 0.0
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    with Progress(files) as progress:
        for transcript in transcriber(
            files,
            language=language,
            task=str(task),
            timestamps=timestamps or format is not Format.txt,
            fallback=fallback,
            batch_size=batch,
            seed=seed,
            on_progress=progress.step,
        ):
            sound += transcript.duration
            if transcript.error is not None:
                failed += 1
                note(f"{transcript.name}: {transcript.error}")
            else:
                write_transcript(transcript, format, out, timestamps, alone=len(files) == 1)
    if transcriber.stats.new_tokens:
        note(statistics_line(transcriber, sound))
    if failed:
        note(f"{failed} of {len(files)} files failed")
        raise typer.Exit(1)


def write_transcript(
    transcript: Transcript, format: Format, folder: Path | None, timestamps: bool, alone: bool
) -> None:
    """Write a transcript to a file named after the sound, or to stdout.

    Args:
        transcript: The transcript.
        format: Format of the text.
        folder: Folder of the file; None is stdout.
        timestamps: Whether plain text has timestamps.
        alone: Whether there is only one file. Otherwise plain text on stdout has the file's name above it.
    """
    text = format_transcript(transcript, format, timestamps)
    if folder is not None:
        path = file_of(folder, Path(transcript.name), format)
        write_atomic(path, text if text.endswith("\n") else text + "\n")
        note(f"{transcript.name}: {path}")
        return
    if not alone and format is Format.txt:
        print(f"# {transcript.name}")
    print(text.rstrip("\n"), flush=True)


def file_of(folder: Path, sound: Path, format: Format) -> Path:
    """Return the file that a transcript is written to."""
    return folder / f"{sound.stem}.{format}"


def format_transcript(transcript: Transcript, format: Format, timestamps: bool) -> str:
    """Return a transcript as text in a format."""
    from outpace.tasks import subtitles

    if format is Format.srt:
        return subtitles.srt(transcript.segments)
    if format is Format.vtt:
        return subtitles.vtt(transcript.segments)
    if format is Format.json:
        return subtitles.as_json(
            transcript.name, transcript.text, transcript.language, transcript.duration, transcript.segments
        )
    if timestamps:
        return "\n".join(
            f"[{one.start:7.2f} - {one.end:7.2f}] {one.text.strip()}" for one in transcript.segments
        )
    return transcript.text


def statistics_line(transcriber: Transcriber, sound: float) -> str:
    """Return the statistics line."""
    stats, seconds = transcriber.stats, transcriber.seconds
    line = f"{sound:.1f} s of sound in {seconds:.1f} s, {sound / seconds:.1f} times real time; "
    line += f"{stats.new_tokens} tokens in {stats.target_passes} passes"
    if stats.draft_tokens:
        line += f", {stats.tokens_per_pass:.2f} each, {stats.acceptance_rate:.0%} of draft tokens accepted"
    return line


class Progress:
    """A progress bar on a terminal's stderr, with the speed relative to real time; nothing elsewhere.

    Args:
        files: The audio files.
    """

    def __init__(self, files: list[Path]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        from outpace.tasks.audio import duration

        self._bar = Bar(
            TextColumn("transcribing"),
            BarColumn(),
            TextColumn("{task.completed:.0f} of {task.total:.0f} s"),
            TimeRemainingColumn(),
            TextColumn("{task.fields[speed]}"),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bar.add_task("", total=sum(map(duration, files)), speed="")

    def __enter__(self) -> Progress:
        self._started_at = time.perf_counter()
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def step(self, sound: float) -> None:
        """Show how many seconds of sound are done."""
        speed = f"{sound / (time.perf_counter() - self._started_at):.1f} times real time"
        self._bar.update(self._task, completed=sound, speed=speed)
