from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = (
        "1"  # Triton reads it when it is first imported, which what follows may do
    )

from tests.statistical import chisquare


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


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if chisquare.false_alarm_rate() > chisquare.MOST and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
