from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of models this small: on Arm, oneDNN would take most of their passes to set each product up."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
