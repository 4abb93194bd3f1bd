"""Prefill as graphs, on the CPU: the work of a graph runs directly."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import pytest
import torch
from torch import Tensor

from outpace.models import prefill
from outpace.models.capture import Graphs, Result
from outpace.models.fused_scorer import FusedScorer
from outpace.models.prefill import PrefillGraphs
from tests.tiny import tiny


class DirectGraphs(Graphs):
    """Graphs that run their work instead of capturing it, and remember their keys."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.enabled = True
        self.keys: list[Hashable] = []

    def run(
        self, key: Hashable, work: Callable[[], Result], name: str, mutated: Sequence[Tensor] = ()
    ) -> tuple[Result, float]:
        self.keys.append(key)
        return work(), 0.0


@pytest.fixture
def scorers(monkeypatch: pytest.MonkeyPatch) -> list[FusedScorer]:
    monkeypatch.setattr(prefill, "SIZES", (4, 8, 16))
    model = tiny()
    return [FusedScorer(model), FusedScorer(model)]


def tokens(count: int) -> list[int]:
    return torch.randint(1, 30, (count,)).tolist()


def test_a_graph_fills_the_kv_cache_as_single_kernels_do(scorers: list[FusedScorer]) -> None:
    torch.manual_seed(0)
    scorer, reference = scorers
    scorer.has_kernels = True  # only graphs of such scorers know a slot
    graphs = DirectGraphs()
    prefills = PrefillGraphs(graphs)
    chunks = [(0, 3), (0, 2), (2, 7), (2, 8), (2, 4), (1, 16), (1, 9), (0, 8)]  # slot, tokens
    for slot in range(3):
        for one in scorers:
            one.cache.open(slot, [])
    for slot, count in chunks:
        new = tokens(count)
        prefills.append(scorer, [slot], [new])
        reference.append([slot], [new])
    assert [key[2] for key in graphs.keys] == [4, 8, 4, 16, 8]  # type: ignore[index]
    last = torch.tensor([[5], [6], [7]])
    assert [scorer.cache.length(slot) for slot in range(3)] == [13, 25, 19]
    found, expected = (one.score([0, 1, 2], last) for one in scorers)
    assert torch.allclose(found, expected, atol=1e-5)


def test_several_sequences_are_prefilled_without_graphs(scorers: list[FusedScorer]) -> None:
    graphs = DirectGraphs()
    prefills = PrefillGraphs(graphs)
    scorers[0].has_kernels = True
    for slot in range(4):
        scorers[0].cache.open(slot, [])
    for slots in ([0, 1], [2, 3]):
        logits = prefills.append(scorers[0], slots, [tokens(3), tokens(4)])
        assert logits is not None
        assert logits.shape[0] == 2
    assert not graphs.keys
