"""Sampling parameters as tensors give the logits that ``SamplingParams`` give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outpace import SamplingParams
from outpace.sampling import Prefix, process, warp
from outpace.sampling.rows import (
    IN_PROMPT,
    MAX_COUNT,
    Edits,
    RowSampling,
    allowed_of,
    edit,
    penalties_of,
    seen_of,
    shape_of,
    warp_rows,
)

V = 11
SHAPES = [
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.3, top_k=3),
    SamplingParams(top_k=V),
    SamplingParams(top_p=0.6),
    SamplingParams(temperature=0.5, top_k=6, top_p=0.8, min_p=0.1),
    SamplingParams(min_p=0.3),
]
EDITS = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(frequency_penalty=0.4, presence_penalty=-0.3),
    SamplingParams(logit_bias={0: 2.0, 7: -float("inf")}),
    SamplingParams(repetition_penalty=0.8, frequency_penalty=0.2, logit_bias={3: -1.0}),
    SamplingParams(allowed_token_ids=[0, 3, 10], presence_penalty=0.5),
]


def edits_of(samplings: list[SamplingParams], prompts: list[list[int]], outputs: list[list[int]]) -> Edits:
    edits = Edits.none(len(samplings), V, torch.device("cpu"))
    for b, (one, prompt, output) in enumerate(zip(samplings, prompts, outputs, strict=True)):
        edits.penalties[b], edits.allowed[b] = torch.tensor(penalties_of(one)), allowed_of(one, V)
        for token, value in (one.logit_bias or {}).items():
            edits.bias[b, token] = value
        edits.seen[b] = seen_of(prompt, output, V)
    return edits


def case(n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Edits, Prefix]:
    """Return logits, draft tokens, and the tokens before them in both forms."""
    prompts = [torch.randint(V, (size,)).tolist() for size in (4, 1, 9, 3, 5, 2)]
    outputs = [torch.randint(V, (size,)).tolist() for size in (0, 6, 2, 4, 30, 7)]
    texts = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
    prefix = Prefix.of(texts, [len(prompt) for prompt in prompts])
    drafted = torch.randint(V, (len(EDITS), n - 1))
    return torch.randn(len(EDITS), n, V).to(dtype), drafted, edits_of(EDITS, prompts, outputs), prefix


@pytest.mark.parametrize("n", [1, 4])
def test_shapes_as_tensors_equal_sampling_parameters(n: int) -> None:
    logits = (2 * torch.randn(len(SHAPES), n, V)).round(decimals=1)  # with ties
    sampling = RowSampling(torch.tensor([shape_of(one, V) for one in SHAPES]), filters=True)
    torch.testing.assert_close(warp_rows(logits, sampling), warp(logits, SHAPES))


def test_before_the_argmax_a_greedy_row_has_the_models_own_distribution() -> None:
    sampling = RowSampling(torch.tensor([shape_of(one, V) for one in SHAPES]), filters=True)
    shapes = [SamplingParams() if one.greedy else one for one in SHAPES]
    logits = torch.randn(len(SHAPES), 2, V)
    torch.testing.assert_close(warp_rows(logits, sampling.before_argmax), warp(logits, shapes))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_edits_as_tensors_equal_sampling_parameters(n: int) -> None:
    logits, drafted, edits, prefix = case(n)
    torch.testing.assert_close(edit(logits, edits, drafted), process(logits, EDITS, prefix, drafted)[0])


def test_the_last_position_follows_all_draft_tokens() -> None:
    logits, drafted, edits, _ = case(4)
    whole = edit(logits, edits, drafted)
    for i in range(4):
        torch.testing.assert_close(edit(logits[:, i : i + 1], edits, drafted[:, :i]), whole[:, i : i + 1])


def test_counted_tokens_are_those_of_the_output() -> None:
    prompt, output = [1, 2, 2], [4, 4, 4, 2]
    edits = edits_of([SamplingParams()], [prompt], [[]])
    edits.count(torch.tensor([output[:2]]), torch.tensor([[True, True]]))
    edits.count(torch.tensor([[*output[2:], 9]]), torch.tensor([[True, True, False]]))
    assert torch.equal(edits.seen[0], seen_of(prompt, output, V))
    assert edits.seen[0, 2] == IN_PROMPT + 1


def test_counts_stop_before_they_reach_the_bit_of_the_prompt() -> None:
    edits = edits_of([SamplingParams()], [[]], [[4] * (MAX_COUNT + 5)])
    for _ in range(3):
        edits.count(torch.tensor([[4, 4]]), torch.tensor([[True, True]]))
    assert edits.seen[0, 4] == MAX_COUNT
