"""The engine writes the texts that the decoder writes, and Transformers."""

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
from tests.tiny import V, greedy, tiny

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 12, 40, 41, 42], [30]]
SEEDS = [3, 4, 5]


def texts(
    engine: Engine, g: int, sampling: SamplingParams, tokens: int, late: bool = False
) -> list[list[int]]:
    """So many new tokens of every prompt, the first of them drawn plainly as the decoder does."""
    for row, (prompt, seed) in enumerate(zip(PROMPTS, SEEDS, strict=True)):
        engine.begin(row, prompt, seed)
    new: list[list[int]] = [[] for _ in PROMPTS]
    pending = [engine.start(0, sampling)]
    while pending:
        if late and len(pending) < 2 and min(map(len, new)) < tokens:
            pending.append(engine.start(g, sampling))
        outcome = pending.pop(0).read()
        assert not any(outcome.bad)
        for row, text in enumerate(new):
            if len(text) < tokens:
                text.extend(outcome.won(row))
                if len(text) >= tokens:
                    engine.end(row)
        if not pending and min(map(len, new)) < tokens:
            pending.append(engine.start(g, sampling))
    return [text[:tokens] for text in new]


def engine_of(target: Any, draft: Any, **options: Any) -> Engine:
    return Engine(
        FusedModel(target), None if draft is None else FusedModel(draft), len(PROMPTS), 100, **options
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("g", [0, 1, 4])
def test_greedy_texts_are_those_of_transformers(family: str, g: int) -> None:
    target, draft = tiny(family), tiny(family, seed=1)
    expected = [greedy(target, prompt, 30) for prompt in PROMPTS]
    assert texts(engine_of(target, draft), g, SamplingParams(temperature=0), 30) == expected


@pytest.mark.parametrize("rule", ["token", "block", "match"])
@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(), SamplingParams(temperature=0.8, top_k=20, top_p=0.9), SamplingParams(temperature=0)],
)
def test_texts_are_those_of_the_decoder(rule: str, sampling: SamplingParams) -> None:
    """Same noise, same texts: drafts, verdicts and rollback are the same."""
    target, draft = tiny(), tiny(seed=1)
    outs = Decoder(target, draft, rule=rule, num_draft_tokens=Fixed(3)).generate(
        PROMPTS, sampling, seed=SEEDS, max_new_tokens=40
    )
    # At its end the decoder drafts less than it may.
    expected = [out.token_ids[:30] for out in outs]
    assert texts(engine_of(tiny(), tiny(seed=1), rule=rule), 3, sampling, 30) == expected


def test_reading_one_iteration_late_changes_nothing() -> None:
    target, draft = tiny(), tiny(seed=1)
    found = [texts(engine_of(target, draft), 3, SamplingParams(), 30, late=late) for late in (False, True)]
    assert found[0] == found[1]


@pytest.mark.parametrize("lengths", [(3, 5, 4), (2, 60, 3), (40, 40, 40), (1, 1, 2)])
def test_rows_that_begin_together_begin_as_one_by_one(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...]
) -> None:
    monkeypatch.setattr("outpace.engine.graph.TOGETHER", 24)  # several passes
    noise = torch.Generator().manual_seed(sum(lengths))
    prompts = [torch.randint(V, (n,), generator=noise).tolist() for n in lengths]
    engines = [engine_of(tiny(), tiny(seed=1)) for _ in range(2)]
    engines[0].begin_all(0, prompts, SEEDS)
    for row, (prompt, seed) in enumerate(zip(prompts, SEEDS, strict=True)):
        engines[1].begin(row, prompt, seed)
    for _ in range(4):
        one, other = (engine.start(3, SamplingParams(temperature=0)).read() for engine in engines)
        assert [one.won(row) for row in range(3)] == [other.won(row) for row in range(3)]


class Replayed:
    """A graph that is a function: it is called again, with whatever lies in the tensors that it was made
    with."""

    def __init__(self, work: Any, result: Tensor) -> None:
        self.work, self.result = work, result

    def replay(self) -> None:
        self.result.copy_(self.work())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What graphs were made of, which is done here, too."""

    def capture(self: Graphs, work: Any) -> Any:
        work()
        found.append(work)
        result = work().clone()
        return Replayed(work, result), result

    found: list[Any] = []
    monkeypatch.setattr(Graphs, "capture", capture)
    return found


def test_it_says_which_lengths_are_ready(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outpace.engine.capture.MOST", 4)
    engine, plain = engine_of(tiny(), tiny(seed=1)), SamplingParams()
    assert engine.ready(plain, 2, given=False) is None  # all are: there are no graphs
    engine.graphs.on = True
    assert engine.ready(plain, 2, given=False) == frozenset()
    for g in (3, 0, 3):
        pending = engine.start(g, plain, 2)
        pending.read()
        assert (pending.making > 0) == (pending.seconds is None) == (not pending.ready)
    assert len(made) == 2
    assert pending.ready
    assert engine.ready(plain, 2, given=False) == frozenset({0, 3})
    assert engine.ready(plain, 2, given=True) == engine.ready(plain, 1, given=False) == frozenset()
    assert engine.ready(SamplingParams(temperature=0.5), 2, given=False) == frozenset()
    for g in (1, 2, 4):  # there is room for four: the ones that were not used for the longest go
        engine.start(g, plain, 2)
        engine.start(3, plain, 2)
    assert engine.ready(plain, 2, given=False) == frozenset({1, 2, 3, 4})


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_prompts_of_all_rows_are_graphs_of_a_few_sizes(
    made: list[Any], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr("outpace.engine.graph.CHUNK", 16)
    monkeypatch.setattr("outpace.engine.graph.SHORTEST", 4)
    kind = FusedModel if family == "llama" else GenericModel
    engines = [Engine(kind(tiny(family)), kind(tiny(family, seed=1)), 1, 80) for _ in range(2)]
    engines[1].graphs.on = True
    noise = torch.Generator().manual_seed(5)
    for length in (1, 2, 5, 6, 17, 40, 78, 39, 79, 7):
        prompt = torch.randint(V, (length,), generator=noise).tolist()
        found = []
        for engine in engines:
            engine.begin(0, prompt, 3)
            found.append([engine.start(0, SamplingParams()).read().won(0) for _ in range(2)])
        assert found[0] == found[1]
    sizes, reaches = 3, 3  # of 4, 8 and 16 tokens, over 16, 32, 64 and all: not each with each
    assert sizes < len(made) - 1 <= sizes * (reaches + 1)


def test_one_graph_reads_whatever_a_draft_has_missed(made: list[Any]) -> None:
    engine = engine_of(tiny(), tiny(seed=1))
    engine.graphs.on = True
    written = {row: [*prompt, *range(1, 60)] for row, prompt in enumerate(PROMPTS)}
    for row, text in written.items():
        engine.begin(row, text, 1)
    assert [engine.catch_up(written, missing) > 0 for missing in (2, 1, 40, 58)] == [
        True,
        False,
        False,
        False,
    ]
    assert len(made) == 1


def test_an_engine_made_where_nothing_is_learnt_works_elsewhere() -> None:
    """Costs are measured in inference mode, texts need not be."""
    with torch.inference_mode():
        engine = engine_of(tiny(), tiny(seed=1))
        engine.begin(0, PROMPTS[0], 1)
        engine.catch_up({0: PROMPTS[0]}, 2)
        engine.end(0)
    engine.begin(0, PROMPTS[0], 1)
    won = engine.start(2, SamplingParams()).read().won(0)
    engine.catch_up({0: [*PROMPTS[0], *won]}, 2)
    engine.end(0)


def test_what_was_interrupted_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = list(range(1, 40)), list(range(1, 20)) + list(range(40, 60))
    engine, fresh = engine_of(tiny(), tiny(seed=1)), engine_of(tiny(), tiny(seed=1))
    engine.begin(0, first, 1)
    with monkeypatch.context() as patch:
        patch.setattr("outpace.engine.graph.CHUNK", 4)
        read = FusedModel.read

        def interrupted(self: FusedModel, ids: Tensor, positions: Tensor, cache: Cache) -> None:
            read(self, ids, positions, cache)
            raise KeyboardInterrupt

        patch.setattr(FusedModel, "read", interrupted)
        for row in (0, 1):
            with pytest.raises(KeyboardInterrupt):
                engine.begin(row, second, 1)
    for one in (engine, fresh):
        one.begin(0, first, 1)
        one.begin(1, second, 1)
    for _ in range(3):
        found, expected = (
            one.start(3, SamplingParams(temperature=0), rows=2).read() for one in (engine, fresh)
        )
        assert [found.won(row) for row in (0, 1)] == [expected.won(row) for row in (0, 1)]


def test_a_row_takes_up_one_text_after_another() -> None:
    """What an earlier text left in the caches is not seen."""
    target, draft = tiny(), tiny(seed=1)
    engine = engine_of(target, draft)
    first = texts(engine, 3, SamplingParams(), 30)
    assert texts(engine, 3, SamplingParams(), 30) == first


def test_rows_at_the_end_of_the_cache_stand_still() -> None:
    engine = Engine(FusedModel(tiny()), FusedModel(tiny(seed=1)), 2, 16)
    engine.begin(0, list(range(15)), 1)
    engine.end(0)
    engine.begin(1, [1, 2], 2)
    before = int(engine.lengths[0])
    alone = Engine(FusedModel(tiny()), FusedModel(tiny(seed=1)), 1, 16)
    alone.begin(0, [1, 2], 2)
    for _ in range(3):
        assert engine.start(3, SamplingParams()).read().won(1) == alone.start(3, SamplingParams()).read().won(
            0
        )
    assert int(engine.lengths[0]) == before


def test_some_rows_can_go_on_without_the_others() -> None:
    engine, alone = engine_of(tiny(), tiny(seed=1)), engine_of(tiny(), tiny(seed=1))
    for one in (engine, alone):
        one.begin(0, [1, 2], 2)
    engine.begin(1, [3, 4, 5], 3)
    for _ in range(3):
        outcome = engine.start(3, SamplingParams(), rows=1).read()
        assert outcome.won(0) == alone.start(3, SamplingParams()).read().won(0)
        assert len(outcome.accepted) == 1
    assert int(engine.lengths[1]) == 3


@pytest.mark.parametrize("sizes", [(V, V - 3), (V - 3, V)])
def test_vocabularies_may_differ_by_padding(sizes: tuple[int, int]) -> None:
    target, draft = tiny(vocab_size=sizes[0]), tiny(seed=1, vocab_size=sizes[1])
    expected = [greedy(target, prompt, 20) for prompt in PROMPTS]
    assert texts(engine_of(target, draft), 3, SamplingParams(temperature=0), 20) == expected


def test_rows_go_through_the_kernels_together(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = pytest.importorskip(
        "outpace.models.kernels.attention", reason="needs triton", exc_type=ImportError
    )
    monkeypatch.setattr(attention, "RANGE", 16)
    monkeypatch.setattr(attention, "BLOCK", 16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, draft = tiny(), tiny(seed=1)
    expected = [greedy(target, prompt, 4) for prompt in PROMPTS]
    monkeypatch.setattr("outpace.models.fused.has_kernels", lambda device, dtype: True)
    engine = engine_of(target.to(device), draft.to(device))
    assert texts(engine, 2, SamplingParams(temperature=0), 4) == expected


def test_a_draft_that_was_not_asked_does_not_know_the_text() -> None:
    """So that plain iterations cost no more than without one."""
    engine = engine_of(tiny(), tiny())
    for row, prompt in enumerate(PROMPTS):
        engine.begin(row, prompt, 1)
    written = {row: list(prompt) for row, prompt in enumerate(PROMPTS)}
    for _ in range(4):
        outcome = engine.start(0, SamplingParams()).read()
        for row, text in written.items():
            text += outcome.won(row)
    assert engine.start(3, SamplingParams()).read().accepted != [3] * len(PROMPTS)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("plain", [1, 4, 40])
def test_a_draft_that_has_caught_up_guesses_on(
    plain: int, graphs: bool, made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = FusedModel.read

    def read(self: FusedModel, ids: torch.Tensor, positions: torch.Tensor, cache: Any) -> None:
        assert (positions.diff(dim=1) == 1).all(), "kernels want positions that follow each other"
        honest(self, ids, positions, cache)

    monkeypatch.setattr(FusedModel, "read", read)
    engine = Engine(FusedModel(tiny()), FusedModel(tiny()), 3, 400)
    engine.graphs.on = graphs
    prompts = [PROMPTS[0], PROMPTS[1] * 12, PROMPTS[2]]
    written = {row: list(prompt) for row, prompt in enumerate(prompts)}
    for row, prompt in enumerate(prompts):
        engine.begin(row, prompt, 1)
    for i in range(3 * plain):
        g = 3 if i % plain == 0 else 0
        if g:
            engine.catch_up(written, plain)
        outcome = engine.start(g, SamplingParams()).read()
        assert outcome.accepted == [g] * len(PROMPTS)
        for row, text in written.items():
            text += outcome.won(row)


def test_without_anyone_who_guesses_decoding_is_plain() -> None:
    expected = [greedy(tiny(), prompt, 20) for prompt in PROMPTS]
    assert texts(engine_of(tiny(), None), 3, SamplingParams(temperature=0), 20) == expected


def test_models_of_two_precisions_write_together() -> None:
    target, draft = tiny(), tiny(seed=1).double()
    expected = [greedy(target, prompt, 20) for prompt in PROMPTS]
    assert texts(engine_of(target, draft), 3, SamplingParams(temperature=0), 20) == expected


def test_what_does_not_fit_is_named() -> None:
    engine = engine_of(tiny(), None)
    with pytest.raises(ValueError, match="got 0 tokens"):
        engine.begin(0, [], 1)
    with pytest.raises(ValueError, match="got 100 tokens"):
        engine.begin(0, [1] * 100, 1)
    with pytest.raises(ValueError, match="penalties"):
        engine.start(0, SamplingParams(repetition_penalty=1.2))
    for rows in (0, 4):
        with pytest.raises(ValueError, match="there are 1 to 3"):
            engine.start(0, SamplingParams(), rows=rows)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("g", [0, 3])
def test_a_graph_writes_what_the_cpu_writes(g: int) -> None:
    sampling = SamplingParams(temperature=0.8, top_k=20)
    expected = texts(engine_of(tiny().double(), tiny(seed=1).double()), g, sampling, 30)
    on_gpu = engine_of(tiny().double().cuda(), tiny(seed=1).double().cuda())
    assert texts(on_gpu, g, sampling, 30, late=True) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_what_cannot_be_captured_runs_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = tiny().cuda(), tiny(seed=1).cuda()
    expected = texts(engine_of(target, draft), 3, SamplingParams(), 20)
    logits = FusedModel.logits

    def asks(self: FusedModel, ids: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            ids.sum().item()  # the host cannot have it now
        return logits(self, ids, positions, cache)

    monkeypatch.setattr(FusedModel, "logits", asks)
    engine = engine_of(target, draft)
    stream = torch.cuda.current_stream()
    with pytest.warns(UserWarning, match="could not be captured"):
        assert texts(engine, 3, SamplingParams(), 20) == expected
    assert torch.cuda.current_stream() == stream
    monkeypatch.undo()
    assert texts(engine_of(target, draft), 3, SamplingParams(), 20) == expected  # the device is as it was


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_iterations_do_not_wait_for_the_host() -> None:
    """No copy that waits and no synchronization between the start of one iteration and that of another."""
    engine = engine_of(tiny().cuda(), tiny(seed=1).cuda())
    for row, prompt in enumerate(PROMPTS):
        engine.begin(row, prompt, row)
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
