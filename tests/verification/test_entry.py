"""The public function `outpace.verify`: arguments, errors, sampling parameters, processors with state."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import outpace
from outpace.sampling import Prefix, SamplingParams, adjust
from outpace.verification import check, eager, oracle, rules
from tests.sampling.test_params import Alternate

B, G, V = 3, 2, 5


def make_arguments(**changes: Any) -> dict[str, Any]:
    arguments = {
        "draft_tokens": torch.zeros(B, G, dtype=torch.int64),
        "draft_logits": torch.randn(B, G, V),
        "target_logits": torch.randn(B, G + 1, V),
        "seed": 1,
    }
    return arguments | changes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"target_logits": torch.randn(B, V)}, ValueError, r"target_logits: got shape \(3, 5\)"),
        ({"target_logits": torch.randn(B, G, V)}, ValueError, r"draft_tokens: got shape \(3, 2\)"),
        ({"target_logits": torch.randn(B + 1, G + 1, V)}, ValueError, "draft_tokens: got shape"),
        ({"target_logits": torch.randn(B, G + 1, V + 1)}, ValueError, "draft_logits: got shape"),
        ({"target_logits": torch.randn(B, 0, V)}, ValueError, "target_logits: got shape"),
        ({"target_logits": torch.randn(B, G + 1, 0)}, ValueError, "target_logits: got shape"),
        (
            {"target_logits": torch.ones(B, G + 1, V).long()},
            TypeError,
            "target_logits: got a tensor of torch.int64",
        ),
        ({"target_logits": [[1.0]]}, TypeError, "target_logits: got list"),
        (
            {"target_logits": torch.randn(B, G + 1, V).double()},
            TypeError,
            "draft_logits: got dtype torch.float32",
        ),
        ({"draft_logits": torch.randn(B, G, V).half()}, TypeError, "draft_logits: got dtype torch.float16"),
        (
            {"draft_logits": torch.randn(B, G, V, device="meta")},
            ValueError,
            "draft_logits: got a tensor on meta",
        ),
        ({"draft_logits": torch.randn(B, V)}, ValueError, "draft_logits: got shape"),
        ({"draft_tokens": torch.zeros(B, G)}, TypeError, "draft_tokens: got a tensor of torch.float32"),
        (
            {"draft_tokens": torch.zeros(B, G, dtype=torch.bool)},
            TypeError,
            "draft_tokens: got a tensor of torch.bool",
        ),
        ({"draft_tokens": torch.full((B, G), V)}, ValueError, "draft_tokens: got token id 5"),
        ({"draft_tokens": torch.full((B, G), -1)}, ValueError, "draft_tokens: got token id -1"),
        ({"lengths": [1, 2, 3]}, ValueError, r"lengths: got 3; .* 0\.\.2"),
        ({"lengths": [-1, 0, 0]}, ValueError, "lengths: got"),
        ({"lengths": [1, 2]}, ValueError, "lengths: got 2 values for 3 rows"),
        ({"lengths": torch.tensor([0.5, 1, 1])}, TypeError, "lengths: got a tensor of torch.float32"),
        ({"lengths": torch.ones(B, 1).long()}, ValueError, "lengths: got shape"),
        ({"lenience": 0}, ValueError, "lenience: got 0"),
        ({"lenience": 1.5}, ValueError, "lenience: got 1.5"),
        ({"lenience": -0.5}, ValueError, "lenience: got -0.5"),
        ({"lenience": math.nan}, ValueError, "lenience: got nan"),
        ({"lenience": "half"}, TypeError, "lenience: got str"),
        ({"lenience": 0.5, "rule": "block"}, ValueError, 'lenience: got 0.5 with rule "block"'),
        ({"lenience": 0.5, "rule": "match"}, ValueError, 'lenience: got 0.5 with rule "match"'),
        ({"lenience": 0.5, "rule": "sigmoid(-1, 1)"}, ValueError, 'only rule "token" has lenience'),
        ({"rule": "tokens"}, ValueError, "rule: got 'tokens'; it must be token, block, match"),
        ({"rule": "sigmoid"}, ValueError, "rule: got 'sigmoid'"),
        ({"rule": "sigmoid(a, b)"}, ValueError, "rule: got"),
        ({"rule": "sigmoid(1, -1)"}, ValueError, "needs alpha < beta"),
        ({"rule": 3}, TypeError, "rule: got 3"),
        ({"seed": torch.zeros(B, dtype=torch.uint64)}, TypeError, "seed: got a tensor of torch.uint64"),
        ({"prefix": [1, 2, 3]}, TypeError, "prefix: got list"),
        ({"seed": 1.5}, TypeError, "seed: got float 1.5"),
        ({"seed": [1, 2]}, ValueError, "seed: got 2 values for 3 rows"),
        ({"seed": 2**64}, ValueError, "seed: got"),
        ({"seed": torch.zeros(2).long()}, ValueError, "seed: got shape"),
        ({"position": -1}, ValueError, "position: got"),
        ({"position": [1, 2, 2**32 - 2]}, ValueError, "position: got"),
        ({"position": "first"}, ValueError, "position: got 5 values for 3 rows"),
        ({"sampling": 0.7}, TypeError, "sampling: got float 0.7"),
        ({"sampling": [SamplingParams()]}, ValueError, "sampling: got 1 for 3 rows"),
        (
            {"draft_logits": None, "draft_sampling": SamplingParams()},
            ValueError,
            "draft_sampling: given without",
        ),
        ({"draft_logits": None, "draft_lse": torch.zeros(B, G)}, ValueError, "draft_lse: given without"),
        ({"draft_lse": torch.zeros(B)}, ValueError, "draft_lse: got shape"),
        ({"draft_lse": torch.zeros(B, G).long()}, TypeError, "draft_lse: got a tensor of torch.int64"),
        ({"prefix": [[1]]}, ValueError, "prefix: got 1 rows"),
        ({"prefix": torch.zeros(B, 2)}, TypeError, "prefix.tokens: got a tensor of torch.float32"),
        ({"prefix": torch.zeros(B, 2, device="meta").long()}, ValueError, "prefix: got a tensor on meta"),
        ({"sampling": SamplingParams(repetition_penalty=1.2), "position": 7}, ValueError, "prefix: missing"),
        (
            {"sampling": SamplingParams(presence_penalty=1.0), "position": [0, 0, 1]},
            ValueError,
            "prefix: missing",
        ),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else None,
)
def test_wrong_arguments_raise_errors_that_name_them(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        outpace.verify(**make_arguments(**changes))


def test_verify_is_a_function_of_the_package() -> None:
    import outpace.verification.eager as by_path

    assert callable(outpace.verify)
    assert by_path is eager
    assert list(inspect.signature(outpace.verify).parameters)[:3] == [
        "draft_tokens",
        "draft_logits",
        "target_logits",
    ]


def test_tokens_may_be_int32_and_seeds_any_64_bits() -> None:
    arguments = make_arguments(seed=[2**64 - 1, -1, 0])
    first = outpace.verify(**arguments)
    arguments["draft_tokens"] = arguments["draft_tokens"].int()
    second = outpace.verify(**arguments)
    assert torch.equal(first.next_token, second.next_token)
    assert first.next_token.dtype is first.accepted.dtype is torch.int64
    assert first.bad.dtype is torch.bool


def test_no_rows_give_an_empty_verdict() -> None:
    for rule in ("token", "block", "match", "rejection", "sigmoid(-1, 1)"):
        verdict = outpace.verify(
            torch.zeros(0, 2).long(), torch.zeros(0, 2, 4), torch.zeros(0, 3, 4), rule=rule
        )
        assert verdict.accepted.shape == verdict.next_token.shape == verdict.bad.shape == (0,)


def test_a_seed_fixes_the_output_and_no_seed_uses_pytorchs_generator() -> None:
    arguments = make_arguments(
        draft_tokens=torch.zeros(64, 0).long(), draft_logits=None, target_logits=torch.zeros(64, 1, 50)
    )
    fixed = [outpace.verify(**arguments | {"seed": list(range(64))}).next_token for _ in range(2)]
    assert torch.equal(*fixed)
    other_position = outpace.verify(**arguments | {"seed": list(range(64)), "position": 1}).next_token
    assert not torch.equal(fixed[0], other_position)
    fresh = [outpace.verify(**arguments | {"seed": None}).next_token for _ in range(2)]
    assert not torch.equal(*fresh)
    assert len(set(fresh[0].tolist())) > 10  # every row has its own seed
    again = []
    for _ in range(2):
        torch.manual_seed(5)
        again.append(outpace.verify(**arguments | {"seed": None, "position": list(range(64))}).next_token)
    assert torch.equal(*again)


def test_sampling_parameters_inside_verify_equal_logits_adjusted_before() -> None:
    rows = [
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=2, repetition_penalty=1.5),
        SamplingParams(temperature=0),
    ]
    draft_rows = [
        SamplingParams(top_p=0.9),
        SamplingParams(temperature=2.0),
        SamplingParams(frequency_penalty=0.3),
    ]
    prefix = Prefix.of([[1, 2], [3], [0, 0, 4]])
    arguments = make_arguments(prefix=prefix)
    inside = outpace.verify(**arguments, sampling=rows, draft_sampling=draft_rows)
    tokens = arguments["draft_tokens"]
    arguments["target_logits"] = adjust(arguments["target_logits"], rows, prefix, tokens)
    arguments["draft_logits"] = adjust(arguments["draft_logits"], draft_rows, prefix, tokens)
    before = outpace.verify(**arguments)
    assert torch.equal(inside.accepted, before.accepted)
    assert torch.equal(inside.next_token, before.next_token)


def test_position_is_by_default_the_length_of_the_prefix() -> None:
    arguments = make_arguments(seed=9)
    by_prefix = outpace.verify(**arguments, prefix=[[1], [2, 2], []])
    by_hand = outpace.verify(**arguments, position=[1, 2, 0])
    assert torch.equal(by_prefix.next_token, by_hand.next_token)


def test_rules_by_name_and_by_object_are_the_same() -> None:
    assert rules.parse("sigmoid(-1e3, 1e3)") == outpace.sigmoid(-1000, 1000)
    assert str(outpace.sigmoid(-1000, 1000)) == "sigmoid(-1000, 1000)"
    assert rules.parse(str(outpace.sigmoid(-0.5, 2))) == outpace.sigmoid(-0.5, 2)
    assert rules.parse("block").exact
    assert not outpace.sigmoid(-1, 1).exact
    for alpha, beta in ((0.0, math.inf), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="must be a finite number"):
            outpace.sigmoid(alpha, beta)
    far = outpace.sigmoid(-1234567.8, 1e9)
    assert rules.parse(str(far)) == far
    for wrong in ("tokn", "sigmoid"):
        with pytest.raises(ValueError, match=r"^(rule|alpha, beta): got"):
            outpace.Rule(wrong)


def test_stateful_processors_end_in_the_state_of_decoding_without_speculation() -> None:
    """Speculation shows a processor draft tokens that are then rejected; its state must not keep them."""
    table = torch.randn(7, 7)
    processor = Alternate()
    text, calls = [3], 0
    while len(text) < 40:
        drafts = torch.randint(7, (1, 3))
        context = torch.cat((torch.tensor([[text[-1]]]), drafts), 1)
        verdict = outpace.verify(
            drafts,
            None,
            table[context],
            rule="match",
            seed=11,
            sampling=SamplingParams(temperature=0.8, processors=[processor]),
            prefix=[text],
        )
        text += [*drafts[0, : int(verdict.accepted)].tolist(), int(verdict.next_token)]
        calls = len(text) - 1
        assert len(processor.calls) == calls
    baseline, baseline_processor = [3], Alternate()
    while len(baseline) < len(text):
        verdict = outpace.verify(
            torch.zeros(1, 0).long(),
            None,
            table[torch.tensor([[baseline[-1]]])],
            seed=11,
            sampling=SamplingParams(temperature=0.8, processors=[baseline_processor]),
            prefix=[baseline],
        )
        baseline.append(int(verdict.next_token))
    assert text == baseline


@pytest.mark.parametrize(
    "wrap", [lambda s: s, lambda s: [s], lambda s: SamplingParams(1.3, processors=s.processors)]
)
def test_one_processor_for_target_and_draft_keeps_their_states_apart(wrap: Any) -> None:
    sampling = SamplingParams(processors=[Alternate()])
    arguments = make_arguments(draft_tokens=torch.tensor([[1, 2]]), prefix=[[4]])
    arguments["draft_logits"], arguments["target_logits"] = torch.randn(1, 2, V), torch.randn(1, 3, V)
    verdict = outpace.verify(**arguments, sampling=sampling, draft_sampling=wrap(sampling))
    (processor,) = sampling.processors
    assert isinstance(processor, Alternate)
    assert processor.calls == [4, 1, 2][: int(verdict.accepted) + 1]


def test_draft_processors_advance_with_the_accepted_draft_tokens() -> None:
    processor = Alternate()
    arguments = make_arguments(draft_tokens=torch.tensor([[1, 2]]), prefix=[[4]])
    arguments["draft_logits"], arguments["target_logits"] = torch.zeros(1, 2, V), torch.zeros(1, 3, V)
    verdict = outpace.verify(**arguments, draft_sampling=SamplingParams(processors=[processor]))
    assert processor.calls == [4, 1][: int(verdict.accepted) + 1]


def test_off_the_cpu_out_of_range_tokens_are_flagged_without_an_exception() -> None:
    """The code for other devices runs here on CPU values: it sets a flag and raises nothing."""

    class Elsewhere(Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda")

    tokens = torch.tensor([[1, 9], [1, 9], [1, 2]]).as_subclass(Elsewhere)
    counts = torch.tensor([2, 1, 2])
    clamped, bad = check.tokens(tokens, counts, 5)
    assert bad is not None
    assert bad.tolist() == [True, False, False]
    assert int(clamped.max()) < 5


@pytest.mark.parametrize("rule", ["token", "block", "match", "rejection", "sigmoid(-1, 1)"])
def test_inputs_are_not_changed_and_gradients_are_not_tracked(rule: str) -> None:
    arguments = make_arguments(
        sampling=SamplingParams(top_p=0.9, repetition_penalty=1.2), draft_sampling=SamplingParams(top_k=3)
    )
    arguments["target_logits"].requires_grad_()
    before = {name: value.clone() for name, value in arguments.items() if isinstance(value, Tensor)}
    outpace.verify(**arguments, rule=rule)
    outpace.verify(**arguments | {"sampling": None, "draft_sampling": None}, rule=rule)
    for name, value in before.items():
        assert torch.equal(arguments[name], value)
    assert not adjust(arguments["target_logits"], SamplingParams(temperature=0.5)).requires_grad


@pytest.mark.parametrize("rule", ["token", "block", "match", "rejection", "sigmoid(-1, 1)"])
def test_memory_layout_does_not_matter(rule: str) -> None:
    arguments = make_arguments(seed=[5, 6, 7], lengths=[2, 1, 0])
    contiguous = outpace.verify(**arguments, rule=rule)
    for name in ("draft_tokens", "draft_logits", "target_logits"):
        arguments[name] = arguments[name].transpose(0, -1).contiguous().transpose(0, -1)
    strided = outpace.verify(**arguments, rule=rule)
    assert torch.equal(contiguous.accepted, strided.accepted)
    assert torch.equal(contiguous.next_token, strided.next_token)


def test_the_papers_sigmoid_rule_hardly_notices_a_gap_of_20_logits() -> None:
    """docs/design/verification.md quotes this."""
    target, draft = torch.zeros(2000, 2, 3), torch.zeros(2000, 1, 3)
    draft[..., 0] = 20.0
    tokens = torch.zeros(2000, 1, dtype=torch.int64)
    seeds = list(range(2000))
    approximate = outpace.verify(tokens, draft, target, rule="sigmoid(-1e4, 1e4)", seed=seeds).accepted
    exact = outpace.verify(tokens, draft, target, seed=seeds).accepted
    assert approximate.float().mean() > 0.99
    assert exact.float().mean() < 0.4


def test_docstring_example_runs() -> None:
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(1, 3, 3)
    verdict = outpace.verify(torch.tensor([[0, 2]]), logits[:, :2], logits, seed=7, position=0)
    assert verdict.accepted.tolist() == [2]


def test_the_oracle_refuses_weights_that_are_all_zero() -> None:
    with pytest.raises(ValueError, match="no token has weight"):
        oracle.sample([0.0, 0.0], 0.5)
