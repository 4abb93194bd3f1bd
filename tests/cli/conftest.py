from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from outpace import cli
from tests.tiny import byte_tokenizer, tiny

CHAT = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[bot]"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)


class Run:
    """Run the command in this process, and return exit status, stdout and stderr.

    "bench alpha" is split into two words.
    """

    def __init__(self, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capsys = patch, capsys

    def __call__(self, command: str, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        words = command.split(" ") if command.startswith("bench ") else [command]
        self._patch.setattr(sys, "argv", ["outpace", *words, *arguments])
        self._patch.setattr(sys, "stdin", io.StringIO(stdin))
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = self._capsys.readouterr()
        return int(stopped.value.code or 0), out, err


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny model, and a tokenizer with a chat template."""
    return saved(tmp_path_factory.mktemp("model"), 0)


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("other"), 1)


def saved(folder: Path, seed: int) -> str:
    tiny(vocab_size=272, seed=seed).save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return str(folder)


def full_disk(patch: pytest.MonkeyPatch, after: int) -> None:
    """Let ``Path.write_text`` succeed ``after`` times, then raise as on a full disk."""
    write, remaining = Path.write_text, iter(range(after))

    def write_text(path: Path, *arguments: Any, **options: Any) -> int:
        if next(remaining, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write(path, *arguments, **options)

    patch.setattr(Path, "write_text", write_text)


def interrupted(
    words: Sequence[str], reached: Callable[[], bool], before: str = "", seconds: float = 180
) -> tuple[int, str, str]:
    """Run the command, send Ctrl-C once ``reached`` is true, and return exit status, stdout and stderr.

    ``before`` is Python code that runs first.
    """
    code = f"{before}\nfrom outpace.cli import main\nmain()"
    with subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + seconds
        while process.poll() is None and not reached() and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def outpace(*words: str, stdin: bytes = b"", redirect: str = "") -> tuple[int, str, str]:
    """Run the command in a process of its own, and return exit status, stdout and stderr.

    ``redirect`` is in the syntax of a shell, such as ``>&-``, which closes stdout.
    """
    command = f'exec "$@" {redirect}'
    done = subprocess.run(
        ["bash", "-c", command, "bash", sys.executable, "-m", "outpace", *words],
        input=stdin,
        capture_output=True,
        env=buffered(),
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def buffered() -> dict[str, str]:
    """Return the environment without PYTHONUNBUFFERED, so that stdout is buffered as usual."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
