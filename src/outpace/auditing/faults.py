"""Known faults of other implementations, planted to show that an audit finds them.

``outpace audit`` prints the docstring of a planted fault as part of a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from outpace.decoder import Decoder
from outpace.engine.logprobs import adjusted_logits
from outpace.engine.sequence import SequenceState, Step
from outpace.sampling import Prefix

StepFunction = Callable[[list[SequenceState]], list[Step]]


def accept_all(decoder: Any) -> None:
    """Every draft token is accepted."""
    original = decoder._verify

    def verify(rows: list[SequenceState], draft: Any, logits: Any) -> Any:
        verdict = original(rows, draft, logits)
        lengths = draft.lengths or [0] * len(rows)
        return replace(verdict, accepted=torch.tensor(lengths, device=logits.device))

    decoder._verify = verify


def resample(decoder: Any) -> None:
    """After a rejection the next token is sampled from p, which may bring the rejected one back."""
    original = decoder._verify
    generator = torch.Generator(decoder.scorer.device).manual_seed(0)

    def verify(rows: list[SequenceState], draft: Any, logits: Any) -> Any:
        verdict = original(rows, draft, logits)
        prefix = Prefix.padded(
            [row.tokens for row in rows], [row.prompt_length for row in rows], logits.device
        )
        scores = adjusted_logits(logits, [row.sampling for row in rows], prefix, draft)
        at = scores[torch.arange(len(rows), device=logits.device), verdict.accepted]
        rejected = verdict.accepted < torch.tensor(draft.lengths or [0] * len(rows), device=logits.device)
        sampled = torch.multinomial(at.softmax(-1), 1, generator=generator)[:, 0]
        return replace(verdict, next_token=torch.where(rejected, sampled, verdict.next_token))

    decoder._verify = verify


def rollback(decoder: Any) -> None:
    """The KV cache keeps one token too many after a rejection."""
    original = decoder._step

    def run_step(rows: list[SequenceState]) -> list[Step]:
        steps: list[Step] = original(rows)
        for row, step in zip(rows, steps, strict=True):
            if step.num_accepted < step.num_draft_tokens:
                decoder.scorer._lengths[row.slot] += 1
        return steps

    decoder._step = run_step


def stale(decoder: Any) -> None:
    """Tokens see two positions ahead, where rejected draft tokens lie."""
    original = decoder.scorer._masks
    decoder.scorer._masks = lambda at, start, reach: original(at + 2, None, reach)


def noise(decoder: Any) -> None:
    """All sequences of a batch are sampled with the noise of its first."""

    def shared(original: StepFunction) -> StepFunction:
        def run(rows: list[SequenceState]) -> list[Step]:
            own = [row.seed for row in rows]
            for row in rows:
                row.seed = own[0]
            try:
                return original(rows)
            finally:
                for row, seed in zip(rows, own, strict=True):
                    row.seed = seed

        return run

    decoder._prefill, decoder._step = shared(decoder._prefill), shared(decoder._step)


def reuse(decoder: Any) -> None:
    """Every step is sampled with the noise of the first."""
    original = decoder._block
    decoder._block = lambda rows, draft, logits: replace(original(rows, draft, logits), starts=0)


def mislabel(decoder: Any) -> None:
    """The drafter states a distribution that its tokens are not sampled from."""
    original = decoder._verify

    def verify(rows: list[SequenceState], draft: Any, logits: Any) -> Any:
        if draft.logits is not None:
            stated_logits = 2 * draft.logits  # a lower temperature
        else:  # the draft has probability 1; half of it is spread over the vocabulary
            V = logits.shape[-1]
            stated_logits = torch.full((*draft.tokens.shape, V), -math.log(V), device=logits.device)
            stated_logits.scatter_(2, draft.tokens[..., None], 0.0)
        return original(rows, replace(draft, logits=stated_logits, precomputed=None), logits)

    decoder._verify = verify


FAULTS: dict[str, Callable[[Any], None]] = {
    "accept-all": accept_all,
    "resample": resample,
    "rollback": rollback,
    "stale": stale,
    "noise": noise,
    "reuse": reuse,
    "mislabel": mislabel,
}


@contextmanager
def planted(decoder: Decoder, fault: str) -> Iterator[None]:
    """Plant a fault, by its name in ``FAULTS``, inside a ``with`` block.

    The decoder then runs without the graph executor.
    """
    if fault not in FAULTS:
        raise ValueError(f"plant: got {fault!r}; known are {', '.join(FAULTS)}")
    engines, decoder.engines = decoder.engines, None  # an engine does not call the replaced methods
    before = [(one, set(vars(one))) for one in (decoder, decoder.scorer)]
    FAULTS[fault](decoder)
    added = [(one, set(vars(one)) - names) for one, names in before]
    try:
        yield
    finally:
        for one, names in added:
            for name in names:
                delattr(one, name)
        decoder.engines = engines
        decoder.forget()
