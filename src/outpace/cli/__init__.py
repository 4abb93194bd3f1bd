"""The command: `outpace generate`, `chat`, `transcribe`, `eval`, `plan`, `measure`, `sweep`, `tune`,
`report`, `audit`, `doctor`, `bench`. Nothing heavy is imported before its use."""

from __future__ import annotations

import gc
import io
import os
import sys
import warnings
from contextlib import suppress
from typing import IO, Annotated, Any, NoReturn

import typer

from outpace import __version__
from outpace.cli.audit import audit
from outpace.cli.bench import bench
from outpace.cli.chat import chat
from outpace.cli.doctor import doctor
from outpace.cli.eval import eval
from outpace.cli.generate import generate
from outpace.cli.measure import measure
from outpace.cli.options import blamed
from outpace.cli.plan import plan
from outpace.cli.report import report
from outpace.cli.sweep import sweep
from outpace.cli.threads import bound_spinning
from outpace.cli.transcribe import transcribe
from outpace.cli.tune import tune

# What a flag that does not fit raises: of click, or of the copy of it that newer versions of typer bring.
WrongUse: Any = next(one for one in typer.BadParameter.__mro__ if one.__name__ == "ClickException")

app = typer.Typer(
    help="Language models from the Transformers library, faster by speculative decoding, same output "
    "distribution.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(chat)
app.command()(transcribe)
app.command()(eval)
app.command()(plan)
app.command()(report)
app.command()(measure)
app.command()(sweep)
app.command()(tune)
app.command()(audit)
app.command()(doctor)
app.add_typer(bench, name="bench")


def _version(asked: bool) -> None:
    if asked:
        print(f"outpace {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version),
    ] = False,
) -> None: ...


def main() -> None:
    """Run the command; what a user did wrong is one line on stderr and exit status 2."""
    _open_streams()
    warnings.showwarning = lambda message, *_: _say(_first_line(str(message)))
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    bound_spinning()
    gc.disable()  # imports make millions of objects that stay: a fifth of a start went into looking at them
    command = typer.main.get_command(app)
    meta: dict[str, Any] = {}
    status = 0
    try:
        try:
            # Not `app()`, which has its own way with errors.
            with command.make_context("outpace", sys.argv[1:]) as context:
                meta = context.meta
                command.invoke(context)
        except typer.Exit as done:
            status = done.exit_code
        sys.stdout.flush()  # here, what cannot be written is still one line
    except WrongUse as error:
        fail(error.format_message())
    except (typer.Abort, KeyboardInterrupt):
        _say("interrupted")
        raise SystemExit(130) from None
    except BrokenPipeError:
        fail("the output was closed before the end")
    except Exception as error:
        if os.environ.get("OUTPACE_TRACEBACK"):
            raise
        expected = isinstance(error, ValueError | TypeError | OSError | MemoryError | ImportError)
        if expected:
            fail(blamed(meta, str(error)))
        fail(f"{type(error).__name__}: {error} (OUTPACE_TRACEBACK=1 shows where)")
    finally:
        gc.enable()
        gc.unfreeze()
    raise SystemExit(status)


def _open_streams() -> None:
    """Open what the caller closed (`<&-`), or a file opened later would take its number."""
    closed = sys.stdout is None
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if number else "r"))
    if closed:
        fail("stdout is closed; send it to a file, or to /dev/null")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # commands look for bytes that are no text


def _flush(stream: IO[str]) -> None:
    """Write what waits, or give it up: Python would try again at exit, complain, and change the status."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def fail(why: str) -> NoReturn:
    _flush(sys.stdout)
    _say(_first_line(why) or "it failed without saying why")
    raise SystemExit(2)


def _first_line(text: str) -> str:
    """Return the first line that is not empty: PyTorch's warnings and errors may carry a stack trace."""
    return next((one.strip() for one in text.splitlines() if one.strip()), "")


def _say(line: str) -> None:
    with suppress(OSError):
        print(f"outpace: {line}", file=sys.stderr)
    _flush(sys.stderr)
