"""Checks of a decoder against its target without speculation, for anyone's own pair of models.

Greedy decoding must give the target's own tokens, one by one. In sampling, the first few tokens together must
be distributed as the target alone would sample them. Many samples are taken over a few tokens. Pearson's χ²
compares how often each sequence came with its exact probability, computed from ordinary forward passes of the
target. Speculation is forced: a decoder whose policy depends on measured time may draft nothing.

In 16 bits, forward passes of other shapes round differently. The probabilities are then computed a second
time, from forward passes with a KV cache. Twice the distance between the two does not count as a difference.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outpace.auditing.pearson import (
    CERTAINTY,
    LOOK_AGAIN,
    LOOKS,
    SUSPICIOUS,
    Floats,
    Ints,
    Power,
    decide,
    power,
    samples_for,
)
from outpace.checks.arguments import integer, number
from outpace.decoder import Decoder
from outpace.engine.request import Prompt, seed_of
from outpace.engine.stats import Stats
from outpace.models.seq2seq import Seq2SeqScorer
from outpace.policy import Fixed, Goodput
from outpace.sampling import SamplingParams

MOST_OUTCOMES = 20_000
DRAFT_TOKENS = 3  # per step, where the decoder's policy depends on measured time
# Tokens by which batches of samples may be longer, in turn. A step drafts no token that would be the last one
# or beyond, so a sample with a higher limit has longer drafts. `stop_when` ends it as early as the others.
# The longer ones come first: they cost more, and a large fault ends the audit early.
LONGER = 0, 2, 0, 1, *[0] * 12
ROUNDING = 2.0  # times the distance between two ways to compute probabilities in 16 bits
TIE = 4.0  # roundings by which two logits may differ and still be called equal
RAISED = 100.0  # added to the logits of allowed tokens, so that no other is ever sampled
CANDIDATES = 8  # tokens among which a set without rare sequences is chosen

NO_DIFFERENCE, DIFFERENCE, UNKNOWN = "no difference found", "difference found", "could not tell"


@dataclass(frozen=True)
class Greedy:
    """Greedy decoding of one prompt."""

    tokens: int  # compared
    differs_at: int | None  # the first token that differs
    draft_tokens: int  # of the whole output
    ties: int = 0  # tokens that differ where two logits are equal up to rounding, so either is right

    @property
    def passed(self) -> bool:
        """True if all tokens are the target's own."""
        return self.differs_at is None


@dataclass(frozen=True)
class Joint:
    """Samples of one prompt.

    Attributes:
        samples: Sequences that were sampled.
        outcomes: Sequences that are possible.
        impossible: Sampled sequences that the target cannot give.
        p_value: The p-value of this prompt by itself.
        detectable: Misplaced probability on this prompt alone that is found with 99 % certainty.
        draft_tokens: Draft tokens of all samples.
        accepted_tokens: Draft tokens that were accepted.
    """

    samples: int
    outcomes: int
    impossible: int
    p_value: float
    detectable: float
    draft_tokens: int
    accepted_tokens: int


@dataclass(frozen=True)
class Report:
    """Result of an audit.

    Attributes:
        greedy: The greedy check of each prompt; empty where that check was left out.
        joint: The sampling check of each prompt; empty where that check was left out.
        tokens: Tokens of a sample.
        different: Whether the sampling check found a difference.
        p_value: The p-value of its last look at all prompts together, corrected for their number. None
            without a sampling check.
        alarm: Probability that a correct decoder is found different.
        detectable: Misplaced probability on every prompt that is found with 99 % certainty. None without a
            sampling check.
        rounding: Misplaced probability on any prompt that is attributed to rounding.
        length: Draft-length policy that the checks ran with.
        forced: Whether the audit's own policy replaced one that depends on measured time.
        engine: Whether the decoder has an engine. Samples have a logit bias, so they do not run in it.
        seconds: Seconds of all checks.
    """

    greedy: list[Greedy]
    joint: list[Joint]
    tokens: int
    different: bool
    p_value: float | None
    alarm: float
    detectable: float | None
    rounding: float
    length: str
    forced: bool
    engine: bool
    seconds: float

    @property
    def sampling(self) -> str:
        """Verdict of the sampling check alone."""
        if self.different:
            return DIFFERENCE
        drafted = any(one.draft_tokens for one in self.joint)
        return NO_DIFFERENCE if drafted and not self.suspicious and not self.blind else UNKNOWN

    @property
    def suspicious(self) -> bool:
        """True if the p-value is small, but not small enough for a difference."""
        return not self.different and self.p_value is not None and self.p_value < SUSPICIOUS

    @property
    def blind(self) -> bool:
        """True if there are too few samples to find anything."""
        return self.detectable is None or self.detectable >= 1

    @property
    def verdict(self) -> str:
        """One of "no difference found", "difference found" and "could not tell"."""
        if not all(one.passed for one in self.greedy) or self.different:
            return DIFFERENCE
        if self.joint:
            return self.sampling
        return NO_DIFFERENCE if self.tested else UNKNOWN

    @property
    def passed(self) -> bool:
        """True if no difference was found."""
        return self.verdict == NO_DIFFERENCE

    @property
    def tested(self) -> bool:
        """True if there were any draft tokens; without them there is nothing to test."""
        return self.draft_tokens > 0 or any(one.draft_tokens for one in self.greedy)

    @property
    def draft_tokens(self) -> int:
        """Draft tokens of the sampling check."""
        return sum(one.draft_tokens for one in self.joint)

    @property
    def accepted_tokens(self) -> int:
        """Accepted draft tokens of the sampling check."""
        return sum(one.accepted_tokens for one in self.joint)

    def __str__(self) -> str:
        """Return the verdict in words, then the figures."""
        lines = [f"{self.verdict.capitalize()}."]
        if self.verdict == DIFFERENCE:
            lines = ["DIFFERENCE FOUND: the output is not what the target gives without speculation."]
        elif not self.tested:
            lines = ["Could not tell: no draft token was proposed on these prompts, so nothing was tested."]
        if self.greedy:
            lines.append(self._greedy_words())
        if self.joint:
            lines += self._sampling_words()
        return "\n".join(lines)

    def _greedy_words(self) -> str:
        passed, compared = sum(one.passed for one in self.greedy), sum(one.tokens for one in self.greedy)
        ties = sum(one.ties for one in self.greedy)
        parted = f", {ties} of them at ties that rounding decides" if ties else ""
        return (
            f"Greedy: {passed} of {len(self.greedy)} prompts gave the target's own tokens "
            f"({compared} compared{parted})."
        )

    def _sampling_words(self) -> list[str]:
        assert self.p_value is not None
        samples = sum(one.samples for one in self.joint)
        impossible = sum(one.impossible for one in self.joint)
        corrected = f", corrected for {len(self.joint)} prompts" if len(self.joint) > 1 else ""
        lines = [
            f"Sampling: {self.sampling} in {samples:,} samples of {self.tokens} tokens; "
            f"p-value {self.p_value:.2g}{corrected}."
        ]
        if impossible:
            lines.append(f"{impossible:,} samples have tokens that were ruled out.")
        elif self.p_value < SUSPICIOUS:
            chance = len(LOOKS) * self.p_value  # at one of the looks
            odds = f"at most 1 of {1 / chance:,.0f}" if chance > 1e-12 else "fewer than 1 of 10^12"
            lines.append(f"A correct decoder gives a p-value this small in {odds} audits.")
        if self.suspicious:
            lines.append("That is suspicious, and no proof: run again with more samples.")
        undrafted = [i for i, one in enumerate(self.joint) if not one.draft_tokens]
        if self.tested and undrafted and not self.different:
            which = "any prompt" if len(undrafted) == len(self.joint) else f"prompt {undrafted[0] + 1}"
            lines.append(f"No draft token was proposed in the samples of {which}: give prompts that repeat.")
        if self.blind and not self.different:
            lines.append("There are too few samples to find anything: give more.")
        if self.sampling == NO_DIFFERENCE:
            every = " on every prompt" if len(self.joint) > 1 else ""
            lines.append(
                f"A misplacement of {self.detectable:.1%} or more of these sequences' probability{every} "
                f"would have been found with {CERTAINTY:.0%} certainty."
            )
            lines.append(
                f"A correct decoder is found different in at most 1 of {1 / self.alarm:,.0f} audits."
            )
        if self.rounding:
            lines.append(f"Up to {self.rounding:.1%} is put down to rounding in 16 bits.")
        fixed = ", fixed for the audit" if self.forced else ""
        lines.append(
            f"Draft tokens: {self.accepted_tokens:,} accepted, "
            f"{self.draft_tokens - self.accepted_tokens:,} rejected "
            f"(length {self.length}{fixed})."
        )
        if self.engine:
            lines.append("Samples were drawn without the engine: it takes no logit bias, which they need.")
        if self.draft_tokens and not self.accepted_tokens:
            lines.append("None was accepted, so acceptance was not tested: give prompts that repeat.")
        elif self.draft_tokens and self.accepted_tokens == self.draft_tokens:
            lines.append("None was rejected, so rejection was not tested: give other prompts.")
        return lines


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
            sampler = _Sampler(decoder, ids, tokens, top, temperature, batch_size, seed)
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


class _Sampler:
    """Samples of every prompt, counted by outcome."""

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[list[int]],
        tokens: int,
        top: int,
        temperature: float,
        batch_size: int,
        seed: int,
    ) -> None:
        self._decoder, self._prompts, self._tokens = decoder, prompts, tokens
        self._batch_size, self._seed, self._temperature = batch_size, seed, temperature
        self._drawn = 0  # samples of all prompts
        self._longer = [itertools.cycle(LONGER) for _ in prompts]
        self.stats = [Stats() for _ in prompts]
        self.exact: list[dict[tuple[int, ...], float]] = []
        self._samplings, self._allowed = list[SamplingParams](), list[list[int]]()
        model = decoder.scorer.model
        for prompt in prompts:
            allowed = balanced(model, prompt, top, temperature)
            self._allowed.append(allowed)
            self.exact.append(distribution(model, prompt, tokens, allowed, temperature))
            raised = dict.fromkeys(allowed, RAISED * max(1.0, temperature))
            self._samplings.append(SamplingParams(temperature=temperature, logit_bias=raised))

    def rounding(self) -> Floats:
        """Return Σ(q − p)²/p per prompt that rounding may bring about; 0 in 32 bits."""
        if self._decoder.scorer.dtype.itemsize > 2:
            return np.zeros(len(self._prompts))
        found = []
        for prompt, allowed, exact in zip(self._prompts, self._allowed, self.exact, strict=True):
            other = distribution(
                self._decoder.scorer.model, prompt, self._tokens, allowed, self._temperature, cached=True
            )
            away = sum((other[outcome] - p) ** 2 / p for outcome, p in exact.items() if p)
            found.append(ROUNDING**2 * away)
        return np.array(found)

    def draw(self, i: int, n: int, told: Callable[[int], None]) -> Ints:
        """Return how often each outcome of prompt i came in n new samples; the last count is of others."""
        places = {outcome: place for place, outcome in enumerate(self.exact[i])}
        counts = np.zeros(len(places) + 1, dtype=np.int64)
        for first in range(0, n, self._batch_size):
            size = min(self._batch_size, n - first)
            outs = self._decoder.generate(
                self._prompts[i],
                self._samplings[i],
                n=size,
                max_new_tokens=self._tokens + next(self._longer[i]),
                stop_when=lambda row: len(row.new_tokens) >= self._tokens,
                ignore_eos=True,
                seed=seed_of(self._seed, 0, self._drawn, 1),  # no two samples of an audit share their noise
            )
            for out in outs:
                counts[places.get(tuple(out.token_ids), -1)] += 1
            self.stats[i] += sum((out.stats for out in outs), Stats())
            self._drawn += size
            told(size)
        return counts


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


@torch.inference_mode()
def balanced(model: Any, prompt: Sequence[int], top: int, temperature: float = 1.0) -> list[int]:
    """Return ``top`` tokens of which no sequence is rare after the prompt.

    They are tokens of the prompt, if it has enough: prompt lookup can propose no others. Among the likeliest
    of them the result is the set whose first two tokens have the largest entropy.
    """
    device = model.get_input_embeddings().weight.device
    text = torch.tensor([list(prompt)], device=device)
    logits = model(input_ids=text, use_cache=False).logits[0, -1].double() / temperature
    own, order = set(prompt), logits.argsort(descending=True).tolist()
    found = [token for token in order if token in own]
    if len(found) < top:
        found += [token for token in order if token not in own]
    candidates = torch.tensor(found[: max(CANDIDATES, top)], device=device)
    longer = torch.cat((text.expand(len(candidates), -1), candidates[:, None]), dim=1)
    after = model(input_ids=longer, use_cache=False).logits[:, -1, candidates].double() / temperature

    def entropy(some: tuple[int, ...]) -> float:
        first, second = (
            logits[candidates[list(some)]].softmax(0),
            after[list(some)][:, list(some)].softmax(-1),
        )
        joint = first[:, None] * second
        return float(-torch.xlogy(joint, joint).sum())

    best = max(itertools.combinations(range(len(candidates)), top), key=entropy)
    return candidates[list(best)].tolist()


@torch.inference_mode()
def distribution(
    model: Any,
    prompt: Sequence[int],
    tokens: int,
    allowed: Sequence[int],
    temperature: float = 1.0,
    cached: bool = False,
) -> dict[tuple[int, ...], float]:
    """Return the exact probability of every sequence of ``tokens`` allowed tokens.

    The forward passes take whole texts. With ``cached`` they take the tokens after the prompt, one text at a
    time.
    """
    following = _cached(model, prompt) if cached else _uncached(model, prompt)
    level: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        scores = following([*level])[:, list(allowed)].double() / temperature
        level = {
            (*prefix, token): mass * chance
            for (prefix, mass), row in zip(level.items(), scores.softmax(-1).tolist(), strict=True)
            for token, chance in zip(allowed, row, strict=True)
        }
    return level


Following = Callable[[Sequence[tuple[int, ...]]], Tensor]
"""A function that returns the logits ``[n, V]`` after the prompt and each of n texts of equal length."""


def _uncached(model: Any, prompt: Sequence[int]) -> Following:
    device = model.get_input_embeddings().weight.device
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}

    def following(texts: Sequence[tuple[int, ...]]) -> Tensor:
        ids = torch.tensor([[*prompt, *text] for text in texts], device=device)
        parts = torch.split(ids, 64)
        return torch.cat([model(input_ids=part, use_cache=False, **last).logits[:, -1] for part in parts])

    return following


def _cached(model: Any, prompt: Sequence[int]) -> Following:
    device = model.get_input_embeddings().weight.device
    begun = model(input_ids=torch.tensor([list(prompt)], device=device), use_cache=True)

    def following(texts: Sequence[tuple[int, ...]]) -> Tensor:
        found: list[Tensor] = [] if texts != [()] else [begun.logits[0, -1]]
        for text in filter(None, texts):
            ids, cache = torch.tensor([text], device=device), copy.deepcopy(begun.past_key_values)
            found.append(model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0, -1])
        return torch.stack(found)

    return following
