from __future__ import annotations

import contextlib
import os
import signal
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # Triton reads it when it is first imported, which what follows may do
    )

from tests import tiers
from tests.statistical import chisquare

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So a shell starts what runs in the background; tests interrupt themselves, and programs that inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if os.environ.get("TRITON_INTERPRET") == "1":
    with contextlib.suppress(ImportError):
        from tests import interpreter

        interpreter.patch_language_once()

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if WORKERS > 1:
    torch.set_num_threads(max(1, torch.get_num_threads() // WORKERS))
    os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # of programs that tests start


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="the full tier: every cell, a million draws each; tens of minutes"
    )


def pytest_configure(config: pytest.Config) -> None:
    tiers.full = config.getoption("--full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not tiers.full:
        skip = pytest.mark.skip(reason="in the full tier alone: pytest --full")
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Tests draw their inputs from PyTorch's generator; each starts from the same state."""
    torch.manual_seed(20230213)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if chisquare.assertions():
        terminalreporter.write_line(
            f"statistical assertions: {chisquare.assertions()}, "
            f"false alarms below {chisquare.false_alarm_rate():.1e} per run (limit {chisquare.MOST:g})"
        )


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist has ended."""
    chisquare.count(**getattr(node, "workeroutput", {}).get("statistical", {}))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workeroutput"):
        tally = {"assertions": chisquare.assertions(), "rate": chisquare.false_alarm_rate()}
        session.config.workeroutput["statistical"] = tally
    if chisquare.false_alarm_rate() > chisquare.MOST and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
