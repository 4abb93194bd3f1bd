"""Closed or full streams, bytes that are not UTF-8, and an early Ctrl-C give one line each."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from typing import Any

import pytest

from tests import tiers
from tests.cli.conftest import Run, outpace
from tests.cli.test_cli import PROMPT, common

PLAN = ("plan", "--alpha", "0.8")
STDOUT_CLOSED = "outpace: stdout is closed; send it to a file, or to /dev/null\n"


COMMANDS = [("generate", "ab"), PLAN, ("chat",), ("doctor",), ("bench", "kernel")]


@pytest.mark.parametrize("words", tiers.sized(COMMANDS[:2], COMMANDS))
def test_a_closed_stdout_is_refused_before_any_work(words: tuple[str, ...]) -> None:
    assert outpace(*words, redirect=">&-") == (2, "", STDOUT_CLOSED)
    assert outpace(*words, redirect="<&- >&- 2>&-") == (2, "", "")


def test_with_a_closed_stderr_stdout_is_unchanged() -> None:
    assert outpace(*PLAN, redirect="2>&-") == outpace(*PLAN)


@pytest.mark.full
def test_with_a_closed_stderr_a_text_is_generated(run: Run, model: str) -> None:
    words = ("generate", PROMPT, "--raw", "--num-draft-tokens", "2", *common(model))
    assert outpace(*words, redirect="2>&-")[:2] == run(*words)[:2]


@pytest.mark.full
def test_a_closed_stdin_counts_as_empty(model: str) -> None:
    code, out, err = outpace("generate", redirect="<&-")
    assert (code, out) == (2, "")
    assert err == "outpace: prompt: it is empty; a model needs something to go on from\n"
    assert outpace("chat", *common(model), redirect="<&-")[:2] == (0, "")


@pytest.mark.parametrize("words", [PLAN, (*PLAN, "--json"), ("--version",), ("plan", "--help")])
def test_a_full_disk_gives_one_line(words: tuple[str, ...]) -> None:
    assert outpace(*words, redirect=">/dev/full") == (2, "", "outpace: [Errno 28] No space left on device\n")


@pytest.mark.parametrize("redirect", ["", ">/dev/null"])
def test_the_exit_status_is_2_even_if_nobody_reads_stderr(redirect: str) -> None:
    words = "-m outpace plan --alpha 3"
    command = f"trap '' PIPE; sleep 1; exec {sys.executable} {words} 2>&1 {redirect}"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; ({command}) | true"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


@pytest.mark.full
def test_chat_asks_again_after_a_line_that_is_not_utf8(model: str) -> None:
    code, _, err = outpace("chat", *common(model), stdin=b"a\xff\xfeb\nab\n")
    assert code == 0
    assert "prompt: not text in UTF-8; type it again" in err.splitlines()
    assert "24 tokens | " in err  # of the line after it


def test_a_prompt_that_is_not_utf8_is_refused(run: Run) -> None:
    code, out, err = outpace("generate", stdin=b"a\xff\xfeb\n")
    assert (code, out, err) == (2, "", "outpace: prompt: not text in UTF-8\n")
    for command in ("generate", "chat"):
        words = ["ab"] if command == "generate" else []
        code, _, err = run(command, *words, "--system", "a\udcff")
        assert (code, err) == (2, "outpace: --system: not text in UTF-8\n")


def test_a_warning_gives_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = importlib.import_module("outpace.cli.plan")
    original = plan.compute

    def compute(*arguments: Any) -> Any:
        warnings.warn("the first line\nframe #0: and the rest", stacklevel=1)
        return original(*arguments)

    monkeypatch.setattr(plan, "compute", compute)
    code, _, err = run(*PLAN)
    assert (code, err) == (0, "outpace: the first line\n")


@pytest.mark.parametrize("module", ["typer", "outpace.cli.show", "torch", "transformers"])
def test_ctrl_c_during_imports_gives_one_line(model: str, module: str) -> None:
    code = f"""
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from outpace.__main__ import main
main()
"""
    words = ["generate", PROMPT, *common(model)]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.splitlines()[-1] == "outpace: interrupted"
    assert "Traceback" not in done.stderr
