"""Draft tokens of the host reach the slots that they are for."""

from __future__ import annotations

import pytest
import torch

from outpace.draft.base import Draft
from outpace.engine.slots import Slots

V = 7


@pytest.mark.parametrize("with_logits", [False, True])
def test_draft_tokens_are_copied_to_their_slots_and_others_get_none(with_logits: bool) -> None:
    torch.manual_seed(0)
    slots = Slots(6, 32, V, torch.device("cpu"))
    logits = torch.randn(2, 2, V) if with_logits else None
    full = Draft(torch.tensor([[1, 2], [3, 4]]), logits)
    buffers = slots.copy_draft(2, full, [3, 0], 4)
    assert buffers.tokens.tolist() == [[3, 4], [0, 0], [0, 0], [1, 2]]
    assert buffers.lengths is not None
    assert buffers.lengths.tolist() == [2, 0, 0, 2]
    if logits is not None:
        assert buffers.logits is not None
        assert buffers.logits.shape == (4, 2, V)
        assert torch.equal(buffers.logits[[3, 0]], logits)
    ragged = Draft(torch.tensor([[5, 0], [6, 6]]), logits, [1, 2])
    assert slots.copy_draft(2, ragged, [1, 3], 4) is buffers, "graphs read the same memory"
    assert buffers.tokens.tolist() == [[0, 0], [5, 0], [0, 0], [6, 6]]
    assert buffers.lengths.tolist() == [0, 1, 0, 2]
    assert slots.copy_draft(2, ragged, [1, 3], 6).tokens.shape == (6, 2)
