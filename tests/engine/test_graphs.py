"""A decoder with an engine writes what it writes without one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from outpace import Decoder, Fixed, Goodput, Heuristic, RandomDrafter, SamplingParams
from outpace.auditing.audit import audit
from outpace.engine.capture import CaptureError, Graphs
from outpace.engine.commit import advance
from outpace.engine.graph import Engine
from outpace.models.fused import FusedModel
from outpace.policy import DraftLengthPolicy, Hint, Load, StepOutcome
from tests.tiny import FAMILIES, V, greedy, tiny

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 12, 40, 41, 42], [30], [1, 2]]


def decoder(engine: bool = True, **options: Any) -> Decoder:
    return Decoder(tiny(), tiny(seed=1), engine=engine, **{"num_draft_tokens": Fixed(3), **options})


def used(one: Decoder) -> bool:
    return one.engines is not None and one.engines.engine is not None


@pytest.mark.parametrize(
    ("family", "batch_size"), [*((family, 2) for family in FAMILIES), ("llama", 1), ("llama", None)]
)
def test_greedy_texts_are_those_of_transformers(family: str, batch_size: int | None) -> None:
    target = tiny(family)
    expected = [greedy(target, prompt, 25) for prompt in PROMPTS]
    for drafter in (tiny(family, seed=1), None):
        one = Decoder(target, drafter, engine=True)
        outs = one.generate(PROMPTS, temperature=0, max_new_tokens=25, batch_size=batch_size)
        assert [out.token_ids for out in outs] == expected
        assert used(one)


@pytest.mark.parametrize("length", [Fixed(0), Fixed(4), Heuristic(3)])
def test_match_writes_plain_decodings_texts(length: Any) -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.9)
    plain = Decoder(tiny(), rule="match").generate(PROMPTS, sampling, seed=[1, 2, 3, 4], max_new_tokens=25)
    one = decoder(rule="match", num_draft_tokens=length)
    outs = one.generate(PROMPTS, sampling, seed=[1, 2, 3, 4], max_new_tokens=25, batch_size=3)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    assert used(one)


@pytest.mark.parametrize("rule", ["token", "match"])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0), SamplingParams(temperature=0.3, top_k=5)]
)
def test_copies_are_those_of_the_lookup(rule: str, sampling: SamplingParams) -> None:
    """A target that repeats itself, so that copies are there and are kept."""
    prompts = [prompt * 4 for prompt in PROMPTS]
    options: dict[str, Any] = {"rule": rule, "num_draft_tokens": Fixed(4)}
    expected = Decoder(tiny(), "lookup", **options).generate(prompts, sampling, seed=3, max_new_tokens=40)
    one = Decoder(tiny(), "lookup", engine=True, **options)
    outs = one.generate(prompts, sampling, seed=3, max_new_tokens=40, batch_size=3)
    assert used(one)
    if sampling.temperature == 0 or rule == "match":
        assert [out.token_ids for out in outs] == [out.token_ids for out in expected]
    assert sum(out.stats.accepted_tokens for out in outs) > 0
    assert any(out.stats.draft_tokens < 4 * out.stats.target_passes for out in outs)


@pytest.mark.parametrize("drafter", ["model", "lookup"])
def test_texts_pass_the_audit(drafter: str) -> None:
    one = Decoder(
        tiny(), tiny(seed=1) if drafter == "model" else drafter, engine=True, num_draft_tokens=Fixed(3)
    )
    report = audit(one, PROMPTS, samples=400, progress=False)
    assert report.passed, str(report)
    assert used(one)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_beginnings_are_computed_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that several rows have, and a text that goes on with what was written."""
    prompt = list(range(1, 41))
    one = Decoder(tiny(family), tiny(family, seed=1), engine=True, num_draft_tokens=Fixed(3))
    alone = Decoder(tiny(family), tiny(family, seed=1), num_draft_tokens=Fixed(0))
    read, seen = type(one.engines._get(4, 200).target).read, []  # type: ignore[union-attr]

    def counts(self: Any, ids: torch.Tensor, *rest: Any) -> None:
        seen.append(ids.shape[1])
        read(self, ids, *rest)

    monkeypatch.setattr(type(one.engines.engine.target), "read", counts)  # type: ignore[union-attr]
    outs = one.generate([prompt] * 4, temperature=0, max_new_tokens=20)
    assert seen == [39, 39]  # target and draft, of one row
    assert {tuple(out.token_ids) for out in outs} == {
        tuple(alone.generate(prompt, temperature=0, max_new_tokens=20).token_ids)
    }
    longer = [*prompt, *outs[0].token_ids, 7, 8, 9]
    seen.clear()
    again = one.generate(longer, temperature=0, max_new_tokens=20)
    assert seen == [4, 4]
    assert again.token_ids == alone.generate(longer, temperature=0, max_new_tokens=20).token_ids
    with torch.no_grad():
        for decoder in (one, alone):
            decoder.scorer.base.get_output_embeddings().weight.mul_(-1.0)
    seen.clear()
    assert one.generate(longer, temperature=0, max_new_tokens=20).token_ids == (
        alone.generate(longer, temperature=0, max_new_tokens=20).token_ids
    )
    assert seen == [62, 62]


def test_rows_end_where_they_should() -> None:
    """At the limit, and at a token that ends texts, in the midst of a block."""
    expected = decoder(engine=False).generate(PROMPTS, temperature=0, max_new_tokens=30)
    ends = [out.token_ids[7] for out in expected]
    both = [
        decoder(engine).generate(PROMPTS, temperature=0, max_new_tokens=30, stop_tokens=ends)
        for engine in (False, True)
    ]
    assert [out.token_ids for out in both[0]] == [out.token_ids for out in both[1]]
    assert [out.finish_reason for out in both[0]] == [out.finish_reason for out in both[1]]
    assert min(len(out.token_ids) for out in both[1]) < 30


def test_a_stream_can_be_left_and_the_decoder_used_again() -> None:
    one = decoder()
    whole = one.generate(PROMPTS[0], SamplingParams(), seed=3, max_new_tokens=20)
    stream = one.stream(PROMPTS[0], SamplingParams(), seed=3, max_new_tokens=20)
    first = next(stream)
    stream.close()
    assert first.token_ids == whole.token_ids[: len(first.token_ids)]
    steps = list(one.stream(PROMPTS[0], SamplingParams(), seed=3, max_new_tokens=20))
    assert [token for step in steps for token in step.token_ids] == whole.token_ids
    assert steps[-1].output is not None
    assert steps[-1].output.token_ids == whole.token_ids
    assert whole.stats.new_tokens == 20
    assert whole.stats.draft_tokens == 3 * whole.stats.target_passes
    assert whole.stats.seconds > 0


def test_rows_that_need_the_host_are_decoded_without_it() -> None:
    one, other = decoder(), decoder(engine=False)
    for options in ({"repetition_penalty": 1.3}, {"logprobs": True}, {"scores": True}):
        found, expected = (
            each.generate(PROMPTS, temperature=0.8, seed=2, max_new_tokens=10, **options)
            for each in (one, other)
        )
        assert [out.token_ids for out in found] == [out.token_ids for out in expected]
    assert not used(one)


def test_weights_that_change_are_seen() -> None:
    one = decoder(num_draft_tokens=Fixed(2))
    one.generate(PROMPTS, temperature=0, max_new_tokens=10)
    fresh = tiny(seed=5)
    with torch.no_grad():
        for mine, theirs in zip(one.scorer.base.parameters(), fresh.parameters(), strict=True):
            mine.copy_(theirs)
    expected = [greedy(fresh, prompt, 10) for prompt in PROMPTS]
    assert [out.token_ids for out in one.generate(PROMPTS, temperature=0, max_new_tokens=10)] == expected
    one.scorer.base.load_state_dict(tiny(seed=6).state_dict(), assign=True)
    expected = [greedy(one.scorer.base, prompt, 10) for prompt in PROMPTS]
    assert [out.token_ids for out in one.generate(PROMPTS, temperature=0, max_new_tokens=10)] == expected


def test_adapters_and_hooks_are_not_overlooked() -> None:
    one = decoder()
    one.generate(PROMPTS, temperature=0, max_new_tokens=5)
    layer = one.scorer.base.model.layers[1]
    layer.register_forward_hook(lambda module, inputs, output: output * 1.5)
    expected = [greedy(one.scorer.base, prompt, 10) for prompt in PROMPTS]
    assert [out.token_ids for out in one.generate(PROMPTS, temperature=0, max_new_tokens=10)] == expected
    one.scorer.base._hf_peft_config_loaded = True
    one.generate(PROMPTS, temperature=0, max_new_tokens=5)
    assert "has adapters" in one.describe()


def test_it_does_not_matter_in_which_mode_it_was_made() -> None:
    one = decoder()
    with torch.inference_mode():
        first = one.generate(PROMPTS, temperature=0, max_new_tokens=5)
    assert [out.token_ids for out in one.generate(PROMPTS, temperature=0, max_new_tokens=5)] == [
        out.token_ids for out in first
    ]


def test_models_may_be_made_in_inference_mode() -> None:
    with torch.inference_mode():
        target, draft = tiny(), tiny(seed=1)
    outs = Decoder(target, draft, engine=True).generate(PROMPTS, temperature=0, max_new_tokens=5)
    assert [out.token_ids for out in outs] == [greedy(target, prompt, 5) for prompt in PROMPTS]


def test_a_target_may_draft_for_itself() -> None:
    model = tiny()
    one = Decoder(model, model, engine=True, num_draft_tokens=Fixed(3))
    outs = one.generate(PROMPTS, temperature=0, max_new_tokens=10)
    assert [out.token_ids for out in outs] == [greedy(model, prompt, 10) for prompt in PROMPTS]


def test_longer_texts_and_more_rows_get_room() -> None:
    one = decoder()
    for prompts, tokens in ((PROMPTS[:1], 5), (PROMPTS, 5), (PROMPTS, 60), (PROMPTS[:2], 10)):
        expected = [greedy(one.scorer.base, prompt, tokens) for prompt in prompts]
        outs = one.generate(prompts, temperature=0, max_new_tokens=tokens)
        assert [out.token_ids for out in outs] == expected


def test_unusable_logits_end_their_row_alone() -> None:
    one = decoder()
    with torch.no_grad():
        one.scorer.base.model.embed_tokens.weight[30] = float("nan")
    with pytest.warns(UserWarning, match="unusable"):
        outs = one.generate([[5, 6, 7], [30]], temperature=0, max_new_tokens=3)
    assert outs[1].finish_reason == "error"
    assert outs[0].finish_reason == "length" or 30 in outs[0].token_ids
    # What was NaN is not left behind in the slots.
    clean = decoder().generate([[5, 6], [7, 8]], temperature=0, max_new_tokens=2)
    again = one.generate([[5, 6], [7, 8]], temperature=0, max_new_tokens=2)
    assert [out.token_ids for out in again] == [out.token_ids for out in clean]


def test_the_choice_is_visible() -> None:
    assert "without graphs" in decoder().describe()
    assert "engine" not in decoder(engine=False).describe()
    assert "without graphs" in Decoder(tiny(), "lookup", engine=True).describe()
    host = Decoder(tiny(), RandomDrafter(V), engine=True)
    assert "RandomDrafter drafts on the host" in host.describe()
    assert "as it is, since it is of another family" in Decoder(tiny("gpt2"), engine=True).describe()


def test_what_cannot_be_captured_runs_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here nothing can: trying it fails as it may on a GPU, after it has run twice."""

    def fails(self: Graphs, work: Any) -> Any:
        work()
        work()
        raise CaptureError("CUDA out of memory. Tried to allocate a lot")

    expected = decoder().generate(PROMPTS, SamplingParams(), seed=1, max_new_tokens=12)
    monkeypatch.setattr(Graphs, "capture", fails)
    one = decoder()
    assert one.engines is not None
    engine = one.engines._get(len(PROMPTS), 100)
    engine.graphs.on = True
    with pytest.warns(
        UserWarning, match=r"g = 3, 4 rows, could not be captured as a graph \(CUDA out of memory"
    ):
        outs = one.generate(PROMPTS, SamplingParams(), seed=1, max_new_tokens=12)
    assert [out.token_ids for out in outs] == [out.token_ids for out in expected]
    assert one.engines.engine is engine


def test_the_policy_knows_what_is_ready_and_what_making_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Graphs, work: Any) -> Any:
        raise CaptureError("not here")

    monkeypatch.setattr(Graphs, "capture", fails)
    policy, loads = Goodput(), list[Load]()
    one = decoder(num_draft_tokens=policy)
    choose = policy.choose

    def noted(rows: Sequence[int], *, load: Load | None = None, hint: Hint | None = None) -> list[int]:
        assert load is not None
        loads.append(load)
        return choose(rows, load=load, hint=hint)

    monkeypatch.setattr(policy, "choose", noted)
    assert one.engines is not None
    one.engines._get(len(PROMPTS), 200).graphs.on = True
    with pytest.warns(UserWarning, match="could not be captured"):
        one.generate(PROMPTS, SamplingParams(), seed=1, max_new_tokens=60)
    assert loads[0].ready == frozenset()
    assert loads[-1].ready is not None
    assert 0 in loads[-1].ready
    costs = policy.forecast.at(loads[-1])
    assert costs.made == len(loads[-1].ready) > 1
    assert costs.making > 0


def test_a_cache_without_room_is_said_and_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    expected = decoder(engine=False).generate(PROMPTS, temperature=0, max_new_tokens=12)
    monkeypatch.setattr(FusedModel, "room", full)
    with pytest.warns(UserWarning, match="no engine: a cache of 4 rows of 33 tokens does not fit"):
        outs = decoder().generate(PROMPTS, temperature=0, max_new_tokens=12)
    assert [out.token_ids for out in outs] == [out.token_ids for out in expected]


class Uneasy(Fixed):
    """Rests and guesses, for some iterations each, so that a draft has to read what it has missed."""

    def __init__(self) -> None:
        super().__init__(4)
        self.turn, self.loads, self.done = 0, list[Load](), list[StepOutcome]()

    def observe(self, done: StepOutcome) -> None:
        self.done.append(done)

    def choose(self, rows: Sequence[int], *, load: Load | None = None, hint: Hint | None = None) -> list[int]:
        self.turn += 1
        assert load is not None
        self.loads.append(load)
        return [(0, 0, 0, 0, 4, 2, 0, 3)[self.turn % 8]] * len(rows)


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_draft_that_rested_knows_the_text_and_what_it_lacks_is_said(
    engine: bool, batch_size: int | None
) -> None:
    """One that is the target is then never wrong."""
    model, policy = tiny().double(), Uneasy()
    one = Decoder(model, tiny().double(), num_draft_tokens=policy, engine=engine)
    outs = one.generate(
        PROMPTS, SamplingParams(temperature=0), max_new_tokens=60, batch_size=batch_size, ignore_eos=True
    )
    assert [out.token_ids for out in outs] == [greedy(model, prompt, 60) for prompt in PROMPTS]
    for out in outs:
        assert out.stats.draft_tokens > 20
        assert out.stats.accepted_tokens >= out.stats.draft_tokens - 4  # but for the end
    assert any(load.unread == 0 for load in policy.loads)
    assert any(load.unread >= 3 for load in policy.loads)
    if engine:  # it reads whole pieces, of all rows
        assert {load.unread % (32 * load.batch) for load in policy.loads} == {0}
        # and knows it right after
        assert {load.unread for turn, load in enumerate(policy.loads, 1) if turn % 8 == 5} == {0}


def test_what_making_a_drafts_reading_ready_took_is_said_and_not_taken_for_its_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(self: Graphs, work: Any) -> Any:
        raise CaptureError("not here")

    monkeypatch.setattr(Graphs, "capture", fails)
    policy = Uneasy()
    one = decoder(num_draft_tokens=policy)
    assert one.engines is not None
    one.engines._get(len(PROMPTS), 200).graphs.on = True
    with pytest.warns(UserWarning, match="could not be captured"):
        one.generate(PROMPTS, SamplingParams(), seed=1, max_new_tokens=100, ignore_eos=True)
    made = [done for done in policy.done if done.reading_made]
    assert len(made) == 1
    assert not made[0].catching_up
    assert any(done.catching_up for done in policy.done)
    assert all((done.seconds is None) == (done.making > 0) for done in policy.done)


class NowAndThen(DraftLengthPolicy):
    """Wants guesses at every sixth choice, whatever became of the last ones."""

    max_draft_tokens = 3

    def __init__(self) -> None:
        self.chosen: list[int] = []
        self.loads: list[Load] = []
        self.done: list[int] = []

    def choose(self, rows: Sequence[int], *, load: Load | None = None, hint: Hint | None = None) -> list[int]:
        assert load is not None
        self.loads.append(load)
        self.chosen.append(3 if len(self.chosen) % 6 == 5 else 0)
        return [self.chosen[-1]] * len(rows)

    def observe(self, done: StepOutcome) -> None:
        self.done.append(done.g)


def test_what_is_chosen_ahead_is_done() -> None:
    """A drafter on the host guesses when what is under way has ended; the choice is then not made again."""
    policy = NowAndThen()
    decoder = Decoder(tiny(), RandomDrafter(V), num_draft_tokens=policy, engine=True)
    decoder.generate([1, 2, 3], temperature=0, max_new_tokens=60, ignore_eos=True)
    assert policy.done.count(3) >= 8
    assert abs(sum(g > 0 for g in policy.chosen) - policy.done.count(3)) <= 1
    unread = [load.unread for load in policy.loads]
    after = [n for n, g in zip(unread[1:], policy.chosen, strict=False) if g]
    assert set(after[: policy.done.count(3)]) == {0}
    assert all(n > 0 for n, g in zip(unread, policy.chosen, strict=True) if g)


class Asks(NowAndThen):
    """And is asked between steps, for the rows that it chose for."""

    asks = True
    rows: Sequence[int] = ()
    withdrawn = 0

    def choose(self, rows: Sequence[int], *, load: Load | None = None, hint: Hint | None = None) -> list[int]:
        self.rows = list(rows)
        return super().choose(rows, load=load, hint=hint)

    def enough(self, confidence: Sequence[float]) -> bool:
        assert len(confidence) == len(self.rows)
        return False

    def withdraw(self) -> None:
        self.withdrawn += 1


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("batch", [3, 1])
def test_what_is_chosen_ahead_is_withdrawn_when_rows_end_or_others_begin(batch: int, inside: bool) -> None:
    policy = Asks()
    drafter = tiny(seed=1) if inside else RandomDrafter(V)
    decoder = Decoder(tiny(), drafter, num_draft_tokens=policy, engine=True)
    prompts = [[1, 2, 3], [4, 5], [6]]
    for tokens in range(4, 24):
        outs = decoder.generate(
            prompts, temperature=2, max_new_tokens=tokens, ignore_eos=True, batch_size=batch, seed=tokens
        )
        assert [len(out.token_ids) for out in outs] == [tokens] * 3
    assert policy.withdrawn > 0


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("engine", [True, False])
def test_a_policy_is_told_what_texts_have_use_for(inside: bool, engine: bool) -> None:
    policy = NowAndThen()
    decoder = Decoder(
        tiny(), tiny(seed=1) if inside else RandomDrafter(V), num_draft_tokens=policy, engine=engine
    )
    out = decoder.generate([1, 2, 3], temperature=0, max_new_tokens=20, ignore_eos=True)
    assert len(out.token_ids) == 20
    rooms = [load.room for load in policy.loads]
    assert rooms[0] == (19 if engine else 18,)  # without one, the first token comes with the prompt
    assert all(one is not None and one < before for before, one in itertools.pairwise(rooms))  # type: ignore[operator]
    assert rooms[-1] is not None
    assert rooms[-1][0] <= 3
    assert {load.way for load in policy.loads} == {"engine" if engine else ""}
    assert {load.padded for load in policy.loads} == {inside and engine}


class Told(NowAndThen):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[StepOutcome] = []

    def observe(self, done: StepOutcome) -> None:
        self.told.append(done)


@pytest.mark.parametrize("where", ["decoder", "user", "host"])
def test_what_the_device_waits_for_is_part_of_guessing_on_the_host(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With graphs, plain iterations are under way while the host reads what came of the last; the one after
    guesses is not. What users do is theirs."""
    policy, pause = Told(), 0.05

    def slow(*given: Any) -> Any:
        time.sleep(pause)
        return advance(*given)

    decoder = Decoder(tiny(), RandomDrafter(V), num_draft_tokens=policy, engine=True)
    if where != "user":
        monkeypatch.setattr("outpace.engine.graph_run.advance", slow)
    if where != "host":
        monkeypatch.setattr(Engine, "goes_on", True)
    for _ in decoder.stream([1, 2, 3], temperature=0, max_new_tokens=30, ignore_eos=True):
        if where == "user":
            time.sleep(pause)
    lengths, waited = [done.g for done in policy.told], [done.waited >= pause for done in policy.told]
    lengths, waited = lengths[:24], waited[:24]  # guesses that its end leaves no room for are waited for, too
    assert sum(g > 0 for g in lengths) >= 3
    assert not waited[0]
    around = [one > 0 or before > 0 for before, one in itertools.pairwise(lengths)]
    assert waited[1:] == [where == "decoder" and one for one in around]
    assert all(done.draft_seconds < pause for done in policy.told)


def test_the_device_waits_for_a_draft_that_has_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses that are part of the iteration are not waited for, once the draft knows the text."""
    policy, pause = Told(), 0.05

    def slow(*given: Any) -> Any:
        time.sleep(pause)
        return advance(*given)

    monkeypatch.setattr("outpace.engine.graph_run.advance", slow)
    monkeypatch.setattr(Engine, "goes_on", True)
    decoder = Decoder(tiny(), tiny(seed=1), num_draft_tokens=policy, engine=True)
    decoder.generate([1, 2, 3], temperature=0, max_new_tokens=30, ignore_eos=True)
    assert sum(done.g > 0 for done in policy.told) >= 3
    assert [done.waited >= pause for done in policy.told] == [done.g > 0 for done in policy.told]
