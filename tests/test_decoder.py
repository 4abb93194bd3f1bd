"""The public behaviour of `Decoder`."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor

import outpace
from outpace import Decoder, Draft, Fixed, Heuristic, Output, SamplingParams, Stats
from outpace.policy import DraftLengthPolicy, Load, StepOutcome
from outpace.verification import Rule
from tests import tiers
from tests.tiny import V, byte_tokenizer, greedy, greedy_of, sources, tiny, tiny_seq2seq

PROMPT = [9, 8, 7, 6, 5, 4]
TOKENIZER = byte_tokenizer()


def text_decoder(**changes: Any) -> Decoder:
    """Return a decoder with a tokenizer."""
    target = tiny(vocab_size=272)
    return Decoder(target, tiny(seed=1, vocab_size=272), TOKENIZER, num_draft_tokens=Fixed(3), **changes)


def test_a_string_prompt_gives_a_string() -> None:
    out = text_decoder().generate("The lighthouse", max_new_tokens=12, temperature=0.8, top_p=0.95, seed=7)
    assert isinstance(out, Output)
    assert len(out.token_ids) == 12
    assert out.text == TOKENIZER.decode(out.token_ids)
    assert out.finish_reason == "length"
    assert out.stats.new_tokens == 12


def test_a_batch_gives_the_tokens_of_its_prompts_alone() -> None:
    decoder = Decoder(tiny(), tiny(seed=1), num_draft_tokens=Fixed(3))
    prompts: list[Any] = [PROMPT, torch.tensor([3, 4]), (1,)]
    outs = decoder.generate(prompts, SamplingParams(top_k=20), seed=[1, 2, 3], max_new_tokens=15)
    for prompt, out, seed in zip(prompts, outs, (1, 2, 3), strict=True):
        assert (
            out.token_ids
            == decoder.generate(prompt, SamplingParams(top_k=20), seed=seed, max_new_tokens=15).token_ids
        )
        assert out.text is None


@pytest.mark.parametrize(("rule", "policy"), [("token", Heuristic(3)), ("block", Fixed(2)), ("match", None)])
def test_equal_seeds_give_equal_tokens_and_fresh_seeds_do_not(
    rule: str, policy: DraftLengthPolicy | None
) -> None:
    decoder = Decoder(tiny(), tiny(seed=1), rule=rule, num_draft_tokens=policy)
    once, again = (decoder.generate(PROMPT, temperature=1.0, seed=5, max_new_tokens=20) for _ in range(2))
    assert once.token_ids == again.token_ids
    fresh = {tuple(decoder.generate(PROMPT, temperature=1.0, max_new_tokens=20).token_ids) for _ in range(3)}
    assert len(fresh) == 3
    several = decoder.generate(PROMPT, temperature=1.0, seed=5, max_new_tokens=20, n=3)
    assert several[0].token_ids == once.token_ids
    assert len({tuple(out.token_ids) for out in several}) == 3


def test_samples_come_prompt_by_prompt() -> None:
    decoder = Decoder(tiny(), num_draft_tokens=0)
    outs = decoder.generate([PROMPT, [1]], temperature=0, n=2, max_new_tokens=6)
    expected = [greedy(tiny(), prompt, 6) for prompt in (PROMPT, PROMPT, [1], [1])]
    assert [out.token_ids for out in outs] == expected


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7])
def test_waiting_sequences_take_the_slots_of_ended_ones(batch_size: int) -> None:
    decoder = Decoder(tiny(), tiny(seed=1), num_draft_tokens=Fixed(2))
    prompts = [torch.randint(V, (n,)).tolist() for n in (3, 11, 1, 6, 2, 9, 4)]
    together = decoder.generate(prompts, temperature=0, max_new_tokens=9)
    limited = decoder.generate(prompts, temperature=0, max_new_tokens=9, batch_size=batch_size)
    assert [out.token_ids for out in limited] == [out.token_ids for out in together]
    assert [out.token_ids for out in together] == [greedy(tiny(), prompt, 9) for prompt in prompts]


def test_the_generation_config_sets_the_defaults() -> None:
    model = tiny()
    decoder = Decoder(model, num_draft_tokens=0)
    assert decoder.generate(PROMPT, max_new_tokens=8).token_ids == greedy(model, PROMPT, 8)
    model.generation_config.max_new_tokens = 3
    assert len(decoder.generate(PROMPT).token_ids) == 3
    model.generation_config.update(do_sample=True, temperature=0.7, top_p=0.9)
    expected = SamplingParams(temperature=0.7, top_p=0.9, top_k=50)
    assert outpace.sampling.from_generation_config(model.generation_config) == expected
    by_default, explicit = decoder.generate(PROMPT, seed=1), decoder.generate(PROMPT, expected, seed=1)
    assert by_default.token_ids == explicit.token_ids


def test_end_of_text_ends_a_sequence_among_accepted_tokens() -> None:
    model = tiny()
    baseline = greedy(model, PROMPT, 30)
    end = baseline[7]
    model.generation_config.eos_token_id = [end, 60]
    for g in (0, 3, 12):
        decoder = Decoder(model, model, num_draft_tokens=Fixed(g))
        out = decoder.generate(PROMPT, temperature=0, max_new_tokens=30)
        assert out.token_ids == baseline[: baseline.index(end) + 1] == greedy(model, PROMPT, 30)
        assert out.finish_reason == "stop"
        continued = decoder.generate(PROMPT, temperature=0, max_new_tokens=30, ignore_eos=True)
        assert continued.token_ids == baseline
        stopped = decoder.generate(
            PROMPT, temperature=0, max_new_tokens=30, ignore_eos=True, stop_tokens=[baseline[2]]
        )
        assert stopped.token_ids == baseline[: baseline.index(baseline[2]) + 1]


@pytest.mark.parametrize("g", [0, 1, 2, 5])
def test_stop_strings_end_a_text_where_decoding_without_speculation_would(g: int) -> None:
    target = tiny(vocab_size=272)
    decoder = Decoder(target, target, TOKENIZER, num_draft_tokens=Fixed(g))
    whole = decoder.generate("abc", temperature=0, max_new_tokens=40)
    assert whole.text is not None
    stop = whole.text[9:12]
    out = decoder.generate("abc", temperature=0, max_new_tokens=40, stop=[stop, "never"])
    assert out.finish_reason == "stop"
    assert out.text == whole.text[: whole.text.index(stop)]
    assert TOKENIZER.decode(out.token_ids).endswith(stop) or stop in TOKENIZER.decode(out.token_ids)
    assert out.token_ids == whole.token_ids[: len(out.token_ids)]
    assert stop not in TOKENIZER.decode(out.token_ids[:-1])
    steps = list(decoder.stream("abc", temperature=0, max_new_tokens=40, stop=stop))
    assert "".join(step.text or "" for step in steps) == out.text


def test_a_full_context_ends_a_sequence() -> None:
    model = tiny(max_position_embeddings=32)
    for drafter in (None, model, outpace.LookupDrafter(), tiny(seed=1, max_position_embeddings=16)):
        out = Decoder(model, drafter, num_draft_tokens=Fixed(6)).generate(
            PROMPT, temperature=0, max_new_tokens=100
        )
        assert len(PROMPT) + len(out.token_ids) == 32
        assert out.finish_reason == "length"
        assert out.token_ids == greedy(model, PROMPT, 26)


def test_an_output_says_whether_the_context_was_full() -> None:
    decoder = Decoder(tiny(max_position_embeddings=32), "lookup", num_draft_tokens=Fixed(3))
    for max_new_tokens, full in ((25, False), (26, False), (27, True), (1000, True)):
        out = decoder.generate(PROMPT, temperature=0, max_new_tokens=max_new_tokens)
        assert (out.finish_reason, out.context_full) == ("length", full)
    *_, last = decoder.stream(PROMPT, temperature=0, max_new_tokens=1000)
    assert last.output is not None
    assert last.output.context_full


def test_learned_positions_are_never_exceeded() -> None:
    model = tiny("gpt2", max_position_embeddings=24)
    outs = Decoder(model, model, num_draft_tokens=Fixed(6)).generate(
        [PROMPT, [3] * 20, [1]], temperature=0, max_new_tokens=50
    )
    assert [len(out.token_ids) for out in outs] == [18, 4, 23]


def test_a_stream_yields_the_steps_of_generate() -> None:
    decoder = text_decoder()
    out = decoder.generate("hello", temperature=1.0, seed=3, max_new_tokens=30)
    steps = list(decoder.stream("hello", temperature=1.0, seed=3, max_new_tokens=30))
    assert "".join(step.text or "" for step in steps) == out.text
    assert [token for step in steps for token in step.token_ids] == out.token_ids
    assert sum(step.num_draft_tokens for step in steps) == out.stats.draft_tokens
    assert sum(step.num_accepted for step in steps) == out.stats.accepted_tokens
    assert len(steps) == out.stats.target_passes
    for step in steps[:-1]:
        assert step.token_ids == [*step.draft_token_ids[: step.num_accepted], step.token]
        assert len(step.draft_token_ids) == step.num_draft_tokens
        assert step.finish_reason is None
        assert step.output is None
    assert steps[-1].finish_reason == "length"
    assert steps[-1].output is not None
    assert steps[-1].output.token_ids == out.token_ids


def test_a_step_of_a_batch_names_its_output() -> None:
    decoder = Decoder(tiny(), num_draft_tokens=0)
    rows: dict[int, list[int]] = {0: [], 1: []}
    for step in decoder.stream([PROMPT, [1, 2]], temperature=0, max_new_tokens=5):
        rows[step.index] += step.token_ids
    assert rows == {0: greedy(tiny(), PROMPT, 5), 1: greedy(tiny(), [1, 2], 5)}


@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_all_draft_tokens_of_the_target_itself_are_accepted(rule: str) -> None:
    """If the draft model's KV cache missed tokens, its draft tokens would differ."""
    model = tiny()
    decoder = Decoder(model, tiny(), num_draft_tokens=Fixed(3), rule=rule)
    for sampling in (
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_p=0.8, repetition_penalty=1.3),
    ):
        outs = decoder.generate([PROMPT, [1]], sampling, max_new_tokens=29, seed=1)
        assert sum((out.stats for out in outs), Stats()).acceptance_rate == 1
        assert outs[0].stats.target_passes == 1 + 7


@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(temperature=0.5, top_k=9, frequency_penalty=0.4)]
)
def test_match_generates_the_same_tokens_with_every_drafter(sampling: SamplingParams) -> None:
    model = tiny()
    baseline = Decoder(model, rule="match").generate(PROMPT, sampling, seed=9, max_new_tokens=40)
    fitted = outpace.NGramDrafter.fit(baseline.token_ids, 3, V)
    drafters: list[Any] = [model, tiny(seed=1), "lookup", outpace.RandomDrafter(V), fitted]
    for drafter in drafters:
        for policy in tiers.sized((Fixed(7),), (Fixed(1), Fixed(7), Heuristic(3))):
            decoder = Decoder(model, drafter, rule="match", num_draft_tokens=policy)
            out = decoder.generate([[1, 2, 3], PROMPT], sampling, seed=9, max_new_tokens=40)
            assert out[1].token_ids == baseline.token_ids
    assert (
        Decoder(model, rule="token").generate(PROMPT, sampling, seed=9, max_new_tokens=40).token_ids
        == baseline.token_ids
    )


def test_log_probabilities_are_those_of_the_adjusted_target() -> None:
    model = tiny()
    sampling = SamplingParams(temperature=0.7, top_k=12, repetition_penalty=1.2)
    for g in (0, 3):
        decoder = Decoder(model, model, num_draft_tokens=Fixed(g))
        out = decoder.generate(PROMPT, sampling, seed=4, max_new_tokens=10, logprobs=3)
        assert out.logprobs is not None
        assert out.top_logprobs is not None
        text = torch.tensor([[*PROMPT, *out.token_ids]])
        with torch.inference_mode():
            logits = model(input_ids=text).logits
        for i, token in enumerate(out.token_ids):
            before = text[:, : len(PROMPT) + i]
            scores = (
                RepetitionPenaltyLogitsProcessor(1.2)(before, logits[:, before.shape[1] - 1].clone()) / 0.7
            )
            scores = scores.masked_fill(scores < scores.topk(12).values[:, -1:], -torch.inf)
            exact = scores.log_softmax(-1)[0]
            assert out.logprobs[i] == pytest.approx(float(exact[token]), abs=1e-4)
            top = exact.topk(3)
            assert list(out.top_logprobs[i]) == top.indices.tolist()
            assert list(out.top_logprobs[i].values()) == pytest.approx(top.values.tolist(), abs=1e-4)
    greedy_out = decoder.generate(PROMPT, temperature=0, max_new_tokens=4, logprobs=True)
    assert greedy_out.logprobs is not None
    assert greedy_out.top_logprobs is None
    assert all(-10 < logprob < 0 for logprob in greedy_out.logprobs)
    assert decoder.generate(PROMPT, temperature=0, max_new_tokens=4).logprobs is None


def test_statistics_are_complete_and_add_up() -> None:
    decoder = Decoder(tiny(), tiny(seed=1), num_draft_tokens=Fixed(3))
    outs = decoder.generate([PROMPT, [1], [2, 3]], temperature=1.0, seed=1, max_new_tokens=20)
    total = sum((out.stats for out in outs), Stats())
    assert total.new_tokens == 60
    assert total.draft_tokens == sum(total.draft_tokens_by_position)
    assert total.accepted_tokens == sum(total.accepted_by_position) > 0
    assert total.accepted_by_position == sorted(total.accepted_by_position, reverse=True)
    assert total.acceptance_rate == total.accepted_tokens / total.draft_tokens
    assert total.tokens_per_pass == 60 / total.target_passes > 1
    assert total.tokens_per_second == 60 / total.seconds
    parts = (total.draft_seconds, total.target_seconds, total.verify_seconds, total.other_seconds)
    assert all(part > 0 for part in parts)
    assert total.seconds == pytest.approx(sum(parts) + total.encode_seconds)
    steps, seconds = total.steps_by_num_draft_tokens, total.seconds_by_num_draft_tokens
    assert sum(g * steps for g, steps in enumerate(steps)) == total.draft_tokens
    assert sum(steps) == total.target_passes - len(outs)  # the prefill is no decode step
    assert 0 < sum(seconds) < len(outs) * total.seconds  # each sequence counts the whole step
    assert total.speculative_share == sum(steps[1:]) / sum(steps) > 0.5
    assert total.exploration_seconds == 0
    for out in outs:
        assert out.stats.target_passes + out.stats.accepted_tokens >= out.stats.new_tokens


@pytest.mark.parametrize("engine", [False, True])
def test_policy_says_what_it_has_learned(engine: bool) -> None:
    decoder = Decoder(tiny(), tiny(), engine=engine)
    assert "num_draft_tokens  Goodput(16)\n" in decoder.describe()
    decoder.generate(PROMPT, temperature=0, max_new_tokens=100)
    name = "graph" if engine else "eager"
    assert re.search(
        rf"Goodput\(16\): acceptance rate 0\.\d\d; {name}, batch size up to 1: .* ms per step without draft "
        r"tokens \(g=0\); relative to it: \d\.\d\d at g=\d",
        decoder.describe(),
    )


class Explores(Fixed):
    """A policy that says that each step took half a second to learn."""

    def observe(self, done: StepOutcome) -> None:
        self.exploration_seconds += 0.5


@pytest.mark.parametrize("engine", [False, True])
def test_statistics_tell_what_exploration_took(engine: bool) -> None:
    policy = Explores(2)
    decoder = Decoder(tiny(), tiny(seed=1), engine=engine, num_draft_tokens=policy)
    for _ in range(2):
        before = policy.exploration_seconds
        outs = decoder.generate([PROMPT, [5]], temperature=1.0, max_new_tokens=30)
        seconds = sum(out.stats.exploration_seconds for out in outs)
        assert seconds == policy.exploration_seconds - before >= 5


def test_the_heuristic_grows_shrinks_pauses_and_probes_again() -> None:
    policy = Heuristic(2, max_draft_tokens=5)
    chosen = []
    for accepted in (2, 4, 5, 0, 0, 0, 0, 0):
        (g,) = policy.choose([7])
        chosen.append(g)
        policy.observe(StepOutcome([7], [g], [accepted], g, Load(1), None))
    assert chosen == [2, 4, 5, 5, 4, 3, 2, 1]
    after_pause = []
    for _ in range(10):
        (g,) = policy.choose([7])
        after_pause.append(g)
        policy.observe(StepOutcome([7], [g], [g], g, Load(1), None))
    assert after_pause == [0] * 4 + [1, 2, 4, 5, 5, 5]


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("drafter", ["lookup", None])
def test_a_heuristic_works_without_draft_tokens(drafter: str | None, engine: bool) -> None:
    decoder = Decoder(tiny(), drafter, num_draft_tokens=Heuristic(5), engine=engine)
    assert decoder.generate(PROMPT, temperature=0, max_new_tokens=2).token_ids == greedy(tiny(), PROMPT, 2)


def test_a_drafter_that_samples_cannot_be_free() -> None:
    drafter: Any = outpace.RandomDrafter(V)
    drafter.free = True
    with pytest.raises(ValueError, match="got RandomDrafter, which has free = True and returns logits"):
        Decoder(tiny(), drafter).generate(PROMPT, SamplingParams(), max_new_tokens=9)


def test_a_heuristic_with_a_least_never_rests() -> None:
    policy = Heuristic(2, least=1)
    chosen = []
    for _ in range(4):
        chosen += policy.choose([0])
        policy.observe(StepOutcome([0], chosen[-1:], [0], chosen[-1], Load(1), None))
    assert chosen == [2, 1, 1, 1]
    assert repr(policy) == "Heuristic(2, least=1)"
    with pytest.raises(ValueError, match=r"least: got 3; it must be an int in 0\.\.2"):
        Heuristic(2, least=3)
    policy.reset([7])
    assert policy.choose([7]) == [2]


def test_the_heuristic_stops_drafting_if_nothing_is_accepted() -> None:
    model = tiny()
    out = Decoder(model, outpace.RandomDrafter(V), num_draft_tokens=Heuristic(3)).generate(
        PROMPT, temperature=0, max_new_tokens=100
    )
    assert out.stats.draft_tokens < 40


def test_the_draft_may_have_other_sampling_parameters() -> None:
    model = tiny()
    decoder = Decoder(model, tiny(), num_draft_tokens=Fixed(3), draft_sampling=SamplingParams(temperature=0))
    out = decoder.generate(PROMPT, SamplingParams(), seed=1, max_new_tokens=50)
    assert 0 < out.stats.acceptance_rate < 1


class Counting(LogitsProcessor):  # type: ignore[misc]
    """A processor with state: which tokens it forbids depends on the number of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[0] == scores.shape[0] == 1
        scores = scores.clone()
        scores[:, (5 * self.calls) % V :: 3] = -torch.inf
        self.calls += 1
        return scores


@pytest.mark.parametrize("drafter", ["model", "random", "lookup"])
@pytest.mark.parametrize("draft_processors", [None, "same", "none"])
def test_processors_with_state_see_only_generated_tokens(drafter: str, draft_processors: str | None) -> None:
    model = tiny()
    draft = {"model": tiny(), "random": outpace.RandomDrafter(V), "lookup": "lookup"}[drafter]
    draft_sampling = {
        None: None,
        "same": SamplingParams(temperature=0, processors=[Counting()]),
        "none": SamplingParams(),
    }[draft_processors]
    sampling = SamplingParams(temperature=0, processors=[Counting()])
    baseline = Decoder(model).generate([PROMPT, [1]], sampling, max_new_tokens=30)
    decoder = Decoder(model, draft, num_draft_tokens=Fixed(3), draft_sampling=draft_sampling)
    outs = decoder.generate([PROMPT, [1]], sampling, max_new_tokens=30)
    assert [out.token_ids for out in outs] == [out.token_ids for out in baseline]
    assert sampling.processors[0].calls == 0  # type: ignore[attr-defined]
    if drafter == "model" and draft_processors is None:
        assert outs[0].stats.acceptance_rate == 1


def test_a_second_thread_gets_an_error_and_the_decoder_stays_usable() -> None:
    decoder = Decoder(tiny(), tiny(seed=1), num_draft_tokens=Fixed(2))
    stream = decoder.stream(PROMPT, temperature=0, max_new_tokens=20)
    next(stream)
    errors: list[Exception] = []

    def call() -> None:
        try:
            decoder.generate([1], max_new_tokens=3)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "this Decoder is generating already" in str(errors[0])
    stream.close()
    assert decoder.generate(PROMPT, temperature=0, max_new_tokens=9).token_ids == greedy(tiny(), PROMPT, 9)


def test_decoders_of_one_model_work_in_several_threads() -> None:
    model, found = tiny(), {}
    torch.set_num_threads(torch.get_num_threads())

    def work(name: int) -> None:
        found[name] = (
            Decoder(model, model, num_draft_tokens=Fixed(3))
            .generate([name], temperature=0, max_new_tokens=30)
            .token_ids
        )

    threads = [threading.Thread(target=work, args=(name,)) for name in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: greedy(model, [name], 30) for name in (1, 2, 3)}


# Prompts of a list that cannot be read

MESSAGES = [{"role": "user", "content": "hello"}]
UNREADABLE: dict[str, Any] = {
    "too long": "x" * 9000,
    "empty": "",
    "unknown ids": [1, 999],
    "no prompt": None,
    "floats": torch.tensor([1.0, 2.0]),
    "a batch": [[1], [2]],
    "messages without a template": MESSAGES,
    "half a message": [{"role": "user"}],
    "a source": outpace.Source([1, 2]),
    "a hole in the mask": {"input_ids": [1, 2, 3], "attention_mask": [1, 0, 1]},
}


@pytest.mark.parametrize("bad", UNREADABLE.values(), ids=UNREADABLE)
def test_an_unreadable_prompt_does_not_affect_the_others(bad: Any) -> None:
    decoder = text_decoder()
    options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 6}
    others = decoder.generate(["first", "last"], **options, seed=[1, 3])
    with pytest.warns(UserWarning, match=r"^prompt 1: ") as warned:
        outs = decoder.generate(["first", bad, "last"], **options, seed=[1, 2, 3])
    assert [str(warning.message) for warning in warned] == [
        f"prompt 1: {str(outs[1].error).removeprefix('prompt: ')}"
    ]
    assert [outs[0].text, outs[2].text] == [out.text for out in others]
    assert (outs[1].finish_reason, outs[1].text, outs[1].token_ids, outs[1].stats) == (
        "error",
        "",
        [],
        Stats(),
    )
    assert isinstance(outs[1].error, ValueError | TypeError)
    if bad is not UNREADABLE["a batch"]:  # which is valid by itself
        with pytest.raises(type(outs[1].error), match=re.escape(str(outs[1].error))):
            decoder.generate(bad, **options)


def test_sampling_seeds_and_samples_stay_with_their_prompts() -> None:
    decoder = text_decoder()
    samplings = [SamplingParams(), SamplingParams(temperature=0.5), SamplingParams(top_k=3)]
    options: dict[str, Any] = {"max_new_tokens": 5, "n": 2, "batch_size": 2, "logprobs": 1}
    with pytest.warns(UserWarning, match="prompt 1: it is empty"):
        outs = decoder.generate(["first", "", "last"], samplings, seed=[7, 8, 9], **options)
    others = decoder.generate(["first", "last"], samplings[::2], seed=[7, 9], **options)
    assert [out.token_ids for out in outs] == [
        others[0].token_ids,
        others[1].token_ids,
        [],
        [],
        others[2].token_ids,
        others[3].token_ids,
    ]
    assert [out.finish_reason for out in outs[2:4]] == ["error"] * 2
    assert (outs[2].logprobs, outs[2].top_logprobs) == ([], [])
    torch.manual_seed(5)
    with pytest.warns(UserWarning, match="prompt 1: it is empty"):
        outs = decoder.generate(["first", "", "last"], temperature=1.0, max_new_tokens=5)
    torch.manual_seed(5)
    others = decoder.generate(["first", "good", "last"], temperature=1.0, max_new_tokens=5)
    assert (outs[0].token_ids, outs[2].token_ids) == (others[0].token_ids, others[2].token_ids)


def test_a_list_of_unreadable_prompts_gives_a_list_of_errors() -> None:
    decoder = Decoder(tiny())
    with pytest.warns(UserWarning, match="prompt [01]: "):
        outs = decoder.generate([[], [999]], temperature=0, max_new_tokens=3)
    assert [(out.finish_reason, out.text) for out in outs] == [("error", None)] * 2
    assert decoder.generate(PROMPT, temperature=0, max_new_tokens=3).token_ids == greedy(tiny(), PROMPT, 3)


def test_a_stream_has_one_step_for_an_unreadable_prompt() -> None:
    decoder = text_decoder()
    steps = list(decoder.stream(["first", "", "last"], temperature=0, max_new_tokens=5))
    (step,) = [step for step in steps if step.index == 1]
    assert (step.text, step.token_ids, step.kinds, step.finish_reason) == ("", [], [], "error")
    assert step.output is not None
    assert "it is empty" in str(step.output.error)
    assert {step.index for step in steps if step.finish_reason == "length"} == {0, 2}
    with pytest.raises(ValueError, match="it is empty"):
        decoder.stream("")


def test_features_of_a_wrong_shape_fail_only_their_sequence() -> None:
    model = tiny_seq2seq("whisper")
    good, bad = sources("whisper", 1)[0], outpace.Source(features=torch.randn(8, 30))
    with pytest.warns(UserWarning, match=r"prompt 0: features: got shape \[8, 30\]; it must be \[8, 40\]"):
        outs = Decoder(model).generate([bad, good], temperature=0, max_new_tokens=5)
    assert outs[0].finish_reason == "error"
    assert outs[1].token_ids == greedy_of(model, good, 5)


# Bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "prompt: it is empty"),
        ({"prompt": ""}, "prompt: it is empty"),
        ({"prompt": [1] * 128}, "prompt: got 128 tokens; it must be less than the model's context of 128"),
        ({"prompt": [1, 999]}, r"prompt: got ids 1\.\.999; they must be in 0\.\.271"),
        ({"prompt": None}, "prompt: got NoneType None; it must be a string, messages, token ids"),
        ({"prompt": b"ab"}, "prompt: got bytes b'ab'; it must be a string"),
        ({"prompt": [1, True]}, "prompt: got bool True at 1; token ids must be ints"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0; it must be an int >= 1"),
        ({"n": 0}, "n: got 0"),
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"max_new_tokens": "5"}, "max_new_tokens: got str '5'; it must be an int >= 1"),
        ({"stop": ""}, "stop: got ''"),
        ({"stop": {"a": 1}}, "stop: got {'a': 1}"),
        ({"stop_tokens": "5"}, "stop_tokens: got str '5'"),
        ({"stop_when": 5}, "stop_when: got int 5; it must be a function of a SequenceState"),
        ({"ignore_eos": "no"}, "ignore_eos: got str 'no'; it must be True or False"),
        ({"scores": 1}, "scores: got int 1; it must be True or False"),
        ({"logits": "yes"}, "logits: got str 'yes'; it must be True or False"),
        ({"seed": [1, 2]}, "seed: got 2 for 1 prompts"),
        ({"seed": 1.5}, "seed: got float 1.5"),
        ({"seed": True}, "seed: got bool True"),
        ({"seed": np.True_}, "seed: got bool True"),
        ({"logprobs": -1}, "logprobs: got -1"),
        ({"temperature": -1}, "temperature: got -1"),
        ({"temperature": None}, "temperature: got NoneType None; it must be 0"),
        ({"top_k": None}, "top_k: got NoneType None; it must be an int"),
        ({"tempreature": 1}, 'tempreature: no such argument; did you mean "temperature"'),
        ({"max_tokens": 5}, 'max_tokens: no such argument; did you mean "max_new_tokens"'),
        ({"prompt": ["ok", ""], "max_tokens": 5}, "max_tokens: no such argument"),
        ({"prompt": ["", ""], "seed": [1]}, "seed: got 1 for 2 prompts"),
        ({"sampling": SamplingParams(), "top_k": 3}, "sampling: got it together with top_k"),
        ({"sampling": [SamplingParams()] * 2}, "sampling: got 2 for 1 rows"),
    ],
)
def test_errors_name_the_wrong_argument_and_the_next_call_works(
    arguments: dict[str, Any], message: str
) -> None:
    decoder = text_decoder()
    with pytest.raises((ValueError, TypeError), match=message):
        decoder.generate(**{"prompt": PROMPT, **arguments})
    assert len(decoder.generate(PROMPT, max_new_tokens=3).token_ids) == 3


def test_the_constructor_names_the_wrong_argument() -> None:
    model = tiny()
    with pytest.raises(
        ValueError, match=r"num_draft_tokens: got Fixed\(128\), .* less than the target's context of 128"
    ):
        Decoder(model, model, num_draft_tokens=Fixed(128))
    with pytest.raises(TypeError, match=r"draft: got str 'nobody'.*outpace\.load takes a model's name"):
        Decoder(model, "nobody")
    for wrong, message in (
        ({"draft": "lokup"}, "draft: got str 'lokup'.*did you mean \"lookup\""),
        ({"draft": outpace.LookupDrafter}, "draft: got the class LookupDrafter; it must be a Drafter"),
        ({"drafter": "lookup"}, 'drafter: no such argument; did you mean "draft"'),
        ({"rule": "tokn"}, "rule: got 'tokn'; it must be token, block, match or .*did you mean \"token\""),
        (
            {"num_draft_tokens": "goodput"},
            'num_draft_tokens: got str \'goodput\'; it must be an int, "auto", Fixed.*mean "Goodput"',
        ),
        ({"num_draft_tokens": Fixed}, 'num_draft_tokens: got .*Fixed\'>; it must be an int, "auto", Fixed'),
        ({"num_draft_tokens": True}, "num_draft_tokens: got bool True; it must be an int >= 0"),
        ({"num_draft_tokens": -1}, "num_draft_tokens: got -1; it must be an int >= 0"),
        ({"pack": "no"}, "pack: got str 'no'; it must be True or False"),
        ({"engine": 0}, "engine: got int 0; it must be True or False"),
        ({"tokenizer": "gpt2"}, "tokenizer: got str 'gpt2'; it must be the target's tokenizer"),
        ({"target": "gpt2"}, "target: got str 'gpt2'; it must be a model; outpace.load takes a name"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            Decoder(**{"target": model, **wrong})
    with pytest.raises(ValueError, match=r'lenience: got 0\.5 with rule "block"'):
        Decoder(model, rule="block", lenience=0.5)
    with pytest.raises(ValueError, match="prompt: got a string, and the Decoder has no tokenizer"):
        Decoder(model).generate("hello")
    with pytest.raises(ValueError, match="stop: got a string, and the Decoder has no tokenizer"):
        Decoder(model).generate([1], stop="x")


def test_errors_do_not_mention_the_rule_for_comparison() -> None:
    with pytest.raises(ValueError, match="it must be token") as caught:
        Decoder(tiny(), rule="rejektion")
    assert "rejection" not in str(caught.value)
    assert str(Decoder(tiny(), rule="rejection").rule) == "rejection"


def test_errors_suggest_the_nearest_known_name() -> None:
    with pytest.raises(TypeError, match='topk: no such argument; did you mean "top_k"'):
        SamplingParams(topk=5)  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="outpace has no 'Decodr'; did you mean \"Decoder\""):
        outpace.Decodr  # noqa: B018
    with pytest.raises(
        AttributeError, match="integrations has no 'transformer'; did you mean \"transformers\""
    ):
        outpace.integrations.transformer  # noqa: B018


def test_numbers_of_numpy_and_torch_are_accepted() -> None:
    three: Any = np.int64(3)
    decoder = Decoder(tiny(), "lookup", num_draft_tokens=three)
    assert repr(decoder.policy) == "Fixed(3)"
    baseline = greedy(tiny(), PROMPT, 9)
    end = baseline[4]
    ends: list[Any] = [
        [end],
        np.int64(end),
        torch.tensor(end),
        torch.tensor([end]),
        (token for token in [end]),
    ]
    for stop_tokens in ends:
        out = decoder.generate(PROMPT, temperature=0, max_new_tokens=9, stop_tokens=stop_tokens)
        assert (out.token_ids, out.finish_reason) == (baseline[: baseline.index(end) + 1], "stop")
    assert decoder.generate(PROMPT, temperature=0, max_new_tokens=9, stop_tokens=None).token_ids == baseline
    assert len(decoder.generate(PROMPT, max_new_tokens=three).token_ids) == 3
    seeds: list[Any] = [[3, 4], np.array([3, 4]), torch.tensor([3, 4])]
    prompts = [PROMPT, [1]]
    found = [decoder.generate(prompts, temperature=1.0, seed=seed, max_new_tokens=5) for seed in seeds]
    assert len({tuple(tuple(out.token_ids) for out in outs) for outs in found}) == 1


def test_a_draft_with_another_tokenizer_is_rejected() -> None:
    with pytest.raises(ValueError, match="got a model of 5000 tokens for a target of 61"):
        Decoder(tiny(), tiny(vocab_size=5000))
    other = byte_tokenizer()
    other.add_tokens([f"word{i}" for i in range(10)])
    swapped = byte_tokenizer()
    swapped.get_vocab = lambda: {token: 270 - id for token, id in TOKENIZER.get_vocab().items()}
    target, draft = tiny(vocab_size=272), tiny(seed=1, vocab_size=272)
    Decoder(target, outpace.ModelDrafter(draft, other), TOKENIZER)
    with pytest.raises(ValueError, match="draft: got a model whose tokenizer shares"):
        Decoder(target, outpace.ModelDrafter(draft, swapped), TOKENIZER)


@pytest.mark.parametrize(("target_size", "draft_size"), [(61, 64), (64, 61)])
def test_vocabularies_may_differ_by_padding(target_size: int, draft_size: int) -> None:
    target, draft = tiny(vocab_size=target_size), tiny(seed=1, vocab_size=draft_size)
    decoder = Decoder(target, draft, num_draft_tokens=Fixed(4))
    prompt = [target_size - 1, 5, target_size - 1]
    assert decoder.generate(prompt, temperature=0, max_new_tokens=30).token_ids == greedy(target, prompt, 30)
    decoder.generate(prompt, SamplingParams(temperature=3.0), seed=1, max_new_tokens=60)


class NanAfter(LogitsProcessor):  # type: ignore[misc]
    """A processor that returns NaN once the sequence contains a token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores * torch.nan if self.token in input_ids[0].tolist() else scores


def test_nan_fails_only_its_sequence() -> None:
    model = tiny()
    decoder = Decoder(model, model, num_draft_tokens=Fixed(3))
    bad = greedy(model, PROMPT, 9)[4]
    sampling = SamplingParams(temperature=0, processors=[NanAfter(bad)])
    with pytest.raises(ValueError, match=r"the logits at position 1[01] are unusable"):
        decoder.generate(PROMPT, sampling, max_new_tokens=9)
    unprocessed = SamplingParams(temperature=0)
    with pytest.warns(UserWarning, match="prompt 0: the logits"):
        outs = decoder.generate([PROMPT, [1]], [sampling, unprocessed], max_new_tokens=9)
    assert outs[0].finish_reason == "error"
    assert isinstance(outs[0].error, ValueError)
    assert outs[1].token_ids == greedy(model, [1], 9)
    assert decoder.generate(PROMPT, unprocessed, max_new_tokens=9).token_ids == greedy(model, PROMPT, 9)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_nan_of_a_model_does_not_stay_in_its_kv_cache(role: str) -> None:
    target, draft = tiny(), tiny(seed=1)
    broken = target if role == "target" else draft
    decoder = Decoder(target, draft, num_draft_tokens=Fixed(3))
    weights = broken.model.embed_tokens.weight.clone()
    expected = greedy(target, PROMPT, 9)
    with torch.no_grad():
        broken.model.embed_tokens.weight[expected[3]] = torch.nan
    if role == "target":
        with pytest.raises(ValueError, match="are unusable"):
            decoder.generate(PROMPT, SamplingParams(temperature=0.001), max_new_tokens=9, seed=1)
    else:  # a draft model that fails only proposes fewer tokens
        assert decoder.generate(PROMPT, temperature=0, max_new_tokens=9).token_ids == expected
    with torch.no_grad():
        broken.model.embed_tokens.weight.copy_(weights)
    for prompt in (PROMPT, [1, 2, 3], PROMPT):
        assert decoder.generate(prompt, temperature=0, max_new_tokens=9).token_ids == greedy(
            target, prompt, 9
        )


class Grammar(LogitsProcessor):  # type: ignore[misc]
    """A processor that allows even tokens only, and raises an error after an odd one."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if (input_ids[0, len(PROMPT) :] % 2).any():
            raise RuntimeError("an odd token")
        return scores.index_fill(1, torch.arange(1, V, 2), -torch.inf)


@pytest.mark.parametrize("rule", ["token", "block", "match"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_never_sees_a_forbidden_token(rule: str, temperature: float) -> None:
    """Draft tokens ignore the grammar. It is not called for positions after a forbidden draft token."""
    sampling = SamplingParams(temperature=temperature, processors=[Grammar()])
    drafter = outpace.RandomDrafter(V)
    decoder = Decoder(tiny(), drafter, rule=rule, num_draft_tokens=Fixed(4), draft_sampling=SamplingParams())
    out = decoder.generate(PROMPT, sampling, seed=3, max_new_tokens=20, logprobs=True)
    assert len(out.token_ids) == 20
    assert not any(token % 2 for token in out.token_ids)
    if temperature == 0 or rule == "match":
        baseline = Decoder(tiny()).generate(PROMPT, sampling, seed=3, max_new_tokens=20)
        assert out.token_ids == baseline.token_ids


def test_the_decoder_works_after_an_error_in_a_processor_or_drafter() -> None:
    class Failing(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            if input_ids.shape[1] > len(PROMPT) + 3:
                raise ZeroDivisionError("processor failed")
            return scores

    class FailingDrafter(outpace.RandomDrafter):
        def propose(self, state: Any, g: int) -> Draft:
            raise ZeroDivisionError("drafter failed")

    model = tiny()
    decoder = Decoder(model, model, num_draft_tokens=Fixed(3))
    for g in (1, 3):  # the drafter or the target calls it first
        decoder.policy = Fixed(g)
        sampling = SamplingParams(temperature=0, processors=[Failing()])
        with pytest.warns(UserWarning, match="prompt 0: processor failed"):
            outs = decoder.generate([PROMPT, [1]], sampling, max_new_tokens=len(PROMPT) + 2)
        assert isinstance(outs[0].error, ZeroDivisionError)
        assert outs[1].token_ids == greedy(model, [1], len(PROMPT) + 2)
        with pytest.raises(ZeroDivisionError, match="processor failed"):
            decoder.generate(PROMPT, sampling, max_new_tokens=9)
    assert decoder.generate(PROMPT, temperature=0, max_new_tokens=9).token_ids == greedy(model, PROMPT, 9)
    decoder = Decoder(model, FailingDrafter(V), num_draft_tokens=Fixed(3))
    with pytest.raises(ZeroDivisionError, match="drafter failed"):
        decoder.generate(PROMPT, temperature=0, max_new_tokens=9)
    decoder.drafter = None
    assert decoder.generate(PROMPT, temperature=0, max_new_tokens=9).token_ids == greedy(model, PROMPT, 9)


def test_a_decoder_exposes_its_target_tokenizer_and_drafter() -> None:
    target, draft = tiny(vocab_size=272), tiny(seed=1, vocab_size=272)
    decoder = Decoder(target, draft, TOKENIZER)
    assert decoder.target is target
    assert decoder.tokenizer is TOKENIZER
    assert isinstance(decoder.drafter, outpace.ModelDrafter)
    assert decoder.drafter.scorer.model is draft
    assert Decoder(decoder.scorer).target is target
    with pytest.raises(AttributeError):
        decoder.tokenizer = None  # type: ignore[misc]


def test_a_decoder_describes_itself() -> None:
    decoder = Decoder(tiny(), tiny("gpt2"), rule="token", lenience=0.5, engine=True)
    described = dict(line.split(maxsplit=1) for line in decoder.describe().splitlines())
    assert list(described) == ["target", "drafter", "rule", "num_draft_tokens", "executor"]
    assert "LlamaForCausalLM" in described["target"]
    assert "KiB a token" in described["target"]
    assert "GPT2LMHeadModel" in described["drafter"]
    assert "lenience 0.5" in described["rule"]
    assert described["num_draft_tokens"] == "Goodput(16)"
    assert "none, without speculation" in Decoder(tiny()).describe()


def test_a_drafter_without_a_possible_token_proposes_nothing() -> None:
    model, forbidden = tiny(), {5: -torch.inf, 6: -torch.inf}
    fitted = outpace.NGramDrafter.fit([5] * 20 + [6, 5], 2, V)
    baseline = Decoder(model).generate(PROMPT, SamplingParams(logit_bias=forbidden), seed=1, max_new_tokens=8)
    out = Decoder(model, fitted, num_draft_tokens=2).generate(
        PROMPT, SamplingParams(logit_bias=forbidden), seed=1, max_new_tokens=8
    )
    assert out.token_ids == baseline.token_ids
    assert out.stats.draft_tokens == 0


class WithoutCommit:
    """A drafter that has no method `commit`."""

    def propose(self, state: Any, g: int) -> Draft:
        return Draft.chosen([[] for _ in state.slots])

    def reset(self, slots: Sequence[int]) -> None: ...


def test_a_drafter_may_be_a_pytorch_module() -> None:
    class Learned(outpace.Drafter, torch.nn.Module):
        def propose(self, state: Any, g: int) -> Draft:
            return Draft.chosen([[7] * min(g, 2) for _ in state.slots])

    model = tiny()
    out = Decoder(model, Learned(), num_draft_tokens=2).generate(PROMPT, temperature=0, max_new_tokens=5)
    assert out.token_ids == greedy(model, PROMPT, 5)
    assert out.stats.draft_tokens > 0


def test_a_drafter_without_a_method_is_rejected_by_the_constructor() -> None:
    with pytest.raises(
        TypeError, match=r"WithoutCommit has no method commit; derive it from outpace\.Drafter"
    ):
        Decoder(tiny(), WithoutCommit())  # type: ignore[arg-type]

    class Derived(WithoutCommit, outpace.Drafter): ...

    out = Decoder(tiny(), Derived(), num_draft_tokens=2).generate(PROMPT, temperature=0, max_new_tokens=5)
    assert out.token_ids == greedy(tiny(), PROMPT, 5)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([[1]], r"draft: got list \[\[1\]\] from Returns.propose; it must be an outpace.Draft"),
        (None, "draft: got NoneType None from Returns.propose; it must be an outpace.Draft"),
        (torch.zeros(1, 2, dtype=torch.int64), "got a tensor of torch.int64 from Returns.propose; it"),
        (
            Draft([[1, 2]]),  # type: ignore[arg-type]
            r"draft.tokens: got list \[\[1, 2\]\] from Returns.propose; it must be a tensor",
        ),
        (Draft(torch.zeros(1, 2, dtype=torch.int64), [0.5]), r"draft.logits: got list"),  # type: ignore[arg-type]
    ],
)
def test_errors_say_what_a_drafter_must_return(returned: Any, message: str) -> None:
    decoder = Decoder(tiny(), Returns(lambda state, g: returned), num_draft_tokens=2)
    with pytest.raises(TypeError, match=message):
        decoder.generate(PROMPT, max_new_tokens=5)


class Returns(outpace.Drafter):
    """A drafter that returns what a function returns."""

    def __init__(self, draft: Callable[[Any, int], Draft]) -> None:
        self.draft = draft

    def propose(self, state: Any, g: int) -> Draft:
        return self.draft(state, g)


def test_a_drafter_need_not_derive_from_the_base_class() -> None:
    class Sevens:
        def propose(self, state: Any, g: int) -> Draft:
            return Draft.chosen([[7] * g for _ in state.slots])

        def commit(self, accepted: Tensor, next_token: Tensor) -> None: ...

        def reset(self, slots: Sequence[int]) -> None: ...

    model, drafter = tiny(), Sevens()
    decoder = Decoder(model, drafter, num_draft_tokens=2)  # type: ignore[arg-type]
    out = decoder.generate(PROMPT, temperature=0, max_new_tokens=5)
    assert out.token_ids == greedy(model, PROMPT, 5)
    assert out.stats.draft_tokens > 0
    assert "Sevens" in decoder.describe()


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft(torch.zeros(1, 2, dtype=torch.int64), None, [3]), r"draft.lengths: got \[3\]; each must be"),
        (Draft(torch.zeros(1, 2, dtype=torch.int64), None, [-1]), r"draft.lengths: got \[-1\]"),
        (Draft(torch.zeros(1, 2, dtype=torch.int64), None, [1, 1]), "draft.lengths: got 2; it must be one"),
        (Draft(torch.zeros(2, 2, dtype=torch.int64)), "draft.tokens: got torch.int64"),
        (Draft(torch.full((1, 2), V)), r"draft.tokens: got ids 61\.\.61; they must be in 0\.\.60"),
        (Draft(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2, 5)), "draft.logits: got shape"),
    ],
)
def test_errors_say_what_is_wrong_with_a_draft(draft: Draft, message: str) -> None:
    decoder = Decoder(tiny(), Returns(lambda state, g: draft), num_draft_tokens=2)
    with pytest.raises(ValueError, match=message):
        decoder.generate(PROMPT, max_new_tokens=5)


def test_a_drafter_in_lower_precision_does_not_round_the_target() -> None:
    def proposal(state: Any, g: int) -> Draft:
        return Draft(torch.zeros(1, g, dtype=torch.int64), torch.zeros(1, g, V, dtype=torch.bfloat16))

    outs = [
        Decoder(tiny(), drafter, num_draft_tokens=2, rule="match").generate(
            PROMPT, SamplingParams(), seed=1, max_new_tokens=9, logprobs=True
        )
        for drafter in (None, Returns(proposal))
    ]
    assert outs[0].token_ids == outs[1].token_ids
    assert outs[0].logprobs == pytest.approx(outs[1].logprobs, abs=1e-5)


def test_a_drafter_serves_one_decoder_at_a_time() -> None:
    drafter = outpace.LookupDrafter()
    first, second = Decoder(tiny(), drafter), Decoder(tiny(), drafter)
    stream = first.stream(PROMPT, temperature=0, max_new_tokens=9)
    next(stream)
    with pytest.raises(RuntimeError, match="this LookupDrafter is in use by another Decoder"):
        second.generate(PROMPT)
    stream.close()
    assert second.generate(PROMPT, temperature=0, max_new_tokens=9).token_ids == greedy(tiny(), PROMPT, 9)


def test_a_stop_string_may_be_a_special_token() -> None:
    target = tiny(vocab_size=272)
    decoder = Decoder(target, None, TOKENIZER)
    end = TOKENIZER.convert_tokens_to_ids("<end>")
    sampling = SamplingParams(logit_bias={end: 100.0})
    out = decoder.generate("abc", sampling, max_new_tokens=5, stop="<end>", ignore_eos=True)
    assert (out.token_ids, out.text, out.finish_reason) == ([end], "", "stop")


def test_a_seed_may_be_a_numpy_integer() -> None:
    decoder, seeds = Decoder(tiny()), list[Any]([7, np.int64(7)])
    outs = [decoder.generate(PROMPT, temperature=1.0, seed=seed, max_new_tokens=5) for seed in seeds]
    assert outs[0].token_ids == outs[1].token_ids


def test_a_warning_names_fields_of_the_generation_config_that_have_no_effect() -> None:
    model = tiny()
    model.generation_config.no_repeat_ngram_size = 2
    with pytest.warns(UserWarning, match="generation_config: no_repeat_ngram_size not applied"):
        Decoder(model).generate(PROMPT, max_new_tokens=3)


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_given_seed_repeats_by_default(engine: bool, dtype: torch.dtype) -> None:
    model = tiny().to(dtype)
    decoder = Decoder(model, tiny(seed=1).to(dtype), engine=engine)  # the policy measures time
    options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 60}
    texts = {tuple(decoder.generate(PROMPT, seed=7, **options).token_ids) for _ in range(4)}
    assert len(texts) == 1
    if dtype == torch.float32:
        alone = Decoder(model, engine=engine).generate(PROMPT, seed=7, **options)
        assert texts == {tuple(alone.token_ids)}
    unseeded = {tuple(decoder.generate(PROMPT, **options).token_ids) for _ in range(3)}
    assert len(unseeded) == 3


@pytest.mark.parametrize(
    ("named", "match"), [({}, True), ({"rule": "token"}, False), ({"lenience": 0.9}, False)]
)
def test_requests_with_a_seed_have_rule_match_unless_a_rule_or_a_lenience_is_named(
    named: dict[str, Any], match: bool
) -> None:
    decoder = Decoder(tiny(), tiny(seed=1), **named)
    assert [one.match for one in decoder.requests([PROMPT, [1]], seed=[1, 2])] == [match] * 2
    assert [one.match for one in decoder.requests([PROMPT, [1]])] == [False] * 2
    assert [one.match for one in decoder.with_own_rule().requests([PROMPT, [1]], seed=1)] == [False] * 2
    assert decoder.rule.name == "token"
    assert Decoder(tiny(), rule=Rule("match")).requests(PROMPT)[0].match
