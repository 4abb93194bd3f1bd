"""Programs that a language model wrote, run apart from everything else.

This file is both sides. `run` starts it again as a script, in a fresh Python of its own session; that process
watches over a second one, in which the program runs.

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

import builtins
import os
import re
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from math import ceil, inf
from types import ModuleType
from typing import Any

FILE = os.path.abspath(__file__)
START = 60.0  # seconds that Python may take to start, on a busy machine
READY = "ready"
STOPPED = "stopped: "  # before reasons that are not the program's own
FULL = f"{STOPPED}ran out of memory"
EARLY = "exited before the end"


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    passed   it ran to its end
    reason   why not, in a line; empty if it passed
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
    from outpace.arguments import integer, number  # here, as the child runs this file alone

    number("seconds", seconds, "a number of seconds > 0", lambda n: 0 < n < inf)
    integer("memory", memory, "a number of bytes >= 1", lambda n: n >= 1)
    if find_spec("resource") is None:
        raise NotImplementedError(
            "programs cannot be run safely here: this Python has no module `resource`, as on Windows, which "
            "limits their time and memory; use Linux, macOS, WSL or a container"
        )
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

    def line(self, seconds: float) -> str | None:
        """The next, or None if there will be none; TimeoutError after so many seconds."""
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
        return found[1].decode()


def _outcome(report: _Report, seconds: float) -> Outcome:
    try:
        first = report.line(START)
    except TimeoutError:
        raise RuntimeError(f"the sandbox did not start within {START:g} s") from None
    if first != READY:
        said = report.rest.decode(errors="replace").strip().splitlines()
        raise RuntimeError(f"the sandbox did not start: {said[-1] if said else first}")
    start = time.monotonic()
    try:
        reason = report.line(seconds)
    except TimeoutError:
        reason = f"{STOPPED}took longer than {seconds:g} s"
    why = EARLY if reason is None else reason
    spent = time.monotonic() - start
    return Outcome(why == "", why.removeprefix(STOPPED), spent, why.startswith(STOPPED))


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


# From here on: what runs in the new process.


class RefusedError(PermissionError):
    """What a program may not do."""


def watch() -> None:
    """Runs the task of standard input in a process of its own, and says how that ended if it does not."""
    head, _, program = sys.stdin.buffer.read().partition(b"\n")
    token, seconds, memory = head.decode().split()
    report = os.dup(1)

    def line(what: str) -> bytes:
        return f"{token} {what}\n".encode(errors="backslashreplace")

    lines = {what: line(what) for what in ("", FULL)}  # now, as there may be no memory left then

    def say(what: str) -> None:
        os.write(report, lines.get(what) or line(what))

    _enter_namespaces()
    _die_with_parent()
    child = os.fork()
    if not child:
        try:
            _die_with_parent()
            _run(program.decode("utf-8", "surrogatepass"), int(seconds), int(memory), say)
        except BaseException as error:  # ours: the program's own are reported
            os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="backslashreplace"))
        finally:
            os._exit(0)  # threads may be left
    for cue in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(cue, lambda *_: os.kill(child, signal.SIGKILL))
    signal.alarm(int(seconds) + 10)  # should our parent be gone
    _, status = os.waitpid(child, 0)
    for cue in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(cue, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(status)
    say(EARLY if code >= 0 else f"crashed ({signal.Signals(-code).name})")


def _run(program: str, seconds: int, memory: int, say: Callable[[str], None]) -> None:
    import resource

    null = os.open(os.devnull, os.O_RDWR)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("ctypes", "_ctypes")]:
        del sys.modules[name]  # so that importing it is seen
    main = ModuleType("__main__")
    sys.modules["__main__"] = main  # where pickle and dataclasses look
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # -S leaves them out
    sys.argv = ["program.py"]
    hook = _hook((*sys.path, os.getcwd()))
    # No RLIMIT_NPROC: it counts threads, too, and all of a user's, wherever they run.
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CPU, 2 * seconds + 2),  # should nobody be left to look at the clock
    ):
        _limit(what, most)
    say(READY)
    for fd in range(3):
        os.dup2(null, fd)
    os.close(null)
    try:
        try:
            _limit(resource.RLIMIT_AS, memory)
            sys.addaudithook(hook)
            exec(compile(program, "<program>", "exec", dont_inherit=True), vars(main))
            reason = ""
        except BaseException as error:
            reason = _reason(error)
        say(reason)
    except MemoryError:
        say(FULL)


def _reason(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return FULL
    if isinstance(error, SystemExit):
        return EARLY
    cause: BaseException | None = error
    for _ in range(20):  # a chain may be a ring
        if isinstance(cause, RefusedError):
            return f"{STOPPED}{cause}"[:200]
        cause = cause and (cause.__cause__ or cause.__context__)
    try:
        said = str(error).strip().splitlines()
    except Exception:  # the program's own class
        said = []
    return ": ".join([type(error).__name__, *said[:1]])[:200]


def _limit(what: int, most: int) -> None:
    import resource

    _, hard = resource.getrlimit(what)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    with suppress(ValueError, OSError):  # macOS refuses to limit address spaces
        resource.setrlimit(what, (most, most))


REFUSED = {  # audit events, and what to say of them
    "os.chflags": "changed a file",
    "os.chmod": "changed a file",
    "os.chown": "changed a file",
    "os.exec": "started a process",
    "os.fork": "started a process",
    "os.forkpty": "started a process",
    "os.kill": "sent a signal",
    "os.killpg": "sent a signal",
    "os.link": "wrote a file",
    "os.mkdir": "made a folder",
    "os.posix_spawn": "started a process",
    "os.remove": "deleted a file",
    "os.removexattr": "changed a file",
    "os.rename": "renamed a file",
    "os.rmdir": "deleted a folder",
    "os.setxattr": "changed a file",
    "os.symlink": "wrote a file",
    "os.system": "started a process",
    "os.truncate": "changed a file",
    "os.utime": "changed a file",
    "resource.prlimit": "changed its limits",
    "resource.setrlimit": "changed its limits",
    "signal.pthread_kill": "sent a signal",
    "subprocess.Popen": "started a process",
}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
AF_UNIX = 1  # asyncio wakes itself up with a pair of these


def _hook(folders: tuple[str, ...]) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that lets programs read what is in some folders."""

    def inside(path: Any) -> bool:
        whole = os.path.abspath(os.fsdecode(path))
        return any(whole == folder or whole.startswith(folder + os.sep) for folder in folders)

    def hook(event: str, values: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir"):
            path = values[0]
            if path is None or isinstance(path, int) or path == os.devnull:
                return
            if event == "open" and (values[2] & WRITING):
                raise RefusedError(f"wrote a file: {os.fsdecode(path)}")
            if not inside(path):
                raise RefusedError(f"read a file: {os.fsdecode(path)}")
        elif event in REFUSED:
            about = REFUSED[event]
            named = about.endswith(("file", "folder")) and isinstance(values[0], str | bytes | os.PathLike)
            raise RefusedError(f"{about}: {os.fsdecode(values[0])}" if named else about)
        elif event.startswith("socket.") and not (event == "socket.__new__" and values[1] == AF_UNIX):
            raise RefusedError("used the network")
        elif event == "sqlite3.connect" and values[0] != ":memory:":
            raise RefusedError(f"wrote a file: {os.fsdecode(values[0])}")
        elif event.startswith("ctypes.") or (event == "import" and values[0] in ("ctypes", "_ctypes")):
            raise RefusedError("used ctypes")

    return hook


def _libc() -> Any:
    """The C library on Linux; None elsewhere, or in a Python without ctypes."""
    if sys.platform != "linux":
        return None
    try:
        import ctypes
    except ImportError:
        return None
    return ctypes.CDLL(None)


def _enter_namespaces() -> None:
    """Leaves network, other processes and writable files behind, where the kernel lets us."""
    libc = _libc()
    # CLONE_NEWUSER, _NEWPID (for children), _NEWNET, _NEWNS (mounts), _NEWIPC
    if libc is None or libc.unshare(0x10000000 | 0x20000000 | 0x40000000 | 0x00020000 | 0x08000000):
        return
    # mount_setattr("/", AT_RECURSIVE): set MOUNT_ATTR_RDONLY, clear nothing, MS_PRIVATE, no user namespace
    how = struct.pack("QQQQ", 1, 0, 1 << 18, 0)
    libc.syscall(442, -100, b"/", 0x8000, how, len(how))  # Linux 5.12; before it, the hook has to do
    # capset: all of version 3 that the new namespace gave us, as they could undo this
    libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    if not os.access(os.__file__, os.R_OK):  # root may be nobody in particular here
        raise PermissionError(f"{os.__file__} is not readable for its user: run as the owner of this Python")


def _die_with_parent() -> None:
    libc = _libc()
    if libc is not None:
        libc.prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    watch()
