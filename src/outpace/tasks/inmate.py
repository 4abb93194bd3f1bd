"""The new process of `sandbox.run`: this file is run as a script, and imports nothing of ours.

A watcher forks; its child runs the program, with limits, under an audit hook, and in namespaces of its own
where the kernel lets it. Both write to standard output, with the token that came in with the task.
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
if TYPE_CHECKING:  # typing takes a third of the start
    from collections.abc import Callable
    from typing import Any

READY = "ready"
STOPPED = "stopped: "  # before reasons that are not the program's own
FULL = f"{STOPPED}ran out of memory"
EARLY = "exited before the end"


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
    main = ModuleType("program")  # what is for scripts alone does not run
    sys.modules["program"] = main  # where pickle and dataclasses look
    sys.modules["__main__"] = ModuleType("__main__")
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
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return f"{STOPPED}wrote a file"
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
