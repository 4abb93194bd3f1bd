"""The sandbox worker: ``sandbox.run`` runs this file as a script, and it imports nothing of ``outpace``.

The watcher forks. Its child runs the program with limits, under an audit hook, and in namespaces of its own
where the kernel allows them. Both report lines on standard output: the token that came with the task, the
verdict in one word, and a reason. Only the word PASSED means that the program passed.
"""

from __future__ import annotations

import builtins
import errno
import os
import signal
import struct
import sys
from contextlib import suppress
from types import ModuleType

TYPE_CHECKING = False
if TYPE_CHECKING:  # importing typing takes a third of the start
    from collections.abc import Callable
    from typing import Any

    ProgramVerdict = tuple[str, str]  # a word, and the reason

# Functions below look built-in names up in this copy, which no program can change.
globals()["__builtins__"] = dict(vars(builtins))

READY, PASSED, FAILED = "ready", "passed", "failed"  # the first word of a line
STOPPED = "stopped"  # the first word for what a program may not do
EARLY = "exited before the end"
# Verdicts that are encoded in advance, as there may be no memory left to do it later.
RAN = PASSED, ""
FULL = STOPPED, "ran out of memory"
UNKNOWN = FAILED, "raised an exception that cannot be shown"
MAX_REASON = 200  # characters
REPORT = 100  # a file descriptor beyond the 64 that programs may open, so that none closes it


class RefusedError(PermissionError):
    """An operation that a program may not do."""


def watch() -> None:
    """Run the task of standard input in a child process, and report its end unless the child did."""
    head, _, program = sys.stdin.buffer.read().partition(b"\n")
    token, seconds, memory = head.decode().split()
    os.dup2(1, REPORT, inheritable=False)
    write, leave = os.write, os._exit  # a program may replace those of the module

    def line(verdict: ProgramVerdict) -> bytes:
        return f"{token} {verdict[0]} {verdict[1]}\n".encode(errors="backslashreplace")

    lines = {verdict: line(verdict) for verdict in (RAN, FULL, UNKNOWN)}

    def say(verdict: ProgramVerdict) -> None:
        write(REPORT, lines.get(verdict) or line(verdict))

    inside = _enter_namespaces()
    _die_with_parent()
    child = os.fork()
    if not child:
        try:
            _die_with_parent()
            # The first process of a namespace survives its own signals, so a program is the second.
            first = os.fork() if inside else 0
            if first:
                _say_end(first, say)
            else:
                _run(program.decode("utf-8", "surrogatepass"), int(seconds), int(memory), say)
        except BaseException as error:  # of the worker: the program's own errors are reported as verdicts
            write(2, f"{type(error).__name__}: {error}\n".encode(errors="backslashreplace"))
        finally:
            leave(0)  # threads may be left
    for cue in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(cue, lambda *_: os.kill(child, signal.SIGKILL))
    signal.alarm(int(seconds) + 10)  # in case the parent process is gone
    _say_end(child, say)


def _say_end(child: int, say: Callable[[ProgramVerdict], None]) -> None:
    """Wait for a process, and report how it ended; it has not passed unless it reported that before."""
    _, status = os.waitpid(child, 0)
    for cue in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(cue, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(status)
    say((FAILED, EARLY if code >= 0 else f"crashed ({signal.Signals(-code).name})"))


def _run(program: str, seconds: int, memory: int, say: Callable[[ProgramVerdict], None]) -> None:
    import resource

    null = os.open(os.devnull, os.O_RDWR)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("ctypes", "_ctypes")]:
        del sys.modules[name]  # so that the audit hook sees an import of it
    main = ModuleType("program")  # not "__main__", so that blocks for scripts do not run
    vars(main)["__builtins__"] = builtins
    sys.modules["program"] = main  # where pickle and dataclasses look
    sys.modules["__main__"] = ModuleType("__main__")
    vars(builtins).update(exit=sys.exit, quit=sys.exit)  # -S leaves them out
    sys.argv = ["program.py"]
    hook = _hook((*sys.path, os.getcwd()))
    # No RLIMIT_NPROC: it counts threads, too, and all of a user's, wherever they run.
    for resource_kind, limit in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CPU, 2 * seconds + 2),  # in case no process is left to enforce the time
    ):
        _limit(resource_kind, limit)
    say((READY, ""))
    for fd in range(3):
        os.dup2(null, fd)
    os.close(null)
    try:
        try:
            _limit(resource.RLIMIT_AS, memory)
            sys.addaudithook(hook)
            exec(compile(program, "<program>", "exec", dont_inherit=True), vars(main))
            verdict = RAN
        except BaseException as error:
            verdict = _verdict(error)
        say(verdict)
    except MemoryError:
        say(FULL)


def _verdict(error: BaseException) -> ProgramVerdict:
    """Return the verdict on a program that raised an exception, and the reason in one line."""
    try:
        word, reason = _reason(error)
        reason = " ".join(reason.split())[:MAX_REASON]
        return (word, reason) if reason else UNKNOWN
    except MemoryError:
        return FULL
    except BaseException:  # of the program's own class
        return UNKNOWN


def _reason(error: BaseException) -> ProgramVerdict:
    kind = type(error)  # error.__class__ may say anything
    if issubclass(kind, MemoryError):
        return FULL
    if issubclass(kind, SystemExit):
        return FAILED, EARLY
    cause: BaseException | None = error
    for _ in range(20):  # a chain may be a ring
        if isinstance(cause, RefusedError):
            return STOPPED, str(cause)
        cause = cause and (cause.__cause__ or cause.__context__)
    if issubclass(kind, OSError) and getattr(error, "errno", None) == errno.EROFS:
        return STOPPED, "wrote a file"
    try:
        message = str.strip(str(error))[:MAX_REASON].splitlines()
    except BaseException:  # of the program's own class
        message = []
    return FAILED, ": ".join(part for part in (kind.__name__.strip(), *message[:1]) if part)


def _limit(resource_kind: int, limit: int) -> None:
    import resource

    _, hard = resource.getrlimit(resource_kind)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    with suppress(ValueError, OSError):  # macOS refuses to limit address spaces
        resource.setrlimit(resource_kind, (limit, limit))


REFUSED = {  # audit events, and the reason to report
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
    """Return an audit hook that lets programs read the files in some folders only."""

    def inside(path: Any) -> bool:
        full_path = os.path.abspath(os.fsdecode(path))
        return any(full_path == folder or full_path.startswith(folder + os.sep) for folder in folders)

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
            reason = REFUSED[event]
            has_path = reason.endswith(("file", "folder")) and isinstance(
                values[0], str | bytes | os.PathLike
            )
            raise RefusedError(f"{reason}: {os.fsdecode(values[0])}" if has_path else reason)
        elif event.startswith("socket.") and not (event == "socket.__new__" and values[1] == AF_UNIX):
            raise RefusedError("used the network")
        elif event == "sqlite3.connect" and values[0] != ":memory:":
            raise RefusedError(f"wrote a file: {os.fsdecode(values[0])}")
        elif event.startswith("ctypes.") or (event == "import" and values[0] in ("ctypes", "_ctypes")):
            raise RefusedError("used ctypes")

    return hook


def _libc() -> Any:
    """Return the C library on Linux; None elsewhere, or in a Python without ctypes."""
    if sys.platform != "linux":
        return None
    try:
        import ctypes
    except ImportError:
        return None
    return ctypes.CDLL(None)


def _enter_namespaces() -> bool:
    """Cut this process off from network, other processes and writable files, where the kernel allows it.

    Returns:
        Whether the kernel allowed it.
    """
    libc = _libc()
    # CLONE_NEWUSER, _NEWPID (for children), _NEWNET, _NEWNS (mounts), _NEWIPC
    if libc is None or libc.unshare(0x10000000 | 0x20000000 | 0x40000000 | 0x00020000 | 0x08000000):
        return False
    # mount_setattr("/", AT_RECURSIVE): set MOUNT_ATTR_RDONLY, clear nothing, MS_PRIVATE, no user namespace
    attributes = struct.pack("QQQQ", 1, 0, 1 << 18, 0)
    libc.syscall(442, -100, b"/", 0x8000, attributes, len(attributes))  # Linux 5.12; older ones have the hook
    # capset, version 3: drop the capabilities of the new namespace, as they could undo this
    libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    if not os.access(os.__file__, os.R_OK):  # root may have no rights of its own here
        raise PermissionError(f"{os.__file__} is not readable for its user: run as the owner of this Python")
    return True


def _die_with_parent() -> None:
    libc = _libc()
    if libc is not None:
        libc.prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    watch()
