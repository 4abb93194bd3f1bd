"""Every draft, sampling and length takes its turn, and what is counted is what happened."""

from __future__ import annotations

import time
from typing import Any

import pytest

from outpace.bench import sweep
from outpace.bench.forecast import Known, figures
from outpace.bench.runs import Cell
from outpace.bench.sweep import Sweep
from outpace.decoder import Decoder
from outpace.draft.lookup import LookupDrafter
from outpace.policy import Heuristic
from outpace.sampling import SamplingParams
from tests.tiny import tiny

GREEDY, WARM = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
PROMPTS = [[1, 2, 3, 4], [5, 6, 7, 5, 6, 7], [8, 9]]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    """Its draft is never wrong."""
    model = tiny()
    return Decoder(model, model)


def test_cells_take_turns_and_another_one_comes_first_each_time(decoder: Decoder) -> None:
    told: list[str] = []
    found = Sweep({"small": decoder}, [GREEDY, WARM], ["2", "auto"], PROMPTS, tokens=8, repeats=2)
    rounds = list(found.rounds(told.append))
    orders = [[(run.cell.sampling.temperature, run.cell.length) for run in one] for one in rounds]
    cells = [(t, length) for t in (0.0, 1.0) for length in ("0", "2", "auto")]
    assert orders[0] == cells
    assert orders[1] == [*cells[1:], cells[0]]
    assert [order[0] for order in orders] == cells
    assert [{run.group for run in one} for one in rounds] == [{0}, {1}, {2}] * 2
    assert len(rounds) == found.total
    # Those with the most room first; then what is told is what is run.
    assert told[0].startswith("warming up: ")
    assert told[0].endswith("g = auto")
    assert told[6:8] == [f"round 1 of 6: small, temperature 0, g = {g}" for g in (0, 2)]


def test_groups_are_filled_up() -> None:
    assert sweep.grouped(3, 1) == [[0], [1], [2]]
    assert sweep.grouped(3, 2) == [[0, 1], [2, 0]]
    assert sweep.grouped(2, 5) == [[0, 1, 0, 1, 0]]


@pytest.mark.parametrize("batch", [1, 2])
def test_a_draft_that_is_never_wrong_fills_every_pass(decoder: Decoder, batch: int) -> None:
    """17 tokens: the prompt's, then four passes of 4, the first of which is not counted."""
    found = Sweep({"same": decoder}, [GREEDY], ["3"], PROMPTS, tokens=17, batch=batch)
    plain, three = figures(run for one in found.rounds() for run in one)
    texts = batch * len(found.groups)
    assert (plain.texts, plain.tokens, plain.tokens_per_pass) == (texts, 15 * texts, 1.0)
    assert (three.texts, three.tokens, three.tokens_per_pass) == (texts, 12 * texts, 4.0)
    assert (three.alpha, three.acceptance) == (1.0, 1.0)
    assert three.predicted is None  # as long as parts were not timed
    assert three.p50_ms <= three.p90_ms <= three.p99_ms
    assert three.interval is not None
    assert three.interval[0] <= three.speedup <= three.interval[1]


def test_parts_are_timed_for_every_draft_and_sampling(decoder: Decoder) -> None:
    found = Sweep({"same": decoder}, [GREEDY, SamplingParams()], ["3"], PROMPTS, tokens=17, batch=2)
    parts: Known = {}
    sweep.timed(found, parts)
    assert list(parts) == [("same", GREEDY), ("same", SamplingParams())]
    greedy, drawn = parts.values()
    assert greedy.B == 2
    assert greedy.drafting.step > 0
    assert [(one.B, one.n) for one in greedy.passes] == [(2, 1), (2, 4)]
    assert [(one.g, one.drawn) for one in greedy.verify] == [(0, False), (3, False)]
    assert all(one.drawn for one in drawn.verify)


def test_times_are_those_of_the_clock(decoder: Decoder) -> None:
    """All iterations of a run, the beginning's too, are within the time that it took."""
    found = Sweep({"same": decoder}, [WARM], ["2"], PROMPTS, tokens=40)
    cell = found.cells[0]
    found.warm(cell)
    begun = time.perf_counter()
    run = found.run(cell, 0)
    taken = time.perf_counter() - begun
    assert run.iterations == 38
    assert 0.3 * taken < run.seconds < taken


def test_each_cell_has_its_policy(decoder: Decoder) -> None:
    lookup = Decoder(decoder.scorer, LookupDrafter())
    lengths = ["4", "auto", "heuristic"]
    found = Sweep({"same": decoder, "lookup": lookup}, [GREEDY, WARM], lengths, PROMPTS[:1], tokens=12)
    own = [one.policy for cell, one in found.writers.items() if cell.length == "auto"]
    assert len({id(policy) for policy in own}) == 4
    assert {type(policy) for policy in own} == {type(lookup.policy)}
    four = found.writers[Cell("lookup", WARM, "4")]
    assert repr(four.policy) == "Fixed(4)"
    assert (four.drafter, four.scorer) == (lookup.drafter, decoder.scorer)
    assert isinstance(found.writers[Cell("same", WARM, "heuristic")].policy, Heuristic)
    assert found.writers[Cell("same", GREEDY, "0")].drafter is None


def test_an_engine_is_made_once_for_all_lengths() -> None:
    model = tiny()
    decoder = Decoder(model, tiny(seed=1), engine=True)
    found = Sweep({"small": decoder}, [GREEDY], ["1", "2"], PROMPTS[:2], tokens=12)
    assert decoder.engines is not None
    engines = []
    for runs in found.rounds():
        assert all(run.drafted[run.cell.g or 0] for run in runs)
        engines.append(decoder.engines.engine)
    assert engines[0] is engines[1] is not None


def test_drafts_take_turns(decoder: Decoder) -> None:
    lookup = Decoder(decoder.scorer, LookupDrafter())
    found = Sweep({"same": decoder, "lookup": lookup}, [GREEDY], ["1"], PROMPTS[:2], tokens=8)
    rounds = list(found.rounds())
    assert [[run.cell.draft for run in one] for one in rounds] == [
        ["same", "same", "lookup", "lookup"],
        ["same", "lookup", "lookup", "same"],
    ]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"prompts": []}, "prompts: there are none"),
        ({"lengths": ["far"]}, "length: got 'far'; it must be a number, auto or heuristic"),
        ({"lengths": ["7"]}, "length: got 7 for texts of 16 tokens"),
        (
            {"lengths": ["200"], "tokens": 1000},
            r"num_draft_tokens: Fixed\(200\) does not fit a context of 128",
        ),
        ({"decoders": {}}, "draft: got none"),
        ({"decoders": {"none": None}}, "draft: got none"),
    ],
)
def test_what_does_not_fit_is_named(decoder: Decoder, changes: dict[str, Any], why: str) -> None:
    given: dict[str, Any] = {
        "decoders": {"same": decoder}, "samplings": [GREEDY], "lengths": ["1"], "prompts": PROMPTS,
        "tokens": 16, **changes,
    }  # fmt: skip
    if None in given["decoders"].values():
        given["decoders"] = {"none": Decoder(decoder.scorer)}
    with pytest.raises(ValueError, match=why):
        Sweep(**given)
