"""Each method of the sampling step uses the rule of its name, and its savings are computed correctly."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from outpace.bench import kernel
from outpace.bench.distance import Quality
from outpace.bench.profile import StepTiming, Time, bounds, compared, measure, methods, timed
from outpace.bench.vocabulary import VOCABULARIES, of_size
from outpace.verification.rules import sigmoid

CPU = torch.device("cpu")


def test_vocabularies_are_found_by_size_and_have_the_papers_scales() -> None:
    assert tuple(one.V for one in VOCABULARIES) == kernel.VOCABULARIES
    assert of_size(51865).name == "Whisper"
    assert methods(of_size(51865))["sigmoid"][1] == sigmoid(-1e3, 1e3)
    assert methods(of_size(256000))["sigmoid"][1] == sigmoid(-1e4, 1e4)
    assert of_size(300).name == "300"


def test_exact_methods_reject_a_draft_token_that_sigmoid_accepts() -> None:
    """The target's logit of the draft token is 40 below the draft's."""
    target, tokens = torch.zeros(1, 4, 50), torch.zeros(1, 3, dtype=torch.int64)
    draft = target[:, :3].clone()
    draft[..., 0], target[..., 0] = 20, -20
    inputs = kernel.Inputs(tokens, draft, target, torch.tensor([7]), torch.tensor([0]))
    calls = {name: call for name, (call, _) in methods(of_size(50)).items()}
    assert int(calls["transformers"](inputs)[0][1]) == 0
    assert calls["exact"](inputs).accepted.tolist() == [0]
    assert int(calls["drop-in"](inputs)[1]) == 0
    assert calls["sigmoid"](inputs).accepted.tolist() == [3]


def test_all_methods_are_timed_at_all_sizes() -> None:
    figures = list(measure(CPU, torch.float32, [of_size(300), of_size(200)], [1, 3]))
    assert [(one.V, one.g) for one in figures[::4]] == [(300, 1), (300, 3), (200, 1), (200, 3)]
    assert [one.method for one in figures[:4]] == ["transformers", "exact", "drop-in", "sigmoid"]
    assert [one.rule for one in figures[:4]] == ["token"] * 3 + ["sigmoid(-10000, 10000)"]
    for one in figures:
        assert one.eager.microseconds is not None
        assert one.eager.microseconds > 0
        assert one.graph == one.device == Time(None, None, None)
        assert (one.quality.distance > 0.1) == (one.method == "sigmoid")
        assert (one.quality.acceptance > 0.99) == (one.method == "sigmoid")


def test_savings_are_against_transformers_and_those_of_sigmoid_also_against_exact() -> None:
    times = compared(
        {"transformers": [200.0], "exact": [20.0], "drop-in": [50.0], "sigmoid": [16.0]}, [200.0]
    )
    assert times == {
        "transformers": Time(200.0, None, None),
        "exact": Time(20.0, 90.0, None),
        "drop-in": Time(50.0, 75.0, None),
        "sigmoid": Time(16.0, 92.0, 20.0),
    }
    unknown = compared({"transformers": [], "exact": [10.0], "sigmoid": []}, [100.0, 200.0, 400.0])
    assert unknown["exact"] == Time(10.0, 95.0, None)
    assert unknown["sigmoid"] == Time(None, None, None)


def test_slow_rounds_do_not_change_the_savings() -> None:
    exact, sigmoid = [10.0, 10.0, 10.0, 20.0, 20.0], [9.0, 9.0, 18.0, 18.0, 18.0]
    assert compared({"exact": exact, "sigmoid": sigmoid}, [])["sigmoid"] == Time(18.0, None, 10.0)


def test_bounds_are_the_least_saved_and_the_most_saved_on_exact() -> None:
    none = Time(None, None, None)
    one = StepTiming(
        "300", 300, 1, "sigmoid", "", Time(9.0, 90.0, -5.0), none, none, None, 700, Quality(1, 0, 0)
    )
    other = dataclasses.replace(one, g=2, eager=Time(8.0, 95.0, 12.0), peak_bytes=500)
    other_method = dataclasses.replace(one, method="exact")
    found = bounds([one, other_method, other])
    assert [bound.method for bound in found] == ["sigmoid", "exact"]
    assert found[0].eager == Time(9.0, 90.0, 12.0)
    assert found[0].graph == found[0].device == none
    assert found[0].peak_bytes == 700


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_device_time_on_a_gpu_is_less_than_elapsed_time() -> None:
    cuda = torch.device("cuda")
    sets = kernel.rotated(1, 3, 2000, cuda, torch.float32)
    calls = {name: call for name, (call, _) in methods(of_size(2000)).items()}
    eager, graph, device = timed(calls, sets)
    for name in calls:
        elapsed, busy = eager[name].microseconds, device[name].microseconds
        assert elapsed is not None
        assert busy is not None
        assert 0 < busy < elapsed
        assert (graph[name].microseconds is None) == (name in ("transformers", "drop-in"))
