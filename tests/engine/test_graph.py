"""The graph executor generates the tokens of the eager executor and of Transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from outpace import Decoder, Fixed, SamplingParams
from outpace.engine.capture import Graphs
from outpace.engine.graph import Engine
from outpace.models.fused import FAMILIES, Cache, FusedModel
from outpace.models.generic import GenericModel
from tests import tiers
from tests.tiny import V, greedy, tiny

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 12, 40, 41, 42], [30]]
SEEDS = [3, 4, 5]


def generate(
    engine: Engine, g: int, sampling: SamplingParams, tokens: int, late: bool = False
) -> list[list[int]]:
    """Generate tokens for every prompt, the first one without draft tokens, as the decoder does.

    With ``late``, each outcome is read after the next step has started.
    """
    for slot, (prompt, seed) in enumerate(zip(PROMPTS, SEEDS, strict=True)):
        engine.prefill(slot, prompt, seed)
    new: list[list[int]] = [[] for _ in PROMPTS]
    pending = [engine.start(0, sampling)]
    while pending:
        if late and len(pending) < 2 and min(map(len, new)) < tokens:
            pending.append(engine.start(g, sampling))
        outcome = pending.pop(0).read()
        assert not any(outcome.bad)
        for slot, text in enumerate(new):
            if len(text) < tokens:
                text.extend(outcome.new_tokens(slot))
                if len(text) >= tokens:
                    engine.end(slot)
        if not pending and min(map(len, new)) < tokens:
            pending.append(engine.start(g, sampling))
    return [text[:tokens] for text in new]


def engine_of(target: Any, draft: Any, **options: Any) -> Engine:
    return Engine(
        FusedModel(target), None if draft is None else FusedModel(draft), len(PROMPTS), 100, **options
    )


@pytest.mark.parametrize(("family", "g"), tiers.each_value(FAMILIES, [0, 1, 4]))
def test_greedy_texts_are_those_of_transformers(family: str, g: int) -> None:
    target, draft = tiny(family), tiny(family, seed=1)
    expected = [greedy(target, prompt, 30) for prompt in PROMPTS]
    assert generate(engine_of(target, draft), g, SamplingParams(temperature=0), 30) == expected


@pytest.mark.parametrize(
    ("rule", "sampling"),
    tiers.each_value(
        ["token", "block", "match"],
        [
            SamplingParams(),
            SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
            SamplingParams(temperature=0),
        ],
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
    assert generate(engine_of(tiny(), tiny(seed=1), rule=rule), 3, sampling, 30) == expected


def test_reading_outcomes_one_step_late_changes_no_token() -> None:
    target, draft = tiny(), tiny(seed=1)
    found = [generate(engine_of(target, draft), 3, SamplingParams(), 30, late=late) for late in (False, True)]
    assert found[0] == found[1]


@pytest.mark.parametrize("lengths", [(3, 5, 4), (2, 60, 3), (40, 40, 40), (1, 1, 2)])
def test_joint_prefill_equals_prefill_one_by_one(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...]
) -> None:
    monkeypatch.setattr("outpace.engine.graph.MAX_PREFILL_TOKENS", 24)  # several passes
    noise = torch.Generator().manual_seed(sum(lengths))
    prompts = [torch.randint(V, (n,), generator=noise).tolist() for n in lengths]
    engines = [engine_of(tiny(), tiny(seed=1)) for _ in range(2)]
    engines[0].prefill_all(0, prompts, SEEDS)
    for slot, (prompt, seed) in enumerate(zip(prompts, SEEDS, strict=True)):
        engines[1].prefill(slot, prompt, seed)
    for _ in range(4):
        joint, single = (engine.start(3, SamplingParams(temperature=0)).read() for engine in engines)
        assert [joint.new_tokens(slot) for slot in range(3)] == [single.new_tokens(slot) for slot in range(3)]


class FakeGraph:
    """A replacement of a CUDA graph: ``replay`` calls the captured function again on the same tensors."""

    def __init__(self, work: Any, result: Tensor) -> None:
        self.work, self.result = work, result

    def replay(self) -> None:
        self.result.copy_(self.work())


@pytest.fixture
def captured_work(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that were captured. The capture itself is replaced, so that no GPU is needed."""

    def capture(self: Graphs, work: Any) -> Any:
        work()
        functions.append(work)
        result = work().clone()
        return FakeGraph(work, result), result

    functions: list[Any] = []
    monkeypatch.setattr(Graphs, "capture", capture)
    return functions


def test_engine_reports_captured_draft_lengths(
    captured_work: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outpace.engine.capture.MAX_GRAPHS", 4)
    engine, sampling = engine_of(tiny(), tiny(seed=1)), SamplingParams()
    assert engine.captured_lengths(sampling, 2, from_host=False) is None  # without graphs none needs capture
    engine.graphs.enabled = True
    assert engine.captured_lengths(sampling, 2, from_host=False) == frozenset()
    for g in (3, 0, 3):
        pending = engine.start(g, sampling, 2)
        pending.read()
        assert (pending.capture_seconds > 0) == (pending.seconds is None) == (not pending.needed_no_capture)
    assert len(captured_work) == 2
    assert pending.needed_no_capture
    assert engine.captured_lengths(sampling, 2, from_host=False) == frozenset({0, 3})
    assert engine.captured_lengths(sampling, 2, from_host=True) == frozenset()
    assert engine.captured_lengths(sampling, 1, from_host=False) == frozenset()
    assert engine.captured_lengths(SamplingParams(temperature=0.5), 2, from_host=False) == frozenset()
    for g in (1, 2, 4):  # only four graphs are held: the least recently used one is dropped
        engine.start(g, sampling, 2)
        engine.start(3, sampling, 2)
    assert engine.captured_lengths(sampling, 2, from_host=False) == frozenset({1, 2, 3, 4})


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_prefill_captures_graphs_of_few_sizes(
    captured_work: list[Any], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr("outpace.engine.graph.CHUNK", 16)
    monkeypatch.setattr("outpace.engine.graph.MIN_CHUNK", 4)
    kind = FusedModel if family == "llama" else GenericModel
    engines = [Engine(kind(tiny(family)), kind(tiny(family, seed=1)), 1, 80) for _ in range(2)]
    engines[1].graphs.enabled = True
    noise = torch.Generator().manual_seed(5)
    for length in (1, 2, 5, 6, 17, 40, 78, 39, 79, 7):
        prompt = torch.randint(V, (length,), generator=noise).tolist()
        found = []
        for engine in engines:
            engine.prefill(0, prompt, 3)
            found.append([engine.start(0, SamplingParams()).read().new_tokens(0) for _ in range(2)])
        assert found[0] == found[1]
    # Chunks have 4, 8 or 16 tokens and attend to 16, 32, 64 or all positions. Not every pair occurs.
    sizes, attended = 3, 4
    assert sizes < len(captured_work) - 1 <= sizes * attended


def test_one_graph_serves_every_catch_up(captured_work: list[Any]) -> None:
    engine = engine_of(tiny(), tiny(seed=1))
    engine.graphs.enabled = True
    sequences = {slot: [*prompt, *range(1, 60)] for slot, prompt in enumerate(PROMPTS)}
    for slot, tokens in sequences.items():
        engine.prefill(slot, tokens, 1)
    captures = [engine.catch_up(sequences, missing) > 0 for missing in (2, 1, 40, 58)]
    assert captures == [True, False, False, False]
    assert len(captured_work) == 1


def test_engine_created_in_inference_mode_works_outside_it() -> None:
    """Costs are measured in inference mode. Generation may run outside it."""
    with torch.inference_mode():
        engine = engine_of(tiny(), tiny(seed=1))
        engine.prefill(0, PROMPTS[0], 1)
        engine.catch_up({0: PROMPTS[0]}, 2)
        engine.end(0)
    engine.prefill(0, PROMPTS[0], 1)
    new_tokens = engine.start(2, SamplingParams()).read().new_tokens(0)
    engine.catch_up({0: [*PROMPTS[0], *new_tokens]}, 2)
    engine.end(0)


def test_interrupted_prefill_is_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = list(range(1, 40)), list(range(1, 20)) + list(range(40, 60))
    engine, fresh = engine_of(tiny(), tiny(seed=1)), engine_of(tiny(), tiny(seed=1))
    engine.prefill(0, first, 1)
    with monkeypatch.context() as patch:
        patch.setattr("outpace.engine.graph.CHUNK", 4)
        fill_cache = FusedModel.fill_cache

        def interrupted(self: FusedModel, ids: Tensor, positions: Tensor, cache: Cache) -> None:
            fill_cache(self, ids, positions, cache)
            raise KeyboardInterrupt

        patch.setattr(FusedModel, "fill_cache", interrupted)
        for slot in (0, 1):
            with pytest.raises(KeyboardInterrupt):
                engine.prefill(slot, second, 1)
    for each in (engine, fresh):
        each.prefill(0, first, 1)
        each.prefill(1, second, 1)
    for _ in range(3):
        found, expected = (
            each.start(3, SamplingParams(temperature=0), slots=2).read() for each in (engine, fresh)
        )
        assert [found.new_tokens(slot) for slot in (0, 1)] == [expected.new_tokens(slot) for slot in (0, 1)]


def test_slot_decodes_one_sequence_after_another() -> None:
    """A sequence does not see what an earlier one left in the KV caches."""
    target, draft = tiny(), tiny(seed=1)
    engine = engine_of(target, draft)
    first = generate(engine, 3, SamplingParams(), 30)
    assert generate(engine, 3, SamplingParams(), 30) == first


def test_ended_slot_at_the_end_of_the_cache_stands_still() -> None:
    engine = Engine(FusedModel(tiny()), FusedModel(tiny(seed=1)), 2, 16)
    engine.prefill(0, list(range(15)), 1)
    engine.end(0)
    engine.prefill(1, [1, 2], 2)
    before = int(engine.lengths[0])
    alone = Engine(FusedModel(tiny()), FusedModel(tiny(seed=1)), 1, 16)
    alone.prefill(0, [1, 2], 2)
    for _ in range(3):
        expected = alone.start(3, SamplingParams()).read().new_tokens(0)
        assert engine.start(3, SamplingParams()).read().new_tokens(1) == expected
    assert int(engine.lengths[0]) == before


def test_a_step_may_run_the_first_slots_only() -> None:
    engine, alone = engine_of(tiny(), tiny(seed=1)), engine_of(tiny(), tiny(seed=1))
    for each in (engine, alone):
        each.prefill(0, [1, 2], 2)
    engine.prefill(1, [3, 4, 5], 3)
    for _ in range(3):
        outcome = engine.start(3, SamplingParams(), slots=1).read()
        assert outcome.new_tokens(0) == alone.start(3, SamplingParams()).read().new_tokens(0)
        assert len(outcome.accepted) == 1
    assert int(engine.lengths[1]) == 3


@pytest.mark.parametrize("sizes", [(V, V - 3), (V - 3, V)])
def test_vocabularies_may_differ_by_padding(sizes: tuple[int, int]) -> None:
    target, draft = tiny(vocab_size=sizes[0]), tiny(seed=1, vocab_size=sizes[1])
    expected = [greedy(target, prompt, 20) for prompt in PROMPTS]
    assert generate(engine_of(target, draft), 3, SamplingParams(temperature=0), 20) == expected


def test_kernels_decode_sequences_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = pytest.importorskip(
        "outpace.models.kernels.attention", reason="needs triton", exc_type=ImportError
    )
    monkeypatch.setattr(attention, "MIN_RANGE", 16)
    monkeypatch.setattr(attention, "BLOCK", 16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, draft = tiny(num_hidden_layers=2), tiny(seed=1, num_hidden_layers=1)
    expected = [greedy(target, prompt, 3) for prompt in PROMPTS]
    monkeypatch.setattr("outpace.models.fused.has_kernels", lambda device, dtype: True)
    engine = engine_of(target.to(device), draft.to(device))
    assert generate(engine, 2, SamplingParams(temperature=0), 3) == expected


def test_draft_model_does_not_run_in_steps_without_draft_tokens() -> None:
    """Such steps cost no more than without a draft model."""
    engine = engine_of(tiny(), tiny())
    for slot, prompt in enumerate(PROMPTS):
        engine.prefill(slot, prompt, 1)
    for _ in range(4):
        engine.start(0, SamplingParams()).read()
    assert engine.start(3, SamplingParams()).read().accepted != [3] * len(PROMPTS)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("interval", [1, 4, 40])
@pytest.mark.usefixtures("captured_work")
def test_draft_model_drafts_exactly_after_catching_up(
    interval: int, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step in ``interval`` has draft tokens. The draft model is the target, so all are accepted."""
    original = FusedModel.fill_cache

    def fill_cache(self: FusedModel, ids: torch.Tensor, positions: torch.Tensor, cache: Any) -> None:
        assert (positions.diff(dim=1) == 1).all(), "kernels need consecutive positions"
        original(self, ids, positions, cache)

    monkeypatch.setattr(FusedModel, "fill_cache", fill_cache)
    engine = Engine(FusedModel(tiny()), FusedModel(tiny()), 3, 400)
    engine.graphs.enabled = graphs
    prompts = [PROMPTS[0], PROMPTS[1] * 12, PROMPTS[2]]
    sequences = {slot: list(prompt) for slot, prompt in enumerate(prompts)}
    for slot, prompt in enumerate(prompts):
        engine.prefill(slot, prompt, 1)
    for i in range(3 * interval):
        g = 3 if i % interval == 0 else 0
        if g:
            engine.catch_up(sequences, interval)
        outcome = engine.start(g, SamplingParams()).read()
        assert outcome.accepted == [g] * len(PROMPTS)
        for slot, tokens in sequences.items():
            tokens += outcome.new_tokens(slot)


def test_engine_without_drafter_decodes_without_speculation() -> None:
    expected = [greedy(tiny(), prompt, 20) for prompt in PROMPTS]
    assert generate(engine_of(tiny(), None), 3, SamplingParams(temperature=0), 20) == expected


def test_target_and_draft_may_differ_in_precision() -> None:
    target, draft = tiny(), tiny(seed=1).double()
    expected = [greedy(target, prompt, 20) for prompt in PROMPTS]
    assert generate(engine_of(target, draft), 3, SamplingParams(temperature=0), 20) == expected


def test_errors_name_the_wrong_argument() -> None:
    engine = engine_of(tiny(), None)
    with pytest.raises(ValueError, match="got 0 tokens"):
        engine.prefill(0, [], 1)
    with pytest.raises(ValueError, match="got 100 tokens"):
        engine.prefill(0, [1] * 100, 1)
    with pytest.raises(ValueError, match="penalties"):
        engine.start(0, SamplingParams(repetition_penalty=1.2))
    for slots in (0, 4):
        with pytest.raises(ValueError, match="it must be 1 to 3"):
            engine.start(0, SamplingParams(), slots=slots)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("g", [0, 3])
def test_graph_generates_the_tokens_of_the_cpu(g: int) -> None:
    sampling = SamplingParams(temperature=0.8, top_k=20)
    expected = generate(engine_of(tiny().double(), tiny(seed=1).double()), g, sampling, 30)
    on_gpu = engine_of(tiny().double().cuda(), tiny(seed=1).double().cuda())
    assert generate(on_gpu, g, sampling, 30, late=True) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_step_that_cannot_be_captured_runs_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = tiny().cuda(), tiny(seed=1).cuda()
    expected = generate(engine_of(target, draft), 3, SamplingParams(), 20)
    logits = FusedModel.logits

    def synchronizing(self: FusedModel, ids: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            ids.sum().item()  # a capture forbids this
        return logits(self, ids, positions, cache)

    monkeypatch.setattr(FusedModel, "logits", synchronizing)
    engine = engine_of(target, draft)
    stream = torch.cuda.current_stream()
    with pytest.warns(UserWarning, match="could not be captured"):
        assert generate(engine, 3, SamplingParams(), 20) == expected
    assert torch.cuda.current_stream() == stream
    monkeypatch.undo()
    assert generate(engine_of(target, draft), 3, SamplingParams(), 20) == expected  # the device still works


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_steps_start_without_waiting_for_the_host() -> None:
    """Between the starts of two steps there is no blocking copy and no synchronization."""
    engine = engine_of(tiny().cuda(), tiny(seed=1).cuda())
    for slot, prompt in enumerate(PROMPTS):
        engine.prefill(slot, prompt, slot)
    for _ in range(3):
        engine.start(3, SamplingParams()).read()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profile:
        started = [engine.start(3, SamplingParams()) for _ in range(4)]
    calls = sorted(profile.events(), key=lambda event: event.time_range.start)
    names = [event.name for event in calls if event.device_type.name == "CPU"]
    launches = [i for i, name in enumerate(names) if "GraphLaunch" in name]
    assert len(launches) == 4, set(names)
    between = names[launches[0] : launches[-1]]  # the profiler waits itself when it ends
    assert not [name for name in between if "Synchronize" in name or name in ("cudaMemcpy", "aten::item")]
    for pending in started:
        pending.read()
