"""Programs in `benchmarks/` start `outpace` with commands, flags and runners that exist."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from outpace.cli import app
from outpace.tasks.kinds import RUNNERS

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
STARTERS = ("gguf_start_cpu", "resume_cpu", "start_cpu", "threads_cpu", "tune_cpu")
COMMAND: Any = typer.main.get_command(app)
Word = str | None  # None: known only when the program runs


def command_lines(source: str) -> list[list[Word]]:
    """Return the words after `outpace` of each command line in a program, from its syntax tree."""
    tree = ast.parse(source)
    assigned = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.List):
            continue
        after = after_outpace(with_first_list(node.elts, assigned), assigned)
        if after is not None:
            wrapper = next((one for one in functions if forwards(one, node, after)), None)
            lines = [after] if wrapper is None else arguments_of(wrapper.name, tree)
            found += [[word for one in line for word in words(one, assigned)] for line in lines]
    return found


def with_first_list(elements: list[ast.expr], assigned: dict[str, ast.expr]) -> list[ast.expr]:
    """Return the elements of a list; if it starts with the name of another list, with those of that one."""
    first = elements[0] if elements else None
    if isinstance(first, ast.Starred) and isinstance(first.value, ast.Name):
        value = assigned.get(first.value.id)
        return [*value.elts, *elements[1:]] if isinstance(value, ast.List) else elements
    return elements


def after_outpace(elements: list[ast.expr], assigned: dict[str, ast.expr]) -> list[ast.expr] | None:
    """Return the elements after `python -m outpace`, or after the executable `outpace`; else None."""
    for i, one in enumerate(elements):
        value = assigned.get(one.id, one) if isinstance(one, ast.Name) else one
        executable = i == 0 and "with_name('outpace')" in ast.unparse(value)
        if executable or (i and words(elements[i - 1], {}) == ["-m"] and words(one, {}) == ["outpace"]):
            return elements[i + 1 :]
    return None


def forwards(function: ast.FunctionDef, line: ast.List, after: list[ast.expr]) -> bool:
    """Return whether a function has a command line whose words are its own arguments."""
    own = function.args.vararg
    return own is not None and line in ast.walk(function) and ast.unparse(after[0]) == f"*{own.arg}"


def arguments_of(name: str, tree: ast.Module) -> list[list[ast.expr]]:
    """Return the arguments of all calls of a function."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [call.args for call in calls if isinstance(call.func, ast.Name) and call.func.id == name]


def words(node: ast.expr, assigned: dict[str, ast.expr]) -> list[Word]:
    """Return the words of an argument. Of a starred list, the flags in the expression that makes it."""
    if isinstance(node, ast.Starred):
        value = assigned.get(node.value.id, node.value) if isinstance(node.value, ast.Name) else node.value
        constants = (one.value for one in ast.walk(value) if isinstance(one, ast.Constant))
        return [None, *(one for one in constants if isinstance(one, str) and one.startswith("-"))]
    return [node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None]


def problems(line: list[Word]) -> Iterator[str]:
    """Yield the command, the flags and the runners of a command line that do not exist."""
    command, rest = COMMAND, list(line)
    while hasattr(command, "commands"):
        name = rest.pop(0) if rest else None
        if name not in command.commands:
            yield f"command {name}"
            return
        command = command.commands[name]
    flags = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    yield from (f"flag {word}" for word in rest if word and word.startswith("-") and word not in flags)
    for flag, value in itertools.pairwise(rest):
        if flag == "--runners" and value:
            yield from (f"runner {name}" for name in value.split(",") if name not in RUNNERS)


@pytest.mark.parametrize("name", STARTERS)
def test_command_lines_of_a_benchmark_exist(name: str) -> None:
    lines = command_lines((BENCHMARKS / f"{name}.py").read_text(encoding="utf-8"))
    assert lines
    assert [problem for line in lines for problem in problems(line)] == []


def test_every_benchmark_that_starts_outpace_is_checked() -> None:
    programs = {path.stem: path.read_text(encoding="utf-8") for path in BENCHMARKS.glob("*.py")}
    found = {name for name, source in programs.items() if command_lines(source)}
    assert found == set(STARTERS)
    named = {
        name
        for name, source in programs.items()
        if "import subprocess" in source and ('"-m", "outpace"' in source or 'with_name("outpace")' in source)
    }
    assert named == found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (
            "def run(*words): call([exe, '-m', 'outpace', *words])\nrun('sweep', '-o', path)",
            ["command sweep"],
        ),
        ("def run(*words): call([exe, '-m', 'outpace', *words])\nrun('bench', 'sweep', '-o', path)", []),
        ("[exe, '-m', 'outpace', 'eval', task, '--runners', 'plain,exact', '-o']", ["runner plain"]),
        ("[exe, '-m', 'outpace', 'eval', task, '--sides', 'baseline']", ["flag --sides"]),
        ("outpace = str(exe.with_name('outpace'))\n[outpace, 'measure', '-m', '1']", ["command measure"]),
        ("flags = ['--length', n]\n[exe, '-m', 'outpace', 'generate', *flags]", ["flag --length"]),
        ("words = [exe, '-m', 'outpace', 'chat']\n[*words, '--drafts']", ["flag --drafts"]),
        ("[exe, '-m', 'outpace', 'bench']", ["command None"]),
    ],
)
def test_outdated_command_lines_are_found(source: str, found: list[str]) -> None:
    assert [problem for line in command_lines(source) for problem in problems(line)] == found
