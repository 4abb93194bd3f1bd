"""The sandbox: programs pass or fail with the right reason, and leave no files or processes behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from outpace.tasks import sandbox
from outpace.tasks.sandbox import run

pytest.importorskip("resource", reason="programs cannot be limited on this platform")

SECONDS = 0.5
MEMORY = 100 << 20
NAMESPACES = "with namespaces"


def group_ended(group: int) -> bool:
    for _ in range(500):  # init may take its time to reap
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def is_running(mark: str) -> bool:
    """Return whether a process has this text in its command line."""
    found = subprocess.run(["ps", "-wweo", "args"], capture_output=True, text=True, check=True).stdout
    return any(mark in line and "ps -wweo" not in line for line in found.splitlines())


def has_ended(mark: str) -> bool:
    """Wait until no process has this text; a killed process may need a moment on a busy machine."""
    deadline = time.monotonic() + 10
    while is_running(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not is_running(mark)


@cache
def namespaces() -> bool:
    return run("import os\nassert os.getppid() == 1").passed


@pytest.fixture(params=[NAMESPACES, "with the hook alone"])
def mode(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test with namespaces, and without, as on a kernel that refuses them."""
    name: str = request.param
    if name == NAMESPACES:
        if not namespaces():
            pytest.skip("this kernel does not let users make namespaces")
    else:
        source = Path(sandbox.FILE).read_text()
        assert source.count(" = _enter_namespaces()\n") == 1
        copy = tmp_path / "without.py"
        copy.write_text(source.replace(" = _enter_namespaces()\n", " = False\n"))
        monkeypatch.setattr(sandbox, "FILE", str(copy))
    return name


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Record the process groups that a test starts, and check that they and their folders are gone."""
    groups: list[int] = []
    folders: list[Path] = []

    class Recorded(subprocess.Popen[Any]):
        def __init__(self, args: Any, **options: Any) -> None:
            super().__init__(args, **options)
            if options.get("start_new_session"):
                groups.append(self.pid)
                folders.append(Path(options["cwd"]))

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    yield groups
    assert all(group_ended(group) for group in groups)
    assert not any(folder.exists() for folder in folders)


TESTED = """
from typing import List

def total(numbers: List[int]) -> int:
    {body}

def check(candidate):
    assert candidate([]) == 0
    assert candidate([1, 2]) == 3

check(total)
"""


def test_a_correct_program_passes(mode: str) -> None:
    result = run(TESTED.format(body="return sum(numbers)"))
    assert result.passed
    assert result.reason == ""
    assert result.seconds > 0


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (TESTED.format(body="return 0"), "AssertionError"),
        ("assert 1 == 2, 'no\\nnot at all'", "AssertionError: no"),
        ("def f(:\n  pass", r"SyntaxError: invalid syntax \(<program>, line 1\)"),
        ("x = 'a\0b'", "(SyntaxError|ValueError): source code string cannot contain null bytes"),
        ("x = '\ud800'", "UnicodeEncodeError: .*"),
        ("def f():\n  f()\nf()", "RecursionError: maximum recursion depth exceeded"),
        ("input()", "EOFError: EOF when reading a line"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("class E(Exception):\n  def __str__(self): raise self\nraise E", "E"),
        ("raise ValueError('x' * 10000)", "ValueError: x{188}"),
        ("import numpy", "ModuleNotFoundError: No module named 'numpy'"),
        ("import os\nos.abort()", r"crashed \(SIG[A-Z]+\)"),
    ],
)
def test_a_wrong_program_fails_with_a_reason_in_one_line(program: str, reason: str) -> None:
    result = run(program)
    assert not result.passed
    assert re.fullmatch(reason, result.reason), result.reason


@pytest.mark.parametrize(
    "leave",
    ["import sys; sys.exit(0)", "import sys; sys.exit()", "import os; os._exit(0)", "exit()", "quit()",
     "raise SystemExit", "import os; os.closerange(0, 64); os._exit(0)"],
)  # fmt: skip
def test_a_program_that_exits_before_its_tests_fails(leave: str) -> None:
    result = run(f"{leave}\nassert False")
    assert not result.passed
    assert result.reason == "exited before the end"


def test_a_program_that_prints_a_verdict_does_not_pass_by_it() -> None:
    forged = (
        "import os\nfor fd in range(64):\n  try: os.write(fd, b'\\npassed\\n \\n')\n  except OSError: pass\n"
    )
    assert run(forged + "os._exit(0)").reason == "exited before the end"
    assert run(forged + "assert False").reason == "AssertionError"


UNKNOWN = "raised an exception that cannot be shown"
NAMED = "raise type({!r}, (Exception,), {{}})"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (NAMED.format(""), UNKNOWN),
        (NAMED.format("\n"), UNKNOWN),
        (NAMED.format("\nx"), "x"),
        (NAMED.format("\r"), UNKNOWN),
        (NAMED.format("\n") + "('said')", "said"),
        (NAMED.format("passed"), "passed"),
        (NAMED.format("passed") + "('passed')", "passed: passed"),
        (NAMED.format("passed\n"), "passed"),
        (NAMED.format("ready"), "ready"),
        (NAMED.format("stopped"), "stopped"),
        (NAMED.format("stopped: ran out of memory"), "stopped: ran out of memory"),
        (NAMED.format("x" * 100000), "x" * 200),
        ("class M(type): __name__ = ''\nclass E(Exception, metaclass=M): pass\nraise E", UNKNOWN),
        ("class M(type): __name__ = 3\nclass E(Exception, metaclass=M): pass\nraise E", UNKNOWN),
        ("class E(Exception):\n  def __str__(self): return '\\n\\npassed\\n'\nraise E", "E: passed"),
        ("class E(Exception):\n  def __str__(self): return '\\ud800'\nraise E", "E: \\ud800"),
        ("class E(Exception):\n  def __str__(self): raise SystemExit\nraise E", "E"),
        ("class S(str): splitlines = None\nclass E(Exception):\n  def __str__(self): return S('x')\nraise E",
         "E: x"),
        ("class E(Exception): __class__ = property(lambda self: MemoryError)\nraise E", "E"),
        ("class E(Exception): __cause__ = property(lambda self: 1 / 0)\nraise E", UNKNOWN),
        ("a = ValueError('a')\na.__cause__ = b = ValueError('b')\nb.__cause__ = a\nraise a", "ValueError: a"),
        ("raise ValueError('x' * (100 << 20))", "ValueError: " + "x" * 188),
        ("raise BaseExceptionGroup('passed', [SystemExit(0)])",
         "BaseExceptionGroup: passed (1 sub-exception)"),
        ("import codecs\ncodecs.register_error('backslashreplace', lambda e: ('', e.end))\n"
         "raise ValueError('\\ud800')", "ValueError: \\ud800"),
        ("import os\nos.closerange(0, 64)\nassert False", "AssertionError"),
        ("import sys\nsys.modules.clear()\nassert False", "AssertionError"),
        ("import os\nos.write = os._exit = None\nassert False", "AssertionError"),
        ("import builtins\nbuiltins.isinstance = builtins.issubclass = lambda *_: True\nassert False",
         "AssertionError"),
        ("import builtins\nbuiltins.BaseException = builtins.type = builtins.str = 3\nassert False",
         "AssertionError"),
        ("import builtins\nvars(builtins).clear()\n1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys\nsys.setrecursionlimit(10)\nassert False", "AssertionError"),
        ("def steps():\n  yield 1\n  return\nnext(s := steps())\nnext(s)", "StopIteration"),
    ],
)  # fmt: skip
def test_any_exception_is_a_failure(program: str, reason: str) -> None:
    result = run(program)
    assert (result.passed, result.stopped, result.reason) == (False, False, reason)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGALRM", "SIGSEGV"])
def test_a_program_ended_by_a_signal_fails(mode: str, name: str) -> None:
    result = run(f"import signal\nsignal.raise_signal(signal.{name})")
    assert (result.passed, result.stopped, result.reason) == (False, False, f"crashed ({name})")


def test_an_invalid_verdict_line_raises_an_error_of_the_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(sandbox.FILE).read_text()
    assert source.count("    verdict = RAN\n") == 1
    copy = tmp_path / "other.py"
    monkeypatch.setattr(sandbox, "FILE", str(copy))
    for verdict in ('"", ""', '"PASSED", ""', "PASSED, 'x'", "FAILED, ''", "READY, ''"):
        copy.write_text(source.replace("    verdict = RAN\n", f"    verdict = {verdict}\n"))
        with pytest.raises(RuntimeError, match="the sandbox gave no verdict"):
            run("")


@pytest.mark.parametrize(
    "wait",
    ["while True: pass", "import time; time.sleep(60)", "while True: print('x' * 1000)",
     "import threading; threading.Event().wait()",
     "from signal import *\nfor s in set(Signals) - {SIGKILL, SIGSTOP}: signal(s, SIG_IGN)\nwhile True: pass",
     "import os\nos.setsid()\nwhile True: pass",
     "import os\nos.closerange(0, 64)\nwhile True: pass",
     "while True:\n  try:\n    while True: pass\n  except BaseException: pass",
     "import os\nwhile True:\n  for fd in range(9):\n    try: os.write(fd, b'x' * 999)\n    except: 0"],
)  # fmt: skip
def test_a_program_is_killed_at_its_time_limit(wait: str) -> None:
    result = run(wait, seconds=SECONDS)
    assert result.reason == f"took longer than {SECONDS} s"
    assert result.seconds >= SECONDS


@pytest.mark.parametrize(
    "hog",
    ["bytearray(8 << 30)", "x = []\nwhile True: x.append(len(x))", "x = 'a'\nwhile True: x += x",
     "x = {}\nwhile True: x[len(x)] = [len(x)]",
     "class A: pass\ndef f():\n  x = []\n  while True: x.append(A())\nf()"],
)  # fmt: skip
def test_a_program_that_exceeds_its_memory_fails(hog: str) -> None:
    if sys.platform == "darwin":
        pytest.skip("macOS does not limit address spaces")
    assert run(hog, seconds=10, memory=MEMORY).reason == "ran out of memory"


def test_the_default_memory_limit_is_one_gibibyte() -> None:
    if sys.platform == "darwin":
        pytest.skip("macOS does not limit address spaces")
    assert run("bytearray(300 << 20)").passed
    assert run("bytearray(1 << 30)").reason == "ran out of memory"
    assert run("", memory=1).reason in ("ran out of memory", "")


@pytest.mark.parametrize("folder", [".", "/tmp", str(Path.home())])
@pytest.mark.parametrize(
    "write", ["open({path!r}, 'w').write('x')", "open({path!r}, 'a')",
              "import os; os.open({path!r}, os.O_CREAT | os.O_RDWR)",
              "import pathlib; pathlib.Path({path!r}).write_text('x')"],
)  # fmt: skip
def test_no_file_is_written(folder: str, write: str, tmp_path: Path) -> None:
    path = Path(folder) / f"{tmp_path.parent.name}-{os.getpid()}-sandbox.txt"
    result = run(write.format(path=str(path)))
    assert result.reason == f"wrote a file: {path}"
    assert not path.exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("os.remove(file)", "deleted a file: {file}"),
        ("pathlib.Path(file).unlink()", "deleted a file: {file}"),
        ("shutil.rmtree(folder)", "(read|deleted) a (file|folder): .*"),
        ("os.rename(file, file + 'x')", "renamed a file: {file}"),
        ("os.truncate(file, 0)", "changed a file: {file}"),
        ("open(file, 'r+')", "wrote a file: {file}"),
        ("os.chmod(file, 0)", "changed a file: {file}"),
        ("os.utime(file, (0, 0))", "changed a file: {file}"),
        ("os.symlink(file, file + 'x')", "wrote a file: {file}"),
        ("os.link(file, file + 'x')", "wrote a file: {file}"),
        ("os.mkdir(folder + '/x')", "made a folder: {folder}/x"),
        ("os.rmdir(folder)", "deleted a folder: {folder}"),
        ("sqlite3.connect(file + 'x')", "wrote a file: {file}x"),
        ("open(file).read()", "read a file: {file}"),
        ("os.listdir(folder)", "read a file: {folder}"),
        ("open('/etc/passwd')", "read a file: /etc/passwd"),
        ("open(os.__file__ + '/../../../../../../etc/passwd')", "read a file: .*"),
    ],
)
def test_no_file_is_changed_or_read(change: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    file.write_text("content")
    before = file.stat()
    names = f"import os, pathlib, shutil, sqlite3\nfile, folder = {str(file)!r}, {str(tmp_path)!r}\n"
    result = run(names + change)
    assert re.fullmatch(reason.format(file=file, folder=tmp_path), result.reason), result.reason
    after = file.stat()
    assert file.read_text() == "content"
    assert (before.st_mode, before.st_mtime) == (after.st_mode, after.st_mtime)
    assert os.listdir(tmp_path) == ["file.txt"]


@pytest.mark.parametrize(
    "connect",
    ["import socket; socket.create_connection(('127.0.0.1', {port}), 1)",
     "import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}/', timeout=1)",
     "import socket; socket.getaddrinfo('localhost', {port})",
     "import _socket; _socket.socket().connect(('127.0.0.1', {port}))"],
)  # fmt: skip
def test_nothing_goes_to_the_network(connect: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        result = run(connect.format(port=server.getsockname()[1]))
        assert result.reason == "used the network"
        with pytest.raises(TimeoutError):
            server.accept()


@pytest.mark.parametrize(
    ("start", "reason"),
    [
        ("import subprocess; subprocess.run(['sleep', '60'])", "started a process"),
        ("import os; os.system('sleep 60')", "started a process"),
        ("import os; os.fork()", "started a process"),
        ("import pty; pty.fork()", "started a process"),
        ("import os; os.execv('/bin/sleep', ['sleep', '60'])", "started a process"),
        ("import os; os.posix_spawn('/bin/sleep', ['sleep', '60'], {})", "started a process"),
        ("import multiprocessing as m; m.get_context('fork').Process().start()", "started a process"),
        ("import os; os.kill(os.getppid(), 9)", "sent a signal"),
        ("import os; os.killpg(0, 9)", "sent a signal"),
        ("import ctypes", "used ctypes"),
        ("import _ctypes", "used ctypes"),
        ("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "changed its limits"),
    ],
)
def test_a_program_starts_and_kills_nothing(start: str, reason: str) -> None:
    assert run(start).reason == reason


def test_a_process_started_despite_the_hook_dies_with_the_program(mode: str) -> None:
    duration = f"{600 + os.getpid() / 1e7:.7f}"  # seconds, which mark the process
    program = (
        "import sys, subprocess\nsys.audit = lambda *_: None\n"
        f"subprocess.Popen(['sleep', '{duration}'], start_new_session={mode == NAMESPACES})\n"
    )
    assert run(program).passed
    assert has_ended(duration)
    assert run(program + "while True: pass", seconds=SECONDS).reason == f"took longer than {SECONDS} s"
    assert has_ended(duration)


def test_a_program_dies_and_fails_if_its_watcher_is_killed(mode: str, groups: list[int]) -> None:
    threading.Timer(SECONDS, lambda: os.kill(groups[-1], signal.SIGKILL)).start()
    result = run("import os\nos.closerange(0, 64)\nwhile True: pass", seconds=20)
    assert result.reason == "exited before the end"


def test_namespaces_refuse_operations_without_an_audit_event(mode: str, tmp_path: Path) -> None:
    if mode != NAMESPACES:
        pytest.skip("there is no hook for this")
    result = run(f"import os; os.mkfifo({str(tmp_path / 'x')!r})")
    assert (result.reason, result.stopped) == ("wrote a file", True)
    assert not os.listdir(tmp_path)
    network = os.readlink("/proc/self/ns/net")
    assert run(f"import os\nassert os.readlink('/proc/self/ns/net') != {network!r}").passed


@pytest.mark.parametrize(
    "program",
    ["for _ in range(1024): print('x' * (1 << 20))",
     "import sys\nfor _ in range(64): sys.stderr.write('x' * (1 << 20))",
     "import os\nfor _ in range(256): os.write(1, b'x' * (1 << 20))"],
)  # fmt: skip
def test_output_of_a_program_is_discarded(program: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(program, seconds=20).passed
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "program",
    ["import typing, math, collections, re, hashlib, itertools, functools, heapq, bisect, random, string\n"
     "import json, datetime, decimal, fractions, statistics, copy, operator, sys, os, time, dataclasses\n"
     "assert hashlib.md5(b'').hexdigest().startswith('d41d8')",
     "from typing import *\nfrom dataclasses import dataclass\n@dataclass\nclass A: x: 'ClassVar[int]'\nA()",
     "ran = False\nif __name__ == '__main__':\n  ran = True\nassert not ran",
     "import pickle\nclass A: pass\nassert type(pickle.loads(pickle.dumps(A()))) is A",
     "größe = '日本語 🙂'\nprint(größe)\nassert len(größe) == 5 and größe.encode().decode() == größe",
     "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
     "import asyncio\nasync def f(): return 3\nassert asyncio.run(f()) == 3",
     "import contextlib, io, os\nwith contextlib.redirect_stdout(open(os.devnull, 'w')): print()",
     "import sqlite3\nassert sqlite3.connect(':memory:').execute('select 1').fetchone() == (1,)",
     "try: open('missing.txt')\nexcept FileNotFoundError: pass",
     "def f(x: undefined if False else int): return f.__annotations__\nassert f(1) == {'x': int}",
     "import os\nassert os.listdir() == [] and len(os.environ) < 8",
     "import os\nos.closerange(0, 64)",
     "import os\nos.write = os._exit = None",
     "import sys\nsys.stdout.close(); sys.stderr.close(); sys.stdin.close()",
     "import atexit, os\natexit.register(lambda: os._exit(1))",
     "import sys\ntry: sys.exit(0)\nexcept SystemExit: pass",
     "import sys\nsys.modules.clear()",
     "import builtins\nvars(builtins).clear()",
     "exec = type = BaseException = len = None",
     "import builtins\nsum = builtins.len = lambda items: 3\nassert len([]) == sum([]) == 3",
     "from signal import *\nfor s in set(Signals) - {SIGKILL, SIGSTOP}: signal(s, SIG_IGN)",
     "x = []\ntry:\n  while True: x.append(bytearray(1 << 20))\nexcept MemoryError: pass",
     ""],
)  # fmt: skip
def test_ordinary_programs_pass(program: str) -> None:
    result = run(program)
    assert result.passed, result.reason


def test_an_interrupt_kills_the_program_and_is_raised() -> None:
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(SECONDS, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        run("while True: pass", seconds=60)


def test_several_threads_can_run_programs_at_once() -> None:
    found: list[bool] = []
    threads = [threading.Thread(target=lambda: found.append(run("x = 1").passed)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4


def test_a_sandbox_that_does_not_start_raises_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise OSError('out of order')")
    monkeypatch.setattr(sandbox, "FILE", str(broken))
    with pytest.raises(RuntimeError, match="the sandbox did not start: OSError: out of order"):
        run("")


def test_a_platform_without_process_limits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "find_spec", lambda name: None)
    with pytest.raises(OSError, match=r"no module `resource`.*Windows.*WSL"):
        run("")


@pytest.mark.parametrize("limits", [{"seconds": 0}, {"seconds": float("inf")}, {"memory": 0}])
def test_invalid_limits_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        run("", **limits)
