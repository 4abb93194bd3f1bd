"""A sandbox for programs that a language model wrote.

``run`` starts ``worker.py`` as a script, in a fresh Python with a session of its own. That process, the
watcher, starts a second one, in which the program runs.

These hold for any program:

- It ends in time, and its process group ends with it.
- Its address space, its file sizes and its number of open files are limited.
- Its output is discarded.

These hold for programs that do not try to get around them:

- A program passes only if it ran to its end.
- No files are written, changed or deleted, and none are read but Python's library.
- Nothing goes to the network, and no processes are started.

An audit hook refuses these operations. A hostile program can evade it.

Where Linux lets users make namespaces, the kernel enforces most of this, too. There is no network, and all
file systems are read-only. A process that the program starts dies with it, even in another session. This does
not hold on macOS, in many containers, and on some distributions.

The sandbox does not stop hostile code. Such code can read every file that you can read. It can find the token
in its interpreter and report that it passed. Run by root without namespaces, it can lift its limits. Run
hostile code in a container or a virtual machine.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil, inf

from outpace.checks.arguments import integer, number
from outpace.tasks import worker
from outpace.tasks.worker import EARLY, FAILED, PASSED, READY, STOPPED

FILE = worker.__file__
START = 60.0  # seconds that Python may take to start, on a busy machine


@dataclass(frozen=True)
class ProgramResult:
    """The result of a program.

    Attributes:
        passed: Whether it ran to its end, as the sandbox worker confirmed.
        reason: Why it did not pass, in one line; empty if and only if it passed.
        seconds: Seconds that it ran, without the start of Python.
        stopped: Whether it exceeded its time or memory, or attempted what it may not do.
    """

    passed: bool
    reason: str
    seconds: float
    stopped: bool = False


def run(program: str, *, seconds: float = 5.0, memory: int = 1 << 30) -> ProgramResult:
    """Run a program in the sandbox, and return its result.

    A program passes if it raises nothing and does not exit early. It finds Python's own library, and no other
    packages.

    Args:
        program: Python source code.
        seconds: Wall-clock seconds after which it is killed.
        memory: Bytes of address space, of which Python itself uses about 30 MB. macOS does not enforce this.

    Returns:
        The result.

    Raises:
        OSError: The platform has no limits for processes.
        RuntimeError: The sandbox itself failed, which says nothing about the program.
    """
    number("seconds", seconds, "a number of seconds > 0", lambda n: 0 < n < inf)
    integer("memory", memory, "a number of bytes >= 1", lambda n: n >= 1)
    check()
    token = os.urandom(16).hex()
    with (
        tempfile.TemporaryDirectory(prefix="outpace-", ignore_cleanup_errors=True) as folder,
        tempfile.TemporaryFile() as task,
    ):
        task.write(f"{token} {ceil(seconds)} {memory}\n{program}".encode("utf-8", "surrogatepass"))
        task.seek(0)
        watcher = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-X", "utf8", FILE],
            stdin=task,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=_environment(folder),
            start_new_session=True,
        )
        assert watcher.stdout is not None
        with watcher.stdout as pipe:
            report = _Report(pipe.fileno(), token)
            try:
                return _result(report, seconds)
            finally:
                _end(watcher, report)


def check() -> None:
    """Refuse a platform that cannot limit processes.

    Raises:
        OSError: Python has no module ``resource``.
    """
    if find_spec("resource") is None:
        raise OSError(
            "programs cannot be run safely here: this Python has no module `resource`, as on Windows, which "
            "limits their time and memory; use Linux, macOS, WSL or a container"
        )


def _environment(folder: str) -> dict[str, str]:
    """Return the variables that a Python needs to start, and none of the caller's others."""
    inherited = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # where some Pythons find their own library
    variables = {"HOME": folder, "TMPDIR": folder, "PATH": os.defpath, "LC_ALL": "C.UTF-8"}
    return variables | {name: os.environ[name] for name in inherited if name in os.environ}


class _Report:
    """The lines that the watcher and the program's process report; only lines with the token count."""

    def __init__(self, pipe: int, token: str) -> None:
        self.pipe, self.rest = pipe, b""
        self._line = re.compile(rb"%b (.*)\n" % token.encode())

    def line(self, seconds: float) -> tuple[str, str] | None:
        """Return the next verdict and reason, or None if there will be none.

        Raises:
            TimeoutError: No line arrived in time.
        """
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.pipe, selectors.EVENT_READ)
            while not (found := self._line.search(self.rest)):
                remaining = end - time.monotonic()
                if remaining <= 0 or not selector.select(remaining):
                    raise TimeoutError
                received = os.read(self.pipe, 1 << 16)
                if not received:
                    return None
                self.rest = (self.rest + received)[-(1 << 17) :]
        self.rest = self.rest[found.end() :]
        verdict, _, reason = found[1].decode().partition(" ")
        return verdict, reason


def _result(report: _Report, seconds: float) -> ProgramResult:
    try:
        first = report.line(START)
    except TimeoutError:
        raise RuntimeError(f"the sandbox did not start within {START:g} s") from None
    if first != (READY, ""):
        lines = report.rest.decode(errors="replace").strip().splitlines() or [" ".join(first or ())]
        raise RuntimeError(f"the sandbox did not start: {lines[-1]}")
    started_at = time.monotonic()
    try:
        verdict, reason = report.line(seconds) or (FAILED, EARLY)
    except TimeoutError:
        verdict, reason = STOPPED, f"took longer than {seconds:g} s"
    elapsed = time.monotonic() - started_at
    if (verdict, reason) == (PASSED, ""):
        return ProgramResult(True, "", elapsed)
    if verdict not in (FAILED, STOPPED) or not reason:
        raise RuntimeError(f"the sandbox gave no verdict: {verdict} {reason}")
    return ProgramResult(False, reason, elapsed, verdict == STOPPED)


def _end(watcher: subprocess.Popen[bytes], report: _Report) -> None:
    """End all processes.

    The watcher gets SIGTERM first, so that no child is left for another process to reap. The watcher itself
    is not reaped before its group is killed: until then, no other process can have its id.
    """
    try:
        os.kill(watcher.pid, signal.SIGTERM)
        end = time.monotonic() + 2
        while report.line(end - time.monotonic()) is not None:
            pass
    except TimeoutError:
        pass
    finally:
        os.killpg(watcher.pid, signal.SIGKILL)
        watcher.wait()
