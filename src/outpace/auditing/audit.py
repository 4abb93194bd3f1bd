"""``outpace.audit``: a check that speculation does not change the output of a target.

Greedy decoding must give the same tokens as the target without speculation. In sampling, the joint
distribution of the first few tokens must equal the target's. The audit takes many short samples. Pearson's χ²
compares the count of each sequence with its exact probability, which ordinary forward passes of the target
give. The audit forces speculation, because a policy that depends on measured time may draft nothing.

In 16 bits, forward passes of different shapes round differently. The audit then computes the probabilities a
second time, from forward passes with a KV cache. It tolerates twice the distance between the two.
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
from outpace.auditing.samples import ROUNDING_FACTOR, Sampler, forward_passes
from outpace.checks.arguments import integer, number
from outpace.decoder import Decoder
from outpace.engine.request import Prompt
from outpace.models.scorer import Scorer
from outpace.policy import Fixed, Goodput
from outpace.sampling import SamplingParams

MAX_OUTCOMES = 20_000
DRAFT_TOKENS = 3  # per step, if the decoder's policy depends on measured time
TIE_ROUNDINGS = 4.0  # roundings by which two logits may differ and still count as equal
MOST_ROUNDINGS = 16.0  # roundings up to which a gap is compared with other forward passes, in 16 bits


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

    The audit tests samples in up to three looks. The first look is at an eighth of the samples, and a large
    difference ends the audit there. The second look is at all of them. If its p-value is below 0.1, the third
    look is at 60 % more.

    Args:
        decoder: The decoder to check. If its draft-length policy depends on measured time, the audit replaces
            it by three draft tokens per step.
        prompts: Strings or lists of token ids.
        greedy_tokens: Tokens to compare in greedy decoding. 0 skips the greedy check.
        tokens: Tokens of a sample, whose joint distribution is compared.
        top: Number of distinct tokens that samples may contain. They make ``top**tokens`` outcomes.
        samples: Samples per prompt. 0 skips the sampling check. By default as many as ``misplacement`` needs.
        misplacement: Share of the probability on wrong outcomes, on every prompt, that the audit finds with
            99 % certainty.
        temperature: Temperature of the samples.
        batch_size: Sequences at a time.
        seed: Seed of the samples.
        alarm: Probability that the audit reports a difference for a correct decoder.
        progress: Show a progress bar, on a terminal.
        tell: Called with each line of progress.

    Returns:
        A ``Report``. ``print(report)`` shows it in words.
    """
    if decoder.scorer.has_encoder:
        raise ValueError(
            "decoder: models with an encoder cannot be audited yet; tests/statistical covers them"
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
    if samples != 0 and top**tokens > MAX_OUTCOMES:
        raise ValueError(
            f"tokens, top: got {tokens}, {top}; {top}**{tokens} sequences are too many to count, "
            f"{MAX_OUTCOMES} are the most"
        )
    if isinstance(prompts, str) or not len(prompts):
        raise ValueError("prompts: give a list of at least one prompt")
    decoder, started = decoder.with_own_rule(), time.perf_counter()
    ids = [decoder.encode(prompt) for prompt in prompts]
    longest = max(map(len, ids))
    max_prompt_tokens = decoder.scorer.context - max(0 if samples == 0 else tokens + 1, greedy_tokens)
    if longest > max_prompt_tokens:
        raise ValueError(f"prompts: got one of {longest} tokens; it must have at most {max_prompt_tokens}")
    with _force_drafting(decoder) as forced:
        greedy = [_greedy(decoder, prompt, greedy_tokens) for prompt in ids] if greedy_tokens else []
        different, joint, rounding = False, list[Joint](), 0.0
        p_value: float | None = None
        detection: Power | None = None
        if samples != 0:
            sampler = Sampler(decoder, ids, tokens, top, temperature, batch_size, seed)
            exact = np.array([[*outcomes.values(), 0.0] for outcomes in sampler.exact])
            count = samples_for(misplacement, exact, alarm) if samples is None else samples
            divergence = sampler.rounding()
            rounding = float(np.sqrt(divergence.max()) / 2)  # upper bound, as a misplacement
            with closing(_Progress(count * len(ids), progress, tell)) as bar:
                decision = decide(lambda i, n: sampler.sample(i, n, bar), exact, count, alarm, divergence)
            different, p_value = decision.different, decision.p_value
            detection = power(exact, count, alarm, divergence)
            joint = [
                Joint(
                    decision.samples,
                    top**tokens,
                    int(decision.counts[i, -1]),
                    decision.each[i],
                    detection.on_one[i],
                    stats.draft_tokens,
                    stats.accepted_tokens,
                )
                for i, stats in enumerate(sampler.stats)
            ]
        draft_length_policy = repr(decoder.policy)
    seconds = time.perf_counter() - started
    return Report(
        greedy=greedy,
        joint=joint,
        tokens=tokens,
        different=different,
        p_value=p_value,
        alarm=alarm,
        detectable=None if detection is None else detection.on_every,
        rounding=rounding,
        draft_length_policy=draft_length_policy,
        forced=forced,
        seconds=seconds,
    )


@contextmanager
def _force_drafting(decoder: Decoder) -> Iterator[bool]:
    """Replace a policy that depends on measured time by a fixed draft length, inside a ``with`` block.

    Such a policy may draft nothing.

    Yields:
        Whether the policy was replaced.
    """
    policy = decoder.policy
    forced = decoder.drafter is not None and isinstance(policy, Goodput)
    if forced:
        decoder.policy = Fixed(min(DRAFT_TOKENS, policy.max_draft_tokens))
    try:
        yield forced
    finally:
        decoder.policy = policy


@torch.inference_mode()
def _greedy(decoder: Decoder, prompt: list[int], tokens: int) -> Greedy:
    """Compare greedy decoding with the argmax of the target's own forward passes."""
    out = decoder.generate(prompt, SamplingParams(temperature=0), max_new_tokens=tokens, ignore_eos=True)
    model, device = decoder.scorer.model, decoder.scorer.device
    input_ids, cache, ties = torch.tensor([prompt], device=device), None, 0
    for i, token in enumerate(out.token_ids):
        step = model(input_ids=input_ids, past_key_values=cache, use_cache=True)
        logits, cache = step.logits[0, -1].float(), step.past_key_values
        argmax = int(logits.argmax())
        if argmax != token:
            if not is_tie(decoder.scorer, [*prompt, *out.token_ids[:i]], logits, argmax, token):
                return Greedy(i + 1, i, out.stats.draft_tokens, ties)
            ties += 1
        input_ids = torch.tensor([[token]], device=device)
    return Greedy(len(out.token_ids), None, out.stats.draft_tokens, ties)


def is_tie(scorer: Scorer, prefix: list[int], logits: Tensor, one: int, other: int) -> bool:
    """Return whether rounding can decide which of two tokens has the larger logit.

    In 16 bits, rounding is also measured. The gap between the two logits may differ in another forward pass,
    of the model or of the scorer, whose kernels may round otherwise. These passes begin without a KV cache,
    so a faulty cache cannot pass as rounding.

    Args:
        scorer: The scorer.
        prefix: The tokens before.
        logits: Logits ``[V]`` after them.
        one: The likeliest token.
        other: Another token.
    """
    if near_tie(logits, one, other, scorer.dtype):
        return True
    if scorer.dtype.itemsize > 2 or not near_tie(logits, one, other, scorer.dtype, MOST_ROUNDINGS):
        return False
    scorer.forget()
    gap = float(logits[one] - logits[other])
    others = [next_logits([()])[0].float() for next_logits in forward_passes(scorer, prefix)]
    return gap <= ROUNDING_FACTOR * max(abs(gap - float(row[one] - row[other])) for row in others)


def near_tie(
    logits: Tensor, one: int, other: int, dtype: torch.dtype, roundings: float = TIE_ROUNDINGS
) -> bool:
    """Return whether rounding in ``dtype`` can decide which of two tokens has the larger logit."""
    a, b = float(logits[one]), float(logits[other])
    return abs(a - b) <= roundings * torch.finfo(dtype).eps * max(abs(a), abs(b))


class _Progress:
    """Progress lines with the expected time, and on a terminal a progress bar."""

    def __init__(self, total: int, bar: bool, tell: Callable[[str], None] | None) -> None:
        from tqdm.auto import tqdm

        self._total, self._sampled, self._tell = total, 0, tell
        self._started = time.perf_counter()
        self._bar = tqdm(
            total=total, desc="sampling", unit="sample", leave=False, disable=None if bar else True
        )

    def __call__(self, size: int) -> None:
        """Count new samples."""
        if not self._sampled:
            seconds = (time.perf_counter() - self._started) * self._total / size
            self._say(f"sampling: {self._total:,} samples, about {seconds:.0f} s")
        if self._sampled == self._total:
            self._bar.total = math.ceil(LOOKS[2] * self._total)
            self._say(f"sampling: the p-value is below {LOOK_AGAIN}, so {LOOKS[2] - 1:.0%} more samples")
        self._sampled += size
        self._bar.update(size)

    def _say(self, line: str) -> None:
        if self._tell is not None:
            self._bar.clear()
            self._tell(line)

    def close(self) -> None:
        self._bar.close()
