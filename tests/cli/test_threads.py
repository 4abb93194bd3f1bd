"""The command bounds how long waiting threads spin; importing the library does not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from outpace.cli import SPIN_BOUNDS, SPIN_VARIABLES, bound_spinning
from tests import tiers


@pytest.fixture
def without_variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in SPIN_VARIABLES:
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    return monkeypatch


def test_spinning_is_bounded_if_the_user_set_no_variable(without_variables: pytest.MonkeyPatch) -> None:
    bound_spinning()
    assert {name: os.environ[name] for name in SPIN_BOUNDS} == SPIN_BOUNDS


@pytest.mark.parametrize("name", SPIN_VARIABLES)
def test_a_variable_set_by_the_user_prevents_the_bound(
    without_variables: pytest.MonkeyPatch, name: str
) -> None:
    without_variables.setenv(name, "7")
    bound_spinning()
    assert [one for one in SPIN_VARIABLES if one in os.environ] == [name]


def run(program: str) -> str:
    env = {name: value for name, value in os.environ.items() if name not in SPIN_VARIABLES}
    return subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_the_command_sets_the_bound_before_pytorch_is_imported() -> None:
    program = """
import os, sys
from outpace.cli import main
import outpace.cli
original = outpace.cli.bound_spinning
def reporting():
    original()
    print("torch" in sys.modules, os.environ["GOMP_SPINCOUNT"])
outpace.cli.bound_spinning = reporting
sys.argv = ["outpace", "--version"]
main()
"""
    assert run(program).splitlines()[0] == f"False {SPIN_BOUNDS['GOMP_SPINCOUNT']}"


def test_importing_outpace_sets_no_bound() -> None:
    name = tiers.sized("__version__", "Decoder")  # the class imports PyTorch and Transformers
    assert run(f"import os, outpace; outpace.{name}; print('GOMP_SPINCOUNT' in os.environ)") == "False"
