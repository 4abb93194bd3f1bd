"""Log-probabilities of prompts are those of the model itself, whatever else the call does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outpace import Decoder, Fixed, Output
from outpace.engine import prompt_logprobs
from outpace.models import scorer as scorers
from tests.tiny import V, greedy, sources, tiny, tiny_seq2seq

LONG = torch.randint(V, (90,), generator=torch.Generator().manual_seed(3)).tolist()
PROMPTS = [[5, 6, 7], LONG, [30], [*LONG[:70], 1, 2]]
FAMILIES = pytest.mark.parametrize("family", ["llama", "gpt2"])  # in the graph executor: paged, contiguous
BOTH = pytest.mark.parametrize("engine", [False, True], ids=["eager", "graph"])


def exact(model: Any, prompt: list[int]) -> torch.Tensor:
    """Return the log-probabilities ``[n, V]`` that Transformers computes after each token of a prompt."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([prompt])).logits[0]
    return logits.log_softmax(-1)


def check(model: Any, prompt: list[int], out: Output, top: int = 0) -> None:
    assert out.prompt_logprobs is not None
    assert len(out.prompt_logprobs) == len(prompt)
    assert out.prompt_logprobs[0] is None
    expected = exact(model, prompt)[:-1]
    own = [float(row[token]) for row, token in zip(expected, prompt[1:], strict=True)]
    assert out.prompt_logprobs[1:] == pytest.approx(own, abs=1e-4)
    if not top:
        assert out.prompt_top_logprobs is None
        return
    assert out.prompt_top_logprobs is not None
    assert out.prompt_top_logprobs[0] is None
    assert len(out.prompt_top_logprobs) == len(prompt)
    for row, found in zip(expected, out.prompt_top_logprobs[1:], strict=True):
        assert found is not None
        likeliest = row.topk(top)
        assert list(found) == likeliest.indices.tolist()
        assert list(found.values()) == pytest.approx(likeliest.values.tolist(), abs=1e-4)


@BOTH
@FAMILIES
@pytest.mark.parametrize("chunk", [scorers.CHUNK, 16])
def test_they_are_those_of_transformers(
    family: str, engine: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "CHUNK", chunk)
    model = tiny(family)
    decoder = Decoder(model, tiny(family, seed=1), num_draft_tokens=Fixed(3), engine=engine)
    for _ in range(2):  # the second time, the KV cache has all prefixes
        outs = decoder.generate(PROMPTS, temperature=0, max_new_tokens=8, prompt_logprobs=3)
        for prompt, out in zip(PROMPTS, outs, strict=True):
            check(model, prompt, out, top=3)
            assert out.token_ids == greedy(model, prompt, 8)
            assert out.stats.target_seconds > 10 * out.stats.encode_seconds
    single = decoder.generate(LONG, temperature=0, max_new_tokens=2, prompt_logprobs=True)
    check(model, LONG, single)


@BOTH
def test_sampling_parameters_do_not_change_them(engine: bool) -> None:
    model = tiny()
    decoder = Decoder(model, "lookup", engine=engine)
    outs = decoder.generate(
        PROMPTS, temperature=0.3, top_k=2, repetition_penalty=1.5, logit_bias={5: -3.0}, max_new_tokens=4,
        prompt_logprobs=1,
    )  # fmt: skip
    for prompt, out in zip(PROMPTS, outs, strict=True):
        check(model, prompt, out, top=1)


@BOTH
def test_each_prompt_may_ask_for_its_own(engine: bool) -> None:
    model = tiny()
    outs = Decoder(model, model, engine=engine).generate(
        PROMPTS, temperature=0, max_new_tokens=4, prompt_logprobs=[False, 2, True, 0]
    )
    assert (outs[0].prompt_logprobs, outs[0].prompt_top_logprobs) == (None, None)
    check(model, PROMPTS[1], outs[1], top=2)
    check(model, PROMPTS[2], outs[2])
    check(model, PROMPTS[3], outs[3])


@BOTH
def test_samples_of_a_prompt_compute_them_once(engine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, scored = tiny(), list[int]()
    decoder = Decoder(model, "lookup", engine=engine)
    original = type(decoder.scorer).append_scored

    def counted(self: Any, slot: int, tokens: list[int]) -> torch.Tensor:
        scored.append(len(tokens))
        return original(self, slot, tokens)

    monkeypatch.setattr(type(decoder.scorer), "append_scored", counted)
    options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 4, "prompt_logprobs": 2}
    outs = decoder.generate([LONG, [1, 2]], **options, n=3, batch_size=2)
    assert scored == [89, 1]  # the prefill computes the last token
    for prompt, out in zip([LONG] * 3 + [[1, 2]] * 3, outs, strict=True):
        check(model, prompt, out, top=2)
    assert outs[0].prompt_logprobs is not outs[1].prompt_logprobs  # a user may change a list


@BOTH
def test_a_prompt_is_scored_in_chunks_between_the_steps_of_others(
    engine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "CHUNK", 16)
    model = tiny()
    decoder = Decoder(model, tiny(seed=1), num_draft_tokens=Fixed(2), engine=engine, rule="match")
    with decoder.scheduler(batch_size=3) as scheduler:
        (first,) = decoder.requests([5, 6, 7], temperature=0, max_new_tokens=40)
        scheduler.add(first)
        scheduler.step()
        (second,) = decoder.requests(LONG, temperature=0, max_new_tokens=5, prompt_logprobs=True)
        scheduler.add(second)
        before = len(first.tokens)
        for _ in range(4):
            scheduler.step()
        assert len(first.tokens) > before
        assert second.new_tokens == []
        outputs: dict[int, Output] = {}
        while scheduler.unfinished:
            outputs |= {step.index: step.output for step in scheduler.step() if step.output is not None}
    check(model, LONG, outputs[1])
    assert outputs[0].token_ids == greedy(model, [5, 6, 7], 40)
    assert outputs[1].token_ids == greedy(model, LONG, 5)


@BOTH
def test_a_request_that_is_cancelled_while_it_is_scored_frees_its_slot(
    engine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_logprobs, "CHUNK", 16)
    model = tiny()
    decoder = Decoder(model, "lookup", engine=engine)
    with decoder.scheduler(batch_size=2) as scheduler:
        (first,) = decoder.requests([5, 6, 7], temperature=0, max_new_tokens=30)
        scheduler.add(first)
        scheduler.step()
        (second,) = decoder.requests(LONG, max_new_tokens=5, prompt_logprobs=True)
        cancelled = scheduler.add(second)
        scheduler.step()
        scheduler.cancel(cancelled)
        (third,) = decoder.requests(LONG, temperature=0, max_new_tokens=5, prompt_logprobs=True)
        scheduler.add(third)
        outputs: dict[int, Output] = {}
        while scheduler.unfinished:
            outputs |= {step.index: step.output for step in scheduler.step() if step.output is not None}
    assert sorted(outputs) == [0, 2]
    check(model, LONG, outputs[2])


@BOTH
def test_a_prompt_that_runs_out_of_memory_fails_alone(engine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    decoder = Decoder(model, "lookup", engine=engine)
    original = type(decoder.scorer).append_scored

    def limited(self: Any, slot: int, tokens: list[int]) -> torch.Tensor:
        if len(tokens) > 80:
            raise MemoryError("out of memory")
        return original(self, slot, tokens)

    monkeypatch.setattr(type(decoder.scorer), "append_scored", limited)
    with pytest.warns(UserWarning, match="prompt 1: out of memory"):
        outs = decoder.generate(PROMPTS, temperature=0, max_new_tokens=4, prompt_logprobs=True)
    assert [out.finish_reason for out in outs] == ["length", "error", "length", "length"]
    for i in (0, 2, 3):
        check(model, PROMPTS[i], outs[i])
        assert outs[i].token_ids == greedy(model, PROMPTS[i], 4)


@BOTH
@FAMILIES
def test_a_prompt_may_fill_a_block_or_the_context(family: str, engine: bool) -> None:
    model = tiny(family)
    decoder = Decoder(model, "lookup", engine=engine)
    for length in (16, 64, 127):
        prompt = torch.randint(V, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        outs = decoder.generate([prompt, [3, 4]], temperature=0, max_new_tokens=12, prompt_logprobs=True)
        check(model, prompt, outs[0])
        assert outs[0].token_ids == greedy(model, prompt, min(12, 128 - length))
        assert outs[1].token_ids == greedy(model, [3, 4], 12)


def test_models_with_an_encoder_refuse_them() -> None:
    decoder = Decoder(tiny_seq2seq("t5"))
    first, second = sources("t5", 5, 7)
    message = "prompt_logprobs: got True; T5ForConditionalGeneration has an encoder, whose input has no"
    for prompt in (first, [first, second]):
        with pytest.raises(ValueError, match=message):
            decoder.generate(prompt, prompt_logprobs=True)
    assert decoder.generate(first, max_new_tokens=2, prompt_logprobs=False).prompt_logprobs is None
