"""Every draft, sampling and draft length takes its turn, and its steps are counted correctly."""

from __future__ import annotations

import time
from typing import Any

import pytest

from outpace.bench import sweep
from outpace.bench.forecast import TimedParts, figures
from outpace.bench.runs import Cell
from outpace.bench.sweep import Sweep
from outpace.decoder import Decoder
from outpace.draft.lookup import LookupDrafter
from outpace.policy import Heuristic
from outpace.sampling import SamplingParams
from tests.tiny import tiny

GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
PROMPTS = [[1, 2, 3, 4], [5, 6, 7, 5, 6, 7], [8, 9]]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    """Return a decoder whose draft tokens are always accepted."""
    model = tiny()
    return Decoder(model, model)


def test_cells_take_turns_and_another_one_is_first_each_time(decoder: Decoder) -> None:
    messages: list[str] = []
    found = Sweep({"small": decoder}, [GREEDY, SAMPLED], ["2", "auto"], PROMPTS, max_new_tokens=8, repeats=2)
    rounds = list(found.rounds(messages.append))
    orders = [[(run.cell.sampling.temperature, run.cell.num_draft_tokens) for run in one] for one in rounds]
    cells = [(t, length) for t in (0.0, 1.0) for length in ("0", "2", "auto")]
    assert orders[0] == cells
    assert orders[1] == [*cells[1:], cells[0]]
    assert [order[0] for order in orders] == cells
    assert [{run.group for run in one} for one in rounds] == [{0}, {1}, {2}] * 2
    assert len(rounds) == found.total
    # The longest drafts are warmed up first. Then the messages follow the runs.
    assert messages[0].startswith("warming up: ")
    assert messages[0].endswith("g = auto")
    assert messages[6:8] == [f"round 1 of 6: small, temperature 0, g = {g}" for g in (0, 2)]


def test_last_group_is_filled_up_with_the_first_prompts() -> None:
    assert sweep.grouped(3, 1) == [[0], [1], [2]]
    assert sweep.grouped(3, 2) == [[0, 1], [2, 0]]
    assert sweep.grouped(2, 5) == [[0, 1, 0, 1, 0]]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_draft_that_is_always_accepted_adds_g_plus_1_tokens_per_step(decoder: Decoder, batch: int) -> None:
    """17 tokens: one by the prefill, then four steps of 4, the first of which is not counted."""
    found = Sweep({"same": decoder}, [GREEDY], ["3"], PROMPTS, max_new_tokens=17, batch=batch)
    baseline, three = figures(run for one in found.rounds() for run in one)
    texts = batch * len(found.groups)
    assert (baseline.texts, baseline.new_tokens, baseline.tokens_per_pass) == (texts, 15 * texts, 1.0)
    assert (three.texts, three.new_tokens, three.tokens_per_pass) == (texts, 12 * texts, 4.0)
    assert (three.alpha, three.acceptance) == (1.0, 1.0)
    assert three.predicted is None  # parts were not timed
    assert three.p50_ms <= three.p90_ms <= three.p99_ms
    assert three.interval is not None
    assert three.interval[0] <= three.speedup <= three.interval[1]


def test_parts_are_timed_for_every_draft_and_sampling(decoder: Decoder) -> None:
    found = Sweep({"same": decoder}, [GREEDY, SamplingParams()], ["3"], PROMPTS, max_new_tokens=17, batch=2)
    parts: TimedParts = {}
    sweep.time_parts(found, parts)
    assert list(parts) == [("same", GREEDY), ("same", SamplingParams())]
    greedy, sampled = parts.values()
    assert greedy.B == 2
    assert greedy.drafting.step > 0
    assert [(one.B, one.n) for one in greedy.passes] == [(2, 1), (2, 4)]
    assert [(one.g, one.sampled) for one in greedy.verify] == [(0, False), (3, False)]
    assert all(one.sampled for one in sampled.verify)


def test_seconds_of_a_run_lie_within_elapsed_time(decoder: Decoder) -> None:
    """The counted steps take no more than the elapsed time."""
    found = Sweep({"same": decoder}, [SAMPLED], ["2"], PROMPTS, max_new_tokens=40)
    cell = found.cells[0]
    found.warm_up(cell)
    started_at = time.perf_counter()
    run = found.run(cell, 0)
    elapsed = time.perf_counter() - started_at
    assert run.iterations == 38
    assert 0 < run.seconds < elapsed


def test_each_cell_has_its_own_policy(decoder: Decoder) -> None:
    lookup = Decoder(decoder.scorer, LookupDrafter())
    lengths = ["4", "auto", "heuristic"]
    found = Sweep(
        {"same": decoder, "lookup": lookup}, [GREEDY, SAMPLED], lengths, PROMPTS[:1], max_new_tokens=12
    )
    policies = [one.policy for cell, one in found.cell_decoders.items() if cell.num_draft_tokens == "auto"]
    assert len({id(policy) for policy in policies}) == 4
    assert {type(policy) for policy in policies} == {type(lookup.policy)}
    four = found.cell_decoders[Cell("lookup", SAMPLED, "4")]
    assert repr(four.policy) == "Fixed(4)"
    assert (four.drafter, four.scorer) == (lookup.drafter, decoder.scorer)
    assert isinstance(found.cell_decoders[Cell("same", SAMPLED, "heuristic")].policy, Heuristic)
    assert found.cell_decoders[Cell("same", GREEDY, "0")].drafter is None


def test_all_draft_lengths_share_one_graph_executor_and_one_kv_cache() -> None:
    decoder = Decoder(tiny(), tiny(seed=1), engine=True)
    found = Sweep({"small": decoder}, [GREEDY], ["1", "2"], PROMPTS[:2], max_new_tokens=12)
    for runs in found.rounds():
        assert all(run.drafted[run.cell.g or 0] for run in runs)
    assert {id(one.scorer) for one in found.cell_decoders.values()} == {id(decoder.scorer)}
    with_draft = [one for cell, one in found.cell_decoders.items() if cell.g]
    assert {id(one.executor) for one in with_draft} == {id(decoder.executor)}
    assert decoder.executor.name == "graph"


def test_drafts_take_turns(decoder: Decoder) -> None:
    lookup = Decoder(decoder.scorer, LookupDrafter())
    found = Sweep({"same": decoder, "lookup": lookup}, [GREEDY], ["1"], PROMPTS[:2], max_new_tokens=8)
    rounds = list(found.rounds())
    assert [[run.cell.draft for run in one] for one in rounds] == [
        ["same", "same", "lookup", "lookup"],
        ["same", "lookup", "lookup", "same"],
    ]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"prompts": []}, "prompts: there are none"),
        ({"draft_lengths": ["far"]}, "num_draft_tokens: got 'far'; it must be a number, auto or heuristic"),
        ({"draft_lengths": ["7"]}, "num_draft_tokens: got 7 for texts of 16 tokens"),
        (
            {"draft_lengths": ["200"], "max_new_tokens": 1000},
            r"num_draft_tokens: got Fixed\(200\), .* context of 128",
        ),
        ({"decoders": {}}, "draft: got none"),
        ({"decoders": {"none": None}}, "draft: got none"),
    ],
)
def test_wrong_arguments_are_refused_with_their_name(
    decoder: Decoder, changes: dict[str, Any], why: str
) -> None:
    arguments: dict[str, Any] = {
        "decoders": {"same": decoder}, "samplings": [GREEDY], "draft_lengths": ["1"], "prompts": PROMPTS,
        "max_new_tokens": 16, **changes,
    }  # fmt: skip
    if None in arguments["decoders"].values():
        arguments["decoders"] = {"none": Decoder(decoder.scorer)}
    with pytest.raises(ValueError, match=why):
        Sweep(**arguments)
