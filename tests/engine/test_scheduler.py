"""Requests join and leave the scheduler at any step, and each gets the text that it gets alone."""

from __future__ import annotations

import gc
import random
import re
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import pytest
import torch

from outpace import Decoder, Fixed, Heuristic, Output, SamplingParams, Step
from outpace.engine.admission import Admission
from outpace.engine.graph import GraphExecutor
from outpace.engine.scheduler import Scheduler
from outpace.engine.sequence import SequenceState
from outpace.engine.slots import Slots
from outpace.engine.stats import Stats
from outpace.models import scorer as scorers
from outpace.models.kv_cache import KVCache
from outpace.policy import DraftLengthPolicy
from tests.tiny import V, greedy, tiny

GAP = 1e-4  # between the two largest scores: rounding may exchange nearer ones

EXECUTORS = pytest.mark.parametrize("engine", [False, True], ids=["eager", "graph"])
CONFIGURATIONS = pytest.mark.parametrize(
    ("family", "draft", "engine"),
    [
        ("llama", "model", False),
        ("llama", "model", True),
        ("gpt2", "model", True),
        ("gpt2", "lookup", False),
        ("llama", "lookup", True),
        ("gpt2", None, True),
        ("llama", None, False),
    ],
)


@lru_cache
def model(family: str, seed: int = 0) -> Any:
    return tiny(family, seed)


@lru_cache
def near(family: str) -> Any:
    """Return a draft model that agrees with the target often, not always."""
    draft, noise = tiny(family), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=noise))
    return draft


def decoder_of(
    family: str = "llama", draft: str | None = "model", engine: bool = False, g: int = 3, **options: Any
) -> Decoder:
    policies: dict[str | None, DraftLengthPolicy] = {
        "model": Fixed(g),
        "lookup": Heuristic(g),
        None: Fixed(0),
    }
    drafts = near(family) if draft == "model" else draft
    return Decoder(
        model(family), drafts, rule="match", num_draft_tokens=policies[draft], engine=engine, **options
    )


def request(decoder: Decoder, prompt: list[int], **options: Any) -> SequenceState:
    options = {"max_new_tokens": 12, "seed": 1, "temperature": 1.0, **options}
    return decoder.requests(prompt, **options)[0]


def alone(decoder: Decoder, prompt: list[int], **options: Any) -> list[int]:
    """Return the text of a prompt by itself, without speculation."""
    return _alone(decoder.target, tuple(prompt), tuple(sorted(options.items())))


@lru_cache(maxsize=1000)
def _alone(target: Any, prompt: tuple[int, ...], options: tuple[tuple[str, Any], ...]) -> list[int]:
    named = {"max_new_tokens": 12, "seed": 1, "temperature": 1.0, **dict(options)}
    out: Output = Decoder(target, rule="match", engine=False).generate(list(prompt), **named)
    return out.token_ids


def finish(scheduler: Scheduler) -> dict[int, Output]:
    """Run all steps, and return the outputs by id."""
    return outputs(step for _ in iter(lambda: scheduler.unfinished, 0) for step in scheduler.step())


def outputs(steps: Iterable[Step]) -> dict[int, Output]:
    return {step.index: step.output for step in steps if step.output is not None}


def prompts(count: int, low: int = 2, high: int = 30) -> list[list[int]]:
    source = random.Random(count)
    return [[source.randrange(V) for _ in range(source.randint(low, high))] for _ in range(count)]


def caches_of(decoder: Decoder) -> list[KVCache]:
    """Return the KV caches of the target and of the draft model, if there is one."""
    draft = None if decoder.drafter is None else decoder.drafter.scorer
    return [decoder.scorer.cache, *([] if draft is None else [draft.cache])]


def bytes_for(decoder: Decoder, *tokens: int) -> int:
    """Return the budget that suffices for sequences of so many tokens."""
    return sum(cache.bytes_for(tokens) for cache in caches_of(decoder))


def two_in_flight(patch: pytest.MonkeyPatch) -> None:
    """Let the graph executor start a step before the host has read the last one, as on CUDA."""
    patch.setattr(GraphExecutor, "is_async", True)


def is_near_tie(decoder: Decoder, output: Output, prompt: list[int], options: dict[str, Any]) -> bool:
    """Return whether a text first differs where the target's two largest scores are almost equal."""
    expected = alone(decoder, prompt, **options)
    same = next(i for i, token in enumerate(output.token_ids) if token != expected[i])
    with torch.inference_mode():
        logits = decoder.target(input_ids=torch.tensor([prompt + expected[:same]])).logits[0, -1]
    largest = logits.topk(2).values
    return bool(largest[0] - largest[1] < GAP)


# Requests join and leave


@pytest.mark.parametrize(
    ("family", "draft", "engine", "in_flight"),
    [
        ("llama", "model", False, 1),
        ("gpt2", "lookup", False, 1),
        ("gpt2", "model", True, 1),
        ("llama", "model", True, 2),
        ("llama", "lookup", True, 2),
        ("gpt2", None, True, 2),
    ],
)
def test_requests_that_join_and_leave_at_any_step_get_the_texts_they_get_alone(
    family: str, draft: str | None, engine: bool, in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_flight == 2:
        two_in_flight(monkeypatch)
    decoder = decoder_of(family, draft, engine)
    planned, source = random_requests(60), random.Random(8)
    waiting, live, cancelled = list(planned), list[int](), set[int]()
    found = dict[int, Output]()
    with decoder.scheduler(batch_size=6) as scheduler:
        while waiting or scheduler.unfinished:
            for prompt, options in [waiting.pop(0) for _ in waiting[: source.choice([0, 0, 1, 1, 4])]]:
                live.append(scheduler.add(request(decoder, prompt, **options)))
            if live and source.random() < 0.1:
                cancelled.add(id := source.choice(live))
                scheduler.cancel(id)
                live.remove(id)
            for step in scheduler.step():
                assert step.index not in cancelled, "a cancelled sequence had a step"
                if step.output is not None:
                    found[step.index] = step.output
                    live.remove(step.index)
    assert cancelled
    assert set(found) == set(range(len(planned))) - cancelled
    different = {
        id for id in found if found[id].token_ids != alone(decoder, planned[id][0], **planned[id][1])
    }
    for id in different:
        assert is_near_tie(decoder, found[id], *planned[id]), f"request {id} differs"
    assert not different  # no near-tie occurs here


def random_requests(count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Return prompts, some of which begin alike, with random limits and seeds."""
    source = random.Random(7)
    shared = [source.randrange(V) for _ in range(20)]
    return [
        (
            shared + prompt if source.random() < 0.3 else prompt,
            {"max_new_tokens": source.randint(1, 12), "seed": source.randrange(2**40), "temperature": 0.8},
        )
        for prompt in prompts(count)
    ]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_memory_is_flat_after_the_longest_requests(family: str) -> None:
    budget = bytes_for(decoder_of(family, engine=True), *[130] * 4)
    decoder = decoder_of(family, engine=True, kv_cache_bytes=budget)
    memory = []
    with decoder.scheduler(batch_size=4) as scheduler:
        for prompt in [*prompts(4, 100, 100), *prompts(24)]:
            scheduler.add(request(decoder, prompt))
        while scheduler.unfinished:
            scheduler.step()
            memory.append(sum(cache.nbytes for cache in caches_of(decoder)))
    assert max(memory) <= budget
    assert set(memory[len(memory) // 3 :]) == {max(memory)}


@EXECUTORS
def test_a_long_prompt_is_prefilled_between_the_steps_of_others(
    engine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorers, "CHUNK", 8)
    decoder = decoder_of(engine=engine, g=1)
    short, (long,) = prompts(2, 3, 6), prompts(1, 90, 90)
    with decoder.scheduler(batch_size=3) as scheduler:
        for prompt in short:
            scheduler.add(request(decoder, prompt, max_new_tokens=40))
        scheduler.step()
        id = scheduler.add(request(decoder, long, max_new_tokens=10))
        gained, found = 0, dict[int, Output]()
        while scheduler.unfinished:
            steps = scheduler.step()
            found |= outputs(steps)
            if any(step.index == id for step in steps):
                break
            gained += bool(steps) and all(step.token_ids for step in steps)
        assert gained >= 90 // 8, "others waited for the long prompt"
        found |= finish(scheduler)
    texts = [found[i].token_ids for i in range(3)]
    expected = [alone(decoder, prompt, max_new_tokens=40) for prompt in short]
    assert texts == [*expected, alone(decoder, long, max_new_tokens=10)]


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(("family", "draft"), [("llama", "model"), ("gpt2", "lookup"), ("gpt2", "model")])
def test_requests_of_all_kinds_get_the_texts_they_get_alone(
    family: str, draft: str, in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_flight == 2:
        two_in_flight(monkeypatch)
    decoder = decoder_of(family, draft, engine=True)
    planned: list[dict[str, Any]] = [
        {"max_new_tokens": 60},
        {"temperature": 0.5},
        {"repetition_penalty": 1.5},
        {"frequency_penalty": 1.0, "presence_penalty": 0.5},
        {"logit_bias": {3: 2.0, 5: -9.0}},
        {"logprobs": 2},
        {"allowed_token_ids": [4, 5, 30, 60]},
        {"processors": [lambda ids, scores: scores.flip(-1)]},
        {"temperature": 0.0},
        {"top_k": 5, "top_p": 0.8},
    ]
    texts = prompts(len(planned))
    found = dict[int, Output]()
    with decoder.scheduler(batch_size=4) as scheduler:
        for prompt, options in zip(texts, planned, strict=True):
            scheduler.add(request(decoder, prompt, **{"max_new_tokens": 12, **options}))
            found |= outputs(scheduler.step())
        found |= finish(scheduler)
    for id, (prompt, options) in enumerate(zip(texts, planned, strict=True)):
        named = {"max_new_tokens": 12, "seed": 1, "temperature": 1.0, **options}
        expected = Decoder(decoder.target, rule="match", engine=False).generate(prompt, **named)
        assert found[id].token_ids == expected.token_ids, f"request {id}"
    assert found[5].top_logprobs is not None
    assert len(found[5].top_logprobs) == 12


# Cancel


@EXECUTORS
def test_cancelling_an_unknown_or_finished_id_is_an_error(engine: bool) -> None:
    decoder = decoder_of(engine=engine)
    with decoder.scheduler() as scheduler:
        with pytest.raises(ValueError, match="id: got 5"):
            scheduler.cancel(5)
        id = scheduler.add(request(decoder, [1, 2, 3], max_new_tokens=2))
        finish(scheduler)
        with pytest.raises(ValueError, match=f"id: got {id}"):
            scheduler.cancel(id)
        id = scheduler.add(request(decoder, [1, 2, 3]))
        scheduler.cancel(id)
        with pytest.raises(ValueError, match=f"id: got {id}"):
            scheduler.cancel(id)


@EXECUTORS
def test_waiting_and_prefilling_sequences_can_be_cancelled(
    engine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorers, "CHUNK", 8)
    decoder = decoder_of(engine=engine)
    (short, other), (long,) = prompts(2, 3, 6), prompts(1, 60, 60)
    with decoder.scheduler(batch_size=2) as scheduler:
        first = scheduler.add(request(decoder, short, max_new_tokens=60))
        scheduler.step()
        prefilling = scheduler.add(request(decoder, long))
        waiting = scheduler.add(request(decoder, other))
        last = scheduler.add(request(decoder, other))
        steps = scheduler.step()
        scheduler.cancel(prefilling)
        scheduler.cancel(waiting)
        assert scheduler.unfinished == 2
        while scheduler.unfinished:
            steps += scheduler.step()
    assert {step.index for step in steps} <= {first, last}
    found = outputs(steps)
    assert found[first].token_ids == alone(decoder, short, max_new_tokens=60)
    assert found[last].token_ids == alone(decoder, other)


@EXECUTORS
def test_a_cancelled_sequence_has_no_step_even_if_its_prefill_fails(
    engine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorers, "CHUNK", 8)
    decoder = decoder_of(engine=engine)
    (short,), (long,) = prompts(1, 3, 6), prompts(1, 60, 60)
    with decoder.scheduler(batch_size=2) as scheduler:
        first = scheduler.add(request(decoder, short, max_new_tokens=60))
        scheduler.step()
        prefilling = scheduler.add(request(decoder, long))
        scheduler.step()
        scheduler.cancel(prefilling)
        with monkeypatch.context() as patch:
            patch.setattr(decoder.scorer, "append", _no_memory)
            steps = scheduler.step()
        while scheduler.unfinished:
            steps += scheduler.step()
    assert {step.index for step in steps} == {first}


def _no_memory(*arguments: Any) -> None:
    raise MemoryError("the memory is used up")


@pytest.mark.parametrize("draft", ["model", "lookup", None])
def test_a_step_in_flight_never_reaches_the_next_sequence_of_its_slot(
    draft: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_in_flight(monkeypatch)
    decoder = decoder_of(draft=draft, engine=True)
    steady, *others = prompts(7)
    with decoder.scheduler(batch_size=2) as scheduler:
        scheduler.add(request(decoder, steady, max_new_tokens=60))
        scheduler.step()
        steps = list[Step]()
        for prompt in others:  # each takes the slot of the one before it
            id = scheduler.add(request(decoder, prompt, max_new_tokens=30))
            for _ in range(3):
                steps += scheduler.step()
            scheduler.cancel(id)
        last = scheduler.add(request(decoder, others[0], max_new_tokens=30, seed=9))
        while scheduler.unfinished:
            steps += scheduler.step()
    found = outputs(steps)
    assert found[0].token_ids == alone(decoder, steady, max_new_tokens=60)
    assert found[last].token_ids == alone(decoder, others[0], max_new_tokens=30, seed=9)
    for i, prompt in enumerate(others, 1):
        text = [token for step in steps if step.index == i for token in step.token_ids]
        assert text == alone(decoder, prompt, max_new_tokens=30)[: len(text)]


# Budget


@CONFIGURATIONS
def test_a_request_too_long_for_the_budget_fails_and_the_others_go_on(
    family: str, draft: str | None, engine: bool
) -> None:
    budget = bytes_for(decoder_of(family, draft, engine), 60)
    decoder = decoder_of(family, draft, engine, kv_cache_bytes=budget)
    short, (long,) = prompts(2, 3, 20), prompts(1, 100, 100)
    with pytest.warns(UserWarning, match="prompt 1"):
        outs = decoder.generate(
            [short[0], long, short[1]], max_new_tokens=12, temperature=1.0, seed=1, batch_size=2
        )
    assert isinstance(outs[1].error, MemoryError)
    assert "kv_cache_bytes" in str(outs[1].error)
    assert [outs[i].token_ids for i in (0, 2)] == [alone(decoder, prompt) for prompt in short]
    assert (
        decoder.generate(short[0], max_new_tokens=12, temperature=1.0, seed=1).token_ids == outs[0].token_ids
    )


@CONFIGURATIONS
def test_requests_that_do_not_fit_together_wait_and_all_finish(
    family: str, draft: str | None, engine: bool
) -> None:
    budget = 2 * bytes_for(decoder_of(family, draft, engine), 60)
    decoder = decoder_of(family, draft, engine, kv_cache_bytes=budget)
    texts, sizes = prompts(8, 3, 40), [12, 3, 12, 7, 12, 12, 1, 12]
    found, most = dict[int, Output](), 0
    with decoder.scheduler(batch_size=8) as scheduler:
        for prompt, size in zip(texts, sizes, strict=True):
            scheduler.add(request(decoder, prompt, max_new_tokens=size))
        while scheduler.unfinished:
            found |= outputs(scheduler.step())
            most = max(most, sum(cache.nbytes for cache in caches_of(decoder)))
    assert [found[i].error for i in range(8)] == [None] * 8
    expected = [alone(decoder, text, max_new_tokens=size) for text, size in zip(texts, sizes, strict=True)]
    assert [found[i].token_ids for i in range(8)] == expected
    assert most <= budget


@EXECUTORS
def test_short_requests_after_a_long_one_fit_where_they_fit_alone(engine: bool) -> None:
    budget = 4 * bytes_for(decoder_of("gpt2", None, engine), 60)  # four rows of 64 tokens
    decoder = decoder_of("gpt2", None, engine, kv_cache_bytes=budget)
    (long,), short = prompts(1, 90, 90), prompts(4, 3, 6)
    with decoder.scheduler(batch_size=4) as scheduler:
        scheduler.add(request(decoder, long, max_new_tokens=4))
        scheduler.add(request(decoder, short[0], max_new_tokens=40))
        found = dict[int, Output]()
        while 0 not in found:
            found |= outputs(scheduler.step())
        for prompt in short[1:]:
            scheduler.add(request(decoder, prompt))
        found |= finish(scheduler)
    assert [found[i].error for i in range(5)] == [None] * 5
    assert [found[i].token_ids for i in range(2, 5)] == [alone(decoder, prompt) for prompt in short[1:]]


# Weights


def test_weights_that_move_fail_new_requests_and_the_next_call_uses_them() -> None:
    target, other = tiny(), tiny(seed=4)
    decoder = Decoder(target, None, rule="match", engine=True)
    prompt, late = prompts(2)
    before = alone(decoder, prompt, max_new_tokens=30)
    with decoder.scheduler() as scheduler:
        first = scheduler.add(request(decoder, prompt, max_new_tokens=30))
        scheduler.step()
        target.load_state_dict(other.state_dict(), assign=True)
        second = scheduler.add(request(decoder, late))
        found = finish(scheduler)
    assert found[first].error is None
    assert found[first].token_ids == before
    assert isinstance(found[second].error, RuntimeError)
    assert "weights" in str(found[second].error)
    out = decoder.generate(prompt, max_new_tokens=30, temperature=1.0, seed=1)
    new = Decoder(other, rule="match", engine=False)
    assert out.token_ids == new.generate(prompt, max_new_tokens=30, temperature=1.0, seed=1).token_ids


# Memory and warm-up


@CONFIGURATIONS
def test_release_frees_the_kv_cache_and_the_next_call_works(
    family: str, draft: str | None, engine: bool
) -> None:
    decoder = decoder_of(family, draft, engine)
    (prompt,) = prompts(1, 30, 30)

    def text() -> list[int]:
        return decoder.generate(prompt, max_new_tokens=12, temperature=1.0, seed=1).token_ids

    expected = alone(decoder, prompt)
    assert text() == expected
    cache = decoder.scorer.cache
    assert cache.nbytes > cache.bytes_for([0])
    decoder.release()
    assert cache.nbytes == cache.bytes_for([0])  # the scratch block, or nothing
    assert text() == expected


@CONFIGURATIONS
def test_warming_up_changes_no_text(family: str, draft: str | None, engine: bool) -> None:
    decoder = decoder_of(family, draft, engine)
    (prompt,) = prompts(1)
    decoder.warm_up(batch_sizes=[1, 3], sampling=SamplingParams())
    outs = decoder.generate([prompt, prompt], max_new_tokens=12, temperature=1.0, seed=[1, 2])
    decoder.warm_up(batch_sizes=[4], sampling=SamplingParams())
    again = decoder.generate([prompt, prompt], max_new_tokens=12, temperature=1.0, seed=[1, 2])
    expected = [alone(decoder, prompt, seed=seed) for seed in (1, 2)]
    assert [out.token_ids for out in outs] == [out.token_ids for out in again] == expected


@EXECUTORS
def test_the_description_states_the_budget_of_the_kv_cache(engine: bool) -> None:
    decoder = decoder_of(draft=None, engine=engine, kv_cache_bytes=3 * 2**20)
    assert re.search(r"at most 3(\.0)? MiB", decoder.describe())


# Time


@EXECUTORS
def test_the_seconds_of_all_sequences_add_up_to_the_elapsed_time(engine: bool) -> None:
    decoder = decoder_of(engine=engine)
    planned = [(prompt, {"max_new_tokens": 20}) for prompt in prompts(12)]
    decoder.generate(planned[0][0], max_new_tokens=4, temperature=1.0)
    with decoder.scheduler(batch_size=3) as scheduler:
        for prompt, options in planned:
            scheduler.add(request(decoder, prompt, **options))
        started_at = time.perf_counter()
        found = finish(scheduler)
        elapsed = time.perf_counter() - started_at
    total = sum((output.stats for output in found.values()), Stats())
    assert 0.8 * elapsed <= total.seconds <= elapsed
    assert total.target_seconds > 0
    if not engine:
        assert min(total.draft_seconds, total.verify_seconds) > 0
        assert total.other_seconds < 0.3 * total.seconds


def test_a_step_reports_the_seconds_of_each_phase() -> None:
    decoder = decoder_of(engine=False)
    steps = list(decoder.stream([1, 2, 3], max_new_tokens=8, temperature=1.0, seed=1))
    assert {"draft", "target", "verify", "other"} <= set(steps[1].phases)
    assert all(seconds >= 0 for step in steps for seconds in step.phases.values())


def finished(scheduler: Scheduler) -> dict[int, Output]:
    """Run all sequences to their ends; return the outputs by id."""
    outputs: dict[int, Output] = {}
    while scheduler.unfinished:
        outputs |= {step.index: step.output for step in scheduler.step() if step.output is not None}
    return outputs


def random_prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(V), k=length)


@EXECUTORS
def test_weights_that_change_while_a_sequence_runs_leave_no_prefix_behind(engine: bool) -> None:
    target, prompt = tiny(), random_prompt(30, 1)
    decoder = Decoder(target, engine=engine)
    with decoder.scheduler() as scheduler:
        scheduler.add(decoder.requests(prompt, temperature=0, max_new_tokens=12)[0])
        scheduler.step()
        with torch.no_grad():
            target.model.layers[0].self_attn.k_proj.weight.mul_(1.7)
            target.model.layers[1].mlp.up_proj.weight.mul_(-2)
        scheduler.add(decoder.requests([1, 2, 3], temperature=0, max_new_tokens=3)[0])
        finished(scheduler)
    out = decoder.generate(prompt, temperature=0, max_new_tokens=12)
    assert out.token_ids == greedy(target, prompt, 12)


@EXECUTORS
def test_an_error_in_a_users_function_ends_its_request_alone(engine: bool) -> None:
    target, prompts = tiny(), [random_prompt(20, 1), random_prompt(22, 2)]
    calls = iter(range(100))

    def fails(state: SequenceState) -> bool:
        if next(calls) == 2:
            raise KeyError("of the user")
        return False

    decoder = Decoder(target, engine=engine)
    with decoder.scheduler() as scheduler:
        scheduler.add(decoder.requests(prompts[0], temperature=0, max_new_tokens=12, stop_when=fails)[0])
        scheduler.add(decoder.requests(prompts[1], temperature=0, max_new_tokens=12)[0])
        outputs = finished(scheduler)
    assert isinstance(outputs[0].error, KeyError)
    assert outputs[1].token_ids == greedy(target, prompts[1], 12)


@EXECUTORS
def test_a_step_that_fails_ends_the_scheduler(engine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(tiny(), engine=engine)

    def fails(*arguments: Any) -> None:
        raise ZeroDivisionError

    with decoder.scheduler() as scheduler:
        scheduler.add(decoder.requests([1, 2, 3], max_new_tokens=5)[0])
        with monkeypatch.context() as patch:
            patch.setattr(decoder.executor, "start", fails)
            with pytest.raises(ZeroDivisionError):
                finished(scheduler)
        with pytest.raises(RuntimeError, match="an earlier step of the scheduler failed"):
            scheduler.step()
    with pytest.raises(RuntimeError, match="is closed"):
        scheduler.step()
    assert len(decoder.generate([1, 2, 3], max_new_tokens=5, ignore_eos=True).token_ids) == 5


@EXECUTORS
def test_unusable_logits_of_one_request_reach_no_later_one(engine: bool) -> None:
    target = tiny(num_hidden_layers=3)
    with torch.no_grad():
        target.get_input_embeddings().weight[7] = float("nan")
    prompts = [[8 if token == 7 else token for token in random_prompt(n, n)] for n in (40, 22, 21)]
    decoder = Decoder(target, engine=engine)
    with pytest.warns(UserWarning, match="unusable"):
        decoder.generate([*prompts[:2], [3, 7, *prompts[2]]], temperature=0, max_new_tokens=6)
    outs = decoder.generate([prompts[0][::-1], prompts[1][:8]], temperature=0, max_new_tokens=1)
    assert [out.error for out in outs] == [None, None]


def test_a_request_repeats_at_a_budget_that_just_suffices() -> None:
    block = Decoder(tiny(), engine=True).scorer.cache.bytes_for([])
    decoder = Decoder(tiny(), engine=True, kv_cache_bytes=3 * block)
    with decoder.scheduler(1) as scheduler:
        for _ in range(3):
            scheduler.add(decoder.requests(random_prompt(20, 1), temperature=0, max_new_tokens=5)[0])
        outputs = finished(scheduler)
    assert {tuple(out.token_ids) for out in outputs.values()} == {
        tuple(greedy(tiny(), random_prompt(20, 1), 5))
    }


def test_memory_that_runs_out_in_a_step_ends_the_newest_sequence_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder, prompts = Decoder(tiny(), engine=True), [random_prompt(14, seed) for seed in range(2)]
    cache: Any = decoder.scorer.cache
    with decoder.scheduler() as scheduler:
        for prompt in prompts:
            scheduler.add(decoder.requests(prompt, temperature=0, max_new_tokens=100)[0])
        scheduler.step()
        budget, cache.max_bytes = cache.max_bytes, cache.bytes_for([140])  # enough for one of them
        outputs = finished(scheduler)
        cache.max_bytes = budget
    assert isinstance(outputs[1].error, MemoryError)
    assert outputs[0].token_ids == greedy(tiny(), prompts[0], 100)


def test_a_draft_model_with_a_short_context_drafts_no_further() -> None:
    draft = tiny(seed=1, max_position_embeddings=48, num_hidden_layers=1)
    prompts = [random_prompt(10, 1), random_prompt(60, 2)]
    decoder = Decoder(tiny(), draft, engine=True, num_draft_tokens=3)
    requested: list[dict[str, Any]] = [{"logprobs": True}, {}]
    for options in requested:
        outs = decoder.generate(prompts, temperature=0, max_new_tokens=20, **options)
        assert [out.token_ids for out in outs] == [greedy(tiny(), prompt, 20) for prompt in prompts]


def test_a_draft_model_that_moved_stops_drafting_and_the_target_goes_on() -> None:
    draft = tiny(seed=1)
    decoder = Decoder(tiny(), draft, engine=True, num_draft_tokens=3)
    prompts = [random_prompt(10, 1), random_prompt(12, 2)]
    with decoder.scheduler() as scheduler:
        scheduler.add(decoder.requests(prompts[0], temperature=0, max_new_tokens=30, logprobs=True)[0])
        scheduler.step()
        scheduler.step()
        draft.double()
        scheduler.add(decoder.requests(prompts[1], temperature=0, max_new_tokens=8, logprobs=True)[0])
        outputs = finished(scheduler)
    assert [outputs[0].token_ids, outputs[1].token_ids] == [
        greedy(tiny(), prompts[0], 30),
        greedy(tiny(), prompts[1], 8),
    ]


@EXECUTORS
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_target_that_moved_works_in_the_next_call(family: str, engine: bool) -> None:
    target, prompt = tiny(family), random_prompt(20, 1)
    decoder = Decoder(target, engine=engine)
    with decoder.scheduler() as scheduler:
        scheduler.add(decoder.requests(prompt, temperature=0, max_new_tokens=10)[0])
        scheduler.step()
        target.double()
        scheduler.add(decoder.requests([1, 2, 3], temperature=0, max_new_tokens=3)[0])
        outputs = finished(scheduler)
    assert "its weights moved" in str(outputs[1].error)
    out = decoder.generate(prompt, temperature=0, max_new_tokens=10)
    assert out.token_ids == greedy(target, prompt, 10)


def test_an_interrupted_prefill_frees_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(tiny(), engine=True)

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(decoder.scorer.cache, "open", interrupted)
        with pytest.raises(KeyboardInterrupt):
            decoder.generate([1, 2, 3], max_new_tokens=3)
    assert not decoder.scorer.cache.is_open(0)
    assert decoder.generate([1, 2, 3], temperature=0, max_new_tokens=3).token_ids == (
        greedy(tiny(), [1, 2, 3], 3)
    )


def test_a_request_is_added_once() -> None:
    decoder = Decoder(tiny())
    with decoder.scheduler() as scheduler:
        (request,) = decoder.requests([1, 2, 3])
        scheduler.add(request)
        with pytest.raises(ValueError, match="added before"):
            scheduler.add(request)


# Failures in the middle of a step


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_step_without_memory_ends_one_sequence_although_a_draft_model_runs_in_it(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    decoder = decoder_of(family, engine=True)
    with decoder.scheduler() as scheduler:
        for prompt in ([1, 2, 3], [4, 5]):
            scheduler.add(request(decoder, prompt, max_new_tokens=40))
        found = outputs(scheduler.step())
        reserve, calls = decoder.scorer.cache.reserve, iter([True])

        def fail_once(slots: Any, lengths: Any) -> None:
            if next(calls, False):
                raise MemoryError("planted")
            reserve(slots, lengths)

        monkeypatch.setattr(decoder.scorer.cache, "reserve", fail_once)
        found |= finish(scheduler)
    assert found[1].finish_reason == "error"
    assert found[0].token_ids == alone(decoder, [1, 2, 3], max_new_tokens=40)
    assert decoder.generate([4, 5], seed=1, temperature=1.0, max_new_tokens=12).token_ids == alone(
        decoder, [4, 5]
    )


def test_without_its_draft_model_the_graph_executor_goes_on() -> None:
    target, draft = tiny("gpt2"), tiny("gpt2", 1)
    decoder = Decoder(target, draft, rule="match", num_draft_tokens=Fixed(3), engine=True)
    with decoder.scheduler() as scheduler:
        scheduler.add(request(decoder, [1, 2, 3]))
        found = outputs(scheduler.step())
        draft.double()
        found |= finish(scheduler)
    assert found[0].error is None
    assert found[0].token_ids == alone(decoder, [1, 2, 3])


def test_a_sequence_whose_state_was_not_written_to_the_device_is_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = decoder_of(draft=None, engine=True)
    start, calls = Slots.start, iter([True])

    def fail_once(self: Slots, sequences: Any) -> None:
        if next(calls, False):
            raise torch.OutOfMemoryError("planted")
        start(self, sequences)

    monkeypatch.setattr(Slots, "start", fail_once)
    with decoder.scheduler() as scheduler:
        for prompt in ([1, 2, 3], [4, 5]):
            scheduler.add(request(decoder, prompt))
        found = finish(scheduler)
    assert found[1].finish_reason == "error"
    assert found[0].token_ids == alone(decoder, [1, 2, 3])


@EXECUTORS
def test_of_a_prefill_without_memory_only_the_prompt_that_needs_it_fails(
    monkeypatch: pytest.MonkeyPatch, engine: bool
) -> None:
    decoder = decoder_of(draft=None, engine=engine)
    append = decoder.scorer.append

    def limited(slots: Any, tokens: Any) -> torch.Tensor:
        if max(map(len, tokens)) > 20:
            raise torch.OutOfMemoryError("planted")
        return append(slots, tokens)

    monkeypatch.setattr(decoder.scorer, "append", limited)
    prompts = [[1, 2, 3], list(range(30)), [4, 5]]
    with decoder.scheduler() as scheduler:
        for prompt in prompts:
            scheduler.add(request(decoder, prompt))
        found = finish(scheduler)
    assert [found[i].finish_reason for i in range(3)] == ["length", "error", "length"]
    assert [found[i].token_ids for i in (0, 2)] == [alone(decoder, prompts[i]) for i in (0, 2)]


@EXECUTORS
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_unreadable_prompt_lets_no_other_pass_the_memory_check(family: str, engine: bool) -> None:
    probe = decoder_of(family, None, engine)
    budget = probe.scorer.cache.bytes_for([3 + 20 + 1])
    decoder = decoder_of(family, None, engine, kv_cache_bytes=budget)
    with pytest.warns(UserWarning, match="prompt 0: it is empty"):
        outs = decoder.generate([[], [1, 2, 3], [4, 5, 6]], max_new_tokens=20, temperature=0, batch_size=2)
    assert [out.finish_reason for out in outs] == ["error", "length", "length"]


def test_a_budget_that_admission_accepts_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = decoder_of("gpt2", None, True).scorer.cache.bytes_for([64])
    decoder = decoder_of("gpt2", None, True, kv_cache_bytes=budget)
    outs = decoder.generate([[1, 2, 3], [4, 5]], max_new_tokens=60, temperature=0, ignore_eos=True)
    assert [len(out.token_ids) for out in outs] == [60, 60]


def test_admission_counts_the_idle_slots_of_a_step() -> None:
    cache = decoder_of("gpt2", None, True).scorer.cache
    decoder = decoder_of("gpt2", None, True, kv_cache_bytes=cache.bytes_for([20] * 5))
    sequences = [request(decoder, [1, 2, 3]) for _ in range(5)]
    cases: list[tuple[Callable[[int], int], int]] = [(int, 5), (lambda n: 6 if n == 5 else n, 4)]
    for padded, admitted in cases:
        admission = Admission([decoder.scorer], 0, 8, padded)
        admission.waiting.extend(sequences)
        assert len(admission.admit({})[0]) == admitted


# Calls from a user's function inside a step


@EXECUTORS
@pytest.mark.parametrize("whom", [0, 1])
def test_a_function_of_a_request_may_cancel_it_or_another(engine: bool, whom: int) -> None:
    decoder, tokens = decoder_of(engine=engine), {0: list[int](), 1: list[int]()}
    with decoder.scheduler() as scheduler:

        def cancel(sequence: SequenceState) -> bool:
            if sequence.stats.new_tokens == 3:
                scheduler.cancel(whom)
            return False

        scheduler.add(request(decoder, [1, 2, 3], stop_when=cancel))
        scheduler.add(request(decoder, [4, 5]))
        while scheduler.unfinished:
            for step in scheduler.step():
                assert step.finish_reason != "cancelled"
                tokens[step.index] += step.token_ids
    kept = 1 - whom
    assert tokens[kept] == alone(decoder, [[1, 2, 3], [4, 5]][kept])
    assert len(tokens[whom]) < 12
    assert decoder.generate([4, 5], seed=1, temperature=1.0, max_new_tokens=12).token_ids == tokens[1] or whom


@EXECUTORS
@pytest.mark.parametrize("call", ["close", "step"])
def test_a_step_cannot_be_nested_or_closed_from_inside(engine: bool, call: str) -> None:
    decoder = decoder_of(engine=engine)
    with decoder.scheduler() as scheduler:
        scheduler.add(request(decoder, [1, 2, 3], stop_when=lambda _: getattr(scheduler, call)()))
        scheduler.add(request(decoder, [4, 5]))
        found = finish(scheduler)
    assert re.search("the scheduler runs a step", str(found[0].error))
    assert found[1].token_ids == alone(decoder, [4, 5])
    assert len(decoder.generate([1, 2], max_new_tokens=3, ignore_eos=True).token_ids) == 3


@EXECUTORS
def test_the_steps_of_a_request_whose_function_fails_have_all_its_tokens(engine: bool) -> None:
    decoder, tokens = decoder_of(engine=engine), list[int]()

    def fail(sequence: SequenceState) -> bool:
        if sequence.stats.new_tokens == 5:
            raise ValueError("mine")
        return False

    with decoder.scheduler() as scheduler:
        scheduler.add(request(decoder, [1, 2, 3], stop_when=fail))
        while scheduler.unfinished:
            for step in scheduler.step():
                tokens += step.token_ids
                output = step.output
    assert output is not None
    assert tokens == output.token_ids == alone(decoder, [1, 2, 3])[:5]


# Schedulers that are not closed


def test_a_dropped_scheduler_frees_its_decoder() -> None:
    decoder = decoder_of()
    scheduler = decoder.scheduler()
    scheduler.add(request(decoder, [1, 2, 3]))
    scheduler.step()
    del scheduler
    gc.collect()
    assert len(decoder.generate([1, 2], max_new_tokens=3, ignore_eos=True).token_ids) == 3


def test_the_scheduler_of_a_dropped_decoder_blocks_no_other_decoder() -> None:
    for _ in range(4):  # a new decoder often gets the address of the dropped one
        scheduler = Decoder(model("llama")).scheduler()
        gc.collect()
        other = Decoder(near("llama"))
        assert len(other.generate([1, 2], max_new_tokens=2, ignore_eos=True).token_ids) == 2
        scheduler.close()


def test_preparing_changes_nothing_while_sequences_are_active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphExecutor, "is_async", property(lambda self: True))
    decoder = decoder_of(draft=None, engine=True)
    with decoder.scheduler() as scheduler:
        scheduler.add(request(decoder, [1, 2, 3]))
        tokens = [token for _ in range(3) for step in scheduler.step() for token in step.token_ids]
        scheduler.prepare([request(decoder, [4, 5], logprobs=True)])
        while scheduler.unfinished:
            tokens += [token for step in scheduler.step() for token in step.token_ids]
    assert tokens == alone(decoder, [1, 2, 3])
