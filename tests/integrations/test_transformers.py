"""`custom_generate=outpace.generate`: what `model.generate` gives, drafted."""

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
from outpace import Fixed, Stats
from outpace.integrations.processors import Given, samplings
from tests.statistical import chisquare
from tests.tiny import SEQ2SEQ, V, byte_tokenizer, sources, tiny, tiny_seq2seq

ours = outpace.generate
forget = outpace.integrations.transformers.forget

IDS = torch.tensor([[0, 0, 5, 6, 7], [9, 8, 7, 6, 5], [0, 0, 0, 0, 3]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]])
ENDS = [3, 7, 9, 11, 30]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny models are faster on one, above all where others want the rest."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def target() -> Any:
    return tiny()


@functools.cache
def small() -> Any:
    """A draft that agrees with the target often, not always."""
    model = tiny()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    return model


def batch(**changes: Any) -> dict[str, Any]:
    return {"input_ids": IDS, "attention_mask": MASK, "max_new_tokens": 20, "do_sample": False, **changes}


def drafters() -> list[Any]:
    return [small(), target(), "lookup", outpace.RandomDrafter(V), outpace.LookupDrafter(min_ngram=1)]


class ForbidNext(LogitsProcessor):  # type: ignore[misc]
    """Forbids a few tokens that depend on how long the text is and on the last token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        last = input_ids[:, -1:] * 3 + input_ids.shape[1]
        return scores.scatter(1, torch.cat((last % V, (last + 1) % V), 1), -torch.inf)


class Counting(LogitsProcessor):  # type: ignore[misc]
    """What it forbids depends on how often it was called: once a token, in plain generation."""

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
def test_greedy_batches_with_padding_are_transformers_own(name: str) -> None:
    """Tokens, shapes, scores and logits, for each of the usual arguments and every kind of draft."""
    slow = name in ("guidance_scale", "negative_prompt_ids", "watermarking_config")
    asked: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    asked |= {"max_new_tokens": 8 if slow else 20}
    plain = target().generate(**batch(**asked, **ARGUMENTS[name]()))
    for draft in drafters()[slow:2] if slow else drafters():
        out = target().generate(
            **batch(**asked, **ARGUMENTS[name]()),
            custom_generate=ours,
            draft=draft,
            num_draft_tokens=Fixed(4),
        )
        assert torch.equal(out.sequences, plain.sequences)
        ends = [out.sequences.shape[1] - IDS.shape[1]] * len(IDS)
        if "eos_token_id" in ARGUMENTS[name]():
            eos = torch.tensor(ARGUMENTS[name]()["eos_token_id"])
            found = torch.isin(out.sequences[:, IDS.shape[1] :], eos).long()
            ends = [int(row.argmax()) + 1 if row.any() else len(row) for row in found]
        for mine, theirs in ((out.scores, plain.scores), (out.logits, plain.logits)):
            for i, (one, other) in enumerate(zip(mine, theirs, strict=True)):
                live = torch.tensor([i < end for end in ends])
                torch.testing.assert_close(one[live], other[live], rtol=1e-4, atol=1e-4)
                assert not one[~live].any()
                assert one.dtype is torch.float32
                one[0, 0] = 1.0  # it is the caller's


def test_a_target_that_drafts_for_itself_is_always_right() -> None:
    for name in ("nothing", "repetition_penalty", "logits_processor", "begin_suppress_tokens"):
        stats, asked = Stats(), batch(**ARGUMENTS[name](), max_new_tokens=21)
        target().generate(**asked, custom_generate=ours, draft=target(), num_draft_tokens=4, stats=stats)
        assert stats.acceptance_rate == 1, name
        assert stats.tokens_per_pass == 21 / 5


@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_every_rule_is_greedy_where_sampling_is_off(rule: str) -> None:
    plain = target().generate(**batch())
    assert torch.equal(plain, target().generate(**batch(), custom_generate=ours, draft=small(), rule=rule))


def test_inner_holes_of_a_mask_are_left_out_as_in_transformers() -> None:
    mask = MASK.clone()
    mask[1, 2] = 0
    plain = target().generate(**batch(attention_mask=mask, repetition_penalty=1.4))
    out = target().generate(
        **batch(attention_mask=mask, repetition_penalty=1.4), custom_generate=ours, draft="lookup"
    )
    assert torch.equal(out, plain)


def test_the_limit_may_be_a_total_length_or_come_from_criteria() -> None:
    for limit in (
        {"max_new_tokens": None, "max_length": 12},
        {"stopping_criteria": StoppingCriteriaList([transformers.MaxLengthCriteria(8)])},
        {"max_time": 1e-9},
    ):
        plain = target().generate(**batch(**limit))
        assert torch.equal(
            plain,
            target().generate(**batch(**limit), custom_generate=ours, draft=target(), num_draft_tokens=8),
        )


# Sampling


def test_warpers_are_native_where_order_allows_and_processors_elsewhere() -> None:
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
    padded = made(penalty, temperature)[0]  # before 5.23, the penalty of Transformers counts padding
    assert (padded.temperature, padded.repetition_penalty) == (0.7, 1)
    (given,) = padded.processors
    assert isinstance(given, Given)
    assert given.processors == (penalty,)
    assert made(temperature, k, typical)[1] == outpace.SamplingParams(processors=[temperature, k, typical])
    assert made(k, temperature)[1] == outpace.SamplingParams(temperature=0.7, processors=[k])
    assert made(k, k)[1] == outpace.SamplingParams(top_k=9, processors=[k])
    assert made(TopKLogitsWarper(3, min_tokens_to_keep=5))[1].top_k == 0
    assert made(penalty, k, do_sample=False)[1] == outpace.SamplingParams(
        temperature=0, repetition_penalty=1.2, processors=[k]
    )


def test_a_penalty_that_ignores_padding_ignores_each_rows_own() -> None:
    """As Transformers prepares it since 5.23: with a number for each row, or for each prompt."""
    penalty = transformers.RepetitionPenaltyLogitsProcessor(1.2)
    penalty.prompt_ignore_length = torch.tensor([2, 0, 4])
    first, whole, last = samplings([penalty], True, IDS, [[5, 6, 7], [9, 8, 7, 6, 5], [3]], IDS.device)
    assert whole == outpace.SamplingParams(repetition_penalty=1.2)
    for sampling, padding in ((first, 2), (last, 4)):
        (given,) = sampling.processors
        assert isinstance(given, Given)
        (own,) = given.processors
        assert own.prompt_ignore_length == padding  # type: ignore[attr-defined]
    twice = samplings([penalty], True, IDS.repeat_interleave(2, 0), [[1] * 5] * 6, IDS.device)
    assert [one.repetition_penalty for one in twice] == [1, 1, 1.2, 1.2, 1, 1]
    penalty.prompt_ignore_length = torch.tensor([0, 0, 0])
    each = samplings([penalty], True, IDS, [[1] * 5] * 3, IDS.device)
    assert each[0] is each[1] is each[2]
    assert each[0] == outpace.SamplingParams(repetition_penalty=1.2)
    assert isinstance(penalty.prompt_ignore_length, Tensor)  # it was left as it is


def test_sampled_scores_are_what_transformers_says_of_the_same_text() -> None:
    way = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02}
    way |= {"repetition_penalty": 1.2, "typical_p": 0.95}
    asked = batch(**way, return_dict_in_generate=True, output_scores=True)
    out = target().generate(**asked, custom_generate=ours, draft=small(), seed=3)
    config = transformers.GenerationConfig(**way)
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
    def draw(**arguments: Any) -> Tensor:
        sampled = batch(do_sample=True, num_return_sequences=2, **arguments)
        out: Tensor = target().generate(**sampled, custom_generate=ours, draft=small())
        return out

    draw()  # models are made, which takes random numbers
    transformers.set_seed(5)
    once, other = draw(), draw()
    torch.manual_seed(5)
    assert torch.equal(once, draw())
    assert not torch.equal(once, other)
    assert once.shape == (6, 25)
    assert len({tuple(row) for row in once[:, 5:].tolist()}) == 6
    assert torch.equal(draw(seed=7), draw(seed=7))
    assert len({tuple(row) for row in draw(seed=7)[:, 5:].tolist()}) == 6
    assert torch.equal(draw(seed=[1, 2, 3])[2:4], draw(seed=[9, 2, 8])[2:4])
    with pytest.raises(ValueError, match="seed: got 2 for 3 prompts"):
        draw(seed=[1, 2])


def test_rule_match_gives_one_text_whatever_drafts() -> None:
    texts = [
        target().generate(
            **batch(do_sample=True, top_k=30), custom_generate=ours, draft=draft, rule="match", seed=4
        )
        for draft in drafters()
    ]
    assert all(torch.equal(texts[0], text) for text in texts)


@pytest.mark.statistical
@pytest.mark.parametrize("draft", ["model", "lookup"])
def test_sampled_tokens_have_exactly_the_targets_distribution(draft: str) -> None:
    """The first two tokens together, after temperature, top-k, top-p and two processors, behind padding."""
    way = {
        "temperature": 1.4,
        "top_k": 6,
        "top_p": 0.95,
        "repetition_penalty": 1.3,
        "begin_suppress_tokens": [5],
    }
    ids, mask, n = torch.tensor([[0, 5, 6, 5, 6]]), torch.tensor([[0, 1, 1, 1, 1]]), 6000
    out = target().generate(
        **{"input_ids": ids, "attention_mask": mask, "max_new_tokens": 2, "do_sample": True, **way},
        num_return_sequences=n,
        custom_generate=ours,
        draft=small() if draft == "model" else outpace.LookupDrafter(min_ngram=1),
        num_draft_tokens=Fixed(1),
        seed=20230213,
    )
    config = transformers.GenerationConfig(do_sample=True, **way)
    processors = target()._get_logits_processor(config, 5, device="cpu")

    def chances(*more: int) -> Tensor:
        with torch.no_grad():
            logits = target()(input_ids=torch.tensor([[*ids[0, 1:].tolist(), *more]])).logits[:, -1].double()
        adjusted: Tensor = processors(torch.tensor([[*ids[0].tolist(), *more]]), logits)
        return adjusted.softmax(-1)[0]

    first = chances()
    expected = torch.stack([first[i] * chances(i) if first[i] > 0 else torch.zeros(V) for i in range(V)])
    counts = torch.bincount(out[:, 5] * V + out[:, 6], minlength=V * V)
    chisquare.agrees(
        counts.tolist(), expected.flatten().tolist(), f"custom_generate, {draft}", chisquare.SOME
    )


# Ends


class EndsIn(StoppingCriteria):  # type: ignore[misc]
    """Stops a text whose last tokens sum to a multiple of 6; holds what cannot be copied."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        assert scores is None
        done = input_ids[:, -2:].sum(1) % 6 == 0
        return done | self.cancelled.is_set()


class Unsure(StoppingCriteria):  # type: ignore[misc]
    """Stops where the last score's maximum is low."""

    def __call__(self, input_ids: Tensor, scores: tuple[Tensor, ...], **kwargs: Any) -> Tensor:
        return scores[-1].amax(-1) < 3.6


@pytest.mark.parametrize("g", [0, 1, 3, 8])
def test_criteria_stop_inside_a_block_where_plain_generation_would(g: int) -> None:
    for asked in (
        {"stopping_criteria": StoppingCriteriaList([EndsIn()])},
        {
            "stopping_criteria": StoppingCriteriaList([Unsure()]),
            "return_dict_in_generate": True,
            "output_scores": True,
        },
    ):
        asked |= {"eos_token_id": 60, "max_new_tokens": 30}
        plain = target().generate(**batch(**asked))
        out = target().generate(**batch(**asked), custom_generate=ours, draft=target(), num_draft_tokens=g)
        plain, out = (one if isinstance(one, Tensor) else one.sequences for one in (plain, out))
        assert torch.equal(out, plain)
        assert 6 < plain.shape[1] < 35
        assert (plain[:, 6:] == 0).any()  # some row ended before others


def test_a_criterion_is_asked_once_a_token_in_order() -> None:
    class Asked(StoppingCriteria):  # type: ignore[misc]
        def __init__(self) -> None:
            self.texts: list[list[int]] = []

        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            self.texts.append(input_ids[0].tolist())
            return torch.tensor([len(self.texts) == 11])

    asked = {"input_ids": IDS[1:2], "max_new_tokens": 20, "do_sample": False}
    plain, drafted = Asked(), Asked()
    expected = target().generate(**asked, stopping_criteria=[plain])
    out = target().generate(
        **asked, stopping_criteria=[drafted], custom_generate=ours, draft=target(), num_draft_tokens=Fixed(4)
    )
    assert torch.equal(out, expected)
    assert drafted.texts == plain.texts
    assert len(plain.texts) == 11


def two_tokens_each(tokenizer: Any, row: Tensor) -> Iterator[str]:
    texts = (tokenizer.decode(row[i : i + 2]) for i in range(len(row) - 1))
    return (text for text in texts if "\N{REPLACEMENT CHARACTER}" not in text)


def test_stop_strings_stop_where_transformers_stops() -> None:
    tokenizer, model = byte_tokenizer(), tiny(vocab_size=272)
    tokenizer.pad_token, tokenizer.padding_side = "<end>", "left"
    inputs = tokenizer(["abc", "the lighthouse"], return_tensors="pt", padding=True)
    asked = {**inputs, "max_new_tokens": 40, "do_sample": False, "eos_token_id": 271, "pad_token_id": 0}
    whole = model.generate(**asked)[:, inputs.input_ids.shape[1] :]
    stops = [next(filter(str.isprintable, two_tokens_each(tokenizer, row[7:]))) for row in whole]
    criterion = StoppingCriteriaList([transformers.StopStringCriteria(tokenizer, stops)])
    plain = model.generate(**asked, stopping_criteria=criterion)
    out = model.generate(
        **asked, stopping_criteria=criterion, custom_generate=ours, draft=model, num_draft_tokens=6
    )
    assert torch.equal(out, plain)
    assert plain.shape[1] - inputs.input_ids.shape[1] < 40


def test_the_end_of_text_of_the_call_replaces_that_of_the_model() -> None:
    model = tiny()
    model.generation_config.eos_token_id = model.generate(**batch())[:, 9].tolist()
    lengths = []
    for asked in ({}, {"eos_token_id": 60}, {"eos_token_id": [60, -1, 999]}):
        plain = model.generate(**batch(**asked))
        assert torch.equal(plain, model.generate(**batch(**asked), custom_generate=ours, draft=model))
        lengths.append(plain.shape[1])
    assert lengths[0] < lengths[1]


def test_the_context_ends_a_text() -> None:
    model = tiny(max_position_embeddings=16)
    model.generation_config.pad_token_id = None
    with pytest.raises(ValueError, match="pad_token_id: nothing was given, and rows that end early need one"):
        model.generate(**batch(), custom_generate=ours, draft="lookup")
    out = model.generate(**batch(pad_token_id=60), custom_generate=ours, draft="lookup")
    lengths = [16 - 3, 16 - 5, 16 - 1]
    assert out.shape == (3, 5 + max(lengths))
    assert torch.equal(out[1, 5 + lengths[1] :], torch.tensor([60] * 4))


# Streamers


def words() -> tuple[Any, Any, dict[str, Any]]:
    tokenizer, model = byte_tokenizer(), tiny(vocab_size=272)
    asked = {**tokenizer("abc", return_tensors="pt"), "max_new_tokens": 30, "do_sample": False}
    return tokenizer, model, asked


def test_a_text_streamer_prints_what_plain_generation_prints(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, model, asked = words()
    model.generate(**asked, streamer=transformers.TextStreamer(tokenizer))
    plain = capsys.readouterr().out
    for streamed in (
        {"streamer": transformers.TextStreamer(tokenizer), "custom_generate": ours},
        {"custom_generate": functools.partial(ours, streamer=transformers.TextStreamer(tokenizer))},
    ):
        model.generate(**asked, **streamed, draft=model, num_draft_tokens=3)
        printed = capsys.readouterr().out
        assert printed == plain


def test_an_iterator_streamer_ends_and_gets_blocks_as_they_come() -> None:
    tokenizer, model, asked = words()
    puts: list[list[int]] = []

    class Watched(transformers.TextIteratorStreamer):  # type: ignore[misc]
        def put(self, value: Tensor) -> None:
            puts.append(value.flatten().tolist())
            super().put(value)

    streamer = Watched(tokenizer, skip_prompt=True, timeout=30)
    call = functools.partial(
        model.generate,
        **asked,
        streamer=streamer,
        custom_generate=ours,
        draft=model,
        num_draft_tokens=Fixed(3),
    )
    thread = threading.Thread(target=call)
    thread.start()
    text = "".join(streamer)
    thread.join()
    new = model.generate(**asked)[0, asked["input_ids"].shape[1] :].tolist()
    assert text == tokenizer.decode(new)
    assert puts[0] == asked["input_ids"][0].tolist()
    assert [token for put in puts[1:] for token in put] == new
    assert [len(put) for put in puts[1:]] == [1, *[4] * 7, 1]


def test_arguments_that_transformers_keeps_back_are_found_in_its_frame() -> None:
    """Fails with a version of Transformers in which a streamer or an assistant would be ignored silently."""
    found: list[dict[str, Any]] = []

    def custom(model: Any, input_ids: Tensor, **_: Any) -> Tensor:
        found.append(outpace.integrations.transformers._kept_back(model))
        return input_ids

    given = {"streamer": transformers.TextStreamer(byte_tokenizer()), "synced_gpus": False}
    target().generate(IDS[1:2], **given, assistant_model=small(), custom_generate=custom, max_new_tokens=3)
    assert found == [{**given, "assistant_model": small()}]
    assert set(found[0]) == set(outpace.integrations.transformers.KEPT)


def test_an_argument_that_transformers_no_longer_shows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outpace.integrations.transformers, "KEPT", ("streamer", "renamed"))
    with pytest.raises(RuntimeError, match="renamed: outpace cannot see whether generate was given it"):
        target().generate(**batch(), custom_generate=ours, draft="lookup")


def test_a_call_outside_transformers_has_nothing_kept_back() -> None:
    assert outpace.integrations.transformers._kept_back(target()) == {}


def test_a_streamer_takes_one_row() -> None:
    class Silent(transformers.generation.streamers.BaseStreamer):  # type: ignore[misc]
        def put(self, value: Tensor) -> None: ...

        def end(self) -> None: ...

    with pytest.raises(ValueError, match="streamer: got 3 rows; a streamer takes a single one"):
        target().generate(**batch(), streamer=Silent(), custom_generate=ours, draft="lookup")


# Pipelines


def test_a_text_generation_pipeline_writes_the_same_with_a_draft() -> None:
    tokenizer, model = byte_tokenizer(), tiny(vocab_size=272)
    tokenizer.pad_token, tokenizer.padding_side = "<end>", "left"
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
    asked: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    texts = ["abc", "the lighthouse", "de"]
    for inputs, size in (("abc", None), (texts, None), (texts, 3)):
        plain = pipe(inputs, batch_size=size, **asked)
        for draft in ("lookup", model):
            assert pipe(inputs, batch_size=size, **asked, custom_generate=ours, draft=draft) == plain
    stats = Stats()
    pipe(texts, **asked, custom_generate=ours, draft=model, stats=stats)
    assert stats.new_tokens == 60


# Between calls


def fed(model: Any) -> tuple[list[int], Any]:
    """How many tokens each pass of a model takes in, from now on."""
    counts: list[int] = []

    def count(_: Any, arguments: Any, named: dict[str, Any]) -> None:
        counts.append(named["input_ids"].shape[1])

    return counts, model.register_forward_pre_hook(count, with_kwargs=True)


def test_a_prompt_is_not_computed_again_in_the_next_call() -> None:
    model, draft = tiny(), tiny(seed=1)
    prompt = torch.randint(1, V, (1, 50))  # 0 is padding
    asked = {
        "input_ids": prompt,
        "max_new_tokens": 3,
        "do_sample": False,
        "custom_generate": ours,
        "num_draft_tokens": 2,
    }
    first = model.generate(**asked, draft=draft)
    for counts, hook in (fed(model), fed(draft)):
        assert torch.equal(model.generate(**asked, draft=draft), first)
        assert max(counts) < 10
        hook.remove()
    counts, hook = fed(model)
    forget()
    model.generate(**asked, draft=draft)
    assert max(counts) == 50


def test_models_are_not_kept_alive() -> None:
    model, draft = tiny(), tiny(seed=1)
    asked = {"input_ids": IDS[1:2], "max_new_tokens": 3, "custom_generate": ours}
    model.generate(**asked, draft=draft)
    gone = weakref.ref(draft)
    del draft
    gc.collect()
    assert gone() is None
    model.generate(**asked, draft="lookup")
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_model_may_change_between_calls() -> None:
    model = tiny()
    asked = {"input_ids": IDS[1:2], "max_new_tokens": 9, "do_sample": False}

    def same() -> bool:
        plain = model.generate(**asked)
        return torch.equal(plain, model.generate(**asked, custom_generate=ours, draft="lookup"))

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
    asked = {"input_ids": IDS[1:2], "max_new_tokens": 15, "do_sample": False}
    texts = []
    for _ in range(2):
        plain = model.generate(**asked)
        assert torch.equal(plain, model.generate(**asked, custom_generate=ours, draft="lookup"))
        with model.disable_adapter():
            bare = model.generate(**asked)
            assert torch.equal(bare, model.generate(**asked, custom_generate=ours, draft="lookup"))
        texts += [plain, bare]
    assert not torch.equal(texts[0], texts[1])


def test_threads_generate_at_once_from_one_pair() -> None:
    model, draft, found = tiny(), tiny(seed=1), dict[int, Tensor]()

    def work(token: int) -> None:
        ids = torch.tensor([[token]])
        for _ in range(3):
            found[token] = model.generate(
                input_ids=ids, max_new_tokens=20, do_sample=False, custom_generate=ours, draft=draft
            )

    threads = [threading.Thread(target=work, args=(token,)) for token in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for token in (1, 2, 3):
        plain = model.generate(input_ids=torch.tensor([[token]]), max_new_tokens=20, do_sample=False)
        assert torch.equal(found[token], plain)


def test_a_drafter_that_is_at_work_says_so() -> None:
    drafter = outpace.LookupDrafter()
    stream = outpace.Decoder(tiny(), drafter).stream([1, 2], temperature=0, max_new_tokens=5)
    next(stream)
    with pytest.raises(RuntimeError, match="this LookupDrafter is at work for another Decoder"):
        target().generate(**batch(), custom_generate=ours, draft=drafter)
    stream.close()
    target().generate(**batch(), custom_generate=ours, draft=drafter)


# What comes back


def test_the_output_is_transformers_own_with_stats() -> None:
    stats = Stats()
    asked = batch(return_dict_in_generate=True)
    for calls in (1, 2):
        out = target().generate(
            **asked, custom_generate=ours, draft=target(), num_draft_tokens=3, stats=stats
        )
        assert isinstance(out, transformers.generation.GenerateDecoderOnlyOutput)
        assert (out.scores, out.logits, out.past_key_values) == (None, None, None)
        assert out.stats.new_tokens == 60
        assert out.stats.acceptance_rate == 1
        assert stats.new_tokens == 60 * calls
    assert out[0] is out.sequences
    scored = target().generate(
        **asked, output_scores=True, custom_generate=ours, draft=small(), eos_token_id=ENDS
    )
    transition = target().compute_transition_scores(scored.sequences, scored.scores, normalize_logits=True)
    assert transition.shape == (3, scored.sequences.shape[1] - 5)
    assert transition.isfinite().all()


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"draft": None}, 'draft: nothing was given; pass a smaller model, a Drafter .* or "lookup"'),
        ({"draft": "gpt2"}, "draft: got 'gpt2'; it must be a smaller model, a Drafter"),
        ({"draft": "lokup"}, "draft: got 'lokup'; .*did you mean \"lookup\""),
        ({"draft": 3}, "draft: got int 3; it must be a smaller model, a Drafter"),
        ({"draft": outpace.LookupDrafter}, "draft: got type .*; it must be a smaller model"),
        ({"draft": tiny(vocab_size=5000)}, "drafter: it knows 5000 tokens and the target 61"),
        ({"num_beams": 2}, "num_beams: asks for beam search; outpace does greedy search and sampling"),
        ({"num_beams": 2, "do_sample": True}, "num_beams: asks for beam sample"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha: asks for contrastive search"),
        ({"dola_layers": "low"}, "dola_layers: asks for dola generation"),
        ({"prompt_lookup_num_tokens": 3}, 'prompt_lookup_num_tokens: asks for assisted .*draft="lookup"'),
        ({"assistant_early_exit": 1}, "assistant_early_exit: asks for assisted generation"),
        (
            {"assistant_model": tiny(seed=1)},
            "assistant_model: Transformers keeps it .* pass the model as draft=",
        ),
        ({"synced_gpus": True}, "synced_gpus: got True; .* it must be False"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions: got True"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states: got True"),
        ({"attention_mask": 1 - MASK}, "attention_mask: it hides the last token of a row; pad on the left"),
        (
            {"position_ids": torch.arange(5)[None] + 1},
            "position_ids: outpace counts each row's tokens from 0",
        ),
        ({"rule": "guess"}, "rule: got 'guess'"),
        ({"lenience": 0.5, "rule": "block"}, "lenience: got 0.5"),
        ({"num_draft_tokens": "far"}, "num_draft_tokens: got str 'far'"),
        ({"tempreature": 1.0}, "tempreature"),
    ],
)
def test_what_does_not_fit_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        target().generate(**{**batch(), "draft": "lookup", **arguments}, custom_generate=ours)
    assert target().generate(**batch(), draft="lookup", custom_generate=ours).shape == (3, 25)


def test_caches_and_embeddings_are_refused() -> None:
    model = target()
    past = model(input_ids=IDS[:, :3], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="past_key_values: got a cache that is not empty"):
        model.generate(**batch(past_key_values=past), custom_generate=ours, draft="lookup")
    embedded = model.get_input_embeddings()(IDS[1:2])
    with pytest.raises(ValueError, match="inputs_embeds: outpace scores token ids alone"):
        model.generate(inputs_embeds=embedded, custom_generate=ours, draft="lookup", max_new_tokens=3)


@pytest.mark.parametrize("family", SEQ2SEQ)
@pytest.mark.parametrize("draft", ["model", "lookup"])
def test_encoder_decoder_models_write_transformers_greedy_texts(family: str, draft: str) -> None:
    """Of texts of different lengths, whose padding the encoder does not see."""
    model = tiny_seq2seq(family)
    own: Any = tiny_seq2seq(family, seed=1) if draft == "model" else draft
    read = sources(family, 3, 9, 5)
    if family == "whisper":
        start = torch.full((3, 1), model.config.decoder_start_token_id)
        given = {"input_features": torch.stack(read), "decoder_input_ids": start}
    else:
        longest = max(map(len, read))
        ids = torch.tensor([[*one, *[0] * (longest - len(one))] for one in read])
        given = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
    expected = GenerationMixin.generate(model, **given, **options)
    found = GenerationMixin.generate(model, **given, **options, custom_generate=ours, draft=own)
    assert torch.equal(found, expected)
    options |= {"return_dict_in_generate": True, "output_scores": True, "num_return_sequences": 2}
    options |= {"do_sample": True, "top_k": 1}
    whole = GenerationMixin.generate(model, **given, **options, custom_generate=ours, draft=own)
    assert torch.equal(whole.sequences[::2], expected)
    assert len(whole.scores) == 20


@pytest.mark.parametrize("length", [4, 5])
def test_suppressed_tokens_are_those_that_transformers_suppresses(length: int) -> None:
    """Everywhere, and where the first token is drawn; ids that no token has are ignored."""
    theirs: list[Any] = [
        transformers.SuppressTokensLogitsProcessor([3, 7, V + 5, -1]),
        transformers.SuppressTokensAtBeginLogitsProcessor([9, 11], 4),
    ]
    ids, scores = torch.randint(V, (1, length)), torch.randn(1, V)
    (own,) = samplings(theirs, True, ids, [ids[0].tolist()], torch.device("cpu"))
    expected, found = scores, scores
    for one, other in zip(theirs, own.processors, strict=True):
        expected, found = one(ids, expected), other(ids, found)
    assert torch.equal(found, expected)
    assert int(found.isinf().sum()) == (4 if length == 4 else 2)


def test_a_decoder_can_be_used_again_and_again() -> None:
    model = tiny()
    decoder = outpace.Decoder(model, "lookup", num_draft_tokens=3)
    expected = model.generate(input_ids=IDS[:1], max_new_tokens=12, do_sample=False)
    for _ in range(2):
        found = model.generate(
            input_ids=IDS[:1], max_new_tokens=12, do_sample=False, custom_generate=ours, decoder=decoder
        )
        assert torch.equal(found, expected)
    with pytest.raises(ValueError, match="one or the other"):
        model.generate(input_ids=IDS[:1], custom_generate=ours, decoder=decoder, draft="lookup")
    with pytest.raises(ValueError, match="whose target is the model"):
        tiny().generate(input_ids=IDS[:1], custom_generate=ours, decoder=decoder)


def test_unusable_logits_name_the_row() -> None:
    class Poison(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores * torch.nan if input_ids[0, 0] == 9 and input_ids.shape[1] > 7 else scores

    with pytest.raises(ValueError, match="row 1: the logits at position"):
        target().generate(**batch(), logits_processor=[Poison()], custom_generate=ours, draft="lookup")


def test_the_options_of_the_decoder_behind_it_hold_without_transformers() -> None:
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
    own = sampled.scores.log_softmax(-1).gather(1, torch.tensor(sampled.token_ids)[:, None])[:, 0]
    assert own.tolist() == pytest.approx(sampled.logprobs, abs=1e-5)
    for wanted in (1, 3, 7):
        asked: list[int] = []

        def enough(row: Any, wanted: int = wanted, asked: list[int] = asked) -> bool:
            asked.append(row.tokens[-1])
            return len(row.new_tokens) == wanted

        cut = decoder.generate(
            [9, 8, 7], temperature=0, max_new_tokens=20, stop_when=enough, scores=True, ignore_eos=True
        )
        assert cut.token_ids == asked == whole.token_ids[:wanted]
        assert cut.finish_reason == "stop"
        assert cut.scores is not None
        assert len(cut.scores) == wanted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
@pytest.mark.parametrize("given_on", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["nothing", "repetition_penalty", "suppress_tokens", "many"])
def test_on_cuda_it_is_as_on_cpu_wherever_the_ids_are(name: str, given_on: str) -> None:
    model, draft = tiny().double().cuda(), tiny(seed=1).double().cuda()  # in double precision no tie is near
    ends = StoppingCriteriaList([EndsIn()])
    where = {"input_ids": IDS.to(given_on), "attention_mask": MASK.to(given_on)}
    plain = model.generate(**batch(input_ids=IDS.cuda(), attention_mask=MASK.cuda(), **ARGUMENTS[name]()))
    for proposer in (draft, model, "lookup"):
        asked = batch(**where, **ARGUMENTS[name](), return_dict_in_generate=True, output_scores=True)
        out = model.generate(**asked, custom_generate=ours, draft=proposer)
        assert torch.equal(out.sequences.cpu(), plain.cpu())
        assert out.sequences.device.type == out.scores[0].device.type == given_on
    stopped = batch(**where, eos_token_id=60, stopping_criteria=ends)
    cut = model.generate(**stopped, custom_generate=ours, draft=model)
    on_cuda = batch(input_ids=IDS.cuda(), attention_mask=MASK.cuda(), eos_token_id=60, stopping_criteria=ends)
    assert torch.equal(cut.cpu(), model.generate(**on_cuda).cpu())


def test_all_orders_of_warpers_sample_from_transformers_distribution() -> None:
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
