"""The graph executor generates the tokens of the eager executor and of Transformers."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from outpace import Decoder, Drafter, Fixed, LookupDrafter, NGramDrafter, SamplingParams
from outpace.engine.buckets import BUCKETS, StepKey, bucket_of
from outpace.engine.executor import Outcome, Pending
from outpace.engine.graph import GraphExecutor
from outpace.engine.needs import Needs
from outpace.engine.sequence import SequenceState
from outpace.engine.stats import Clock
from outpace.models.capture import Graphs, announced
from outpace.models.fused import FAMILIES, FusedModel
from outpace.models.fused_scorer import FusedScorer
from outpace.models.paged import Pages
from outpace.policy import Load
from tests import tiers
from tests.tiny import V, greedy, tiny

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 12, 40, 41, 42], [30]]
SEEDS = [3, 4, 5]
GREEDY = SamplingParams(temperature=0)


def decoder_of(target: Any, draft: Any, graphs: bool | None = None, **options: Any) -> Decoder:
    """Return a decoder whose graph executor captures graphs if the device has them, or if told so."""
    decoder = Decoder(target, draft, engine=True, num_draft_tokens=Fixed(8), **options)
    if graphs is not None:
        executor_of(decoder).graphs.enabled = graphs
    return decoder


def executor_of(decoder: Decoder) -> GraphExecutor:
    executor = decoder.executor
    assert isinstance(executor, GraphExecutor)
    return executor


class Batch:
    """Sequences in the first slots of a graph executor, which the test runs instead of the scheduler."""

    def __init__(
        self,
        decoder: Decoder,
        sampling: SamplingParams | None = None,
        prompts: Sequence[Sequence[int]] = PROMPTS,
        jointly: bool = True,
    ) -> None:
        self.decoder, self.executor = decoder, executor_of(decoder)
        self.rows = dict(enumerate(self.requests(prompts, sampling or SamplingParams())))
        self.active = dict(self.rows)
        groups = [list(self.rows.values())] if jointly else [[row] for row in self.rows.values()]
        for group in groups:
            prefilling = self.executor.prefill(group, Clock())
            while not prefilling.advance():
                pass

    def requests(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[SequenceState]:
        seeds = [SEEDS[0] + slot for slot in range(len(prompts))]
        rows = self.decoder.requests(list(map(list, prompts)), sampling, seed=seeds, max_new_tokens=100)
        for slot, row in enumerate(rows):
            row.slot = slot
        return rows

    def start(self, g: int) -> Pending:
        return self.executor.start(dict(self.active), g, None, Clock())

    def read(self, pending: Pending, g: int) -> Outcome:
        """Read the outcome of a step and commit it to the sequences that have not ended."""
        outcome = pending.read()
        for slot, row in self.active.items():
            assert not outcome.bad[slot]
            accepted = outcome.accepted[slot]
            self.executor.commit(row, g, accepted)
            row.tokens += [*outcome.drafts[slot][:accepted], outcome.next_token[slot]]
        return outcome

    def step(self, g: int) -> Outcome:
        return self.read(self.start(g), g)

    def end(self, slot: int) -> None:
        self.executor.release(self.active.pop(slot), keep=True)

    def new_tokens(self, tokens: int | None = None) -> list[list[int]]:
        return [row.new_tokens[:tokens] for row in self.rows.values()]


def generate(
    decoder: Decoder, g: int, sampling: SamplingParams, tokens: int, late: bool = False
) -> list[list[int]]:
    """Generate tokens for every prompt, the first one without draft tokens.

    With ``late``, each outcome is read after the next step has started.
    """
    batch = Batch(decoder, sampling)
    in_flight = [(batch.start(0), 0)]
    while in_flight:
        if late and len(in_flight) < 2 and batch.active:
            in_flight.append((batch.start(g), g))
        batch.read(*in_flight.pop(0))
        for slot, row in list(batch.active.items()):
            if len(row.new_tokens) >= tokens:
                batch.end(slot)
        if not in_flight and batch.active:
            in_flight.append((batch.start(g), g))
    return batch.new_tokens(tokens)


@pytest.mark.parametrize(("family", "g"), tiers.each_value(FAMILIES, [0, 1, 4]))
def test_greedy_texts_are_those_of_transformers(family: str, g: int) -> None:
    target, draft = tiny(family), tiny(family, seed=1)
    expected = [greedy(target, prompt, 30) for prompt in PROMPTS]
    assert generate(decoder_of(target, draft), g, GREEDY, 30) == expected


@pytest.mark.parametrize(
    ("rule", "sampling"),
    tiers.each_value(
        ["token", "block", "match"],
        [SamplingParams(), SamplingParams(temperature=0.8, top_k=20, top_p=0.9), GREEDY],
    ),
)
def test_both_executors_generate_the_same_tokens(rule: str, sampling: SamplingParams) -> None:
    """With the same noise, draft tokens, verdicts and rollback are the same."""
    target, draft = tiny(), tiny(seed=1)
    outs = Decoder(target, draft, rule=rule, num_draft_tokens=Fixed(3)).generate(
        PROMPTS, sampling, seed=SEEDS, max_new_tokens=40
    )
    # Near the end of a sequence the decoder drafts fewer tokens.
    expected = [out.token_ids[:30] for out in outs]
    assert generate(decoder_of(tiny(), tiny(seed=1), rule=rule), 3, sampling, 30) == expected


def test_reading_outcomes_one_step_late_changes_no_token() -> None:
    target, draft = tiny(), tiny(seed=1)
    found = [
        generate(decoder_of(target, draft), 3, SamplingParams(), 30, late=late) for late in (False, True)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("lengths", [(3, 5, 4), (2, 60, 3), (40, 40, 40), (1, 1, 2)])
def test_joint_prefill_equals_prefill_one_by_one(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...]
) -> None:
    monkeypatch.setattr("outpace.models.scorer.MAX_PREFILL_TOKENS", 24)  # several passes
    monkeypatch.setattr("outpace.models.scorer.MIN_CHUNK", 4)
    noise = torch.Generator().manual_seed(sum(lengths))
    prompts = [torch.randint(V, (n,), generator=noise).tolist() for n in lengths]
    joint, single = (
        Batch(decoder_of(tiny(), tiny(seed=1)), GREEDY, prompts, jointly) for jointly in (True, False)
    )
    for _ in range(4):
        for batch in (joint, single):
            batch.step(3)
        assert joint.new_tokens() == single.new_tokens()


class FakeGraph:
    """A replacement of a CUDA graph: ``replay`` calls the captured function again on the same tensors."""

    def __init__(self, work: Any, result: Any) -> None:
        self.work, self.result = work, result

    def replay(self) -> None:
        for old, new in zip(tensors(self.result), tensors(self.work()), strict=True):
            old.copy_(new)


def tensors(result: Any) -> list[Tensor]:
    """Return all tensors of a result."""
    if isinstance(result, Tensor):
        return [result]
    parts = result if isinstance(result, tuple | list) else getattr(result, "__dict__", {}).values()
    return [tensor for part in parts for tensor in tensors(part)]


@pytest.fixture
def captured_work(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that were captured. The capture itself is replaced, so that no GPU is needed."""

    def capture(self: Graphs, work: Any) -> Any:
        work()
        functions.append(work)
        result = copy.deepcopy(work())
        return FakeGraph(work, result), result

    functions: list[Any] = []
    monkeypatch.setattr(Graphs, "capture", capture)
    return functions


def test_executor_reports_captured_draft_lengths(
    captured_work: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.models.capture.MAX_GRAPHS", 4)
    without = Batch(decoder_of(tiny(), tiny(seed=1), graphs=False))
    assert without.executor.load(without.rows, Load(1)).captured is None  # no step needs one
    batch = Batch(decoder_of(tiny(), tiny(seed=1), graphs=True), prompts=PROMPTS[:2])
    executor = batch.executor
    assert executor.load(batch.rows, Load(1)).captured == frozenset()
    for g, captures in ((3, True), (3, False), (0, True)):
        pending = batch.start(g)
        batch.read(pending, g)
        assert (pending.capture_seconds > 0) == (pending.seconds is None) == captures
    assert len(captured_work) == 2
    assert executor.load(batch.rows, Load(1)).captured == frozenset({0, 3})
    hotter = batch.requests(PROMPTS[:2], SamplingParams(temperature=0.5))
    assert executor.load(dict(enumerate(hotter)), Load(1)).captured == frozenset({0, 3})
    filtered = batch.requests(PROMPTS[:2], SamplingParams(top_k=5))
    assert executor.load(dict(enumerate(filtered)), Load(1)).captured == frozenset()
    more = batch.requests(PROMPTS, SamplingParams())
    assert executor.load(dict(enumerate(more)), Load(1)).captured == frozenset()
    for g in (1, 2, 4):  # only four graphs are held: the least recently used one is dropped
        batch.step(g)
        batch.step(3)
    assert executor.load(batch.rows, Load(1)).captured == frozenset({1, 2, 3, 4})


def test_a_bucket_is_the_smallest_size_that_holds_all_slots() -> None:
    for slots in range(1, 3 * BUCKETS[-1]):
        bucket = bucket_of(slots)
        assert bucket >= slots
        assert all(smaller < slots for smaller in BUCKETS if smaller < bucket)


@pytest.mark.usefixtures("captured_work")
def test_one_graph_serves_all_batches_of_a_bucket() -> None:
    """The bucket of five sequences holds six slots, so that a sixth sequence needs no capture."""
    decoder = decoder_of(tiny(), None, graphs=True)
    for size, captures in ((5, True), (6, False)):
        prompts = [[slot + 1, 7] for slot in range(size)]
        batch = Batch(decoder, GREEDY, prompts)
        assert batch.executor.load(batch.rows, Load(1)).batch == 6
        pendings = []
        for _ in range(5):
            pendings.append(batch.start(0))
            batch.read(pendings[-1], 0)
        assert [pending.capture_seconds > 0 for pending in pendings] == [captures, *[False] * 4]
        assert batch.new_tokens() == [greedy(tiny(), prompt, 5) for prompt in prompts]
        for slot in range(size):
            batch.end(slot)


@pytest.mark.usefixtures("captured_work")
def test_a_batch_that_shrinks_keeps_its_graph_until_a_smaller_one_has_sufficed_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outpace.engine.buckets.PATIENCE", 5)
    batch, sizes = Batch(decoder_of(tiny(), None, graphs=True), GREEDY), []
    for step in range(12):
        if step == 2:
            batch.end(2)
            batch.end(1)
        sizes.append(batch.executor.load(batch.active, Load(1)).batch)
        batch.step(0)
    assert sizes == [*[3] * 7, *[1] * 5]
    assert batch.new_tokens()[0] == greedy(tiny(), PROMPTS[0], 12)


@pytest.mark.usefixtures("captured_work")
def test_a_batch_that_shrinks_moves_at_once_to_a_smaller_graph_that_is_captured() -> None:
    decoder = decoder_of(tiny(), None, graphs=True)
    decoder.warm_up([0], [2], GREEDY)
    batch, executor = Batch(decoder, GREEDY), executor_of(decoder)
    batch.step(0)
    batch.end(2)
    assert executor.load(batch.active, Load(1)).batch == 2
    batch.end(1)
    assert executor.load(batch.active, Load(1)).batch == 2  # a graph of one slot is not captured yet


def test_one_graph_serves_every_catch_up(captured_work: list[Any]) -> None:
    batch = Batch(decoder_of(tiny(), tiny(seed=1), graphs=True))
    captures = []
    for missing in (2, 1, 40):
        for _ in range(missing):
            batch.step(0)
        pending = batch.start(3)
        batch.read(pending, 3)
        captures.append(pending.catch_up_capture_seconds > 0)
        assert (pending.catch_up_seconds > 0) != captures[-1]
    assert captures == [True, False, False]
    assert len(captured_work) == 3  # two steps and a catch-up


def test_executor_created_in_inference_mode_works_outside_it() -> None:
    """Costs are measured in inference mode. Generation may run outside it."""
    with torch.inference_mode():
        decoder = decoder_of(tiny(), tiny(seed=1))
        first = generate(decoder, 2, GREEDY, 5)
    assert generate(decoder, 2, GREEDY, 5) == first


def test_interrupted_prefill_is_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = list(range(1, 40)), list(range(1, 20)) + list(range(40, 60))
    decoder, fresh = (Decoder(tiny(), tiny(seed=1), engine=True, num_draft_tokens=Fixed(3)) for _ in range(2))
    decoder.generate(first, GREEDY, max_new_tokens=4)
    append = FusedScorer.append
    with monkeypatch.context() as patch:
        patch.setattr("outpace.models.scorer.CHUNK", 4)

        def interrupted(self: FusedScorer, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
            append(self, slots, tokens)
            raise KeyboardInterrupt

        patch.setattr(FusedScorer, "append", interrupted)
        for prompts in ([second], [first, second]):
            with pytest.raises(KeyboardInterrupt):
                decoder.generate(prompts, GREEDY, max_new_tokens=4)
    found, expected = (each.generate([first, second], GREEDY, max_new_tokens=12) for each in (decoder, fresh))
    assert [out.token_ids for out in found] == [out.token_ids for out in expected]


def test_slot_decodes_one_sequence_after_another() -> None:
    """A sequence does not see what an earlier one left in the KV caches."""
    decoder = decoder_of(tiny(), tiny(seed=1))
    first = generate(decoder, 3, SamplingParams(), 30)
    assert generate(decoder, 3, SamplingParams(), 30) == first


def test_ended_slot_at_the_end_of_the_context_stands_still() -> None:
    """A step that was in flight when the sequence ended does not change the slot either."""
    target, draft = (tiny(seed=seed, max_position_embeddings=16) for seed in (0, 1))
    batch = Batch(decoder_of(target, draft), prompts=[list(range(14)), [1, 2]])
    alone = Batch(decoder_of(target, draft), prompts=[[7], [1, 2]])
    for each in (batch, alone):
        in_flight = each.start(3)
        each.end(0)
        each.read(in_flight, 3)
        before = int(each.executor.slots.lengths[0])
        for _ in range(2):
            each.step(3)
        assert int(each.executor.slots.lengths[0]) == before
    assert batch.new_tokens()[1] == alone.new_tokens()[1]


def test_a_step_may_run_the_first_slots_only() -> None:
    batch, whole = (Batch(decoder_of(tiny(), tiny(seed=1))) for _ in range(2))
    rest = {slot: batch.active.pop(slot) for slot in (1, 2)}
    for _ in range(3):
        assert set(batch.step(3).accepted) == {0}
    batch.active |= rest
    for _ in range(3):
        batch.step(3)
    for _ in range(6):
        whole.step(3)
    tokens = [len(new) for new in batch.new_tokens()]
    assert batch.new_tokens() == [new[:n] for new, n in zip(whole.new_tokens(), tokens, strict=True)]


@pytest.mark.parametrize("sizes", [(V, V - 3), (V - 3, V)])
def test_vocabularies_may_differ_by_padding(sizes: tuple[int, int]) -> None:
    target, draft = tiny(vocab_size=sizes[0]), tiny(seed=1, vocab_size=sizes[1])
    expected = [greedy(target, prompt, 20) for prompt in PROMPTS]
    assert generate(decoder_of(target, draft), 3, GREEDY, 20) == expected


@pytest.mark.full
def test_kernels_decode_sequences_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = pytest.importorskip("outpace.models.kernels.ranges", reason="needs triton", exc_type=ImportError)
    monkeypatch.setattr(ranges, "MIN_RANGE", (16, 16))
    monkeypatch.setattr(ranges, "BLOCK", 16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, draft = tiny(num_hidden_layers=2), tiny(seed=1, num_hidden_layers=1)
    expected = [greedy(target, prompt, 3) for prompt in PROMPTS]
    for module in ("fused", "choice"):
        monkeypatch.setattr(f"outpace.models.{module}.has_kernels", lambda device, dtype: True)
    monkeypatch.setattr("outpace.models.fused_scorer.PAGE", 16)
    decoder = decoder_of(target.to(device), draft.to(device))
    assert generate(decoder, 2, GREEDY, 3) == expected


def test_draft_model_does_not_run_in_steps_without_draft_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such steps cost no more than without a draft model."""
    batch, ran = Batch(decoder_of(tiny(), tiny())), []
    forward, fill = FusedScorer.forward, FusedScorer.fill

    def recording_forward(self: FusedScorer, ids: Tensor, positions: Tensor) -> Tensor:
        ran.append(self)
        return forward(self, ids, positions)

    def recording_fill(self: FusedScorer, ids: Tensor, positions: Tensor, slots: None = None) -> None:
        ran.append(self)
        fill(self, ids, positions)

    monkeypatch.setattr(FusedScorer, "forward", recording_forward)
    monkeypatch.setattr(FusedScorer, "fill", recording_fill)
    for _ in range(4):
        batch.step(0)
    assert ran == [batch.executor.target] * 4
    batch.step(3)
    assert batch.executor.draft_scorer in ran


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("interval", [1, 4, 40])
@pytest.mark.usefixtures("captured_work")
def test_draft_model_drafts_exactly_after_catching_up(
    interval: int, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step in ``interval`` has draft tokens. The draft model is the target, so all are accepted."""
    original = FusedModel.fill

    def fill(self: FusedModel, ids: Tensor, positions: Tensor, pages: Pages, prefill: bool = False) -> None:
        for row in positions.tolist():
            known = [position for position in row if position >= 0]
            expected = list(range(known[0], known[0] + len(known))) if known else []
            assert row == expected + [-1] * (len(row) - len(known)), "kernels need consecutive positions"
        original(self, ids, positions, pages)

    monkeypatch.setattr(FusedModel, "fill", fill)
    target, draft = (tiny(max_position_embeddings=400) for _ in range(2))
    batch = Batch(decoder_of(target, draft, graphs=graphs), prompts=[PROMPTS[0], PROMPTS[1] * 12, PROMPTS[2]])
    for i in range(3 * interval):
        g = 3 if i % interval == 0 else 0
        outcome = batch.step(g)
        assert [outcome.accepted[slot] for slot in batch.rows] == [g] * len(PROMPTS)


def test_draft_model_catches_up_while_an_outcome_is_unread() -> None:
    """The catch-up reads the tokens on the device, which the host does not know yet."""
    batch = Batch(decoder_of(tiny(), tiny()))
    for _ in range(3):
        steps = [(batch.start(g), g) for g in (0, 0, 3)]
        outcomes = [batch.read(*step) for step in steps]
        assert [outcomes[-1].accepted[slot] for slot in batch.rows] == [3] * len(PROMPTS)


def test_without_a_drafter_nothing_is_drafted() -> None:
    decoder = Decoder(tiny(), engine=True, num_draft_tokens=Fixed(3))
    outs = decoder.generate(PROMPTS, GREEDY, max_new_tokens=20)
    assert [out.token_ids for out in outs] == [greedy(tiny(), prompt, 20) for prompt in PROMPTS]
    assert [out.stats.draft_tokens for out in outs] == [0] * len(PROMPTS)


def test_target_and_draft_may_differ_in_precision() -> None:
    target, draft = tiny(), tiny(seed=1).double()
    expected = [greedy(target, prompt, 20) for prompt in PROMPTS]
    assert generate(decoder_of(target, draft), 3, GREEDY, 20) == expected


def test_a_batch_that_needs_less_keeps_its_graph_until_one_of_less_has_sufficed_for_long(
    captured_work: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.engine.buckets.PATIENCE", 3)
    decoder = decoder_of(tiny(), tiny(seed=1), graphs=True, rule="match")
    batch = Batch(decoder, SamplingParams(), prompts=PROMPTS[:2])
    filtered = SamplingParams(top_k=5, repetition_penalty=1.2)
    batch.rows[1].sampling, expected = filtered, []
    eager = Decoder(tiny(), rule="match")
    for row, prompt in zip(batch.rows.values(), PROMPTS, strict=False):
        out = eager.generate(prompt, row.sampling, seed=row.seed, max_new_tokens=30)
        expected.append(out.token_ids)
    batch.step(2)
    assert len(captured_work) == 1
    batch.end(1)
    batch.rows[0].slot = 0
    monkeypatch.setattr("outpace.engine.graph.bucket_of", lambda slots: 2)
    monkeypatch.setattr("outpace.engine.buckets.bucket_of", lambda slots: 2)
    assert batch.executor.load(batch.active, Load(1)).captured == frozenset({2})
    for _ in range(3):  # the graph of both sequences serves one
        batch.step(2)
    assert len(captured_work) == 1
    batch.step(2)
    assert len(captured_work) == 2
    batch.step(2)
    assert len(captured_work) == 2
    for row, tokens in zip(batch.rows.values(), expected, strict=True):
        count = min(len(row.new_tokens), 30)
        assert row.new_tokens[:count] == tokens[:count]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("g", [0, 3])
def test_graph_generates_the_tokens_of_the_cpu(g: int) -> None:
    sampling = SamplingParams(temperature=0.8, top_k=20)
    expected = generate(decoder_of(tiny().double(), tiny(seed=1).double()), g, sampling, 30)
    on_gpu = decoder_of(tiny().double().cuda(), tiny(seed=1).double().cuda())
    assert generate(on_gpu, g, sampling, 30, late=True) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_step_that_cannot_be_captured_runs_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = tiny().cuda(), tiny(seed=1).cuda()
    expected = generate(decoder_of(target, draft), 3, SamplingParams(), 20)
    logits = FusedModel.logits

    def synchronizing(self: FusedModel, ids: Tensor, positions: Tensor, pages: Pages) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            ids.sum().item()  # a capture forbids this
        return logits(self, ids, positions, pages)

    monkeypatch.setattr(FusedModel, "logits", synchronizing)
    decoder = decoder_of(target, draft)
    stream = torch.cuda.current_stream()
    with pytest.warns(UserWarning, match="could not be captured"):
        assert generate(decoder, 3, SamplingParams(), 20) == expected
    assert torch.cuda.current_stream() == stream
    monkeypatch.undo()
    assert generate(decoder_of(target, draft), 3, SamplingParams(), 20) == expected  # the device still works


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_steps_start_without_waiting_for_the_host() -> None:
    """Between the starts of two steps there is no blocking copy and no synchronization."""
    batch = Batch(decoder_of(tiny().cuda(), tiny(seed=1).cuda()))
    for _ in range(3):
        batch.step(3)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profile:
        started = [batch.start(3) for _ in range(4)]
    calls = sorted(profile.events(), key=lambda event: event.time_range.start)
    names = [event.name for event in calls if event.device_type.name == "CPU"]
    launches = [i for i, name in enumerate(names) if "GraphLaunch" in name]
    assert len(launches) == 4, set(names)
    between = names[launches[0] : launches[-1]]  # the profiler waits itself when it ends
    assert not [name for name in between if "Synchronize" in name or name in ("cudaMemcpy", "aten::item")]
    for pending in started:
        batch.read(pending, 3)


@pytest.mark.parametrize(("terminal", "seconds"), [(True, 0.3), (True, 0.0), (False, 0.3)])
def test_a_slow_capture_says_so_on_a_terminal(
    terminal: bool, seconds: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("outpace.models.capture.QUIET_SECONDS", 0.1)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    with announced("capturing a step"):
        time.sleep(seconds)
    assert ("capturing a step; later calls do not wait" in capsys.readouterr().err) == (
        terminal and seconds > 0
    )


@pytest.mark.parametrize("drafter", [LookupDrafter(), NGramDrafter.fit([1, 2, 3] * 5, 3, V)])
@pytest.mark.parametrize("g", [1, 4])
def test_kernels_are_compiled_ahead_for_drafts_of_the_form_that_steps_have(drafter: Drafter, g: int) -> None:
    """Verification has other kernels for drafts with lengths, with logits or with sampled tokens."""
    decoder = Decoder(tiny(), drafter, num_draft_tokens=Fixed(g), engine=True)
    decoder.generate([1, 2, 3], temperature=0.8, max_new_tokens=4, ignore_eos=True)
    executor = decoder.executor
    assert isinstance(executor, GraphExecutor)
    assert executor.draft is not None
    state = executor.state(StepKey(g, 1, Needs(), None))
    step, ahead = executor.draft.propose(state, g), executor.draft.launch_once(state, g)
    assert ahead is not None
    for name in ("tokens", "logits", "lengths"):
        expected, found = getattr(step, name), getattr(ahead, name)
        assert (found is None) == (expected is None)
        assert found is None or (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert len(ahead.drawn) == len(step.drawn)
