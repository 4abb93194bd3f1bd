"""The command ``outpace`` and its subcommands. A command imports heavy packages when it runs."""

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
from outpace.cli.alpha import alpha
from outpace.cli.audit import audit
from outpace.cli.bench import bench
from outpace.cli.chat import chat
from outpace.cli.config import with_config_path
from outpace.cli.doctor import doctor
from outpace.cli.eval import eval
from outpace.cli.generate import generate
from outpace.cli.plan import plan
from outpace.cli.report import report
from outpace.cli.sweep import sweep
from outpace.cli.transcribe import transcribe
from outpace.cli.tune import tune

# The error class of a wrong flag. Newer versions of typer contain a copy of click, with their own class.
UsageError: Any = next(one for one in typer.BadParameter.__mro__ if one.__name__ == "ClickException")
# Each of these variables sets how OpenMP threads wait. If one of them is set, the user has chosen.
SPIN_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")
SPIN_BOUNDS = {"GOMP_SPINCOUNT": "100000", "KMP_BLOCKTIME": "1"}  # spins (GNU); ms (LLVM, Intel)

app = typer.Typer(
    help="Run language models of the Transformers library faster by speculative decoding. The output "
    "distribution stays the same.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for panel, commands in {
    "Generate": (generate, chat, transcribe),
    "Choose and check": (audit, tune, plan, doctor),
    "Evaluate": (eval, report),
}.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
bench.command()(alpha)
bench.command()(sweep)
app.add_typer(bench, name="bench", rich_help_panel="Measure")


def _version(requested: bool) -> None:
    if requested:
        print(f"outpace {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_version),
    ] = False,
) -> None:
    """Take the options of ``outpace`` itself."""


def main() -> None:
    """Run the command. A user's mistake prints one line on stderr and gives exit status 2."""
    _open_streams()
    warnings.showwarning = lambda message, *_: _say(_first_line(str(message)))
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    bound_spinning()
    gc.disable()  # imports create millions of permanent objects; scanning them took 20 % of the start-up time
    command = typer.main.get_command(app)
    meta: dict[str, Any] = {}
    status = 0
    try:
        try:
            # `app()` would handle errors itself.
            with command.make_context("outpace", sys.argv[1:]) as context:
                meta = context.meta
                command.invoke(context)
        except typer.Exit as done:
            status = done.exit_code
        sys.stdout.flush()  # inside `try`, so that a failed write is reported in one line
    except UsageError as error:
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
            fail(with_config_path(meta, str(error)))
        fail(f"{type(error).__name__}: {error} (OUTPACE_TRACEBACK=1 shows where)")
    finally:
        gc.enable()
        gc.unfreeze()
    raise SystemExit(status)


def bound_spinning() -> None:
    """Bound how long waiting OpenMP threads spin, so that two programs on the same cores both advance.

    By default they spin until the next parallel region. The libraries read the variables once, when they are
    loaded, so this runs before PyTorch is imported.
    """
    if not any(name in os.environ for name in SPIN_VARIABLES):
        os.environ.update(SPIN_BOUNDS)


def _open_streams() -> None:
    """Open the streams that the caller closed (``<&-``); a later file would get their file descriptor."""
    stdout_closed = sys.stdout is None
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "w" if number else "r"))
    if stdout_closed:
        fail("stdout is closed; send it to a file, or to /dev/null")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # commands refuse bytes that are not UTF-8


def _flush(stream: IO[str]) -> None:
    """Write the buffer of a stream, or discard it.

    Otherwise Python would try again at exit, print an error, and change the exit status.
    """
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def fail(why: str) -> NoReturn:
    """Print why the command failed, and exit with status 2."""
    _flush(sys.stdout)
    _say(_first_line(why) or "it failed without saying why")
    raise SystemExit(2)


def _first_line(text: str) -> str:
    """Return the first line that is not empty, because messages of PyTorch may contain a stack trace."""
    return next((one.strip() for one in text.splitlines() if one.strip()), "")


def _say(line: str) -> None:
    with suppress(OSError):
        print(f"outpace: {line}", file=sys.stderr)
    _flush(sys.stderr)
