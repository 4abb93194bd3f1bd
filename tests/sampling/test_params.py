"""Adjusted logits equal those of Transformers' `generate`, bit for bit, ties included."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import threading
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as hf

from outpace.sampling import Prefix, SamplingParams, adjust, process

pytest.importorskip("hypothesis", reason="hypothesis is not installed: pip install 'outpace[dev]'")
from hypothesis import given, settings
from hypothesis import strategies as st

SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.7),
    SamplingParams(top_k=1),
    SamplingParams(top_k=5),
    SamplingParams(top_k=10_000),
    SamplingParams(top_p=0.0),
    SamplingParams(top_p=0.3),
    SamplingParams(top_p=0.95),
    SamplingParams(min_p=0.2),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=1.7, top_k=20, top_p=0.8, min_p=0.05),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(repetition_penalty=0.8, temperature=0.5, top_p=0.9),
    SamplingParams(logit_bias={3: -100.0, 7: 2.5, 0: -math.inf}, top_k=8),
    SamplingParams(temperature=0, repetition_penalty=1.2),
]


def transformers_list(sampling: SamplingParams) -> LogitsProcessorList:
    """Return the processors that `generate` would build, in its order."""
    steps: list[Any] = []
    if sampling.logit_bias:
        steps.append(
            hf.SequenceBiasLogitsProcessor({(token,): bias for token, bias in sampling.logit_bias.items()})
        )
    if sampling.repetition_penalty != 1:
        steps.append(hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    steps.extend(sampling.processors)
    if sampling.greedy:
        return LogitsProcessorList(steps)
    if sampling.temperature != 1:
        steps.append(hf.TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        steps.append(hf.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(hf.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        steps.append(hf.MinPLogitsWarper(sampling.min_p))
    return LogitsProcessorList(steps)


@pytest.fixture
def _stable_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the sort in Transformers' top-p stable.

    It is unstable, so its choice among equal logits differs between machines. Outpace uses the stable order.
    """
    monkeypatch.setattr(torch, "sort", functools.partial(torch.sort, stable=True))


def reference(logits: Tensor, sampling: SamplingParams, prefix: list[int], drafted: list[int]) -> Tensor:
    """Adjust one row `[n, V]` position by position with Transformers' own processors."""
    rows = []
    for i, scores in enumerate(logits):
        ids = torch.tensor([prefix + drafted[:i]], dtype=torch.int64)
        adjusted = transformers_list(sampling)(ids, scores[None].float())[0]
        if sampling.greedy:
            adjusted = torch.full_like(adjusted, -math.inf).index_fill_(0, adjusted.argmax(), 0.0)
        rows.append(adjusted)
    return torch.stack(rows)


def batch(V: int, ties: bool, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[list[int]], Tensor]:
    B, n = 4, 3
    logits = 3 * torch.randn(B, n, V)
    if ties:
        logits = logits.round()
    prefixes = [torch.randint(V, (length,)).tolist() for length in (5, 1, 9, 3)]
    return logits.to(dtype), prefixes, torch.randint(V, (B, n - 1))


def assert_equals_transformers(
    sampling: SamplingParams, logits: Tensor, prefixes: list[list[int]], drafted: Tensor
) -> None:
    adjusted = adjust(logits, sampling, Prefix.of(prefixes), drafted)
    for b in range(len(logits)):
        assert torch.equal(adjusted[b], reference(logits[b], sampling, prefixes[b], drafted[b].tolist()))


@pytest.mark.parametrize("V", [1, 2, 33, 50257])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_every_position_of_every_row_equals_transformers(sampling: SamplingParams, V: int) -> None:
    if V < 8 and sampling.logit_bias:
        sampling = SamplingParams(logit_bias={0: -1.0})
    assert_equals_transformers(sampling, *batch(V, ties=False))


@pytest.mark.usefixtures("_stable_sort")
@pytest.mark.parametrize("V", [2, 33, 50257])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_equal_logits_are_treated_as_in_transformers(sampling: SamplingParams, V: int) -> None:
    if V < 8 and sampling.logit_bias:
        sampling = SamplingParams(logit_bias={0: -1.0})
    assert_equals_transformers(sampling, *batch(V, ties=True))


@pytest.mark.usefixtures("_stable_sort")
@pytest.mark.parametrize("V", [33, 5000])
def test_rows_may_each_have_their_own_sampling(V: int) -> None:
    for first in range(len(SAMPLINGS) - 3):
        samplings = SAMPLINGS[first : first + 4]
        logits, prefixes, drafted = batch(V, ties=True)
        adjusted = adjust(logits, samplings, Prefix.of(prefixes), drafted)
        for b, sampling in enumerate(samplings):
            assert torch.equal(adjusted[b], reference(logits[b], sampling, prefixes[b], drafted[b].tolist()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_adjusted_in_float32(dtype: torch.dtype) -> None:
    logits, prefixes, drafted = batch(500, ties=False, dtype=dtype)
    sampling = SamplingParams(temperature=0.6, top_p=0.9, repetition_penalty=1.1)
    adjusted = adjust(logits, sampling, Prefix.of(prefixes), drafted)
    assert adjusted.dtype is torch.float32
    assert torch.equal(adjusted[2], reference(logits[2], sampling, prefixes[2], drafted[2].tolist()))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([-math.inf, -3.0, -1.0, 0.0, 0.0, 1.0, 2.0]), min_size=2, max_size=12).filter(
        lambda row: max(row) > -math.inf
    ),
    st.integers(0, 13),
    st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([0.1, 1.0, 2.0]),
)
def test_any_parameters_with_masks_and_ties_equal_transformers(
    row: list[float], top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = torch.tensor([[row]])
    assert torch.equal(adjust(logits, sampling)[0], reference(logits[0], sampling, [], []))


def tiny_model() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=97, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None
    )
    config.tie_word_embeddings = False
    model = GPT2LMHeadModel(config).eval()
    torch.nn.init.normal_(model.lm_head.weight)
    return model


class Alternate(LogitsProcessor):  # type: ignore[misc]
    """Processor with state.

    Every second call forbids even tokens. The others penalize the last token that the previous call saw.
    """

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        if len(self.calls) % 2:
            scores[:, ::2] = -math.inf
        elif self.calls:
            scores[:, self.calls[-1]] -= 2.0
        self.calls.append(int(input_ids[0, -1]))
        return scores


@pytest.mark.parametrize("do_sample", [True, False])
def test_adjusted_logits_equal_the_scores_of_generate(do_sample: bool) -> None:
    model = tiny_model()
    prompt = torch.randint(97, (1, 6))
    settings: dict[str, Any] = {"repetition_penalty": 1.3}
    if do_sample:
        settings |= {"temperature": 0.8, "top_k": 30, "top_p": 0.9, "min_p": 0.02}
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=do_sample,
        max_new_tokens=8,
        sequence_bias={(5,): 3.0, (9,): -4.0},
        logits_processor=LogitsProcessorList([Alternate()]),
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        **settings,
    )
    sampling = SamplingParams(
        **(settings if do_sample else settings | {"temperature": 0}),
        logit_bias={5: 3.0, 9: -4.0},
        processors=[Alternate()],
    )
    new = out.sequences[:, 6:]
    adjusted = adjust(torch.stack(out.logits, 1), sampling, Prefix(prompt), new[:, :-1])
    if do_sample:
        assert torch.equal(adjusted, torch.stack(out.scores, 1))
    else:
        assert torch.equal(adjusted.argmax(-1), new)


def test_processors_are_called_in_order_with_the_prefix_of_decoding_without_speculation() -> None:
    seen: list[tuple[str, list[int]]] = []

    def named(name: str) -> Any:
        def processor(input_ids: Tensor, scores: Tensor) -> Tensor:
            assert scores.shape == (1, 9)
            seen.append((name, input_ids[0].tolist()))
            return scores + 1

        return processor

    sampling = SamplingParams(processors=(named("a"), named("b")))
    adjust(torch.zeros(2, 3, 9), sampling, Prefix.of([[1], [2, 3]]), torch.tensor([[4, 5], [6, 7]]))
    prefixes = [[1], [1, 4], [1, 4, 5], [2, 3], [2, 3, 6], [2, 3, 6, 7]]
    assert seen == [(name, prefix) for prefix in prefixes for name in "ab"]


def test_processor_state_can_be_rewound_to_any_position() -> None:
    processor = Alternate()
    logits, drafted = torch.randn(1, 4, 9), torch.tensor([[4, 5, 6]])
    _, rewind = process(logits, [SamplingParams(processors=[processor])], Prefix.of([[1]]), drafted)
    assert processor.calls == [1, 4, 5, 6]
    assert rewind is not None
    rewind(torch.tensor([1]))
    assert processor.calls == [1, 4]


def test_rewinding_removes_attributes_that_were_added_later() -> None:
    class Lazy(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            setattr(self, f"after_{input_ids.shape[1]}", True)
            return scores

    processor = Lazy()
    _, rewind = process(
        torch.zeros(1, 3, 9), [SamplingParams(processors=[processor])], None, torch.zeros(1, 2).long()
    )
    assert rewind is not None
    rewind(torch.tensor([0]))
    assert vars(processor) == {"after_0": True}


def test_a_logits_processor_list_is_flattened() -> None:
    processor = Alternate()
    sampling = SamplingParams(processors=[LogitsProcessorList([processor])])
    assert sampling.processors == (processor,)


def test_rows_that_share_a_processor_do_not_share_its_state() -> None:
    shared = SamplingParams(processors=[Alternate()])
    logits = torch.randn(1, 3, 9).expand(2, 3, 9)
    prefix, drafted = Prefix.of([[4], [4]]), torch.tensor([[1, 2], [1, 2]])
    for sampling in (shared, [shared, shared]):
        both = adjust(logits, sampling, prefix, drafted)
        assert torch.equal(both[0], both[1])
    (processor,) = shared.processors
    assert isinstance(processor, Alternate)
    assert processor.calls == []
    alone = adjust(logits[:1], shared.fork(), Prefix.of([[4]]), drafted[:1])
    assert torch.equal(alone[0], both[0])


def test_processors_still_share_an_object_after_a_rewind() -> None:
    class Keeper(Alternate):
        def __init__(self, box: list[int], models: list[torch.nn.Module]) -> None:
            super().__init__()
            self.box, self.models = box, models

    box, model = [0], torch.nn.Linear(1, 1)
    first, second = Keeper(box, [model]), Keeper(box, [model])
    sampling = SamplingParams(processors=[first, second])
    _, rewind = process(torch.zeros(1, 2, 9), [sampling], Prefix.of([[1]]), torch.zeros(1, 1).long())
    assert rewind is not None
    rewind(torch.tensor([0]))
    assert first.calls == second.calls == [1]
    assert first.box is second.box
    assert first.models[0] is model


def test_logit_bias_is_copied_when_it_is_checked() -> None:
    bias = {1: 2.0}
    sampling = SamplingParams(logit_bias=bias)
    bias[1] = math.nan
    assert sampling.logit_bias == {1: 2.0}


def test_the_error_names_a_processor_that_cannot_be_copied() -> None:
    class Locked(Alternate):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    with pytest.raises(TypeError, match=r"processors: Locked cannot be copied .*deepcopy"):
        adjust(torch.zeros(1, 1, 9), SamplingParams(processors=[Locked()]), Prefix.of([[1]]))


def test_a_fork_has_state_of_its_own_and_shares_models() -> None:
    class Guided(Alternate):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model

    model = torch.nn.Linear(2, 2)
    sampling = SamplingParams(processors=[Guided(model)])
    fork = sampling.fork()
    adjust(torch.zeros(1, 1, 9), fork, Prefix.of([[1]]))
    first, second = sampling.processors[0], fork.processors[0]
    assert isinstance(first, Guided)
    assert isinstance(second, Guided)
    assert first.calls == []
    assert second.calls == [1]
    assert first.model is second.model


def test_frequency_and_presence_penalties_count_only_the_output() -> None:
    sampling = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    prefix = Prefix.of([[1, 1, 2, 2, 2, 3]], prompt_lengths=[3])
    adjusted = adjust(torch.zeros(1, 3, 6), sampling, prefix, torch.tensor([[3, 4]]))
    expected = torch.tensor(
        [
            [0, 0, -1.25, -0.75, 0, 0],
            [0, 0, -1.25, -1.25, 0, 0],
            [0, 0, -1.25, -1.25, -0.75, 0],
        ]
    )
    assert torch.equal(adjusted[0], expected)
    whole = adjust(torch.zeros(1, 1, 6), sampling, Prefix.of([[1, 1, 2]]))
    assert torch.equal(whole[0, 0], torch.tensor([0, -1.25, -0.75, 0, 0, 0]))


def test_padding_and_foreign_ids_in_the_prefix_are_not_penalized() -> None:
    prefix = Prefix(torch.tensor([[2, 50, -1, 3, 0]]), lengths=torch.tensor([3]))
    adjusted = adjust(torch.ones(1, 1, 6), SamplingParams(repetition_penalty=2.0), prefix)
    assert adjusted[0, 0].tolist() == [1, 1, 0.5, 1, 1, 1]


def test_input_logits_are_not_changed() -> None:
    logits, prefixes, drafted = batch(33, ties=False)
    before = logits.clone()
    for sampling in (
        *SAMPLINGS,
        SamplingParams(processors=[Alternate()]),
        SamplingParams(frequency_penalty=1.0),
    ):
        adjust(logits, sampling, Prefix.of(prefixes), drafted)
        assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0), SamplingParams(top_k=2), SamplingParams(top_p=0.5, min_p=0.1)]
)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_row_without_a_softmax_stays_without_one(sampling: SamplingParams, poison: float) -> None:
    logits = torch.randn(2, 1, 7)
    logits[0, 0, 3 if poison != -math.inf else slice(None)] = poison
    softmax = adjust(logits, sampling).softmax(-1)
    assert softmax[0].isnan().all()
    assert not softmax[1].isnan().any()


def test_two_dimensional_logits_are_one_position() -> None:
    logits = torch.randn(3, 20)
    sampling = SamplingParams(top_k=4, temperature=0.3)
    assert torch.equal(adjust(logits, sampling), adjust(logits[:, None], sampling)[:, 0])


NAN = math.nan


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"temperature": -0.1}, ValueError),
        ({"temperature": NAN}, ValueError),
        ({"temperature": math.inf}, ValueError),
        ({"temperature": "hot"}, TypeError),
        ({"top_k": -1}, ValueError),
        ({"top_k": 2.5}, TypeError),
        ({"top_k": True}, TypeError),
        ({"top_p": -0.1}, ValueError),
        ({"top_p": 1.1}, ValueError),
        ({"top_p": NAN}, ValueError),
        ({"min_p": -0.1}, ValueError),
        ({"min_p": 2}, ValueError),
        ({"repetition_penalty": 0}, ValueError),
        ({"repetition_penalty": -1.0}, ValueError),
        ({"frequency_penalty": NAN}, ValueError),
        ({"presence_penalty": math.inf}, ValueError),
        ({"logit_bias": {-1: 0.0}}, ValueError),
        ({"logit_bias": {"a": 0.0}}, TypeError),
        ({"logit_bias": {1: NAN}}, ValueError),
        ({"logit_bias": {1: math.inf}}, ValueError),
        ({"allowed_token_ids": []}, ValueError),
        ({"allowed_token_ids": [-1]}, ValueError),
        ({"allowed_token_ids": ["a"]}, TypeError),
        ({"allowed_token_ids": "ab"}, TypeError),
        ({"allowed_token_ids": bytearray(b"12")}, TypeError),
        ({"allowed_token_ids": np.array([0.0])}, TypeError),
        ({"allowed_token_ids": torch.tensor(3)}, TypeError),
        ({"allowed_token_ids": 3}, TypeError),
        ({"processors": [3]}, TypeError),
        ({"processors": abs}, TypeError),
        ({"logit_bias": [1.0]}, TypeError),
    ],
    ids=str,
)
def test_errors_name_the_wrong_parameter(values: dict[str, Any], error: type[Exception]) -> None:
    (name,) = values
    with pytest.raises(error, match=rf"^{name}.*got"):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda z: adjust(z, [SamplingParams()] * 3), "sampling: got 3 for 2 rows"),
        (lambda z: adjust(z, cast(Any, "greedy")), "sampling: got str 'g'"),
        (lambda z: adjust(z, SamplingParams(logit_bias={9: 1.0})), "logit_bias: got token ids .9."),
        (
            lambda z: adjust(z, SamplingParams(allowed_token_ids=range(30))),
            "allowed_token_ids: got token ids .9, 10.* and 11 more",
        ),
        (
            lambda z: adjust(z, SamplingParams(repetition_penalty=2.0), drafted=torch.zeros(2, 1).long()),
            "drafted: got 1",
        ),
        (
            lambda z: adjust(z, SamplingParams(repetition_penalty=2.0), Prefix.of([[1]])),
            "prefix.tokens: got 1 rows",
        ),
        (lambda z: adjust(z.long(), SamplingParams()), "logits: got a tensor of torch.int64"),
        (lambda z: adjust(z[0, 0], SamplingParams()), r"logits: got shape \(9,\)"),
        (lambda z: adjust(z.to(torch.float8_e5m2), SamplingParams()), "logits: got a tensor of torch.float8"),
        (
            lambda z: adjust(z, SamplingParams(repetition_penalty=2.0), drafted=torch.zeros(2, 2)),
            "drafted: got a tensor of torch.float32",
        ),
        (lambda z: Prefix.of(cast(Any, [1, 2])), "prefix: got list"),
        (lambda z: Prefix.of(cast(Any, 3)), "prefix: got int 3"),
        (lambda z: Prefix.of(cast(Any, "ab")), "prefix: got str 'a'"),
        (lambda z: Prefix.of(cast(Any, [[1.7], [2]])), "prefix: got float 1.7"),
        (
            lambda z: Prefix(torch.zeros(1, 3).long(), lengths=torch.zeros(1, device="meta").long()),
            "prefix.lengths: got a tensor on meta",
        ),
        (lambda z: Prefix(torch.zeros(2, 3)), "prefix.tokens: got a tensor of torch.float32"),
        (lambda z: Prefix(torch.zeros(3).long()), "prefix.tokens: got shape"),
        (lambda z: Prefix(torch.zeros(1, 3).long(), lengths=torch.tensor([4])), "prefix.lengths: got .4."),
    ],
)
def test_errors_name_the_wrong_argument(call: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call(torch.zeros(2, 3, 9))


def test_other_tokens_than_the_allowed_ones_are_impossible() -> None:
    logits = torch.randn(2, 3, 70)
    given_as = [range(3), torch.arange(3), np.arange(3), (0, np.int64(1), 2)]
    assert all(SamplingParams(allowed_token_ids=ids).allowed_token_ids == {0, 1, 2} for ids in given_as)
    allowed = SamplingParams(allowed_token_ids={0, 33, 69}, repetition_penalty=1.5)
    found = adjust(logits, [allowed, SamplingParams()], Prefix.of([[1, 33], [2, 3]]), torch.ones(2, 2).long())
    assert found[0].isfinite().nonzero()[:, 1].tolist() == [0, 33, 69] * 3
    assert torch.equal(found[1], logits[1])


def test_sampling_params_with_a_bias_are_hashable() -> None:
    known = {SamplingParams(logit_bias={5: -1.0}): 1, SamplingParams(logit_bias={5: 1.0}): 2}
    assert known[SamplingParams(logit_bias={5: 1.0})] == 2


def test_a_used_mask_is_not_part_of_pickles_and_copies() -> None:
    allowed = SamplingParams(allowed_token_ids=[0, 5], processors=[LogitsProcessorList()])
    size = len(pickle.dumps(allowed))
    adjust(torch.zeros(1, 50_000), allowed)
    assert len(pickle.dumps(allowed)) == size
    for copied in (pickle.loads(pickle.dumps(allowed)), copy.deepcopy(allowed), allowed.fork()):
        assert copied.allowed_token_ids == {0, 5}
        assert adjust(torch.zeros(1, 50_000), copied).isfinite().sum() == 2
