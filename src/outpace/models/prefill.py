"""Prefill of one sequence as CUDA graphs, one per model and number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outpace.checks.arguments import overwrite
from outpace.models.capture import Graphs
from outpace.models.scorer import CHUNK, Scorer

SIZES = (32, 64, 128, 256, CHUNK)  # tokens that a graph serves, padding included
PADDING = -1  # position of padding


class PrefillGraphs:
    """Forward passes over tokens of prompts. Those over one sequence are graphs.

    A graph is captured when its size is used the second time. A capture takes longer than a forward pass
    whose kernels are launched one by one. Both have the same kernels, whatever the number of tokens.

    Args:
        graphs: The graphs, which others may share.
    """

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        # Inputs of graphs, by the model's id and size: token ids, positions and slot ``[2·size + 1]``. A
        # scorer that holds this object is freed at once, since nothing here refers to it.
        self._inputs: dict[tuple[int, int], Tensor] = {}

    @torch.inference_mode()
    def append(self, scorer: Scorer, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor | None:
        """Append tokens to sequences as ``Scorer.append`` does. A graph returns None instead of logits."""
        if not self._graphs.enabled or not scorer.has_kernels or len(slots) > 1:
            return scorer.append(slots, tokens)
        slot, new = slots[0], tokens[0]
        size = next(size for size in SIZES if size >= len(new))
        key = id(scorer), size
        is_new = key not in self._inputs
        if is_new:
            self._inputs[key] = torch.zeros(2 * size + 1, dtype=torch.int64, device=scorer.device)
        inputs, start = self._inputs[key], scorer.cache.length(slot)
        scorer.cache.reserve(slots, [start + len(new)])
        padding = size - len(new)
        ids, positions = [*new, *[0] * padding], [*range(start, start + len(new)), *[PADDING] * padding]
        overwrite(inputs, [*ids, *positions, slot])

        def fill() -> Tensor:
            scorer.fill(inputs[None, :size], inputs[None, size:-1], inputs[-1:])
            return inputs

        if is_new:
            fill()
        else:
            self._graphs.run(("prefill", *key), fill, f"a prefill of {size} tokens")
        scorer.cache.commit(slot, len(new), new)
        return None
