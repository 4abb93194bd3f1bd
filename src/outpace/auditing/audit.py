"""Checks of a decoder against its target without speculation, for anyone's own pair of models.

Greedy decoding must give the target's own tokens, one by one. In sampling, the first few tokens together must
be distributed as the target alone would sample them. Many samples are taken over a few tokens. Pearson's χ²
compares how often each sequence came with its exact probability, computed from ordinary forward passes of the
target. Speculation is forced: a decoder whose policy depends on measured time may draft nothing.

In 16 bits, forward passes of other shapes round differently. The probabilities are then computed a second
time, from forward passes with a KV cache. Twice the distance between the two does not count as a difference.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import numpy as np
import torch
from torch import Tensor

from outpace.auditing.pearson import LOOK_AGAIN, LOOKS, SUSPICIOUS, Power, decide, power, samples_for
from outpace.auditing.report import Greedy, Joint, Report
from outpace.auditing.samples import Sampler
from outpace.checks.arguments import integer, number
from outpace.decoder import Decoder
from outpace.engine.request import Prompt
from outpace.models.seq2seq import Seq2SeqScorer
from outpace.policy import Fixed, Goodput
from outpace.sampling import SamplingParams

MOST_OUTCOMES = 20_000
DRAFT_TOKENS = 3  # per step, where the decoder's policy depends on measured time
TIE = 4.0  # roundings by which two logits may differ and still be called equal


def audit(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    *,
    greedy_tokens: int = 32,
    tokens: int = 3,
    top: int = 3,
    samples: int | None = None,
    misplacement: float = 0.05,
    temperature: float = 1.0,
    batch_size: int = 128,
    seed: int = 0,
    alarm: float = 1e-3,
    progress: bool = True,
    tell: Callable[[str], None] | None = None,
) -> Report:
    """Check a decoder on prompts of your own.

    Samples are compared in up to three looks. The first is at an eighth of the samples, where a large
    difference ends the audit early. The second is at all of them. If the p-value is then below 0.1, the third
    is at 60 % more.

    Args:
        decoder: The decoder to check. If its draft-length policy depends on measured time, it is checked with
            three draft tokens per step instead.
        prompts: Strings or lists of token ids.
        greedy_tokens: Tokens to compare in greedy decoding. 0 leaves it out.
        tokens: Tokens of a sample, whose joint distribution is compared.
        top: Tokens that a sample may consist of. They make ``top**tokens`` outcomes.
        samples: Samples per prompt. 0 leaves sampling out. By default as many as ``misplacement`` needs.
        misplacement: Share of the probability, on every prompt, whose misplacement is to be found with 99 %
            certainty, wherever it moves.
        temperature: Temperature of the samples.
        batch_size: Sequences at a time.
        seed: Seed of the samples.
        alarm: Probability that a correct decoder is found different.
        progress: Show a progress bar, on a terminal.
        tell: Called with each line of progress.

    Returns:
        A ``Report``; ``print`` shows it in words.
    """
    if isinstance(decoder.scorer, Seq2SeqScorer):
        raise ValueError(
            "decoder: models with an encoder cannot be audited yet; tests/statistical has theirs"
        )
    integer("greedy_tokens", greedy_tokens, "an int >= 0", lambda n: n >= 0)
    integer("tokens", tokens, "an int >= 1", lambda n: n >= 1)
    V = decoder.scorer.vocab_size
    integer("top", top, f"an int in 2..{V}", lambda n: 2 <= n <= V)
    if samples is not None:
        integer("samples", samples, "an int >= 0", lambda n: n >= 0)
    integer("batch_size", batch_size, "an int >= 1", lambda n: n >= 1)
    number("misplacement", misplacement, "a number in (0, 1)", lambda m: 0 < m < 1)
    number("alarm", alarm, f"a number in (0, {SUSPICIOUS}]", lambda a: 0 < a <= SUSPICIOUS)
    number("temperature", temperature, "a number > 0", lambda t: t > 0)
    if samples != 0 and top**tokens > MOST_OUTCOMES:
        raise ValueError(
            f"tokens, top: got {tokens}, {top}; {top}**{tokens} sequences are too many to count, "
            f"{MOST_OUTCOMES} are the most"
        )
    if isinstance(prompts, str) or not len(prompts):
        raise ValueError("prompts: give a list of at least one prompt")
    begun = time.perf_counter()
    ids = [decoder.encode(prompt) for prompt in prompts]
    room = decoder.scorer.context - max(0 if samples == 0 else tokens + 1, greedy_tokens)
    if max(map(len, ids)) > room:
        raise ValueError(f"prompts: got one of {max(map(len, ids))} tokens; to be audited it may have {room}")
    with _drafting(decoder) as forced:
        greedy = [_greedy(decoder, prompt, greedy_tokens) for prompt in ids] if greedy_tokens else []
        different, joint, rounding = False, list[Joint](), 0.0
        p_value: float | None = None
        able: Power | None = None
        if samples != 0:
            sampler = Sampler(decoder, ids, tokens, top, temperature, batch_size, seed)
            chances = np.array([[*exact.values(), 0.0] for exact in sampler.exact])
            count = samples_for(misplacement, chances, alarm) if samples is None else samples
            away = sampler.rounding()
            rounding = float(np.sqrt(away.max()) / 2)  # as a misplacement, at most
            with closing(_Progress(count * len(ids), progress, tell)) as shown:
                decision = decide(lambda i, n: sampler.draw(i, n, shown), chances, count, alarm, away)
            different, p_value = decision.different, decision.p_value
            able = power(chances, count, alarm, away)
            joint = [
                Joint(
                    decision.samples,
                    top**tokens,
                    int(decision.counts[i, -1]),
                    decision.each[i],
                    able.on_one[i],
                    stats.draft_tokens,
                    stats.accepted_tokens,
                )
                for i, stats in enumerate(sampler.stats)
            ]
        length = repr(decoder.policy)
    seconds = time.perf_counter() - begun
    return Report(
        greedy=greedy,
        joint=joint,
        tokens=tokens,
        different=different,
        p_value=p_value,
        alarm=alarm,
        detectable=None if able is None else able.on_every,
        rounding=rounding,
        length=length,
        forced=forced,
        engine=decoder.engines is not None,
        seconds=seconds,
    )


@contextmanager
def _drafting(decoder: Decoder) -> Iterator[bool]:
    """Replace a policy that depends on measured time by a fixed draft length, inside a ``with`` block.

    Such a policy may draft nothing.
    """
    own = decoder.policy
    forced = decoder.drafter is not None and isinstance(own, Goodput)
    if forced:
        decoder.policy = Fixed(min(DRAFT_TOKENS, own.max_draft_tokens))
    try:
        yield forced
    finally:
        decoder.policy = own


@torch.inference_mode()
def _greedy(decoder: Decoder, prompt: list[int], tokens: int) -> Greedy:
    out = decoder.generate(prompt, SamplingParams(temperature=0), max_new_tokens=tokens, ignore_eos=True)
    model, device = decoder.scorer.model, decoder.scorer.device
    fed, cache, ties = torch.tensor([prompt], device=device), None, 0
    for i, token in enumerate(out.token_ids):
        step = model(input_ids=fed, past_key_values=cache, use_cache=True)
        logits, cache = step.logits[0, -1].float(), step.past_key_values
        own = int(logits.argmax())
        if own != token:
            if not near_tie(logits, own, token, decoder.scorer.dtype):
                return Greedy(i + 1, i, out.stats.draft_tokens, ties)
            ties += 1
        fed = torch.tensor([[token]], device=device)
    return Greedy(len(out.token_ids), None, out.stats.draft_tokens, ties)


def near_tie(logits: Tensor, one: int, other: int, dtype: torch.dtype) -> bool:
    """Return whether a model that computes in ``dtype`` may see either token as the likelier, by rounding."""
    a, b = float(logits[one]), float(logits[other])
    return abs(a - b) <= TIE * torch.finfo(dtype).eps * max(abs(a), abs(b))


class _Progress:
    """Lines that say how long it takes, and on a terminal a bar with the remaining time."""

    def __init__(self, total: int, bar: bool, tell: Callable[[str], None] | None) -> None:
        from tqdm.auto import tqdm

        self._total, self._drawn, self._tell = total, 0, tell
        self._begun = time.perf_counter()
        self._bar = tqdm(
            total=total, desc="sampling", unit="sample", leave=False, disable=None if bar else True
        )

    def __call__(self, size: int) -> None:
        """Count new samples."""
        if not self._drawn:
            seconds = (time.perf_counter() - self._begun) * self._total / size
            self._say(f"sampling: {self._total:,} samples, about {seconds:.0f} s")
        if self._drawn == self._total:
            self._bar.total = math.ceil(LOOKS[2] * self._total)
            self._say(f"sampling: the p-value is below {LOOK_AGAIN}, so {LOOKS[2] - 1:.0%} more samples")
        self._drawn += size
        self._bar.update(size)

    def _say(self, line: str) -> None:
        if self._tell is not None:
            self._bar.clear()
            self._tell(line)

    def close(self) -> None:
        self._bar.close()
