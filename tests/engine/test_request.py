"""Each prompt of a batch may have its own arguments, and a wrong one fails that prompt alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outpace import Decoder, Fixed, Goodput, Output, Step
from tests.tiny import V, byte_tokenizer, greedy, tiny

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2, 1], [30]]
BOTH = pytest.mark.parametrize("engine", [False, True], ids=["eager", "graph"])


def text_decoder(engine: bool = False) -> Decoder:
    return Decoder(tiny(vocab_size=272), "lookup", byte_tokenizer(), engine=engine)


def batch(decoder: Decoder, prompts: list[Any], wrong: int, message: str, **options: Any) -> list[Output]:
    """Generate from prompts of which one has a wrong argument, and return all outputs."""
    with pytest.warns(UserWarning, match=f"^prompt {wrong}: {message}"):
        outs: list[Output] = decoder.generate(prompts, temperature=0, **options)
    assert [out.finish_reason == "error" for out in outs] == [i == wrong for i in range(len(prompts))]
    return outs


@BOTH
def test_each_prompt_has_its_own_max_new_tokens(engine: bool) -> None:
    model = tiny()
    decoder = Decoder(model, model, engine=engine)
    forms: list[Any] = [[3, 11, 6], (3, 11, 6), np.array([3, 11, 6])]
    for lengths in forms:
        outs = decoder.generate(PROMPTS, temperature=0, max_new_tokens=lengths)
        assert [out.token_ids for out in outs] == [
            greedy(model, prompt, length) for prompt, length in zip(PROMPTS, (3, 11, 6), strict=True)
        ]
    model.generation_config.max_new_tokens = 4
    outs = decoder.generate(PROMPTS, temperature=0, max_new_tokens=[None, 2, None])
    assert [len(out.token_ids) for out in outs] == [4, 2, 4]


def test_samples_of_a_prompt_share_its_arguments() -> None:
    outs = Decoder(tiny()).generate(PROMPTS[:2], temperature=1.0, n=2, max_new_tokens=[3, 5], seed=[1, 2])
    assert [len(out.token_ids) for out in outs] == [3, 3, 5, 5]


@BOTH
def test_each_prompt_has_its_own_stop_strings(engine: bool) -> None:
    decoder = text_decoder(engine)
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 30}
    texts = [str(decoder.generate(one, **options).text) for one in ("first", "last")]
    ends = [next(one for one in texts[i][3:] if one not in texts[1 - i]) for i in range(2)]
    stops: list[Any] = [[["never", ends[0]], None], [[ends[0]], ()], ((ends[0],), [])]
    for stop in stops:
        outs = decoder.generate(["first", "last"], **options, stop=stop)
        assert outs[0].text == texts[0][: texts[0].index(ends[0])]
        assert (outs[0].finish_reason, outs[1].finish_reason) == ("stop", "length")
        assert outs[1].text == texts[1]
    shared = decoder.generate(["first", "last"], **options, stop=ends)  # one set for both
    assert [out.finish_reason for out in shared] == ["stop", "stop"]
    alone = decoder.generate("first", **options, stop=[[ends[0]]])
    assert alone.text == outs[0].text


def test_a_special_token_among_the_stop_strings_ends_only_its_own_prompt() -> None:
    decoder = text_decoder()
    requests = decoder.requests(["a", "b"], stop=[["<end>"], None])
    end = decoder.tokenizer.convert_tokens_to_ids("<end>")
    assert [end in one.stop_tokens for one in requests] == [True, False]


@BOTH
def test_each_prompt_has_its_own_log_probabilities(engine: bool) -> None:
    decoder = Decoder(tiny(), tiny(seed=1), engine=engine)
    outs = decoder.generate(PROMPTS, temperature=1.0, seed=3, max_new_tokens=6, logprobs=[False, 3, True])
    assert outs[0].logprobs is None
    assert outs[1].logprobs is not None
    assert outs[1].top_logprobs is not None
    assert [len(top) for top in outs[1].top_logprobs] == [3] * 6
    assert outs[2].logprobs is not None
    assert outs[2].top_logprobs is None
    together = decoder.generate(PROMPTS, temperature=1.0, seed=3, max_new_tokens=6, logprobs=True)
    assert outs[1].logprobs == pytest.approx(together[1].logprobs, abs=1e-5)


def test_a_seed_of_none_is_a_fresh_one_for_its_prompt() -> None:
    decoder = Decoder(tiny(), "lookup")
    first, second = decoder.requests(PROMPTS[:2], seed=[7, None])
    assert (first.seed, first.match, second.match) == (7, True, False)
    assert second.seed != decoder.requests(PROMPTS[:2], seed=[7, None])[1].seed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": [5, 0]}, "max_new_tokens: got 0; it must be an int >= 1"),
        ({"max_new_tokens": [5, "9"]}, "max_new_tokens: got str '9'; it must be an int >= 1"),
        ({"logprobs": [0, 273]}, r"logprobs: got 273; it must be True, False, or an int in 0\.\.272"),
        ({"prompt_logprobs": [0, 273]}, r"prompt_logprobs: got 273; it must be True, False, or an int"),
        ({"prompt_logprobs": [0, None]}, "prompt_logprobs: got NoneType None; it must be True, False, or"),
        ({"stop": [["a"], [""]]}, r"stop: got \[''\]; it must be a non-empty string, or a list of them"),
        ({"stop": [["a"], [5]]}, r"stop: got \[5\]; it must be a non-empty string, or a list of them"),
        ({"stop": [None, "a"]}, "stop: got 'a' in a list with one entry per prompt; it must be None or a "),
        ({"seed": [5, 1.5]}, "seed: got float 1.5; it must be an int in"),
    ],
)
def test_a_wrong_value_for_one_prompt_fails_that_prompt_alone(
    arguments: dict[str, Any], message: str
) -> None:
    decoder = text_decoder()
    options = {"max_new_tokens": 5, **arguments}
    outs = batch(decoder, ["first", "last"], 1, message, **options)
    assert len(outs[0].token_ids) == 5
    assert str(outs[1].error).startswith(message[:5])
    ((name, values),) = arguments.items()
    if values[1:] == ["a"]:  # it is one set for all prompts
        return
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        decoder.generate("last", **{**options, name: values[1:]})
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        list(decoder.stream("last", **{**options, name: values[1:]}))


def test_a_wrong_value_for_all_prompts_raises() -> None:
    values: list[dict[str, Any]] = [
        {"max_new_tokens": 0}, {"logprobs": 99}, {"prompt_logprobs": -1}, {"seed": 1.5}
    ]  # fmt: skip
    for wrong in values:
        with pytest.raises((TypeError, ValueError), match=f"^{next(iter(wrong))}: got"):
            Decoder(tiny()).generate(PROMPTS, **wrong)


@pytest.mark.parametrize(
    ("name", "values", "fits"),
    [
        ("max_new_tokens", [1, 2], "one int"),
        ("logprobs", [1, 2], "one value"),
        ("prompt_logprobs", [True] * 4, "one value"),
        ("stop", [None, ["a"]], "one set of strings"),
        ("seed", [1, 2], "one int"),
    ],
)
def test_a_list_of_the_wrong_length_is_refused(name: str, values: list[Any], fits: str) -> None:
    options: dict[str, Any] = {name: values}
    message = f"^{name}: got {len(values)} for 3 prompts; it must be {fits}, or one per prompt$"
    with pytest.raises(ValueError, match=message):
        text_decoder().generate(["a", "b", "c"], **options)


def test_the_vocabulary_bounds_log_probabilities() -> None:
    out = Decoder(tiny()).generate(PROMPTS[0], max_new_tokens=1, logprobs=V)
    assert out.top_logprobs is not None
    assert len(out.top_logprobs[0]) == V


# Draft tokens


def steps_of(decoder: Decoder, **options: Any) -> dict[int, list[Step]]:
    """Return the steps of each prompt, without the prefill of the eager executor."""
    found: dict[int, list[Step]] = {}
    for step in decoder.stream([[5, 6, 7], [9, 8, 7, 6], [30], [1, 2]], **options):
        found.setdefault(step.index, []).append(step)
    skipped = 0 if decoder.uses_graphs else 1
    return {index: steps[skipped:] for index, steps in found.items()}


@BOTH
@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_each_prompt_has_its_own_number_of_draft_tokens(engine: bool, rule: str) -> None:
    decoder = Decoder(tiny(), tiny(seed=1), engine=engine, rule=rule, num_draft_tokens=Fixed(2))
    steps = steps_of(decoder, num_draft_tokens=[0, 4, "auto", 1], temperature=1.0, seed=7, max_new_tokens=20)
    for index, g in enumerate((0, 4, 2, 1)):
        drafted = [step.num_draft_tokens for step in steps[index]]
        remaining = 20 - (0 if engine else 1)
        for step, number in zip(steps[index], drafted, strict=True):
            if engine:
                assert number == g
            else:
                assert number == min(g, remaining - 1)
            remaining -= len(step.token_ids)


@BOTH
def test_own_number_of_draft_tokens_changes_no_text(engine: bool) -> None:
    prompts = [[5, 6, 7], [9, 8, 7, 6], [30]]
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_new_tokens": 24}
    texts = [out.token_ids for out in Decoder(tiny()).generate(prompts, **options)]
    for draft in (tiny(seed=1), tiny(), "lookup"):
        decoder = Decoder(tiny(), draft, engine=engine, num_draft_tokens=Goodput(4))
        choices: list[Any] = [[0, 5, "auto"], [3, None, 1], 2, "auto"]
        for own in choices:
            outs = decoder.generate(prompts, **options, num_draft_tokens=own)
            assert [out.token_ids for out in outs] == texts


@BOTH
def test_free_drafter_proposes_at_most_the_own_number(engine: bool) -> None:
    decoder = Decoder(tiny(), "lookup", engine=engine, num_draft_tokens=Fixed(0))
    prompt = [5, 6, 7, 8] * 6
    outs = decoder.generate([prompt] * 3, temperature=0, max_new_tokens=24, num_draft_tokens=[0, 3, "auto"])
    assert outs[0].stats.draft_tokens == outs[2].stats.draft_tokens == 0
    assert len(outs[1].stats.draft_tokens_by_position) == 3


def test_wrong_number_of_draft_tokens_names_what_fits() -> None:
    decoder = Decoder(tiny(), tiny(seed=1))
    with pytest.raises(ValueError, match=r'^num_draft_tokens: got -1; it must be "auto", or an int in 0\.\.'):
        decoder.generate([1], num_draft_tokens=-1)
    with pytest.raises(TypeError, match=r"^num_draft_tokens: got str 'many'"):
        decoder.generate([1], num_draft_tokens="many")
    with pytest.raises(ValueError, match=r"^num_draft_tokens: got 1; .* has no draft"):
        Decoder(tiny()).generate([1], num_draft_tokens=1)
    Decoder(tiny()).generate([1], num_draft_tokens=0, max_new_tokens=2)
    batch(decoder, [[1], [2]], 1, "num_draft_tokens: got float 1.5", num_draft_tokens=[1, 1.5])
