"""Is it lossless? Checks of a decoder against its target alone, for anyone's own pair of models.

Two promises are tested. Greedy decoding gives the target's own tokens, one by one. And when sampling, the
first few tokens together are distributed as the target alone would draw them: many samples are drawn over a
few likely tokens, and Pearson's χ² compares how often each sequence came with its exact probability,
computed from the target's plain forward passes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outpace.arguments import integer, number
from outpace.decode import Decoder
from outpace.models.seq2seq import Seq2SeqScorer
from outpace.request import Prompt
from outpace.rows import Output
from outpace.sampling import Sampling
from outpace.stats import Stats

Floats = npt.NDArray[np.float64]
MOST_OUTCOMES = 20_000


@dataclass(frozen=True)
class Greedy:
    """One prompt, decoded greedily."""

    tokens: int  # compared
    differs_at: int | None  # the first token that differs
    drafted: int  # guesses that were made on the way
    near_tie: bool = False  # the two tokens' logits are equal but for rounding, so either is right

    @property
    def passed(self) -> bool:
        return self.differs_at is None or self.near_tie


@dataclass(frozen=True)
class Joint:
    """One prompt, sampled many times."""

    samples: int
    outcomes: int  # sequences that are possible
    p_value: float
    alarm: float  # p-values below this fail
    detectable: float  # misplaced probability that would have failed with 99 % certainty
    drafted: int  # guesses that were made on the way, and kept: without any, nothing was put to the test
    accepted: int

    @property
    def passed(self) -> bool:
        return self.p_value >= self.alarm


@dataclass(frozen=True)
class Report:
    greedy: list[Greedy]
    joint: list[Joint]

    @property
    def passed(self) -> bool:
        return all(one.passed for one in self.greedy) and all(one.passed for one in self.joint)

    @property
    def tested(self) -> bool:
        """Whether anything was guessed: without guesses there is nothing that could go wrong."""
        return any(one.drafted for one in self.greedy) or any(one.drafted for one in self.joint)

    def __str__(self) -> str:
        """The verdict in words, then the figures."""
        ties = sum(one.near_tie for one in self.greedy)
        lines = ["Lossless as far as these checks can see."]
        if not self.tested:
            lines = ["Not tested: nothing was guessed on these prompts."]
        if not self.passed:
            lines = ["NOT LOSSLESS: the output is not what the target alone would give."]
        if self.greedy:
            passed, compared = sum(one.passed for one in self.greedy), sum(one.tokens for one in self.greedy)
            parted = f"; {ties} parted at a tie that rounding decides" if ties else ""
            lines.append(
                f"Greedy: {passed} of {len(self.greedy)} prompts gave the target's own tokens "
                f"({compared} compared{parted})."
            )
        if self.joint:
            passed, worst = (
                sum(one.passed for one in self.joint),
                min(self.joint, key=lambda one: one.p_value),
            )
            coarse = max(one.detectable for one in self.joint)
            drafted = sum(one.drafted for one in self.joint)
            kept = sum(one.accepted for one in self.joint)
            lines.append(
                f"Sampling: {passed} of {len(self.joint)} prompts agree with the exact distribution; "
                f"the smallest p-value is {worst.p_value:.3g}, and below "
                f"{worst.alarm:.0e} counts as a difference."
            )
            lines.append(
                f"A fault that misplaced {coarse:.1%} of the probability would have been found with 99 % "
                f"certainty; a correct decoder fails once in {1 / (len(self.joint) * worst.alarm):,.0f} "
                "audits."
            )
            lines.append(f"On the way {drafted:,} tokens were guessed and {kept:,} kept.")
        return "\n".join(lines)


def audit(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    *,
    greedy_tokens: int = 32,
    tokens: int = 4,
    top: int = 5,
    samples: int = 2000,
    temperature: float = 1.0,
    batch_size: int = 64,
    seed: int = 0,
    alarm: float = 1e-6,
    progress: bool = True,
) -> Report:
    """Check a decoder on prompts of your own.

    greedy_tokens  tokens to compare in greedy decoding; 0 leaves it out
    tokens, top    the first so many tokens, each from the same few likely ones, make top**tokens outcomes
    samples        draws per prompt; 0 leaves sampling out
    alarm          p-values below this fail: the probability of a false alarm per prompt
    """
    if isinstance(decoder.scorer, Seq2SeqScorer):
        raise ValueError(
            "decoder: models with an encoder cannot be audited yet; tests/statistical has theirs"
        )
    integer("greedy_tokens", greedy_tokens, "an int >= 0", lambda n: n >= 0)
    integer("tokens", tokens, "an int >= 1", lambda n: n >= 1)
    integer("top", top, "an int >= 2", lambda n: n >= 2)
    integer("samples", samples, "an int >= 0", lambda n: n >= 0)
    number("alarm", alarm, "a number in (0, 1)", lambda a: 0 < a < 1)
    number("temperature", temperature, "a number > 0", lambda t: t > 0)
    if samples and top**tokens > MOST_OUTCOMES:
        raise ValueError(
            f"tokens, top: got {tokens}, {top}; {top}**{tokens} texts are too many to count, "
            f"{MOST_OUTCOMES} are the most"
        )
    if isinstance(prompts, str) or not len(prompts):
        raise ValueError("prompts: give a list of at least one prompt")
    from tqdm.auto import tqdm

    ids = [decoder.encode(prompt) for prompt in prompts]
    room = decoder.scorer.context - max(tokens if samples else 0, greedy_tokens)
    if max(map(len, ids)) > room:
        raise ValueError(f"prompts: got one of {max(map(len, ids))} tokens; to be audited it may have {room}")
    bar = tqdm(ids, desc="auditing", unit="prompt", disable=None if progress else True)
    greedy, joint = [], []
    for prompt in bar:
        if greedy_tokens:
            greedy.append(_greedy(decoder, prompt, greedy_tokens))
        if samples:
            allowed = likely(decoder.scorer.model, prompt, tokens, top)
            exact = distribution(decoder.scorer.model, prompt, tokens, allowed, temperature)
            others = dict.fromkeys(set(range(decoder.scorer.vocab_size)) - set(allowed), -math.inf)
            sampling = Sampling(temperature=temperature, logit_bias=others)
            drawn = decoder.generate(
                prompt,
                sampling,
                n=samples,
                max_new_tokens=tokens,
                ignore_eos=True,
                seed=seed,
                batch_size=batch_size,
            )
            joint.append(_joint(drawn, exact, alarm))
    return Report(greedy, joint)


@torch.inference_mode()
def _greedy(decoder: Decoder, prompt: list[int], tokens: int) -> Greedy:
    out = decoder.generate(prompt, Sampling(temperature=0), max_new_tokens=tokens, ignore_eos=True)
    model, device = decoder.scorer.model, decoder.scorer.device
    fed, cache = torch.tensor([prompt], device=device), None
    for i, token in enumerate(out.tokens):
        step = model(input_ids=fed, past_key_values=cache, use_cache=True)
        logits, cache = step.logits[0, -1].float(), step.past_key_values
        own = int(logits.argmax())
        if own != token:
            return Greedy(i + 1, i, out.stats.drafted, near_tie(logits, own, token, decoder.scorer.dtype))
        fed = torch.tensor([[token]], device=device)
    return Greedy(len(out.tokens), None, out.stats.drafted)


def near_tie(logits: Tensor, one: int, other: int, dtype: torch.dtype) -> bool:
    """Whether a model that computes in `dtype` may see either token as the likelier, by rounding alone."""
    gap = float((logits[one] - logits[other]).abs())
    return gap <= 8 * torch.finfo(dtype).eps * float(logits.abs().max())


@torch.inference_mode()
def likely(model: Any, prompt: Sequence[int], tokens: int, top: int) -> list[int]:
    """Few tokens that a text may consist of and still go on naturally: those of the greedy continuation, then
    the runners-up along it."""
    text = torch.tensor([list(prompt)], device=model.get_input_embeddings().weight.device)
    ranks = []
    for _ in range(tokens):
        best = model(input_ids=text, use_cache=False).logits[0, -1].topk(top).indices
        ranks.append(best.tolist())
        text = torch.cat((text, best[None, :1]), dim=1)
    return list(dict.fromkeys(token for rank in zip(*ranks, strict=True) for token in rank))[:top]


@torch.inference_mode()
def distribution(
    model: Any, prompt: Sequence[int], tokens: int, allowed: Sequence[int], temperature: float = 1.0
) -> dict[tuple[int, ...], float]:
    """Exact probability of every sequence of `tokens` allowed tokens, by plain forward passes."""
    device = model.get_input_embeddings().weight.device
    level: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(tokens):
        texts = torch.tensor([[*prompt, *prefix] for prefix in level], device=device)
        logits = [model(input_ids=part, use_cache=False).logits[:, -1] for part in torch.split(texts, 64)]
        scores = torch.cat(logits).double() / temperature
        chances = scores[:, list(allowed)].softmax(-1).tolist()
        level = {
            (*prefix, token): mass * chance
            for (prefix, mass), row in zip(level.items(), chances, strict=True)
            for token, chance in zip(allowed, row, strict=True)
        }
    return level


def _joint(drawn: Sequence[Output], exact: dict[tuple[int, ...], float], alarm: float) -> Joint:
    counts = Counter(tuple(out.tokens) for out in drawn)
    seen = [counts.pop(outcome, 0) for outcome in exact]
    impossible = sum(counts.values())
    chances = [*exact.values(), 0.0]
    p = p_value([*seen, impossible], chances, expected=5)
    stats = sum((out.stats for out in drawn), Stats())
    detectable = _detectable(len(drawn), chances, alarm)
    return Joint(len(drawn), len(exact), p, alarm, detectable, stats.drafted, stats.accepted)


def p_value(counts: npt.ArrayLike, probabilities: npt.ArrayLike, expected: float) -> float:
    """P(a χ² at least this large) for `counts` of independent draws from `probabilities`.

    Counts and probabilities may have several rows, one per group of draws, each row a distribution of its
    own. Rare outcomes are merged until each expects so many draws; one of probability 0 gives p = 0.
    """
    observed = np.atleast_2d(np.asarray(counts, dtype=np.float64))
    hoped_for = np.atleast_2d(np.asarray(probabilities, dtype=np.float64)) * observed.sum(1, keepdims=True)
    if not np.allclose(hoped_for.sum(1), observed.sum(1), rtol=1e-6):
        raise ValueError("probabilities do not sum to 1")
    if (observed[hoped_for == 0] > 0).any():
        return 0.0
    statistic, freedom = 0.0, 0
    for seen, hoped in zip(observed, hoped_for, strict=True):
        seen, hoped = merge(seen, hoped, expected)
        statistic += float(((seen - hoped) ** 2 / hoped).sum())
        freedom += len(hoped) - 1
    if freedom == 0:
        if (np.count_nonzero(hoped_for, axis=1) > 1).any():
            raise ValueError("too few draws: every bin was merged into one, so nothing was tested")
        return 1.0  # a single outcome is possible, and nothing else was seen
    return _beyond(statistic, freedom)


def merge(seen: Floats, hoped: Floats, expected: float) -> tuple[Floats, Floats]:
    """Join bins that expect fewer draws, in the order they come, until each expects at least so many."""
    rare = (hoped > 0) & (hoped < expected)
    merged_seen, merged_hoped = list(seen[hoped >= expected]), list(hoped[hoped >= expected])
    s = h = 0.0
    for one_seen, one_hoped in zip(seen[rare], hoped[rare], strict=True):
        s, h = s + one_seen, h + one_hoped
        if h >= expected:
            merged_seen.append(s)
            merged_hoped.append(h)
            s = h = 0.0
    if h > 0 and merged_hoped:  # what is left goes to the smallest
        smallest = int(np.argmin(merged_hoped))
        merged_seen[smallest] += s
        merged_hoped[smallest] += h
    elif h > 0:
        merged_seen, merged_hoped = [s], [h]
    return np.asarray(merged_seen), np.asarray(merged_hoped)


def _beyond(statistic: float, freedom: float) -> float:
    half: Tensor = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _detectable(samples: int, chances: Sequence[float], alarm: float) -> float:
    """Probability that has to move between two halves of the outcomes for the χ² to fail in 99 of 100 audits.

    Moving δ adds 4δ² times the samples to the statistic's mean; near there a non-central χ² is close to a
    normal variable of mean df + λ and variance 2(df + 2λ).
    """
    hoped = np.asarray(chances) * samples
    freedom = len(merge(hoped, hoped, 5)[1]) - 1
    if freedom < 1:
        return 1.0
    low, high = float(freedom), freedom + 1e4
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if _beyond(middle, freedom) > alarm else (low, middle)
    shift = 0.0
    while freedom + shift - 2.33 * math.sqrt(2 * (freedom + 2 * shift)) < high:
        shift += 0.5
    return min(1.0, math.sqrt(shift / samples) / 2)
