"""Programs that a language model wrote, run apart from everything else.

`run` starts `inmate.py` as a script, in a fresh Python of its own session; that process watches over a second
one, in which the program runs.

What holds for any program: it ends in time, its group of processes with it; its address space, size of files
and number of open files are limited; what it prints goes nowhere.

What holds for programs that do not try to get around it: one passes only if it ran to its end; no files are
written, changed or deleted, none are read but Python's library, nothing goes to the network, no processes are
started. An audit hook refuses these, which a hostile program can evade.

Where Linux lets users make namespaces, its kernel sees to most of it, too: no network, all file systems
read-only, and a process that the program starts dies with it, even in another session. Not so on macOS, in
many containers, and on some distributions.

None of this is a wall against hostile code: it can read what you can read, say that it passed once it found
the token in its interpreter, and, run by root without namespaces, lift its limits. Run such code in a
container or a virtual machine.
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

from outpace.arguments import integer, number
from outpace.tasks import inmate
from outpace.tasks.inmate import EARLY, FAILED, PASSED, READY, STOPPED

FILE = inmate.__file__
START = 60.0  # seconds that Python may take to start, on a busy machine


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    passed   it ran to its end, and the sandbox said so
    reason   why not, in a line; empty if it passed, and only then
    seconds  it took, without the start of Python
    stopped  it did what it may not: took too long or too much memory, or was refused something
    """

    passed: bool
    reason: str
    seconds: float
    stopped: bool = False


def run(program: str, *, seconds: float = 5.0, memory: int = 1 << 30) -> Outcome:
    """The outcome of a program, which passes if it raises nothing and does not exit early.

    seconds  by the clock, after which it is killed
    memory   bytes of address space; Python's own are some 30 MB of them. macOS does not limit it

    Programs find Python's own library, and no other packages. RuntimeError: the sandbox itself did not work,
    which says nothing about the program.
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
                return _outcome(report, seconds)
            finally:
                _end(watcher, report)


def check() -> None:
    """Refuse a platform that has no limits."""
    if find_spec("resource") is None:
        raise OSError(
            "programs cannot be run safely here: this Python has no module `resource`, as on Windows, which "
            "limits their time and memory; use Linux, macOS, WSL or a container"
        )


def _environment(folder: str) -> dict[str, str]:
    """What a Python needs to start, and nothing of ours."""
    kept = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # where some Pythons find themselves
    own = {"HOME": folder, "TMPDIR": folder, "PATH": os.defpath, "LC_ALL": "C.UTF-8"}
    return own | {name: os.environ[name] for name in kept if name in os.environ}


class _Report:
    """What the watcher and the program's process say, of which only lines with the token count."""

    def __init__(self, pipe: int, token: str) -> None:
        self.pipe, self.rest = pipe, b""
        self._line = re.compile(rb"%b (.*)\n" % token.encode())

    def line(self, seconds: float) -> tuple[str, str] | None:
        """Return the next verdict and reason, or None if there will be none; TimeoutError if none comes in
        time."""
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self.pipe, selectors.EVENT_READ)
            while not (found := self._line.search(self.rest)):
                left = end - time.monotonic()
                if left <= 0 or not selector.select(left):
                    raise TimeoutError
                said = os.read(self.pipe, 1 << 16)
                if not said:
                    return None
                self.rest = (self.rest + said)[-(1 << 17) :]
        self.rest = self.rest[found.end() :]
        verdict, _, reason = found[1].decode().partition(" ")
        return verdict, reason


def _outcome(report: _Report, seconds: float) -> Outcome:
    try:
        first = report.line(START)
    except TimeoutError:
        raise RuntimeError(f"the sandbox did not start within {START:g} s") from None
    if first != (READY, ""):
        said = report.rest.decode(errors="replace").strip().splitlines() or [" ".join(first or ())]
        raise RuntimeError(f"the sandbox did not start: {said[-1]}")
    start = time.monotonic()
    try:
        verdict, reason = report.line(seconds) or (FAILED, EARLY)
    except TimeoutError:
        verdict, reason = STOPPED, f"took longer than {seconds:g} s"
    spent = time.monotonic() - start
    if (verdict, reason) == (PASSED, ""):
        return Outcome(True, "", spent)
    if verdict not in (FAILED, STOPPED) or not reason:
        raise RuntimeError(f"the sandbox gave no verdict: {verdict} {reason}")
    return Outcome(False, reason, spent, verdict == STOPPED)


def _end(watcher: subprocess.Popen[bytes], report: _Report) -> None:
    """The end of all processes. The watcher is asked first, so that nobody is left to be reaped by others. It
    is not reaped itself before its group is killed: until then, no other process can have its number."""
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
