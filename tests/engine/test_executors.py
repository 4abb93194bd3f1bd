"""A decoder generates the same tokens with and without the graph executor."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from outpace import (
    Decoder,
    Draft,
    Drafter,
    Fixed,
    Goodput,
    Heuristic,
    LookupDrafter,
    ModelDrafter,
    NGramDrafter,
    Output,
    RandomDrafter,
    SamplingParams,
)
from outpace.auditing.audit import audit
from outpace.draft.base import State
from outpace.draft.ngram import NGrams
from outpace.engine.drafting import Proposer
from outpace.engine.graph import GraphExecutor
from outpace.engine.sequence import advance
from outpace.models.capture import CaptureError, Graphs
from outpace.policy import DraftLengthPolicy, Load, StepOutcome
from tests import tiers
from tests.tiny import FAMILIES, V, greedy, tiny

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1, 12, 40, 41, 42], [30], [1, 2]]


@pytest.fixture(autouse=True)
def steps_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next step starts before the host has read the last outcome, as on a GPU."""
    monkeypatch.setattr(GraphExecutor, "is_async", True)


def make_decoder(engine: bool = True, **options: Any) -> Decoder:
    return Decoder(tiny(), tiny(seed=1), engine=engine, **{"num_draft_tokens": Fixed(3), **options})


def graph_executor(decoder: Decoder, graphs: bool = False) -> GraphExecutor:
    """Return the graph executor of a decoder. With ``graphs`` it captures, also without a GPU."""
    executor = decoder.executor
    assert isinstance(executor, GraphExecutor)
    executor.graphs.enabled |= graphs
    return executor


def ran_on_graph_executor(decoder: Decoder) -> bool:
    return len(graph_executor(decoder).slots) > 0


@pytest.mark.parametrize(
    ("family", "batch_size", "is_async"), tiers.each_value(FAMILIES, [2, 1, None], [True, False])
)
def test_greedy_texts_are_those_of_transformers(
    family: str, batch_size: int | None, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GraphExecutor, "is_async", is_async)
    target = tiny(family)
    expected = [greedy(target, prompt, 16) for prompt in PROMPTS]
    for drafter in (tiny(family, seed=1), None):
        decoder = Decoder(target, drafter, engine=True)
        outs = decoder.generate(PROMPTS, temperature=0, max_new_tokens=16, batch_size=batch_size)
        assert [out.token_ids for out in outs] == expected
        assert ran_on_graph_executor(decoder)


@pytest.mark.parametrize("policy", [Fixed(0), Fixed(4), Heuristic(3)])
def test_match_generates_the_tokens_of_decoding_without_speculation(policy: Any) -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.9)
    options: dict[str, Any] = {"seed": [1, 2, 3, 4], "max_new_tokens": 25}
    baseline = Decoder(tiny(), rule="match").generate(PROMPTS, sampling, **options)
    decoder = make_decoder(rule="match", num_draft_tokens=policy)
    outs = decoder.generate(PROMPTS, sampling, **options, batch_size=3)
    assert [out.token_ids for out in outs] == [out.token_ids for out in baseline]
    assert ran_on_graph_executor(decoder)


@pytest.mark.parametrize("rule", ["token", "match"])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0), SamplingParams(temperature=0.3, top_k=5)]
)
def test_prompt_lookup_in_the_graph_equals_the_lookup_drafter(rule: str, sampling: SamplingParams) -> None:
    """The prompts repeat themselves, so that draft tokens are found and accepted."""
    prompts = [prompt * 4 for prompt in PROMPTS]
    options: dict[str, Any] = {"rule": rule, "num_draft_tokens": Fixed(4)}
    expected = Decoder(tiny(), "lookup", **options).generate(prompts, sampling, seed=3, max_new_tokens=40)
    decoder = Decoder(tiny(), "lookup", engine=True, **options)
    outs = decoder.generate(prompts, sampling, seed=3, max_new_tokens=40, batch_size=3)
    assert ran_on_graph_executor(decoder)
    if sampling.temperature == 0 or rule == "match":
        assert [out.token_ids for out in outs] == [out.token_ids for out in expected]
    assert sum(out.stats.accepted_tokens for out in outs) > 0
    assert any(out.stats.draft_tokens < 4 * out.stats.target_passes for out in outs)


@pytest.mark.parametrize("drafter", ["model", "lookup"])
def test_graph_executor_passes_the_audit(drafter: str) -> None:
    decoder = Decoder(
        tiny(), tiny(seed=1) if drafter == "model" else drafter, engine=True, num_draft_tokens=Fixed(3)
    )
    report = audit(decoder, PROMPTS, samples=400, progress=False)
    assert report.passed, str(report)
    assert ran_on_graph_executor(decoder)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_shared_prefixes_are_computed_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several sequences share a prompt. A later prompt continues a generated sequence."""
    prompt = list(range(1, 41))
    decoder = Decoder(tiny(family), tiny(family, seed=1), engine=True, num_draft_tokens=Fixed(3))
    alone = Decoder(tiny(family), tiny(family, seed=1), num_draft_tokens=Fixed(0))
    scorer_type = type(decoder.scorer)
    append, widths = scorer_type.append, list[int]()

    def recording(self: Any, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        if self in (decoder.scorer, decoder.drafter.scorer):  # type: ignore[union-attr]
            widths.extend(map(len, tokens))
        return append(self, slots, tokens)

    monkeypatch.setattr(scorer_type, "append", recording)
    outs = decoder.generate([prompt] * 4, temperature=0, max_new_tokens=20)
    assert widths == [39, 39]  # target and draft, of one sequence
    assert {tuple(out.token_ids) for out in outs} == {
        tuple(alone.generate(prompt, temperature=0, max_new_tokens=20).token_ids)
    }
    longer = [*prompt, *outs[0].token_ids, 7, 8, 9]
    widths.clear()
    again = decoder.generate(longer, temperature=0, max_new_tokens=20)
    assert widths == [3, 4]  # target and draft, without the tokens that they have processed
    assert again.token_ids == alone.generate(longer, temperature=0, max_new_tokens=20).token_ids
    with torch.no_grad():
        for each in (decoder, alone):
            each.scorer.base.get_output_embeddings().weight.mul_(-1.0)
    widths.clear()
    assert decoder.generate(longer, temperature=0, max_new_tokens=20).token_ids == (
        alone.generate(longer, temperature=0, max_new_tokens=20).token_ids
    )
    assert widths == [62]  # the draft model has not changed


def test_sequences_end_at_limits_and_stop_tokens() -> None:
    """A stop token may come in the middle of a step's tokens."""
    expected = make_decoder(engine=False).generate(PROMPTS, temperature=0, max_new_tokens=30)
    ends = [out.token_ids[7] for out in expected]
    both = [
        make_decoder(engine).generate(PROMPTS, temperature=0, max_new_tokens=30, stop_tokens=ends)
        for engine in (False, True)
    ]
    assert [out.token_ids for out in both[0]] == [out.token_ids for out in both[1]]
    assert [out.finish_reason for out in both[0]] == [out.finish_reason for out in both[1]]
    assert min(len(out.token_ids) for out in both[1]) < 30


def test_decoder_works_after_a_stream_was_closed() -> None:
    decoder = make_decoder()
    whole = decoder.generate(PROMPTS[0], SamplingParams(), seed=3, max_new_tokens=20)
    stream = decoder.stream(PROMPTS[0], SamplingParams(), seed=3, max_new_tokens=20)
    first = next(stream)
    stream.close()
    assert first.token_ids == whole.token_ids[: len(first.token_ids)]
    steps = list(decoder.stream(PROMPTS[0], SamplingParams(), seed=3, max_new_tokens=20))
    assert [token for step in steps for token in step.token_ids] == whole.token_ids
    assert steps[-1].output is not None
    assert steps[-1].output.token_ids == whole.token_ids
    assert whole.stats.new_tokens == 20
    assert whole.stats.draft_tokens == 3 * whole.stats.target_passes
    assert whole.stats.seconds > 0


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3, "top_k": 20},
        {"frequency_penalty": 0.7, "presence_penalty": 0.3, "logit_bias": {7: 3.0, 9: -2.0}},
        {"processors": [lambda ids, scores: scores.roll(1, -1)], "repetition_penalty": 1.3},
        {"allowed_token_ids": range(1, V, 3), "presence_penalty": 0.3},
        {"logprobs": 3, "scores": True, "logits": True, "top_p": 0.9},
        {"logprobs": True, "repetition_penalty": 1.3, "processors": [lambda ids, scores: scores + 1]},
    ],
)
def test_both_executors_give_the_same_results(options: dict[str, Any]) -> None:
    graph, eager = (make_decoder(engine=engine, rule="match") for engine in (True, False))
    assert isinstance(graph.executor, GraphExecutor)
    for temperature in (0.8, 0.0):
        found, expected = (
            decoder.generate(PROMPTS, temperature=temperature, seed=2, max_new_tokens=10, **options)
            for decoder in (graph, eager)
        )
        for one, other in zip(found, expected, strict=True):
            assert one.token_ids == other.token_ids
            for name in ("logprobs", "scores", "logits"):
                ours, theirs = getattr(one, name), getattr(other, name)
                assert (ours is None) == (theirs is None)
                if ours is not None:
                    torch.testing.assert_close(
                        torch.as_tensor(ours), torch.as_tensor(theirs), rtol=1e-4, atol=1e-4
                    )
            if one.top_logprobs is not None and other.top_logprobs is not None:
                assert [list(top) for top in one.top_logprobs] == [list(top) for top in other.top_logprobs]


def each_rule_drafts_with_its_own_noise(engine: bool) -> bool:
    """Return whether sequences of rule match are drafted with the target's noise, and no others.

    The target drafts for itself. So a sequence of rule match rejects draft tokens only if their noise is not
    the target's. Any other sequence has the text of rule match only if it is.
    """
    decoder = Decoder(tiny(), ModelDrafter(tiny()), num_draft_tokens=Fixed(3), engine=engine)
    options: Any = {"temperature": 1.0, "max_new_tokens": 40}
    requests = [decoder.requests(PROMPTS[0], seed=seed, **options)[0] for seed in (None, 3, None, 4)]
    assert [one.match for one in requests] == [False, True, False, True]
    outputs: dict[int, Output] = {}
    with decoder.scheduler() as scheduler:
        for request in requests:
            scheduler.add(request)
        while scheduler.unfinished:
            outputs |= {step.index: step.output for step in scheduler.step() if step.output is not None}
    baseline = Decoder(tiny(), rule="match")
    matched = [baseline.generate(PROMPTS[0], seed=one.seed, **options).token_ids for one in requests]
    return all(
        outputs[i].stats.acceptance_rate > 0.95 and (outputs[i].token_ids == matched[i]) == requests[i].match
        for i in range(len(requests))
    )


@pytest.mark.parametrize("engine", [True, False])
def test_each_rule_drafts_with_its_own_noise_in_a_mixed_batch(engine: bool) -> None:
    assert each_rule_drafts_with_its_own_noise(engine)


@pytest.mark.parametrize("engine", [True, False])
@pytest.mark.parametrize("other", [SamplingParams(), SamplingParams(presence_penalty=0.1)])
def test_a_draft_model_of_nan_ends_no_sequence(engine: bool, other: SamplingParams) -> None:
    broken = tiny(seed=1)
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)
    decoder = Decoder(tiny(), broken, rule="token", num_draft_tokens=Fixed(3), engine=engine)
    outs = decoder.generate(PROMPTS[:2], [SamplingParams(), other], max_new_tokens=6, seed=1)
    assert [out.finish_reason for out in outs] == ["length", "length"]
    assert sum(out.stats.draft_tokens for out in outs) == 0


@pytest.mark.parametrize("drafter", ["n-gram", "lookup", "model"])
def test_a_step_in_flight_beyond_the_context_reads_no_token_there(drafter: str) -> None:
    drafters: dict[str, Any] = {"n-gram": NGramDrafter.fit([7] * 20, 3, V), "model": tiny()}
    decoder = Decoder(tiny(), drafters.get(drafter, drafter), num_draft_tokens=Fixed(6), engine=True)
    context = decoder.scorer.context
    for left in (1, 2, 5, 9):
        prompts = [[7] * (context - left), [7] * 8]
        outs = decoder.generate(prompts, temperature=0, allowed_token_ids=[7], max_new_tokens=50)
        assert [len(out.token_ids) for out in outs] == [left, 50]


def test_processors_leave_allowed_tokens_to_the_draft_model() -> None:
    """The host applies a processor to the target's logits, and the draft model does without it."""
    for engine in (True, False):
        decoder = Decoder(tiny(), tiny(), num_draft_tokens=Fixed(3), engine=engine)
        out = decoder.generate(
            PROMPTS[0], allowed_token_ids=[1, 2, 3, 4, 5], processors=[lambda ids, scores: scores],
            logit_bias={2: 3.0}, max_new_tokens=60, seed=1,
        )  # fmt: skip
        assert out.stats.acceptance_rate > 0.95


def test_release_frees_n_gram_tables_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    tables, honest = list[Any](), NGrams.on

    def on(*arguments: Any) -> NGrams:
        made = honest(*arguments)
        tables.append(weakref.ref(made))
        return made

    monkeypatch.setattr(NGrams, "on", on)
    decoder = Decoder(tiny(), NGramDrafter.fit([1, 2, 3] * 5, 3, V), num_draft_tokens=Fixed(3), engine=True)
    for count in (1, 2):
        assert decoder.generate([1, 2, 3], temperature=0, max_new_tokens=6).stats.draft_tokens
        assert len(tables) == count
        decoder.release()
        gc.collect()
        assert tables[-1]() is None


@pytest.mark.parametrize("engine", [True, False])
def test_a_processor_that_fails_ends_its_own_sequence_alone(engine: bool) -> None:
    def raising(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 8:
            raise RuntimeError("too long for me")
        return scores

    decoder = make_decoder(engine=engine)
    samplings = [
        SamplingParams(temperature=0, processors=[raising]),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, processors=[lambda ids, scores: scores[0]]),
    ]
    with pytest.warns(UserWarning, match="prompt [02]: "):
        outs = decoder.generate([[5, 6, 7]] * 3, samplings, max_new_tokens=12)
    assert [out.finish_reason for out in outs] == ["error", "length", "error"]
    assert "too long for me" in str(outs[0].error)
    assert outs[0].token_ids == outs[1].token_ids[: len(outs[0].token_ids)]  # of the steps before
    assert outs[1].token_ids == greedy(decoder.scorer.base, [5, 6, 7], 12)
    assert "it must return scores (1, 61)" in str(outs[2].error)


@pytest.mark.parametrize("engine", [True, False])
def test_a_bias_for_an_unknown_token_ends_its_own_sequence_alone(engine: bool) -> None:
    decoder = make_decoder(engine=engine)
    samplings = [SamplingParams(temperature=0, logit_bias={V: 1.0}), SamplingParams(temperature=0)]
    with pytest.warns(UserWarning, match="prompt 0: logit_bias: got token ids"):
        outs = decoder.generate(PROMPTS[:2], samplings, max_new_tokens=5)
    assert [out.finish_reason for out in outs] == ["error", "length"]
    with pytest.raises(ValueError, match="logit_bias"):
        decoder.generate(PROMPTS[0], samplings[0])


class Recording(Fixed):
    """A fixed number of draft tokens, with a record of all loads."""

    def __init__(self, num_draft_tokens: int) -> None:
        super().__init__(num_draft_tokens)
        self.loads = list[Load]()

    def choose(
        self, slots: Sequence[int], *, load: Load | None = None, proposed: Sequence[int] | None = None
    ) -> list[int]:
        assert load is not None
        self.loads.append(load)
        return super().choose(slots, load=load, proposed=proposed)


def run(
    decoder: Decoder, requests: Sequence[tuple[list[int], int, dict[str, Any]]], batch_size: int
) -> list[list[int]]:
    """Generate greedily, with as many tokens and such options for each prompt."""
    texts: list[list[int]] = [[] for _ in requests]
    with decoder.scheduler(batch_size) as scheduler:
        for prompt, tokens, options in requests:
            (request,) = decoder.requests(prompt, temperature=0, max_new_tokens=tokens, **options)
            scheduler.add(request)
        while scheduler.unfinished:
            for step in scheduler.step():
                texts[step.index] += step.token_ids
    return texts


@pytest.mark.parametrize(("family", "speculative"), [("llama", True), ("gpt2", True), ("gpt2", False)])
def test_a_sequence_that_joins_does_not_change_the_steps_of_others_in_flight(
    family: str, speculative: bool
) -> None:
    """One of two sequences ends soon, and a third one takes its slot while the other is in flight."""
    target, draft = tiny(family), tiny(family, seed=1)
    long, short, late = (PROMPTS[0], 40), (PROMPTS[2], 3), (PROMPTS[1] * 3, 9)
    for order in ((long, short, late), (short, long, late)):
        decoder = Decoder(target, draft if speculative else None, engine=True, num_draft_tokens=Fixed(3))
        found = run(decoder, [(prompt, tokens, {}) for prompt, tokens in order], batch_size=2)
        assert found == [greedy(target, prompt, tokens) for prompt, tokens in order]


def test_changed_weights_take_effect() -> None:
    decoder = make_decoder(num_draft_tokens=Fixed(2))
    decoder.generate(PROMPTS, temperature=0, max_new_tokens=10)
    fresh = tiny(seed=5)
    with torch.no_grad():
        for weight, new_weight in zip(decoder.scorer.base.parameters(), fresh.parameters(), strict=True):
            weight.copy_(new_weight)
    expected = [greedy(fresh, prompt, 10) for prompt in PROMPTS]
    assert [out.token_ids for out in decoder.generate(PROMPTS, temperature=0, max_new_tokens=10)] == expected
    decoder.scorer.base.load_state_dict(tiny(seed=6).state_dict(), assign=True)
    expected = [greedy(decoder.scorer.base, prompt, 10) for prompt in PROMPTS]
    assert [out.token_ids for out in decoder.generate(PROMPTS, temperature=0, max_new_tokens=10)] == expected


def test_adapters_and_hooks_take_effect() -> None:
    decoder = make_decoder()
    decoder.generate(PROMPTS, temperature=0, max_new_tokens=5)
    layer = decoder.scorer.base.model.layers[1]
    layer.register_forward_hook(lambda module, inputs, output: output * 1.5)
    expected = [greedy(decoder.scorer.base, prompt, 10) for prompt in PROMPTS]
    assert [out.token_ids for out in decoder.generate(PROMPTS, temperature=0, max_new_tokens=10)] == expected
    decoder.scorer.base._hf_peft_config_loaded = True
    decoder.generate(PROMPTS, temperature=0, max_new_tokens=5)
    assert "has adapters" in decoder.describe()


def test_executor_created_in_inference_mode_works_outside_it() -> None:
    decoder = make_decoder()
    with torch.inference_mode():
        first = decoder.generate(PROMPTS, temperature=0, max_new_tokens=5)
    assert [out.token_ids for out in decoder.generate(PROMPTS, temperature=0, max_new_tokens=5)] == [
        out.token_ids for out in first
    ]


def test_models_may_be_created_in_inference_mode() -> None:
    with torch.inference_mode():
        target, draft = tiny(), tiny(seed=1)
    outs = Decoder(target, draft, engine=True).generate(PROMPTS, temperature=0, max_new_tokens=5)
    assert [out.token_ids for out in outs] == [greedy(target, prompt, 5) for prompt in PROMPTS]


def test_a_target_may_draft_for_itself() -> None:
    model = tiny()
    decoder = Decoder(model, model, engine=True, num_draft_tokens=Fixed(3))
    outs = decoder.generate(PROMPTS, temperature=0, max_new_tokens=10)
    assert [out.token_ids for out in outs] == [greedy(model, prompt, 10) for prompt in PROMPTS]


def test_kv_cache_grows_with_sequences_and_tokens() -> None:
    decoder = make_decoder()
    for prompts, tokens in ((PROMPTS[:1], 5), (PROMPTS, 5), (PROMPTS, 60), (PROMPTS[:2], 10)):
        expected = [greedy(decoder.scorer.base, prompt, tokens) for prompt in prompts]
        outs = decoder.generate(prompts, temperature=0, max_new_tokens=tokens)
        assert [out.token_ids for out in outs] == expected


def test_unusable_logits_end_only_their_sequence() -> None:
    decoder = make_decoder()
    with torch.no_grad():
        decoder.scorer.base.model.embed_tokens.weight[30] = float("nan")
    with pytest.warns(UserWarning, match="unusable"):
        outs = decoder.generate([[5, 6, 7], [30]], temperature=0, max_new_tokens=3)
    assert outs[1].finish_reason == "error"
    assert outs[0].finish_reason == "length" or 30 in outs[0].token_ids
    # No NaN remains in the KV caches.
    clean = make_decoder().generate([[5, 6], [7, 8]], temperature=0, max_new_tokens=2)
    again = decoder.generate([[5, 6], [7, 8]], temperature=0, max_new_tokens=2)
    assert [out.token_ids for out in again] == [out.token_ids for out in clean]


def test_description_names_the_executor() -> None:
    assert "without graphs" in make_decoder().describe()
    assert make_decoder(engine=False).describe().endswith("eager")
    assert "without graphs" in Decoder(tiny(), "lookup", engine=True).describe()
    host = Decoder(tiny(), RandomDrafter(V), engine=True)
    assert "RandomDrafter drafts on the host" in host.describe()
    assert "LlamaForCausalLM fused" in make_decoder().describe()
    assert (
        "GPT2LMHeadModel is not fused, since it is of another family"
        in Decoder(tiny("gpt2"), engine=True).describe()
    )


def test_step_that_cannot_be_captured_runs_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every capture fails, as it may on a GPU, after the step has run twice."""

    def fails(self: Graphs, work: Any) -> Any:
        work()
        work()
        raise CaptureError("CUDA out of memory. Tried to allocate a lot")

    expected = make_decoder().generate(PROMPTS, SamplingParams(), seed=1, max_new_tokens=12)
    monkeypatch.setattr(Graphs, "capture", fails)
    decoder = make_decoder()
    executor = graph_executor(decoder, graphs=True)
    with pytest.warns(
        UserWarning, match=r"3 draft tokens and 4 slots could not be captured as a graph \(CUDA out of memory"
    ):
        outs = decoder.generate(PROMPTS, SamplingParams(), seed=1, max_new_tokens=12)
    assert [out.token_ids for out in outs] == [out.token_ids for out in expected]
    assert decoder.executor is executor


def test_policy_knows_captured_lengths_and_capture_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Graphs, work: Any) -> Any:
        raise CaptureError("not here")

    monkeypatch.setattr(Graphs, "capture", fails)
    policy, loads, outcomes = Goodput(), list[Load](), list[StepOutcome]()
    decoder = make_decoder(num_draft_tokens=policy)
    choose, observe = policy.choose, policy.observe

    def observing(done: StepOutcome) -> None:
        outcomes.append(done)
        observe(done)

    def recording(
        rows: Sequence[int], *, load: Load | None = None, proposed: Sequence[int] | None = None
    ) -> list[int]:
        assert load is not None
        loads.append(load)
        return choose(rows, load=load, proposed=proposed)

    monkeypatch.setattr(policy, "choose", recording)
    monkeypatch.setattr(policy, "observe", observing)
    graph_executor(decoder, graphs=True)
    with pytest.warns(UserWarning, match="could not be captured"):
        decoder.generate(PROMPTS, SamplingParams(), seed=1, max_new_tokens=60)
    assert loads[0].captured == frozenset()
    assert loads[-1].captured is not None
    assert 0 in loads[-1].captured
    captures = [done.capture_seconds for done in outcomes if done.capture_seconds]
    assert len(captures) == len(loads[-1].captured) > 1
    assert min(captures) > 0


class Alternating(Fixed):
    """A policy that chooses 0 for some steps, so that the draft model has to catch up."""

    def __init__(self) -> None:
        super().__init__(4)
        self.calls, self.loads, self.outcomes = 0, list[Load](), list[StepOutcome]()

    def observe(self, done: StepOutcome) -> None:
        self.outcomes.append(done)

    def choose(
        self, slots: Sequence[int], *, load: Load | None = None, proposed: Sequence[int] | None = None
    ) -> list[int]:
        self.calls += 1
        assert load is not None
        self.loads.append(load)
        return [(0, 0, 0, 0, 4, 2, 0, 3)[self.calls % 8]] * len(slots)


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_draft_model_catches_up_and_the_policy_knows_the_missing_tokens(
    engine: bool, batch_size: int | None
) -> None:
    """The draft model is the target, so all its tokens are accepted if it has caught up."""
    model, policy = tiny().double(), Alternating()
    decoder = Decoder(model, tiny().double(), num_draft_tokens=policy, engine=engine)
    outs = decoder.generate(
        PROMPTS, SamplingParams(temperature=0), max_new_tokens=60, batch_size=batch_size, ignore_eos=True
    )
    assert [out.token_ids for out in outs] == [greedy(model, prompt, 60) for prompt in PROMPTS]
    for out in outs:
        assert out.stats.draft_tokens > 20
        assert out.stats.accepted_tokens >= out.stats.draft_tokens - 4  # except at the end
    assert any(load.catch_up_tokens == 0 for load in policy.loads)
    assert any(load.catch_up_tokens >= 3 for load in policy.loads)
    if engine:  # it reads whole chunks of all slots
        assert {load.catch_up_tokens % (32 * load.batch) for load in policy.loads} == {0}
        # No token is missing right after a catch-up.
        assert {load.catch_up_tokens for call, load in enumerate(policy.loads, 1) if call % 8 == 5} == {0}


def test_capture_seconds_of_a_catch_up_are_not_part_of_its_cost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(self: Graphs, work: Any) -> Any:
        raise CaptureError("not here")

    monkeypatch.setattr(Graphs, "capture", fails)
    policy = Alternating()
    decoder = make_decoder(num_draft_tokens=policy)
    graph_executor(decoder, graphs=True)
    with pytest.warns(UserWarning, match="could not be captured"):
        decoder.generate(PROMPTS, SamplingParams(), seed=1, max_new_tokens=100, ignore_eos=True)
    timed = [one.catch_up_seconds > 0 for one in policy.outcomes if one.g and one.load.catch_up_tokens]
    assert timed[0] is False  # it was captured
    assert all(timed[1:])
    assert len(timed) > 1
    assert all((outcome.seconds is None) == (outcome.capture_seconds > 0) for outcome in policy.outcomes)


class EverySixth(DraftLengthPolicy):
    """A policy that chooses 3 at every sixth call, and 0 otherwise."""

    max_draft_tokens = 3

    def __init__(self) -> None:
        self.chosen: list[int] = []
        self.loads: list[Load] = []
        self.outcomes: list[StepOutcome] = []

    def choose(
        self, slots: Sequence[int], *, load: Load | None = None, proposed: Sequence[int] | None = None
    ) -> list[int]:
        assert load is not None
        self.loads.append(load)
        self.chosen.append(3 if len(self.chosen) % 6 == 5 else 0)
        return [self.chosen[-1]] * len(slots)

    def observe(self, done: StepOutcome) -> None:
        self.outcomes.append(done)


def test_a_choice_made_before_the_last_outcome_is_carried_out() -> None:
    """A drafter on the host waits for the step in flight. The policy is then not called again."""
    policy = EverySixth()
    decoder = Decoder(tiny(), RandomDrafter(V), num_draft_tokens=policy, engine=True)
    decoder.generate([1, 2, 3], temperature=0, max_new_tokens=60, ignore_eos=True)
    drafted = [outcome.g for outcome in policy.outcomes].count(3)
    assert drafted >= 8
    assert abs(sum(g > 0 for g in policy.chosen) - drafted) <= 1
    missing = [load.catch_up_tokens for load in policy.loads]
    after = [n for n, g in zip(missing[1:], policy.chosen, strict=False) if g]
    assert set(after[:drafted]) == {0}
    assert all(n > 0 for n, g in zip(missing, policy.chosen, strict=True) if g)


@pytest.mark.parametrize(("in_graph", "batch"), tiers.each_value([True, False], [3, 1]))
def test_a_pending_choice_is_dropped_when_a_sequence_ends(batch: int, in_graph: bool) -> None:
    """A choice is pending while a drafter on the host waits for the step in flight."""
    policy = EverySixth()
    drafter = tiny(seed=1) if in_graph else RandomDrafter(V)
    decoder = Decoder(tiny(), drafter, num_draft_tokens=policy, engine=True)
    prompts = [[1, 2, 3], [4, 5], [6]]
    for tokens in range(4, 24):
        outs = decoder.generate(
            prompts, temperature=2, max_new_tokens=tokens, ignore_eos=True, batch_size=batch, seed=tokens
        )
        assert [len(out.token_ids) for out in outs] == [tokens] * 3


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize("engine", [True, False])
def test_policy_knows_the_remaining_draft_tokens(in_graph: bool, engine: bool) -> None:
    policy = EverySixth()
    decoder = Decoder(
        tiny(), tiny(seed=1) if in_graph else RandomDrafter(V), num_draft_tokens=policy, engine=engine
    )
    out = decoder.generate([1, 2, 3], temperature=0, max_new_tokens=20, ignore_eos=True)
    assert len(out.token_ids) == 20
    remaining = [load.remaining_draft_tokens for load in policy.loads]
    # The eager executor samples the first token with the prefill.
    assert remaining[0] == (19 if engine else 18,)
    for before, after in itertools.pairwise(remaining):
        assert before is not None
        assert after is not None
        assert after < before
    assert remaining[-1] is not None
    assert remaining[-1][0] <= 3
    assert {load.executor for load in policy.loads} == {"graph" if engine else "eager"}
    assert {load.padded_drafts for load in policy.loads} == {in_graph and engine}


class SimulatedTime:
    """The module ``time`` with a clock that only ``sleep`` advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def simulated_time(monkeypatch: pytest.MonkeyPatch) -> SimulatedTime:
    clock = SimulatedTime()
    monkeypatch.setattr("outpace.engine.scheduler.time", clock)
    return clock


class HostLookup(LookupDrafter):
    """Prompt lookup that drafts on the host."""


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("slow_part", ["decoder", "user", "host"])
def test_time_in_which_the_device_waits_for_a_drafter_on_the_host_counts(
    slow_part: str, free: bool, simulated_time: SimulatedTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is part of a step with draft tokens, or of the proposal of a free drafter, which comes before.

    With graphs, a step without draft tokens runs while the host reads the last outcome. A drafter on the host
    waits for that outcome. Time that the user's code takes does not count.
    """
    policy, pause = EverySixth(), 1.0

    def slow(*arguments: Any) -> Any:
        simulated_time.sleep(pause)
        return advance(*arguments)

    drafter = HostLookup() if free else RandomDrafter(V)
    decoder = Decoder(tiny(), drafter, num_draft_tokens=policy, engine=True)
    if slow_part != "user":
        monkeypatch.setattr("outpace.engine.scheduler.advance", slow)
    if slow_part == "host":
        monkeypatch.setattr(GraphExecutor, "is_async", False)
    for _ in decoder.stream([1, 2, 3] * 4, temperature=0, max_new_tokens=60, ignore_eos=True):
        if slow_part == "user":
            simulated_time.sleep(pause)
    drafted = [outcome for outcome in policy.outcomes[1:] if outcome.g and outcome.seconds is not None]
    assert len(drafted) >= 3
    waits = slow_part == "decoder"
    assert {outcome.proposal_seconds >= pause for outcome in drafted} == {free and waits}
    assert {(outcome.seconds or 0.0) >= pause for outcome in drafted} == {waits and not free}


@pytest.mark.parametrize("slow_part", ["comparison", "end"])
def test_work_of_the_host_that_the_device_hides_is_no_part_of_a_step(
    slow_part: str, simulated_time: SimulatedTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a step without draft tokens, the host compares the token that prompt lookup would have drafted.

    After the last step, it completes the text. Both take longest where steps without draft tokens are few, so
    that the default policy would take these for slow, and draft where it does not pay.
    """
    policy, pause = EverySixth(), 10.0
    monkeypatch.setattr("outpace.engine.stats.time", simulated_time)
    propose_unscored = Proposer.propose_unscored

    def slow_comparison(*arguments: Any) -> Any:
        simulated_time.sleep(pause)
        return propose_unscored(*arguments)

    def slow_end(sequence: Any, *arguments: Any) -> Any:
        step = advance(sequence, *arguments)
        simulated_time.sleep(pause * (sequence.finish_reason is not None))
        return step

    if slow_part == "comparison":
        monkeypatch.setattr(Proposer, "propose_unscored", slow_comparison)
    else:
        monkeypatch.setattr("outpace.engine.scheduler.advance", slow_end)
    decoder = Decoder(tiny(), "lookup", num_draft_tokens=policy, engine=True)
    decoder.generate([1, 2, 3] * 4, temperature=0, max_new_tokens=20, ignore_eos=True)
    seconds = [outcome.seconds for outcome in policy.outcomes if outcome.seconds is not None]
    assert len(seconds) >= 5
    assert max(seconds) < pause


def test_the_device_never_waits_for_the_host_when_it_drafts_itself(
    simulated_time: SimulatedTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft model catches up from the tokens on the device, without the host."""
    policy, pause = EverySixth(), 1.0

    def slow(*arguments: Any) -> Any:
        simulated_time.sleep(pause)
        return advance(*arguments)

    monkeypatch.setattr("outpace.engine.scheduler.advance", slow)
    decoder = Decoder(tiny(), tiny(seed=1), num_draft_tokens=policy, engine=True)
    decoder.generate([1, 2, 3], temperature=0, max_new_tokens=30, ignore_eos=True)
    drafted = [outcome for outcome in policy.outcomes if outcome.g]
    assert len(drafted) >= 3
    assert all(outcome.load is not None and outcome.load.catch_up_tokens for outcome in drafted)
    assert {outcome.proposal_seconds for outcome in policy.outcomes} == {0.0}
    assert all((outcome.seconds or 0.0) < pause for outcome in drafted)


def test_forget_discards_the_cached_prefixes_of_both_executors() -> None:
    """Weights that are changed through ``.data`` are noticed by this call alone."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    for engine in (False, True):
        model = tiny()
        decoder = Decoder(model, engine=engine)
        decoder.generate(prompt, temperature=0, max_new_tokens=4)
        for parameter in model.parameters():
            parameter.data.mul_(-1.5)
        decoder.forget()
        out = decoder.generate(prompt, temperature=0, max_new_tokens=8)
        assert out.token_ids == greedy(model, prompt, 8)


@pytest.mark.parametrize("engine", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_may_fail_after_a_rejected_draft_token(engine: bool, temperature: float) -> None:
    """Without speculation it would never see such a text."""
    options: dict[str, Any] = {"temperature": temperature, "seed": 5, "max_new_tokens": 20}
    allowed = make_decoder(engine=engine).generate([5, 6, 7], **options).token_ids

    def strict(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        new = ids[0, 3:].tolist()
        if new != allowed[: len(new)]:
            raise RuntimeError("not in the language")
        return scores

    out = make_decoder(engine=engine).generate([5, 6, 7], processors=[strict], **options)
    assert out.token_ids == allowed
    assert out.stats.accepted_tokens < out.stats.draft_tokens


def test_graphs_are_discarded_when_the_weights_of_a_model_move() -> None:
    decoder = Decoder(tiny("gpt2"), engine=True)
    decoder.generate([5, 6, 7], temperature=0, max_new_tokens=5)
    before = decoder.executor
    decoder.generate([5, 6, 7], temperature=0, max_new_tokens=5)
    assert decoder.executor is before
    for parameter, other in zip(decoder.target.parameters(), tiny("gpt2", seed=9).parameters(), strict=True):
        parameter.data = other.data.clone()
    found = decoder.generate([5, 6, 7], temperature=0, max_new_tokens=5)
    assert decoder.executor is not before
    assert found.token_ids == greedy(decoder.target, [5, 6, 7], 5)


def test_a_bias_of_the_drafter_for_an_unknown_token_is_refused() -> None:
    with pytest.raises(ValueError, match="logit_bias: got token ids"):
        make_decoder(draft_sampling=SamplingParams(logit_bias={V: 1.0}))


class Grammar:
    """Allows no token after an end, raises there, or returns NaN. Raises if its state does not fit."""

    def __init__(self, prompt: int, end: int, how: str) -> None:
        self.prompt, self.end, self.how, self.calls = prompt, end, how, 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.calls != ids.shape[1] - self.prompt:
            raise AssertionError("the state is not that of decoding without speculation")
        self.calls += 1
        if self.end not in ids[0, self.prompt :].tolist():
            return scores
        if self.how == "raise":
            raise RuntimeError("nothing may follow")
        return torch.full_like(scores, -torch.inf if self.how == "forbid" else torch.nan)


@pytest.mark.parametrize("how", ["forbid", "raise", "nan"])
@pytest.mark.parametrize("engine", [True, False])
def test_unusable_logits_after_the_end_of_a_sequence_have_no_effect(engine: bool, how: str) -> None:
    """Draft tokens after the end are scored, which decoding without speculation never does."""
    prompt, other = PROMPTS[0], PROMPTS[3]
    expected, neighbour = greedy(tiny(), prompt, 12), greedy(tiny(), other, 20)
    end = expected[4]
    for draft in (None, tiny(), "lookup"):
        decoder = Decoder(tiny(), draft, num_draft_tokens=Fixed(8 if draft else 0), engine=engine)
        processors = [Grammar(len(prompt), end, how)]
        samplings = [SamplingParams(temperature=0, processors=processors), SamplingParams(temperature=0)]
        outs = decoder.generate(
            [prompt, other], samplings, stop=None, stop_tokens=[end], max_new_tokens=20, logprobs=True
        )
        assert outs[0].token_ids == expected[: expected.index(end) + 1]
        assert outs[0].finish_reason == "stop"
        assert outs[0].logprobs is not None
        assert len(outs[0].logprobs) == len(outs[0].token_ids)
        assert outs[1].token_ids == neighbour[: (*neighbour, end).index(end) + 1]


@pytest.mark.parametrize("engine", [True, False])
@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_sampled_texts_end_where_a_grammar_allows_nothing_more(engine: bool, rule: str) -> None:
    """Accepted draft tokens count up to the end, however unusable the logits after them are."""
    prompt, n = PROMPTS[0], 40
    decoder = Decoder(tiny(), tiny(), num_draft_tokens=Fixed(3), rule=rule, engine=engine)
    hows = [("forbid", "raise", "nan")[i % 3] for i in range(n)]
    outs = decoder.generate(
        [prompt] * n,
        [SamplingParams(temperature=2.0, processors=[Grammar(len(prompt), 7, how)]) for how in hows],
        stop_tokens=[7], max_new_tokens=60, seed=list(range(n)),
    )  # fmt: skip
    ended = [out for out in outs if out.finish_reason == "stop"]
    assert len(ended) > n / 4
    assert all(out.token_ids.index(7) == len(out.token_ids) - 1 for out in ended)
    assert {out.finish_reason for out in outs} <= {"stop", "length"}


@pytest.mark.parametrize("engine", [True, False])
@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_a_text_without_an_end_has_its_accepted_tokens_before_the_error(engine: bool, rule: str) -> None:
    """As without speculation, the sequence ends where there is no next token."""
    prompt = PROMPTS[0]
    samplings = [
        SamplingParams(logit_bias={7: 1.0}, processors=[Grammar(len(prompt), 7, "raise")]) for _ in range(6)
    ]
    decoder = Decoder(tiny(), tiny(), num_draft_tokens=Fixed(3), rule=rule, engine=engine)
    with pytest.warns(UserWarning, match="nothing may follow"):
        outs = decoder.generate([prompt] * 6, samplings, max_new_tokens=200, seed=list(range(6)))
    for out in outs:
        assert out.finish_reason == "error"
        assert str(out.error) == "nothing may follow"
        assert out.token_ids.index(7) == len(out.token_ids) - 1


@pytest.mark.parametrize("engine", [True, False])
def test_a_stream_yields_the_tokens_of_a_failing_step(engine: bool) -> None:
    prompt = PROMPTS[0]
    expected = greedy(tiny(), prompt, 4)
    expected = expected[: expected.index(expected[3]) + 1]
    grammar = SamplingParams(temperature=0, processors=[Grammar(len(prompt), expected[-1], "raise")])
    decoder = Decoder(tiny(), tiny(), num_draft_tokens=Fixed(8), engine=engine)
    steps: list[Any] = []
    with pytest.raises(RuntimeError, match="nothing may follow"):
        steps.extend(decoder.stream(prompt, grammar, max_new_tokens=20))
    assert [token for step in steps for token in step.token_ids] == expected


def test_nan_of_a_draft_model_reaches_no_later_request() -> None:
    draft = tiny("gpt2", seed=1)
    with torch.no_grad():
        draft.lm_head.weight = torch.nn.Parameter(draft.lm_head.weight.clone())
        draft.get_input_embeddings().weight[3] = torch.nan
    decoder = Decoder(tiny("gpt2"), draft, num_draft_tokens=Fixed(3), engine=True)
    for prompt, drafts in (([1, 3, 5, 6], False), ([1, 8, 5, 6], True), ([9, 8], True)):
        out = decoder.generate(prompt, temperature=0, max_new_tokens=8)
        assert out.token_ids == greedy(tiny("gpt2"), prompt, 8)
        assert (out.stats.draft_tokens > 0) == drafts


@pytest.mark.parametrize("engine", [True, False])
def test_a_processor_that_raises_after_a_rejected_draft_token_has_no_effect(engine: bool) -> None:
    prompt, unlikely = PROMPTS[0], 40

    def raising(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if unlikely in ids[0, len(prompt) :].tolist():
            raise RuntimeError("a token that the target never generates")
        return scores.index_fill(1, torch.tensor([unlikely]), -100.0)  # not forbidden

    class Unlikely(Drafter):
        def propose(self, state: State, g: int) -> Draft:
            return Draft.chosen([[unlikely] * g for _ in state.slots], state.device)

    decoder = Decoder(tiny(), Unlikely(), num_draft_tokens=Fixed(2), rule="token", engine=engine)
    out = decoder.generate(prompt, processors=[raising], max_new_tokens=8, seed=1)
    assert (out.finish_reason, len(out.token_ids)) == ("length", 8)


def test_request_with_more_draft_tokens_than_the_policys_ends_while_a_step_is_in_flight() -> None:
    outs = make_decoder(num_draft_tokens=Goodput(4)).generate(
        PROMPTS, temperature=1.0, seed=1, max_new_tokens=[8, 40, 30, 9], num_draft_tokens=[20, "auto", 0, 20]
    )
    expected = Decoder(tiny()).generate(PROMPTS, temperature=1.0, seed=1, max_new_tokens=[8, 40, 30, 9])
    assert [out.token_ids for out in outs] == [out.token_ids for out in expected]


@pytest.mark.parametrize("sequences", [2, 65])
def test_limits_of_requests_do_not_reach_a_later_batch(
    sequences: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(graphs: Graphs, key: Any, step: Any, name: str, changed: Any = ()) -> tuple[Any, float]:
        if key not in graphs._captured:  # reuse as on CUDA, while the work runs directly
            graphs.version += 1
            graphs._captured[key] = (None, None)  # type: ignore[assignment]
        return step(), 0.0

    monkeypatch.setattr(Graphs, "run", run)
    decoder = make_decoder()
    graph_executor(decoder, graphs=True)
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(sequences)]
    mixed: list[Any] = [1, "auto"] * (sequences // 2) + [2] * (sequences % 2)
    batches: list[list[Any]] = [mixed, ["auto"] * sequences]
    for numbers in batches:
        for step in decoder.stream(prompts, temperature=0, max_new_tokens=12, num_draft_tokens=numbers):
            number = numbers[step.index]
            assert step.num_draft_tokens == (3 if number == "auto" else number)
