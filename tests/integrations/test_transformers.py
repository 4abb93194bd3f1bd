"""`custom_generate=outpace.generate` gives the results of `model.generate`, with speculative decoding."""

from __future__ import annotations

import functools
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import outpace
from outpace import Decoder, Fixed, Stats
from outpace.integrations.pool import DecoderPool
from outpace.integrations.processors import OriginalPromptProcessor, samplings
from tests import tiers
from tests.statistical import chisquare
from tests.tiny import SEQ2SEQ, V, byte_tokenizer, greedy, sources, tiny, tiny_seq2seq

forget = outpace.integrations.transformers.forget

IDS = torch.tensor([[0, 0, 5, 6, 7], [9, 8, 7, 6, 5], [0, 0, 0, 0, 3]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
ENDS = [3, 7, 9, 11, 30]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Run on one thread. Tiny models are faster on one, above all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def target() -> Any:
    return tiny()


@functools.cache
def small() -> Any:
    """Return a draft model that agrees with the target often, but not always."""
    model = tiny()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    return model


def batch(**changes: Any) -> dict[str, Any]:
    return {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 20, "do_sample": False, **changes}


def drafters() -> list[Any]:
    return [small(), target(), "lookup", outpace.RandomDrafter(V), outpace.LookupDrafter()]


class ForbidNext(LogitsProcessor):  # type: ignore[misc]
    """Forbid a few tokens, depending on the length of the sequence and on its last token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        last = input_ids[:, -1:] * 3 + input_ids.shape[1]
        return scores.scatter(1, torch.cat((last % V, (last + 1) % V), 1), -torch.inf)


class Counting(LogitsProcessor):  # type: ignore[misc]
    """Forbid tokens depending on the number of calls, which is one per token without speculation."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, (5 * self.calls) % V :: 3] = -torch.inf
        self.calls += 1
        return scores


def per_row(row: int, text: Tensor) -> list[int]:
    return list(range(20 * row + 1, 20 * row + 20)) if len(text) % 2 else list(range(V))


ARGUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "nothing": dict,
    "end of text": lambda: {"eos_token_id": ENDS},
    "repetition_penalty": lambda: {"repetition_penalty": 1.5},
    "no_repeat_ngram_size": lambda: {"no_repeat_ngram_size": 2},
    "bad_words_ids": lambda: {"bad_words_ids": [[5], [6, 7], [31, 9]]},
    "sequence_bias": lambda: {"sequence_bias": {(5,): 3.0, (6, 7): -2.0}},
    "min_new_tokens": lambda: {"min_new_tokens": 5, "eos_token_id": ENDS},
    "min_length": lambda: {"min_length": 9, "eos_token_id": ENDS},
    "suppress_tokens": lambda: {"suppress_tokens": list(range(10, 30))},
    "begin_suppress_tokens": lambda: {"begin_suppress_tokens": list(range(30))},
    "forced_bos_token_id": lambda: {"forced_bos_token_id": 17},
    "forced_eos_token_id": lambda: {"forced_eos_token_id": 4, "eos_token_id": 4},
    "exponential_decay": lambda: {"exponential_decay_length_penalty": (3, 1.3), "eos_token_id": [4]},
    "encoder_repetition_penalty": lambda: {"encoder_repetition_penalty": 1.3},
    "encoder_no_repeat_ngram_size": lambda: {"encoder_no_repeat_ngram_size": 1},
    "prefix_allowed_tokens_fn": lambda: {"prefix_allowed_tokens_fn": per_row},
    "guidance_scale": lambda: {"guidance_scale": 1.7},
    "negative_prompt_ids": lambda: {"guidance_scale": 1.7, "negative_prompt_ids": IDS[:, -2:]},
    "renormalize_logits": lambda: {"renormalize_logits": True, "remove_invalid_values": True},
    "watermarking_config": lambda: {"watermarking_config": transformers.WatermarkingConfig(bias=2.5)},
    "logits_processor": lambda: {
        "logits_processor": LogitsProcessorList([ForbidNext(), Counting(), TopKLogitsWarper(5)])
    },
    "many": lambda: {
        "logits_processor": LogitsProcessorList([ForbidNext()]),
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 4,
        "eos_token_id": ENDS,
    },
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_greedy_batches_with_padding_equal_those_of_transformers(name: str) -> None:
    """Compare tokens, shapes, scores and logits, for each common argument and every kind of draft."""
    slow = name in ("guidance_scale", "negative_prompt_ids", "watermarking_config")
    arguments: dict[str, Any] = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    arguments |= {"max_new_tokens": 8 if slow else 20}
    baseline = target().generate(**batch(**arguments, **ARGUMENTS[name]()))
    drafts = drafters()[slow:2] if slow else drafters()
    if not tiers.full:
        place = list(ARGUMENTS).index(name)
        drafts = [drafts[place % len(drafts)]]
    for draft in drafts:
        out = target().generate(
            **batch(**arguments, **ARGUMENTS[name]()),
            custom_generate=outpace.generate,
            draft=draft,
            num_draft_tokens=Fixed(4),
        )
        assert torch.equal(out.sequences, baseline.sequences)
        ends = [out.sequences.shape[1] - IDS.shape[1]] * len(IDS)
        if "eos_token_id" in ARGUMENTS[name]():
            eos = torch.tensor(ARGUMENTS[name]()["eos_token_id"])
            found = torch.isin(out.sequences[:, IDS.shape[1] :], eos).long()
            ends = [int(row.argmax()) + 1 if row.any() else len(row) for row in found]
        for found_scores, expected_scores in ((out.scores, baseline.scores), (out.logits, baseline.logits)):
            for i, (one, other) in enumerate(zip(found_scores, expected_scores, strict=True)):
                live = torch.tensor([i < end for end in ends])
                torch.testing.assert_close(one[live], other[live], rtol=1e-4, atol=1e-4)
                assert not one[~live].any()
                assert one.dtype is torch.float32
                one[0, 0] = 1.0  # the caller may change it


def test_drafts_of_the_target_itself_are_always_accepted() -> None:
    for name in ("nothing", "repetition_penalty", "logits_processor", "begin_suppress_tokens"):
        stats, arguments = Stats(), batch(**ARGUMENTS[name](), max_new_tokens=21)
        target().generate(
            **arguments, custom_generate=outpace.generate, draft=target(), num_draft_tokens=4, stats=stats
        )
        assert stats.acceptance_rate == 1, name
        assert stats.tokens_per_pass == 21 / 5


@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_every_rule_is_greedy_without_sampling(rule: str) -> None:
    baseline = target().generate(**batch())
    assert torch.equal(
        baseline, target().generate(**batch(), custom_generate=outpace.generate, draft=small(), rule=rule)
    )


def test_masked_tokens_inside_a_prompt_are_left_out_as_in_transformers() -> None:
    mask = MASK.clone()
    mask[1, 2] = 0
    baseline = target().generate(**batch(attention_mask=mask, repetition_penalty=1.4))
    out = target().generate(
        **batch(attention_mask=mask, repetition_penalty=1.4), custom_generate=outpace.generate, draft="lookup"
    )
    assert torch.equal(out, baseline)


def test_length_and_time_limits_hold_as_in_transformers() -> None:
    for limit in (
        {"max_new_tokens": None, "max_length": 12},
        {"stopping_criteria": StoppingCriteriaList([transformers.MaxLengthCriteria(8)])},
        {"max_time": 1e-9},
    ):
        baseline = target().generate(**batch(**limit))
        assert torch.equal(
            baseline,
            target().generate(
                **batch(**limit), custom_generate=outpace.generate, draft=target(), num_draft_tokens=8
            ),
        )


# Sampling


def test_warpers_become_sampling_params_where_the_order_allows_it() -> None:
    temperature, k, p = TemperatureLogitsWarper(0.7), TopKLogitsWarper(9), TopPLogitsWarper(0.8)
    typical, penalty = (
        transformers.TypicalLogitsWarper(0.9),
        transformers.RepetitionPenaltyLogitsProcessor(1.2),
    )
    prompts = [[5, 6, 7], [9, 8, 7, 6, 5], [3]]

    def made(*processors: Any, do_sample: bool = True) -> list[Any]:
        return samplings(processors, do_sample, IDS, prompts, IDS.device)

    assert made(temperature, k, p)[0] == outpace.SamplingParams(temperature=0.7, top_k=9, top_p=0.8)
    assert made(penalty, temperature)[1] == outpace.SamplingParams(temperature=0.7, repetition_penalty=1.2)
    padded = made(penalty, temperature)[0]  # before Transformers 5.23, its penalty counts padding
    assert (padded.temperature, padded.repetition_penalty) == (0.7, 1)
    (wrapped,) = padded.processors
    assert isinstance(wrapped, OriginalPromptProcessor)
    assert wrapped.processors == (penalty,)
    assert made(temperature, k, typical)[1] == outpace.SamplingParams(processors=[temperature, k, typical])
    assert made(k, temperature)[1] == outpace.SamplingParams(temperature=0.7, processors=[k])
    assert made(k, k)[1] == outpace.SamplingParams(top_k=9, processors=[k])
    assert made(TopKLogitsWarper(3, min_tokens_to_keep=5))[1].top_k == 0
    assert made(penalty, k, do_sample=False)[1] == outpace.SamplingParams(
        temperature=0, repetition_penalty=1.2, processors=[k]
    )


def test_repetition_penalty_ignores_the_padding_of_each_row() -> None:
    """Transformers prepares the penalty so since 5.23: with a length for each row, or for each prompt."""
    penalty = transformers.RepetitionPenaltyLogitsProcessor(1.2)
    penalty.prompt_ignore_length = torch.tensor([2, 0, 4])
    first, whole, last = samplings([penalty], True, IDS, [[5, 6, 7], [9, 8, 7, 6, 5], [3]], IDS.device)
    assert whole == outpace.SamplingParams(repetition_penalty=1.2)
    for sampling, padding in ((first, 2), (last, 4)):
        (wrapped,) = sampling.processors
        assert isinstance(wrapped, OriginalPromptProcessor)
        (row_penalty,) = wrapped.processors
        assert row_penalty.prompt_ignore_length == padding  # type: ignore[attr-defined]
    twice = samplings([penalty], True, IDS.repeat_interleave(2, 0), [[1] * 5] * 6, IDS.device)
    assert [one.repetition_penalty for one in twice] == [1, 1, 1.2, 1.2, 1, 1]
    penalty.prompt_ignore_length = torch.tensor([0, 0, 0])
    each = samplings([penalty], True, IDS, [[1] * 5] * 3, IDS.device)
    assert each[0] is each[1] is each[2]
    assert each[0] == outpace.SamplingParams(repetition_penalty=1.2)
    assert isinstance(penalty.prompt_ignore_length, Tensor)  # the caller's processor is unchanged


def test_scores_of_sampled_tokens_equal_those_of_transformers() -> None:
    sampling_options = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02}
    sampling_options |= {"repetition_penalty": 1.2, "typical_p": 0.95}
    arguments = batch(**sampling_options, return_dict_in_generate=True, output_scores=True)
    out = target().generate(**arguments, custom_generate=outpace.generate, draft=small(), seed=3)
    config = transformers.GenerationConfig(**sampling_options)
    processors = target()._get_logits_processor(
        config, IDS.shape[1], device="cpu", model_kwargs={"attention_mask": MASK}
    )
    for i, scores in enumerate(out.scores):
        texts, mask = out.sequences[:, : 5 + i], torch.cat((MASK, MASK.new_ones(3, i)), 1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = target()(input_ids=texts, attention_mask=mask, position_ids=positions).logits[:, -1]
        torch.testing.assert_close(scores, processors(texts, logits), rtol=1e-4, atol=1e-4)


def test_torch_manual_seed_makes_runs_repeatable_and_rows_differ() -> None:
    def sample(**arguments: Any) -> Tensor:
        sampled = batch(do_sample=True, num_return_sequences=2, **arguments)
        out: Tensor = target().generate(**sampled, custom_generate=outpace.generate, draft=small())
        return out

    sample()  # creates the models, which uses random numbers
    transformers.set_seed(5)
    once, other = sample(), sample()
    torch.manual_seed(5)
    assert torch.equal(once, sample())
    assert not torch.equal(once, other)
    assert once.shape == (6, 25)
    assert len({tuple(row) for row in once[:, 5:].tolist()}) == 6
    assert torch.equal(sample(seed=7), sample(seed=7))
    assert len({tuple(row) for row in sample(seed=7)[:, 5:].tolist()}) == 6
    assert torch.equal(sample(seed=[1, 2, 3])[2:4], sample(seed=[9, 2, 8])[2:4])
    with pytest.raises(ValueError, match="seed: got 2 for 3 prompts"):
        sample(seed=[1, 2])


def test_rule_match_gives_the_same_text_with_every_drafter() -> None:
    texts = [
        target().generate(
            **batch(do_sample=True, top_k=30),
            custom_generate=outpace.generate,
            draft=draft,
            rule="match",
            seed=4,
        )
        for draft in drafters()
    ]
    assert all(torch.equal(texts[0], text) for text in texts)


@pytest.mark.statistical
@pytest.mark.parametrize("draft", tiers.sized(["model"], ["model", "lookup"]))
def test_sampled_tokens_have_exactly_the_targets_distribution(draft: str) -> None:
    """Test the first two tokens jointly, with temperature, top-k, top-p, two processors, and padding."""
    sampling_options = {
        "temperature": 1.4,
        "top_k": 6,
        "top_p": 0.95,
        "repetition_penalty": 1.3,
        "begin_suppress_tokens": [5],
    }
    ids, mask, n = torch.tensor([[0, 5, 6, 5, 6]]), torch.tensor([[0, 1, 1, 1, 1]]), tiers.sized(2500, 6000)
    out = target().generate(
        **{
            "input_ids": ids,
            "attention_mask": mask,
            "max_new_tokens": 2,
            "do_sample": True,
            **sampling_options,
        },
        num_return_sequences=n,
        custom_generate=outpace.generate,
        draft=small() if draft == "model" else outpace.LookupDrafter(),
        num_draft_tokens=Fixed(1),
        seed=20230213,
    )
    config = transformers.GenerationConfig(do_sample=True, **sampling_options)
    processors = target()._get_logits_processor(config, 5, device="cpu")

    def probabilities(*more: int) -> Tensor:
        with torch.no_grad():
            logits = target()(input_ids=torch.tensor([[*ids[0, 1:].tolist(), *more]])).logits[:, -1].double()
        adjusted: Tensor = processors(torch.tensor([[*ids[0].tolist(), *more]]), logits)
        return adjusted.softmax(-1)[0]

    first = probabilities()
    expected = torch.stack(
        [first[i] * probabilities(i) if first[i] > 0 else torch.zeros(V) for i in range(V)]
    )
    counts = torch.bincount(out[:, 5] * V + out[:, 6], minlength=V * V)
    chisquare.agrees(
        counts.tolist(), expected.flatten().tolist(), f"custom_generate, {draft}", chisquare.SOME
    )


# Stopping criteria


class EndsIn(StoppingCriteria):  # type: ignore[misc]
    """Stop a sequence whose last two tokens sum to a multiple of 6; the event cannot be copied."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        assert scores is None
        done = input_ids[:, -2:].sum(1) % 6 == 0
        return done | self.cancelled.is_set()


class Unsure(StoppingCriteria):  # type: ignore[misc]
    """Stop where the maximum of the last scores is low."""

    def __call__(self, input_ids: Tensor, scores: tuple[Tensor, ...], **kwargs: Any) -> Tensor:
        return scores[-1].amax(-1) < 3.6


@pytest.mark.parametrize("g", [0, 1, 3, 8])
def test_criteria_stop_among_draft_tokens_where_the_baseline_stops(g: int) -> None:
    for arguments in (
        {"stopping_criteria": StoppingCriteriaList([EndsIn()])},
        {
            "stopping_criteria": StoppingCriteriaList([Unsure()]),
            "return_dict_in_generate": True,
            "output_scores": True,
        },
    ):
        arguments |= {"eos_token_id": 60, "max_new_tokens": 30}
        baseline = target().generate(**batch(**arguments))
        out = target().generate(
            **batch(**arguments), custom_generate=outpace.generate, draft=target(), num_draft_tokens=g
        )
        baseline, out = (one if isinstance(one, Tensor) else one.sequences for one in (baseline, out))
        assert torch.equal(out, baseline)
        assert 6 < baseline.shape[1] < 35
        assert (baseline[:, 6:] == 0).any()  # some row ended before the others


def test_a_criterion_is_called_once_per_token_in_order() -> None:
    class RecordingCriterion(StoppingCriteria):  # type: ignore[misc]
        def __init__(self) -> None:
            self.texts: list[list[int]] = []

        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            self.texts.append(input_ids[0].tolist())
            return torch.tensor([len(self.texts) == 11])

    arguments = {"input_ids": IDS[1:2], "max_new_tokens": 20, "do_sample": False}
    baseline, speculative = RecordingCriterion(), RecordingCriterion()
    expected = target().generate(**arguments, stopping_criteria=[baseline])
    out = target().generate(
        **arguments,
        stopping_criteria=[speculative],
        custom_generate=outpace.generate,
        draft=target(),
        num_draft_tokens=Fixed(4),
    )
    assert torch.equal(out, expected)
    assert speculative.texts == baseline.texts
    assert len(baseline.texts) == 11


def token_pairs(tokenizer: Any, row: Tensor) -> Iterator[str]:
    texts = (tokenizer.decode(row[i : i + 2]) for i in range(len(row) - 1))
    return (text for text in texts if "\N{REPLACEMENT CHARACTER}" not in text)


def test_stop_strings_stop_where_the_baseline_stops() -> None:
    tokenizer, model = byte_tokenizer(), tiny(vocab_size=272)
    tokenizer.pad_token, tokenizer.padding_side = "<end>", "left"
    inputs = tokenizer(["abc", "the lighthouse"], return_tensors="pt", padding=True)
    arguments = {**inputs, "max_new_tokens": 40, "do_sample": False, "eos_token_id": 271, "pad_token_id": 0}
    whole = model.generate(**arguments)[:, inputs.input_ids.shape[1] :]
    stops = [next(filter(str.isprintable, token_pairs(tokenizer, row[7:]))) for row in whole]
    criterion = StoppingCriteriaList([transformers.StopStringCriteria(tokenizer, stops)])
    baseline = model.generate(**arguments, stopping_criteria=criterion)
    out = model.generate(
        **arguments,
        stopping_criteria=criterion,
        custom_generate=outpace.generate,
        draft=model,
        num_draft_tokens=6,
    )
    assert torch.equal(out, baseline)
    assert baseline.shape[1] - inputs.input_ids.shape[1] < 40


def test_eos_token_id_of_the_call_replaces_that_of_the_model() -> None:
    model = tiny()
    model.generation_config.eos_token_id = model.generate(**batch())[:, 9].tolist()
    lengths = []
    for arguments in ({}, {"eos_token_id": 60}, {"eos_token_id": [60, -1, 999]}):
        baseline = model.generate(**batch(**arguments))
        assert torch.equal(
            baseline, model.generate(**batch(**arguments), custom_generate=outpace.generate, draft=model)
        )
        lengths.append(baseline.shape[1])
    assert lengths[0] < lengths[1]


def test_a_full_context_ends_a_sequence() -> None:
    model = tiny(max_position_embeddings=16)
    model.generation_config.pad_token_id = None
    with pytest.raises(ValueError, match="pad_token_id: got None; it must be a token id"):
        model.generate(**batch(), custom_generate=outpace.generate, draft="lookup")
    out = model.generate(**batch(pad_token_id=60), custom_generate=outpace.generate, draft="lookup")
    lengths = [16 - 3, 16 - 5, 16 - 1]
    assert out.shape == (3, 5 + max(lengths))
    assert torch.equal(out[1, 5 + lengths[1] :], torch.tensor([60] * 4))


# Streamers


def byte_inputs() -> tuple[Any, Any, dict[str, Any]]:
    tokenizer, model = byte_tokenizer(), tiny(vocab_size=272)
    arguments = {**tokenizer("abc", return_tensors="pt"), "max_new_tokens": 30, "do_sample": False}
    return tokenizer, model, arguments


def test_a_text_streamer_prints_the_text_of_the_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, model, arguments = byte_inputs()
    model.generate(**arguments, streamer=transformers.TextStreamer(tokenizer))
    baseline = capsys.readouterr().out
    for streamed in (
        {"streamer": transformers.TextStreamer(tokenizer), "custom_generate": outpace.generate},
        {
            "custom_generate": functools.partial(
                outpace.generate, streamer=transformers.TextStreamer(tokenizer)
            )
        },
    ):
        model.generate(**arguments, **streamed, draft=model, num_draft_tokens=3)
        printed = capsys.readouterr().out
        assert printed == baseline


def test_an_iterator_streamer_gets_the_tokens_of_each_step_and_ends() -> None:
    tokenizer, model, arguments = byte_inputs()
    puts: list[list[int]] = []

    class RecordingStreamer(transformers.TextIteratorStreamer):  # type: ignore[misc]
        def put(self, value: Tensor) -> None:
            puts.append(value.flatten().tolist())
            super().put(value)

    streamer = RecordingStreamer(tokenizer, skip_prompt=True, timeout=30)
    call = functools.partial(
        model.generate,
        **arguments,
        streamer=streamer,
        custom_generate=outpace.generate,
        draft=model,
        num_draft_tokens=Fixed(3),
    )
    thread = threading.Thread(target=call)
    thread.start()
    text = "".join(streamer)
    thread.join()
    new = model.generate(**arguments)[0, arguments["input_ids"].shape[1] :].tolist()
    assert text == tokenizer.decode(new)
    assert puts[0] == arguments["input_ids"][0].tolist()
    assert [token for put in puts[1:] for token in put] == new
    assert [len(put) for put in puts[1:]] == [1, *[4] * 7, 1]


def test_withheld_arguments_are_read_from_the_frame_of_transformers_generate() -> None:
    """Fail with a version of Transformers in which a streamer or an assistant would be ignored silently."""
    found: list[dict[str, Any]] = []

    def custom(model: Any, input_ids: Tensor, **_: Any) -> Tensor:
        found.append(outpace.integrations.transformers._withheld_arguments(model))
        return input_ids

    withheld = {"streamer": transformers.TextStreamer(byte_tokenizer()), "synced_gpus": False}
    target().generate(IDS[1:2], **withheld, assistant_model=small(), custom_generate=custom, max_new_tokens=3)
    assert found == [{**withheld, "assistant_model": small()}]
    assert set(found[0]) == set(outpace.integrations.transformers.WITHHELD)


def test_a_withheld_argument_that_cannot_be_read_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outpace.integrations.transformers, "WITHHELD", ("streamer", "renamed"))
    with pytest.raises(RuntimeError, match="renamed: outpace cannot read this argument of generate"):
        target().generate(**batch(), custom_generate=outpace.generate, draft="lookup")


def test_a_call_outside_transformers_has_no_withheld_arguments() -> None:
    assert outpace.integrations.transformers._withheld_arguments(target()) == {}


def test_a_streamer_is_refused_for_several_rows() -> None:
    class Silent(transformers.generation.streamers.BaseStreamer):  # type: ignore[misc]
        def put(self, value: Tensor) -> None: ...

        def end(self) -> None: ...

    with pytest.raises(ValueError, match="streamer: got it with 3 rows; a streamer supports only one row"):
        target().generate(**batch(), streamer=Silent(), custom_generate=outpace.generate, draft="lookup")


# Pipelines


def test_a_text_generation_pipeline_returns_the_same_text_with_a_draft() -> None:
    tokenizer, model = byte_tokenizer(), tiny(vocab_size=272)
    tokenizer.pad_token, tokenizer.padding_side = "<end>", "left"
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    arguments: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    texts = ["abc", "the lighthouse", "de"]
    for inputs, size in (("abc", None), (texts, None), (texts, 3)):
        baseline = pipe(inputs, batch_size=size, **arguments)
        for draft in ("lookup", model):
            assert (
                pipe(inputs, batch_size=size, **arguments, custom_generate=outpace.generate, draft=draft)
                == baseline
            )
    stats = Stats()
    pipe(texts, **arguments, custom_generate=outpace.generate, draft=model, stats=stats)
    assert stats.new_tokens == 60


# State between calls


def token_counts(model: Any) -> tuple[list[int], Any]:
    """Count the tokens of each forward pass of a model from now on; return the counts and the hook."""
    counts: list[int] = []

    def count(_: Any, arguments: Any, named: dict[str, Any]) -> None:
        counts.append(named["input_ids"].shape[1])

    return counts, model.register_forward_pre_hook(count, with_kwargs=True)


def test_a_prompt_is_not_computed_again_in_the_next_call() -> None:
    model, draft = tiny(), tiny(seed=1)
    prompt = torch.randint(1, V, (1, 50))  # 0 is padding
    arguments = {
        "input_ids": prompt,
        "max_new_tokens": 3,
        "do_sample": False,
        "custom_generate": outpace.generate,
        "num_draft_tokens": 2,
    }
    first = model.generate(**arguments, draft=draft)
    for counts, hook in (token_counts(model), token_counts(draft)):
        assert torch.equal(model.generate(**arguments, draft=draft), first)
        assert max(counts) < 10
        hook.remove()
    counts, hook = token_counts(model)
    forget()
    model.generate(**arguments, draft=draft)
    assert max(counts) == 50


def test_models_are_freed_without_other_references() -> None:
    model, draft = tiny(), tiny(seed=1)
    arguments = {"input_ids": IDS[1:2], "max_new_tokens": 3, "custom_generate": outpace.generate}
    model.generate(**arguments, draft=draft)
    gone = weakref.ref(draft)
    del draft
    gc.collect()
    assert gone() is None
    model.generate(**arguments, draft="lookup")
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_model_may_change_between_calls() -> None:
    model = tiny()
    arguments = {"input_ids": IDS[1:2], "max_new_tokens": 9, "do_sample": False}

    def same() -> bool:
        baseline = model.generate(**arguments)
        return torch.equal(
            baseline, model.generate(**arguments, custom_generate=outpace.generate, draft="lookup")
        )

    assert same()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(-1)
    assert same()
    model.to(torch.float64)
    assert same()
    model.resize_token_embeddings(80)
    assert same()


def test_adapters_may_be_switched_between_calls() -> None:
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, r=4)
    model: Any = peft.get_peft_model(tiny(), config).eval()
    arguments = {"input_ids": IDS[1:2], "max_new_tokens": 15, "do_sample": False}
    texts = []
    for _ in range(2):
        baseline = model.generate(**arguments)
        assert torch.equal(
            baseline, model.generate(**arguments, custom_generate=outpace.generate, draft="lookup")
        )
        with model.disable_adapter():
            without_adapter = model.generate(**arguments)
            assert torch.equal(
                without_adapter, model.generate(**arguments, custom_generate=outpace.generate, draft="lookup")
            )
        texts += [baseline, without_adapter]
    assert not torch.equal(texts[0], texts[1])


def test_threads_generate_at_once_from_one_pair() -> None:
    model, draft, found = tiny(), tiny(seed=1), dict[int, Tensor]()

    def work(token: int) -> None:
        ids = torch.tensor([[token]])
        for _ in range(3):
            found[token] = model.generate(
                input_ids=ids,
                max_new_tokens=20,
                do_sample=False,
                custom_generate=outpace.generate,
                draft=draft,
            )

    threads = [threading.Thread(target=work, args=(token,)) for token in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for token in (1, 2, 3):
        baseline = model.generate(input_ids=torch.tensor([[token]]), max_new_tokens=20, do_sample=False)
        assert torch.equal(found[token], baseline)


def test_a_drafter_in_use_by_another_decoder_is_refused() -> None:
    drafter = outpace.LookupDrafter()
    stream = outpace.Decoder(tiny(), drafter).stream([1, 2], temperature=0, max_new_tokens=5)
    next(stream)
    with pytest.raises(RuntimeError, match="this LookupDrafter is in use by another Decoder"):
        target().generate(**batch(), custom_generate=outpace.generate, draft=drafter)
    stream.close()
    target().generate(**batch(), custom_generate=outpace.generate, draft=drafter)


# Outputs


def test_the_output_has_the_fields_of_transformers_and_stats() -> None:
    stats = Stats()
    arguments = batch(return_dict_in_generate=True)
    for calls in (1, 2):
        out = target().generate(
            **arguments, custom_generate=outpace.generate, draft=target(), num_draft_tokens=3, stats=stats
        )
        assert isinstance(out, transformers.generation.GenerateDecoderOnlyOutput)
        assert (out.scores, out.logits, out.past_key_values) == (None, None, None)
        assert out.stats.new_tokens == 60
        assert out.stats.acceptance_rate == 1
        assert stats.new_tokens == 60 * calls
    assert out[0] is out.sequences
    scored = target().generate(
        **arguments, output_scores=True, custom_generate=outpace.generate, draft=small(), eos_token_id=ENDS
    )
    transition = target().compute_transition_scores(scored.sequences, scored.scores, normalize_logits=True)
    assert transition.shape == (3, scored.sequences.shape[1] - 5)
    assert transition.isfinite().all()


# Invalid arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"draft": None}, 'draft: got None; it must be a smaller model, a Drafter .* or "lookup"'),
        ({"draft": "gpt2"}, "draft: got 'gpt2'; it must be a smaller model, a Drafter"),
        ({"draft": "lokup"}, "draft: got 'lokup'; .*did you mean \"lookup\""),
        ({"draft": 3}, "draft: got int 3; it must be a smaller model, a Drafter"),
        ({"draft": outpace.LookupDrafter}, "draft: got the class LookupDrafter; it must be a smaller"),
        ({"draft": tiny(vocab_size=5000)}, "draft: got a model of 5000 tokens for a target of 61"),
        ({"num_beams": 2}, "num_beams: got 2, which selects beam search; outpace supports"),
        ({"num_beams": 2, "do_sample": True}, "num_beams: got 2, which selects beam sample"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha: got 0.6, which selects contrastive search"),
        ({"dola_layers": "low"}, "dola_layers: got 'low', which selects dola generation"),
        ({"prompt_lookup_num_tokens": 3}, 'prompt_lookup_num_tokens: got 3, .*draft="lookup"'),
        ({"assistant_early_exit": 1}, "assistant_early_exit: got 1, which selects assisted generation"),
        (
            {"assistant_model": tiny(seed=1)},
            "assistant_model: got .*; it must be None .* pass the model as draft=",
        ),
        ({"synced_gpus": True}, "synced_gpus: got True; it must be False"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions: got True"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states: got True"),
        ({"attention_mask": 1 - MASK}, "attention_mask: got 0 for the last token of a row.* on the left"),
        (
            {"position_ids": torch.arange(5)[None] + 1},
            "position_ids: got other positions than 0, 1, 2",
        ),
        ({"rule": "guess"}, "rule: got 'guess'"),
        ({"lenience": 0.5, "rule": "block"}, "lenience: got 0.5"),
        ({"num_draft_tokens": "far"}, "num_draft_tokens: got str 'far'"),
        ({"tempreature": 1.0}, "tempreature"),
    ],
)
def test_an_invalid_argument_is_named_in_the_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        target().generate(**{**batch(), "draft": "lookup", **arguments}, custom_generate=outpace.generate)
    assert target().generate(**batch(), draft="lookup", custom_generate=outpace.generate).shape == (3, 25)


def test_caches_and_embeddings_are_refused() -> None:
    model = target()
    past = model(input_ids=IDS[:, :3], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="past_key_values: got a cache that is not empty"):
        model.generate(**batch(past_key_values=past), custom_generate=outpace.generate, draft="lookup")
    embedded = model.get_input_embeddings()(IDS[1:2])
    with pytest.raises(ValueError, match="inputs_embeds: got a value; it must be left out"):
        model.generate(
            inputs_embeds=embedded, custom_generate=outpace.generate, draft="lookup", max_new_tokens=3
        )


@pytest.mark.parametrize("family", SEQ2SEQ)
@pytest.mark.parametrize("draft", ["model", "lookup"])
def test_encoder_decoder_models_generate_the_greedy_text_of_transformers(family: str, draft: str) -> None:
    """The encoder does not see the padding of prompts with different lengths."""
    model = tiny_seq2seq(family)
    drafter: Any = tiny_seq2seq(family, seed=1) if draft == "model" else draft
    encoder_inputs = sources(family, 3, 9, 5)
    if family == "whisper":
        start = torch.full((3, 1), model.config.decoder_start_token_id)
        inputs = {"input_features": torch.stack(encoder_inputs), "decoder_input_ids": start}
    else:
        longest = max(map(len, encoder_inputs))
        ids = torch.tensor([[*one, *[0] * (longest - len(one))] for one in encoder_inputs])
        inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    expected = GenerationMixin.generate(model, **inputs, **options)
    found = GenerationMixin.generate(
        model, **inputs, **options, custom_generate=outpace.generate, draft=drafter
    )
    assert torch.equal(found, expected)
    options |= {"return_dict_in_generate": True, "output_scores": True, "num_return_sequences": 2}
    options |= {"do_sample": True, "top_k": 1}
    whole = GenerationMixin.generate(
        model, **inputs, **options, custom_generate=outpace.generate, draft=drafter
    )
    assert torch.equal(whole.sequences[::2], expected)
    assert len(whole.scores) == 20


@pytest.mark.parametrize("length", [4, 5])
def test_the_same_tokens_are_suppressed_as_in_transformers(length: int) -> None:
    """Suppress tokens everywhere, and at the first token; ignore ids outside the vocabulary."""
    processors: list[Any] = [
        transformers.SuppressTokensLogitsProcessor([3, 7, V + 5, -1]),
        transformers.SuppressTokensAtBeginLogitsProcessor([9, 11], 4),
    ]
    ids, scores = torch.randint(V, (1, length)), torch.randn(1, V)
    (sampling,) = samplings(processors, True, ids, [ids[0].tolist()], torch.device("cpu"))
    expected, found = scores, scores
    for one, other in zip(processors, sampling.processors, strict=True):
        expected, found = one(ids, expected), other(ids, found)
    assert torch.equal(found, expected)
    assert int(found.isinf().sum()) == (4 if length == 4 else 2)


def test_a_decoder_serves_several_calls_of_generate() -> None:
    model = tiny()
    decoder = outpace.Decoder(model, "lookup", num_draft_tokens=3)
    expected = model.generate(input_ids=IDS[:1], max_new_tokens=12, do_sample=False)
    for _ in range(2):
        found = model.generate(
            input_ids=IDS[:1],
            max_new_tokens=12,
            do_sample=False,
            custom_generate=outpace.generate,
            decoder=decoder,
        )
        assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="one or the other"):
        model.generate(input_ids=IDS[:1], custom_generate=outpace.generate, decoder=decoder, draft="lookup")
    with pytest.raises(ValueError, match="whose target is the model"):
        tiny().generate(input_ids=IDS[:1], custom_generate=outpace.generate, decoder=decoder)


def test_the_error_for_unusable_logits_names_the_row() -> None:
    class Poison(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores * torch.nan if input_ids[0, 0] == 9 and input_ids.shape[1] > 7 else scores

    with pytest.raises(ValueError, match="row 1: the logits at position"):
        target().generate(
            **batch(), logits_processor=[Poison()], custom_generate=outpace.generate, draft="lookup"
        )


def test_decoder_returns_scores_and_logits_and_stops_when_a_function_says_so() -> None:
    decoder = outpace.Decoder(target(), target(), num_draft_tokens=Fixed(4))
    whole = decoder.generate([9, 8, 7], temperature=0, max_new_tokens=20, scores=True, logits=True)
    assert whole.scores is not None
    assert whole.logits is not None
    assert whole.scores.shape == (20, V)
    assert whole.scores.argmax(-1).tolist() == whole.token_ids
    torch.testing.assert_close(whole.scores, whole.logits)
    sampled = decoder.generate(
        [9, 8, 7], outpace.SamplingParams(0.7, top_k=5), seed=1, max_new_tokens=9, scores=True, logprobs=True
    )
    assert sampled.logits is None
    assert sampled.scores is not None
    assert (sampled.scores.isfinite().sum(-1) == 5).all()
    logprobs = sampled.scores.log_softmax(-1).gather(1, torch.tensor(sampled.token_ids)[:, None])[:, 0]
    assert logprobs.tolist() == pytest.approx(sampled.logprobs, abs=1e-5)
    for length in (1, 3, 7):
        seen: list[int] = []

        def reached(row: Any, length: int = length, seen: list[int] = seen) -> bool:
            seen.append(row.tokens[-1])
            return len(row.new_tokens) == length

        cut = decoder.generate(
            [9, 8, 7], temperature=0, max_new_tokens=20, stop_when=reached, scores=True, ignore_eos=True
        )
        assert cut.token_ids == seen == whole.token_ids[:length]
        assert cut.finish_reason == "stop"
        assert cut.scores is not None
        assert len(cut.scores) == length


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("input_device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["nothing", "repetition_penalty", "suppress_tokens", "many"])
def test_cuda_models_accept_input_ids_on_cpu_and_cuda(name: str, input_device: str) -> None:
    # In double precision, no two logits are nearly equal.
    model, draft = tiny().double().cuda(), tiny(seed=1).double().cuda()
    ends = StoppingCriteriaList([EndsIn()])
    where = {"input_ids": IDS.to(input_device), "attention_mask": MASK.to(input_device)}
    baseline = model.generate(**batch(input_ids=IDS.cuda(), attention_mask=MASK.cuda(), **ARGUMENTS[name]()))
    for proposer in (draft, model, "lookup"):
        arguments = batch(**where, **ARGUMENTS[name](), return_dict_in_generate=True, output_scores=True)
        out = model.generate(**arguments, custom_generate=outpace.generate, draft=proposer)
        assert torch.equal(out.sequences.cpu(), baseline.cpu())
        assert out.sequences.device.type == out.scores[0].device.type == input_device
    stopped = batch(**where, eos_token_id=60, stopping_criteria=ends)
    cut = model.generate(**stopped, custom_generate=outpace.generate, draft=model)
    on_cuda = batch(input_ids=IDS.cuda(), attention_mask=MASK.cuda(), eos_token_id=60, stopping_criteria=ends)
    assert torch.equal(cut.cpu(), model.generate(**on_cuda).cpu())


def test_warpers_in_any_order_give_the_logits_of_transformers() -> None:
    warpers = [
        TemperatureLogitsWarper(0.6),
        TopKLogitsWarper(12),
        TopPLogitsWarper(0.7),
        transformers.MinPLogitsWarper(0.05),
        transformers.RepetitionPenaltyLogitsProcessor(1.7),
    ]
    logits = 4 * torch.randn(3, V)
    prompts = [row[mask.bool()].tolist() for row, mask in zip(IDS, MASK, strict=True)]
    prefix = outpace.Prefix.of(prompts, [3, 5, 1])
    for order in itertools.permutations(warpers):
        expected = LogitsProcessorList(order)(IDS, logits)
        rows = samplings(order, True, IDS, prompts, IDS.device)
        made = outpace.sampling.adjust(logits, rows, prefix)
        torch.testing.assert_close(made, expected)


def test_a_kept_decoder_with_graph_executor_is_freed_with_its_models() -> None:
    pool = DecoderPool()
    model, draft = tiny(), tiny(seed=1)
    kept: list[Any] = []
    for _ in range(2):
        create = functools.partial(Decoder, model, draft, engine=True, num_draft_tokens=3)
        with pool.lend(model, draft, "token", create) as decoder:
            kept.append(weakref.ref(decoder))
            out = decoder.generate([5, 6, 7], temperature=0, max_new_tokens=9)
            assert out.token_ids == greedy(model, [5, 6, 7], 9)
        del decoder, create
    assert kept[0]() is kept[1]() is not None
    gone = [weakref.ref(model), weakref.ref(draft), kept[0]]
    del draft
    gc.collect()
    assert [one() is None for one in gone] == [False, True, True]
    with pool.lend(model, "lookup", "token", functools.partial(Decoder, model, "lookup", engine=True)) as one:
        one.generate([5, 6, 7], temperature=0, max_new_tokens=9)
    del model, one
    gc.collect()
    assert gone[0]() is None


def test_few_decoders_are_kept_for_a_target() -> None:
    pool, model = DecoderPool(), tiny()
    for lenience in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        with pool.lend(model, "lookup", lenience, functools.partial(Decoder, model, "lookup")):
            pass
    assert len(pool._idle[model]) == 4
    pool.clear()
    assert not pool._idle
