from __future__ import annotations

import io
import sys

import pytest

from outpace import cli


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)


class Run:
    """Runs the command in this process: exit status, stdout, stderr."""

    def __init__(self, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capsys = patch, capsys

    def __call__(self, *arguments: str, stdin: str = "") -> tuple[int, str, str]:
        self._patch.setattr(sys, "argv", ["outpace", *arguments])
        self._patch.setattr(sys, "stdin", io.StringIO(stdin))
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main()
        out, err = self._capsys.readouterr()
        return int(stopped.value.code or 0), out, err
