"""A Decoder, its scorers and its drafter serve one call at a time and are released when it ends."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from outpace import Decoder, Fixed, ModelDrafter
from outpace.models.causal import CausalScorer
from tests.tiny import greedy, tiny

PROMPT, OTHER = [5, 6, 7], [9, 8, 7, 6]


def test_two_decoders_on_one_scorer_are_refused_while_the_first_is_streaming() -> None:
    scorer = CausalScorer(tiny())
    one, other = Decoder(scorer), Decoder(scorer)
    stream = one.stream(PROMPT, temperature=0, max_new_tokens=8, ignore_eos=True)
    text = list(next(stream).token_ids)
    with pytest.raises(RuntimeError, match="this CausalScorer is in use by another Decoder"):
        other.generate(OTHER, temperature=0, max_new_tokens=8)
    text += [token for step in stream for token in step.token_ids]
    assert text == greedy(tiny(), PROMPT, 8)
    assert other.generate(OTHER, temperature=0, max_new_tokens=8, ignore_eos=True).token_ids == greedy(
        tiny(), OTHER, 8
    )


def test_two_drafters_on_one_scorer_are_refused_while_the_first_is_streaming() -> None:
    draft = CausalScorer(tiny(seed=1))
    one, other = (Decoder(tiny(), ModelDrafter(draft), num_draft_tokens=Fixed(2)) for _ in range(2))
    stream = one.stream(PROMPT, max_new_tokens=8, ignore_eos=True)
    next(stream)
    with pytest.raises(RuntimeError, match="this CausalScorer is in use by another Decoder"):
        other.generate(OTHER, max_new_tokens=8)
    stream.close()
    other.generate(OTHER, max_new_tokens=8)


def test_a_drafter_with_the_targets_scorer_is_refused() -> None:
    scorer = CausalScorer(tiny())
    with pytest.raises(ValueError, match="draft: got a drafter with the target's own scorer"):
        Decoder(scorer, ModelDrafter(scorer))


def test_two_decoders_of_one_model_can_stream_at_the_same_time() -> None:
    model = tiny()
    streams = [
        Decoder(model).stream(prompt, temperature=0, max_new_tokens=6, ignore_eos=True)
        for prompt in (PROMPT, OTHER)
    ]
    texts: list[list[int]] = [[], []]
    for steps in zip(*streams, strict=True):
        for text, step in zip(texts, steps, strict=True):
            text += step.token_ids
    assert texts == [greedy(model, PROMPT, 6), greedy(model, OTHER, 6)]


def test_an_abandoned_stream_releases_its_decoder() -> None:
    decoder = Decoder(tiny())
    next(decoder.stream(PROMPT, max_new_tokens=8, ignore_eos=True))
    gc.collect()
    decoder.generate(PROMPT, max_new_tokens=2)


def test_an_interruption_at_any_line_releases_the_decoder() -> None:
    decoder = Decoder(tiny(), "lookup", num_draft_tokens=Fixed(2))
    interrupted = {Decoder.scheduler.__code__, Decoder._steps.__code__}
    lines: list[str] = []

    def counting(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and frame.f_code in interrupted:
            lines.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        return counting

    def interrupting(at: int) -> Any:
        seen = 0

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal seen
            if event == "line" and frame.f_code in interrupted:
                seen += 1
                if seen == at:
                    raise KeyboardInterrupt
            return trace

        return trace

    before = sys.gettrace()
    try:
        sys.settrace(counting)
        decoder.generate(PROMPT, max_new_tokens=2, seed=0)
        sys.settrace(before)
        for at in range(1, len(lines)):  # the last line releases the decoder, and cannot be protected
            sys.settrace(interrupting(at))
            with pytest.raises(KeyboardInterrupt):
                decoder.generate(PROMPT, max_new_tokens=2, seed=0)
            sys.settrace(before)
            try:
                decoder.generate(PROMPT, max_new_tokens=2, seed=0)
            except RuntimeError as error:
                pytest.fail(f"after an interruption at {lines[at - 1]}: {error}")
    finally:
        sys.settrace(before)


def test_threads_share_a_decoder_one_call_at_a_time() -> None:
    decoder, barrier = Decoder(tiny()), threading.Barrier(4)
    answers: list[str] = []

    def call() -> None:
        barrier.wait()
        try:
            decoder.generate(PROMPT, max_new_tokens=16, ignore_eos=True)
            answers.append("served")
        except RuntimeError as error:
            answers.append("refused" if "generating already" in str(error) else f"{error}")

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answers) <= {"served", "refused"}
    assert "served" in answers
