"""The help of every command is complete."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from outpace import cli
from outpace.bench import cost
from tests.cli.conftest import Run


def commands(group: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    for word, one in group.commands.items():
        if hasattr(one, "commands"):
            yield from commands(one, f"{name}{word} ")
        else:
            yield f"{name}{word}", one


ALL = dict(commands(typer.main.get_command(cli.app)))


@pytest.mark.parametrize("name", ALL)
def test_every_option_has_help_and_brackets_are_not_parsed_as_markup(
    run: Run, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("TERMINAL_WIDTH", "250")
    status, out, _ = run(*name.split(), "--help")
    assert status == 0
    command = ALL[name]
    assert [one.name for one in command.params if one.name != "help" and not one.help] == []
    written = [command.help, *(one.help for one in command.params), *(one.metavar for one in command.params)]
    for text in filter(None, written):
        for bracket in re.findall(r"\[[^]]*\]", text.replace("\\[", "[")):
            assert bracket in out


def test_help_states_the_default_lists_of_bench_alpha(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    _, out, _ = run("bench alpha", "--help")
    for name in ("PASS_SIZES", "BATCHES"):
        assert f"Default: {', '.join(map(str, getattr(cost, name)))}." in out


def test_sweep_has_the_sampling_flags_of_alpha_and_tune(run: Run) -> None:
    own = {flag for one in ALL["bench sweep"].params for flag in one.opts}
    for other in ("bench alpha", "tune"):
        panel = [one for one in ALL[other].params if getattr(one, "rich_help_panel", None) == "Sampling"]
        assert {flag for one in panel for flag in one.opts} <= own
    (draft,) = [one for one in ALL["bench sweep"].params if one.name == "draft"]
    assert "random" in draft.metavar
