"""The losslessness matrix: with any drafter and rule, texts have the target's distribution.

A tiny target over V tokens generates a few tokens many times. Their joint distribution is compared with the
exact one. That is enumerated from forward passes of the target and Transformers' own processors. It shares no
code with the library. Texts span several steps, because a wrong rollback spoils the step after it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import outpace
from outpace import Decoder, Fixed, Goodput, Heuristic, SamplingParams
from outpace.engine.graph import GraphExecutor
from outpace.policy import DraftLengthPolicy, StepOutcome
from outpace.verification import eager
from tests import tiers
from tests.statistical import chisquare
from tests.tiny import SEQ2SEQ, letter_tokenizer, tiny, tiny_seq2seq

pytestmark = pytest.mark.statistical

V = 4
NEW_TOKENS = 5
END = 3
PROMPT = [1, 2, 0, 1]
SAMPLES = tiers.sized(2000, 5000)  # per cell; test_decoder_planted.py shows that they are enough


class Alternating(LogitsProcessor):  # type: ignore[misc]
    """Has a state: every other call makes token 0 less likely."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, 0] -= 3.0 * (self.calls % 2)
        return scores


class AfterTwo(LogitsProcessor):  # type: ignore[misc]
    """Reads the text: token 2 is likelier after itself."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[input_ids[:, -1] == 2, 2] += 1.0
        return scores


class CountPenalties(LogitsProcessor):  # type: ignore[misc]
    """Frequency and presence penalties by their definition."""

    def __init__(self, frequency: float, presence: float) -> None:
        self.frequency, self.presence = frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.bincount(input_ids[0, len(PROMPT) :], minlength=V)
        return scores - self.frequency * counts - self.presence * (counts > 0)


class Biased(LogitsProcessor):  # type: ignore[misc]
    """A bias by its definition."""

    def __init__(self, bias: dict[int, float]) -> None:
        self.bias = torch.tensor([bias.get(token, 0.0) for token in range(V)])

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + self.bias


class NothingAfterTheEnd(LogitsProcessor):  # type: ignore[misc]
    """A grammar that allows no token after END, where decoding without speculation never asks it."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ended = END in input_ids[0, len(PROMPT) :].tolist()
        return torch.full_like(scores, -torch.inf) if ended else scores


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, and Transformers' processors that do the same, created anew for each text."""

    params: Callable[[], SamplingParams]
    reference: Callable[[], list[Any]]


SAMPLINGS = {
    "plain": Sampling(SamplingParams, list),
    "warm": Sampling(
        lambda: SamplingParams(temperature=0.7, top_k=3),
        lambda: [TemperatureLogitsWarper(0.7), TopKLogitsWarper(3)],
    ),
    "nucleus": Sampling(
        lambda: SamplingParams(temperature=1.3, top_p=0.85, min_p=0.1),
        lambda: [TemperatureLogitsWarper(1.3), TopPLogitsWarper(0.85), MinPLogitsWarper(0.1)],
    ),
    "penalty": Sampling(
        lambda: SamplingParams(repetition_penalty=1.8), lambda: [RepetitionPenaltyLogitsProcessor(1.8)]
    ),
    "counts": Sampling(
        lambda: SamplingParams(frequency_penalty=2.0, presence_penalty=0.7),
        lambda: [CountPenalties(2.0, 0.7)],
    ),
    "bias": Sampling(
        lambda: SamplingParams(logit_bias={1: 1.5, 2: -0.7}), lambda: [Biased({1: 1.5, 2: -0.7})]
    ),
    "allowed": Sampling(
        lambda: SamplingParams(allowed_token_ids=range(1, V)), lambda: [Biased({0: -math.inf})]
    ),
    "processors": Sampling(
        lambda: SamplingParams(processors=[Alternating(), AfterTwo()]), lambda: [Alternating(), AfterTwo()]
    ),
}
ENDING = {"grammar": Sampling(lambda: SamplingParams(processors=[NothingAfterTheEnd()]), list)}


@lru_cache
def target(family: str = "llama") -> Any:
    return fresh(family)


def fresh(family: str) -> Any:
    if family in SEQ2SEQ:
        return tiny_seq2seq(family, vocab_size=V)
    sizes = {} if family == "gpt2" else {"intermediate_size": 32}
    return tiny(family, vocab_size=V, num_hidden_layers=2, hidden_size=16, **sizes)


@lru_cache
def small(family: str = "llama") -> Any:
    """A draft that agrees with the target often, not always."""
    model = fresh(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.08 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)))
    return model


def prompt_of(family: str) -> Any:
    """Return the prompt, or the input of the encoder."""
    if family == "whisper":
        return torch.randn(8, 40, generator=torch.Generator().manual_seed(3))
    return [2, 3, 1, 2, 0, 3, 3] if family in SEQ2SEQ else PROMPT


@lru_cache
def exact(sampling: str, stops: bool, family: str = "llama") -> dict[tuple[int, ...], float]:
    """Probability of every text of NEW_TOKENS tokens, cut at END if that stops."""
    found: dict[tuple[int, ...], float] = {}
    texts = list(itertools.product(range(V), repeat=NEW_TOKENS))
    start = [1] if family in SEQ2SEQ else PROMPT
    ids = torch.tensor([[*start, *text] for text in texts])
    inputs: dict[str, Any] = {"input_ids": ids}
    if family in SEQ2SEQ:
        source = torch.as_tensor(prompt_of(family))
        name = "input_features" if family == "whisper" else "input_ids"
        inputs = {"decoder_input_ids": ids, name: source.expand(len(texts), *source.shape)}
    with torch.inference_mode():
        logits = target(family)(**inputs).logits.double()

    @cache
    def chances(row: int, text: tuple[int, ...]) -> list[float]:
        """After a beginning of a text, which is that row's."""
        processors = (SAMPLINGS | ENDING)[sampling].reference()
        for i in range(len(text) + 1):
            scores = logits[row, len(start) + i - 1][None]
            for processor in processors:
                scores = processor(torch.tensor([[*start, *text[:i]]]), scores)
        return list(scores.softmax(-1)[0].tolist())

    for row, text in enumerate(texts):
        mass = 1.0
        for i, token in enumerate(text):
            first = row - row % V ** (NEW_TOKENS - i)  # of those that begin so
            mass *= chances(first, text[:i])[token]
        cut = text[: text.index(END) + 1] if stops and END in text else text
        found[cut] = found.get(cut, 0.0) + mass
    return found


def drafter(name: str, family: str = "llama") -> Any:
    if name in ("model", "causal"):
        return outpace.ModelDrafter(small(family if name == "model" else "llama"))
    if name == "ngram":
        likely = torch.tensor([0.1, 0.6, 0.05, 0.25])  # unlike each other, so that wrong ones are noticed
        text = torch.multinomial(likely, 200, True, generator=torch.Generator().manual_seed(0))
        return outpace.NGramDrafter.fit(text, 3, V)
    if name == "lookup":
        return outpace.LookupDrafter()
    if name == "text":  # tokens of both cross each other's borders, and the target's texts have many forms
        draft_tokenizer = letter_tokenizer("a", "c", "ba", "b")
        return outpace.TextDrafter(small(family), draft_tokenizer, letter_tokenizer("a", "b", "ab", "c"))
    return outpace.RandomDrafter(V) if name == "random" else None


class Clocked(Goodput):
    """Goodput with simulated times: 1 + 7g/100 for a step with g draft tokens, 1/20 for a proposal."""

    def observe(self, done: StepOutcome) -> None:
        proposal = 0.05 * (done.proposal_seconds > 0)
        super().observe(replace(done, seconds=1 + 0.07 * done.g, proposal_seconds=proposal))


POLICIES: dict[str, Callable[[int], DraftLengthPolicy]] = {
    "f": Fixed,
    "h": Heuristic,
    "l": lambda g: Heuristic(g, least=1),
    "g": Clocked,
}


@dataclass(frozen=True)
class Cell:
    drafter: str = "model"
    rule: str = "token"
    sampling: str = "plain"
    policy: str = "f 2"  # f: Fixed, h: Heuristic, l: one that never rests, g: Goodput
    batch_size: int = SAMPLES
    stops: bool = False
    draft_sampling: str | None = None
    engine: bool = False
    family: str = "llama"

    def __str__(self) -> str:
        parts = [self.drafter, self.rule, self.sampling, self.policy, f"B{self.batch_size}"]
        parts += ["stops"] * self.stops + [f"draft {self.draft_sampling}"] * (self.draft_sampling is not None)
        parts += ["engine"] * self.engine + [self.family] * (self.family != "llama")
        return "-".join(parts)

    @property
    def samples(self) -> int:
        """Draws of this cell; half for slow models and small batches."""
        slow = self.family != "llama" or self.batch_size <= 10
        return SAMPLES // 2 if slow else SAMPLES

    def decoder(self) -> Decoder:
        kind, g = self.policy.split()
        policy = POLICIES[kind](int(g))
        draft = SAMPLINGS[self.draft_sampling].params() if self.draft_sampling else None
        return Decoder(
            target(self.family), drafter(self.drafter, self.family), rule=self.rule, num_draft_tokens=policy,
            draft_sampling=draft, engine=self.engine,
        )  # fmt: skip


def joint_distribution_is_exact(cell: Cell, samples: int | None = None) -> None:
    decoder = cell.decoder()
    outs = decoder.generate(
        prompt_of(cell.family),
        (SAMPLINGS | ENDING)[cell.sampling].params(),
        n=samples or cell.samples,
        max_new_tokens=NEW_TOKENS,
        stop_tokens=[END] if cell.stops else [],
        seed=20230213,
        batch_size=cell.batch_size,
    )
    assert isinstance(decoder.executor, GraphExecutor) == cell.engine, "the other executor ran"
    expected = exact(cell.sampling, cell.stops, cell.family)
    counts = Counter(tuple(out.token_ids) for out in outs)
    assert set(counts) <= set(expected), "an impossible text came out"
    chisquare.agrees(
        [counts[text] for text in expected], list(expected.values()), str(cell), expected=chisquare.SOME
    )


def mixed_batch_is_exact(engine: bool, samples: int = tiers.sized(450, 4000)) -> None:
    """Decode all kinds of requests together, each by rule token and by rule match."""
    decoder = Decoder(target(), drafter("model"), num_draft_tokens=Fixed(2), engine=engine)
    texts: dict[tuple[str, bool], Counter[tuple[int, ...]]] = {}
    with decoder.scheduler(batch_size=50) as scheduler:
        kinds = {}
        for i in range(samples):
            for sampling, one in SAMPLINGS.items():
                match = i % 2 == 0
                requests = decoder.requests(
                    PROMPT,
                    one.params(),
                    max_new_tokens=NEW_TOKENS,
                    seed=2 * i if match else None,
                    num_draft_tokens=("auto", 0, 1, 3)[i // 2 % 4],
                )
                assert requests[0].match == match
                requests[0].seed = 20230213 + i  # of all, so that the test repeats
                kinds[scheduler.add(requests[0])] = sampling, match
        while scheduler.unfinished:
            for step in scheduler.step():
                if step.output is not None:
                    texts.setdefault(kinds[step.index], Counter())[tuple(step.output.token_ids)] += 1
    for (sampling, match), counts in texts.items():
        expected = exact(sampling, False)
        assert set(counts) <= set(expected), "an impossible text came out"
        observed = [counts[text] for text in expected]
        name = f"{sampling}, {'match' if match else 'token'}"
        chisquare.agrees(observed, list(expected.values()), name, expected=chisquare.SOME)


@pytest.mark.parametrize("engine", [False, True])
def test_a_batch_of_all_kinds_of_requests_is_exact(engine: bool) -> None:
    mixed_batch_is_exact(engine)


CELLS: list[Cell] = [
    # every drafter under every rule; samplings, policies and stops rotate
    *(
        Cell(name, rule, sampling, policy, stops=stops)
        for (name, rule), sampling, policy, stops in zip(
            itertools.product(("model", "ngram", "lookup", "random", "text"), ("token", "block", "match")),
            itertools.cycle(SAMPLINGS),
            itertools.cycle(("f 2", "h 2", "f 4", "f 1", "f 3", "h 1", "f 2")),
            itertools.cycle((False, True, False)),
            strict=False,
        )
    ),
    # the model under every sampling with every rule
    *(Cell("model", rule, sampling, "f 3") for rule in ("token", "block", "match") for sampling in SAMPLINGS),
    # draft tokens after an end, where a grammar leaves the target no token, and the draft model some
    *(
        Cell(name, rule, "grammar", "f 3", stops=True, engine=True)
        for name, rule in itertools.product(("model", "lookup"), ("token", "block", "match"))
    ),
    *(
        Cell("model", rule, "grammar", "f 3", stops=True, draft_sampling="plain")
        for rule in ("token", "block", "match")
    ),
    # decoding without speculation
    Cell("none", sampling="processors", stops=True),
    # the draft samples differently
    Cell("model", "token", "plain", "f 3", draft_sampling="warm"),
    Cell("model", "block", "penalty", "f 2", draft_sampling="processors"),
    Cell("ngram", "token", "nucleus", "f 2", draft_sampling="penalty"),
    # small batches whose slots are refilled
    Cell("lookup", "block", "plain", "f 3", batch_size=7, stops=True),
    Cell("model", "token", "penalty", "h 3", batch_size=64, stops=True),
    Cell("none", "match", "nucleus", batch_size=64, stops=True),
    # the graph executor: every drafter under every rule; the drafter runs in the graph or on the host
    *(
        Cell(name, rule, sampling, policy, batch_size, stops, engine=True)
        for (name, rule), sampling, policy, (batch_size, stops) in zip(
            itertools.product(("model", "ngram", "lookup", "random", "text"), ("token", "block", "match")),
            itertools.cycle(("plain", "nucleus", "warm", "nucleus", "plain", "warm", "warm")),
            itertools.cycle(("f 3", "h 3", "f 2", "l 3")),
            itertools.cycle(((SAMPLES, False), (64, True), (SAMPLES, True), (128, False), (200, True))),
            strict=False,
        )
    ),
    *(
        Cell("model", rule, sampling, "f 3", engine=True)
        for rule, sampling in zip(
            itertools.cycle(("token", "match", "block")),
            ("penalty", "penalty", "counts", "counts", "bias", "processors"),
            strict=False,
        )
    ),
    Cell("lookup", "token", "counts", "f 3", stops=True, engine=True),
    Cell("model", "block", "plain", "f 3", engine=True),
    Cell("ngram", "block", "processors", "f 2", batch_size=64, engine=True),
    Cell("ngram", "token", "penalty", "f 2", batch_size=64, engine=True),
    Cell("model", "token", "penalty", "f 3", draft_sampling="warm", engine=True),
    Cell("none", "token", "nucleus", "f 1", stops=True, engine=True),
    Cell("none", "match", "warm", "f 1", batch_size=64, stops=True, engine=True),
    Cell("lookup", "block", "warm", "f 3", batch_size=7, stops=True, engine=True),
    # models that are not fused: rows of the KV cache change places, and positions of idle slots are hidden
    Cell("model", "token", "plain", "f 3", batch_size=64, stops=True, family="gpt2"),
    Cell("model", "token", "plain", "f 3", batch_size=64, stops=True, engine=True, family="gpt2"),
    Cell("lookup", "block", "warm", "l 2", batch_size=20, stops=True, engine=True, family="gpt2"),
    Cell("none", "match", "nucleus", "f 1", batch_size=64, stops=True, engine=True, family="gpt2"),
    # encoder-decoder models
    Cell("model", "token", "plain", "f 3", family="t5"),
    Cell("lookup", "block", "penalty", "f 2", stops=True, family="t5"),
    Cell("model", "block", "nucleus", "h 2", stops=True, family="bart"),
    Cell("model", "match", "warm", "f 3", family="marian"),
    Cell("model", "token", "processors", "h 3", batch_size=64, stops=True, family="whisper"),
    Cell("causal", "token", "warm", "f 2", family="mt5"),
    Cell("model", "token", "plain", "f 3", batch_size=64, stops=True, engine=True, family="whisper"),
    Cell("model", "block", "penalty", "f 2", batch_size=64, stops=True, engine=True, family="t5"),
    Cell("model", "match", "warm", "f 3", engine=True, family="mt5"),
    Cell("lookup", "block", "warm", "l 2", batch_size=64, stops=True, engine=True, family="bart"),
    Cell("none", "match", "nucleus", "f 1", batch_size=64, stops=True, engine=True, family="marian"),
    Cell("causal", "token", "plain", "f 2", engine=True, family="t5"),
    Cell("model", "token", "processors", "f 2", batch_size=64, engine=True, family="whisper"),
    # a policy that depends on time and on accepted tokens
    Cell("lookup", "token", "nucleus", "g 3", stops=True),
    Cell("lookup", "block", "plain", "g 4", batch_size=20, engine=True),
    Cell("lookup", "token", "plain", "g 4", batch_size=64),
    Cell("model", "token", "warm", "g 4", batch_size=20),
    Cell("model", "block", "plain", "g 4", batch_size=20, stops=True, engine=True),
    Cell("random", "block", "plain", "g 3", batch_size=64, stops=True, engine=True),
]
# On a CPU, rule token verifies large vocabularies position by position.
IN_TURN = [
    Cell("model", "token", "plain", "f 3"),
    Cell("model", "token", "nucleus", "h 3", stops=True),
    Cell("model", "token", "processors", "f 2", batch_size=64),
    Cell("ngram", "token", "warm", "f 4", draft_sampling="penalty"),
    Cell("lookup", "token", "plain", "l 3"),
    Cell("random", "token", "counts", "f 3", stops=True),
]


def factors(cell: Cell) -> tuple[Hashable, ...]:
    """Return the factors of which the default tier covers every pair."""
    return cell.drafter, cell.rule, cell.sampling, cell.engine


def others(cell: Cell) -> tuple[Hashable, ...]:
    """Return the factors of which it covers every value."""
    policy, refilled = cell.policy[0], cell.batch_size < SAMPLES
    return (policy, cell.engine), (refilled, cell.engine), cell.stops, cell.draft_sampling, cell.family


CHOSEN = tiers.pairwise(list(dict.fromkeys(CELLS)), factors, others)


@pytest.mark.parametrize("cell", CHOSEN, ids=str)
def test_joint_distribution_of_the_new_tokens_is_the_targets(cell: Cell) -> None:
    joint_distribution_is_exact(cell)


@pytest.mark.parametrize("batch_size", tiers.sized([1], [1, 2]))
def test_batches_of_one_and_two_are_exact(batch_size: int) -> None:
    cell = Cell("model", "token", "plain", "f 2", batch_size=batch_size, stops=True)
    joint_distribution_is_exact(cell, samples=tiers.sized(300, 1500))


@pytest.mark.parametrize(
    ("draft", "family"),
    tiers.each_value(["model", "none", "ngram", "lookup"], ["llama", "gpt2"])[: tiers.sized(2, 8)],
)
def test_two_steps_in_flight_are_exact(draft: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GraphExecutor, "is_async", True)  # as on CUDA
    cell = Cell(draft, policy="f 2", batch_size=64, stops=True, engine=True, family=family)
    joint_distribution_is_exact(cell)


@pytest.mark.parametrize("cell", tiers.sized(IN_TURN[:2], IN_TURN), ids=str)
def test_verifying_position_by_position_is_exact(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, value in (("LARGE_VOCAB", 1), ("FEW_ROWS", SAMPLES)):
        monkeypatch.setattr(eager, limit, value)
    joint_distribution_is_exact(cell)
