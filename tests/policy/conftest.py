from __future__ import annotations

import pytest

from outpace import Goodput


@pytest.fixture(autouse=True)
def _decisions_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock of ``Goodput``, so that simulations do not depend on the machine."""
    monkeypatch.setitem(Goodput.__init__.__kwdefaults__ or {}, "clock", lambda: 0.0)
