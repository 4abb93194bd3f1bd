"""The command bounds how long waiting threads spin; importing the library does not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from outpace.cli.threads import BOUNDED, CHOSEN_BY_USER, bound_spinning


@pytest.fixture
def unchosen(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in CHOSEN_BY_USER:
        monkeypatch.setenv(name, "")  # so that it is as it was afterwards
        monkeypatch.delenv(name)
    return monkeypatch


def test_spinning_is_bounded_where_the_user_chose_nothing(unchosen: pytest.MonkeyPatch) -> None:
    bound_spinning()
    assert {name: os.environ[name] for name in BOUNDED} == BOUNDED


@pytest.mark.parametrize("name", CHOSEN_BY_USER)
def test_what_the_user_chose_stays_the_only_choice(unchosen: pytest.MonkeyPatch, name: str) -> None:
    unchosen.setenv(name, "7")
    bound_spinning()
    assert [one for one in CHOSEN_BY_USER if one in os.environ] == [name]


def run(program: str) -> str:
    env = {name: value for name, value in os.environ.items() if name not in CHOSEN_BY_USER}
    return subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_command_chooses_before_the_libraries_are_loaded() -> None:
    program = """
import os, sys
from outpace.cli import main
import outpace.cli
honest = outpace.cli.bound_spinning
def noting():
    honest()
    print("torch" in sys.modules, os.environ["GOMP_SPINCOUNT"])
outpace.cli.bound_spinning = noting
sys.argv = ["outpace", "--version"]
main()
"""
    assert run(program).splitlines()[0] == f"False {BOUNDED['GOMP_SPINCOUNT']}"


def test_an_import_chooses_nothing() -> None:
    program = "import os, outpace; outpace.Decoder; print('GOMP_SPINCOUNT' in os.environ)"
    assert run(program) == "False"
