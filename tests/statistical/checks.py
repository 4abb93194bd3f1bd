"""The suite's distribution checks. Each draws through `outpace.verify` and asserts by χ² against exact
values.

`test_planted.py` runs the same checks over broken code and sees them fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

import outpace
from outpace.sampling import Prefix, SamplingParams, adjust, random
from outpace.sampling.random import Stream
from outpace.verification import rules
from tests import tiers
from tests.statistical import chisquare
from tests.statistical import enumeration as exact
from tests.statistical.enumeration import Endings, Floats

BEFORE = [0, 1, 1, 0, 1]  # the text before every drafted block


@dataclass(frozen=True)
class Case:
    """One cell of the grid: which rule, over which distributions, drafted how."""

    rule: str = "token"
    V: int = 3
    g: int = 2
    sampling: SamplingParams = field(default_factory=SamplingParams)
    draft_sampling: SamplingParams = field(default_factory=SamplingParams)
    draft: str = "soft"  # soft: inverse CDF; gumbel: Gumbel noise; point: argmax, declared as such
    ragged: bool = False
    lenience: float = 1.0
    dtype: torch.dtype = torch.float32

    @property
    def drafting(self) -> Case:
        """The same for all that may judge the same drafts."""
        return replace(self, rule="", lenience=1.0, sampling=SamplingParams(), ragged=False)

    def __str__(self) -> str:
        def short(sampling: SamplingParams) -> str:
            parts = [("T", sampling.temperature, 1.0), ("k", sampling.top_k, 0), ("p", sampling.top_p, 1.0)]
            parts += [("m", sampling.min_p, 0.0), ("r", sampling.repetition_penalty, 1.0)]
            parts += [("f", sampling.frequency_penalty, 0.0), ("o", sampling.presence_penalty, 0.0)]
            return (
                "".join(f"{name}{value:g}" for name, value, neutral in parts if value != neutral) or "plain"
            )

        kind = str(self.dtype).removeprefix("torch.")
        return (
            f"{self.rule}-V{self.V}-g{self.g}-{short(self.sampling)}/{short(self.draft_sampling)}-{self.draft}"
            f"{'-ragged' if self.ragged else ''}{f'-l{self.lenience:g}' if self.lenience < 1 else ''}-{kind}"
        )


def number_of_draws() -> int:
    """Return the draws of one cell, by the tier."""
    return tiers.sized(200_000, 1_000_000)


def trees(case: Case, device: str = "cpu") -> tuple[list[Tensor], list[Tensor]]:
    """Logits of target and draft after every prefix: `[V**i, V]` for i = 0..g, the draft near the target."""
    generator = torch.Generator().manual_seed(case.V * 100 + case.g)
    target = [torch.randn(case.V**i, case.V, generator=generator) for i in range(case.g + 1)]
    draft = [z + 0.8 * torch.randn(z.shape, generator=generator) for z in target]
    return [z.to(device, case.dtype) for z in target], [z.to(device, case.dtype) for z in draft]


def draft_block(case: Case, draft: list[Tensor], seed: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Drafted tokens `[N, g]`, drawn with the draft stream, and the node of every prefix `[N, g+1]`."""
    nodes = [torch.zeros_like(seed)]
    tokens: list[Tensor] = []
    for i in range(case.g):
        logits = adjusted(draft[i], case.draft_sampling, case.V)[nodes[-1]]
        if case.draft == "point":
            token = logits.argmax(-1)
        elif case.draft == "gumbel":
            token = random.race(logits, random.gumbel(seed, start + i, case.V, Stream.DRAFT, start))
        else:
            token = random.sample(logits.softmax(-1), random.uniform(seed, start + i, start, Stream.DRAFT))
        tokens.append(token)
        nodes.append(nodes[-1] * case.V + token)
    return torch.stack(tokens, 1) if tokens else torch.zeros(len(seed), 0, dtype=torch.int64), torch.stack(
        nodes, 1
    )


@lru_cache(maxsize=1)
def drafted(
    draft_block: Callable[[Case, list[Tensor], Tensor, Tensor], tuple[Tensor, Tensor]],
    case: Case,
    draws: int,
    device: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Seeds, starts, drafts and their nodes, which cases in a row share if they differ in the judge alone."""
    seed = torch.arange(draws, device=device) * 7919 + 13
    start = torch.full_like(seed, len(BEFORE))
    return seed, start, *draft_block(case, trees(case, device)[1], seed, start)


def check_joint(case: Case, draws: int | None = None, device: str = "cpu") -> None:
    """Assert that (accepted tokens, next token) has the enumerated distribution.

    A million draws in the full tier, 500,000 in the default one.
    """
    draws = draws or number_of_draws()
    target, draft = trees(case, device)
    seed, start, tokens, nodes = drafted(draft_block, case.drafting, draws, device)
    lengths = torch.arange(draws, device=device) % (case.g + 1) if case.ragged else None
    verdict = outpace.verify(
        tokens,
        None if case.draft == "point" else levels(draft[:-1], nodes, case),
        levels(target, nodes, case),
        rule=case.rule,
        lenience=case.lenience,
        seed=seed,
        position=start,
        lengths=lengths,
        sampling=case.sampling,
        draft_sampling=None if case.draft == "point" else case.draft_sampling,
        prefix=torch.tensor([BEFORE], device=device).expand(draws, -1),
    )
    assert not verdict.bad.any()
    groups = range(case.g + 1) if case.ragged else [case.g]
    size = exact.outcomes(case.V, case.g)
    codes = outcome_codes(case, nodes, verdict)
    counts, expected = np.zeros((len(groups), size)), np.zeros((len(groups), size))
    for row, length in enumerate(groups):
        of_length = codes if lengths is None else codes[lengths == length]
        counts[row] = np.bincount(of_length.cpu().numpy(), minlength=size)
        outcome = expected_joint(case, target, draft, length)
        expected[row, : len(outcome)] = outcome
    chisquare.agrees(counts, expected, str(case))


def adjusted(logits: Tensor, sampling: SamplingParams, V: int) -> Tensor:
    """Adjusted logits after every prefix of one length, `[V**i, V]`; the text before the block is BEFORE."""
    depth = 0
    while V**depth < len(logits):
        depth += 1
    paths = [[*BEFORE, *tokens] for tokens in itertools.product(range(V), repeat=depth)]
    return adjust(logits, sampling, Prefix.of(paths, device=logits.device))


def levels(tree: list[Tensor], nodes: Tensor, case: Case) -> Tensor:
    """Logits of each row's prefixes: `[N, len(tree), V]`."""
    if not tree:
        return torch.zeros(len(nodes), 0, case.V, dtype=case.dtype)
    return torch.stack([tree[i][nodes[:, i]] for i in range(len(tree))], 1)


def outcome_codes(case: Case, nodes: Tensor, verdict: outpace.Verdict) -> Tensor:
    """`enumeration.code` of each row."""
    first = torch.tensor(
        [sum(case.V**n for n in range(1, m + 1)) for m in range(case.g + 1)], device=nodes.device
    )
    kept = nodes.gather(1, verdict.accepted[:, None]).squeeze(1)
    return first[verdict.accepted] + kept * case.V + verdict.next_token


def expected_joint(case: Case, target: list[Tensor], draft: list[Tensor], length: int) -> Floats:
    def probabilities(tree: list[Tensor], sampling: SamplingParams) -> list[Floats]:
        return [np.asarray(adjusted(z.cpu().double(), sampling, case.V).softmax(-1)) for z in tree]

    p, q = probabilities(target, case.sampling), probabilities(draft, case.draft_sampling)
    if case.draft == "point":
        q = [np.eye(case.V)[level.argmax(-1)] for level in q]
    endings: dict[str, Endings] = {
        "token": exact.token(case.lenience),
        "block": exact.block,
        "match": exact.match,
        "rejection": exact.rejection,
    }
    if case.rule in endings:
        return exact.joint(p, q, length, endings[case.rule])
    rule = rules.parse(case.rule)

    def squash(tree: list[Tensor], sampling: SamplingParams) -> list[Floats]:
        return [
            np.asarray(
                ((adjust(z.cpu().double(), sampling) - rule.alpha) / (rule.beta - rule.alpha)).sigmoid()
            )
            for z in tree
        ]

    q_hat = q if case.draft == "point" else squash(draft, case.draft_sampling)
    return exact.joint(p, q, length, exact.sigmoid(squash(target, case.sampling), q_hat))


def check_text(
    rule: str, draws: int | None = None, g: int = 3, draft: str = "soft", device: str = "cpu"
) -> None:
    """The first tokens of a text that took several iterations are distributed as the target's own.

    Target and draft are Markov chains; every row goes its own way through them, at positions of its own.
    """
    draws = draws or number_of_draws()
    V, length = 3, 4
    generator = torch.Generator().manual_seed(2)
    target = (1.5 * torch.randn(V, V, generator=generator)).to(device)
    proposal = target + torch.randn(V, V, generator=generator).to(device)
    seed = torch.arange(draws, device=device) * 104729 + 1
    texts = torch.zeros(draws, 1 + length + g + 1, dtype=torch.int64, device=device)  # token 0 is the prompt
    written = torch.ones_like(seed)
    rows = torch.arange(draws, device=device)
    while (active := (written <= length).nonzero().squeeze(1)).numel():
        key, start = seed[active], written[active]
        last = texts[active, start - 1]
        tokens: list[Tensor] = []
        seen = [last]
        for i in range(g):
            if draft == "soft":
                u = random.uniform(key, start + i, start, Stream.DRAFT)
                tokens.append(random.sample(proposal.softmax(-1)[seen[-1]], u))
            else:  # under rule "match" the drafter may use the target's noise
                tokens.append(random.race(proposal[seen[-1]], random.gumbel(key, start + i, V)))
            seen.append(tokens[-1])
        before = torch.stack(seen, 1)
        drafted = torch.stack(tokens, 1)
        verdict = outpace.verify(
            drafted, proposal[before[:, :-1]], target[before], rule=rule, seed=key, position=start
        )
        new = torch.cat((drafted, torch.zeros_like(drafted[:, :1])), 1)
        new.scatter_(1, verdict.accepted[:, None], verdict.next_token[:, None])
        for i in range(g + 1):
            fits = (i <= verdict.accepted) & (start + i < texts.shape[1])
            texts[rows[active][fits], (start + i)[fits]] = new[fits, i]
        written[active] += verdict.accepted + 1
    first = exact_codes(texts[:, 1 : 1 + length], V)
    p = np.asarray(target.cpu().double().softmax(-1))
    chain = [p[np.arange(V**i) % V] if i else p[:1] for i in range(length)]
    counts = np.bincount(first.cpu().numpy(), minlength=V**length)
    chisquare.agrees(counts, exact.text(chain, length), f"text by {rule}")


def exact_codes(tokens: Tensor, V: int) -> Tensor:
    code = torch.zeros_like(tokens[:, 0])
    for i in range(tokens.shape[1]):
        code = code * V + tokens[:, i]
    return code


def check_race(draws: int = tiers.sized(500, 2000), V: int = 128256) -> None:
    """A token of probability all but 1 wins every race, however many others run."""
    logits = torch.full((1, V), -20.0)
    logits[0, 5] = 20.0  # all others together: 128255 e**-40 = 5e-13 a race
    wins = 0
    for first in range(0, draws, 100):
        noise = random.gumbel(torch.arange(first, first + 100), torch.tensor(3), V)
        wins += int((random.race(logits, noise) == 5).sum())
    chisquare.agrees([wins, draws - wins], [1.0, 0.0], f"{draws} races among {V} tokens")
