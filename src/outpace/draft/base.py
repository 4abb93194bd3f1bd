"""What a drafter is given, and what it gives back.

A drafter may guess as it likes, as long as it states what it did: the logits of the very distribution each
token was drawn from, or None where tokens were chosen rather than drawn. Whether position i is drafted at
all may depend on the tokens before it and on the distribution at i, never on the token drawn at i: dropping
a token because it was unlikely biases the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from typing import Any, Protocol

import torch
from torch import Tensor

from outpace import random
from outpace.arguments import kind, on_device
from outpace.models.source import Source
from outpace.random import Stream
from outpace.sampling import Prefix, Sampling, adjust, process
from outpace.verify import Drawn, sample


@dataclass(frozen=True)
class Told:
    """What drawing on a GPU found out: see `outpace.verify.Drawn`, here `[R, g]` each."""

    lse: Tensor
    cut: Tensor | None
    tie: Tensor | None
    sampling: list[Sampling] | None

    def first(self, g: int) -> Told:
        """Of the first g tokens."""
        cut, tie = (None if one is None else one[:, :g] for one in (self.cut, self.tie))
        return replace(self, lse=self.lse[:, :g], cut=cut, tie=tie)


@dataclass(frozen=True)
class Draft:
    """R rows' guesses of up to g tokens.

    tokens   int64 `[R, g]`
    logits   `[R, g, V]`, of the distribution that each token was drawn from, but for what `told.sampling`
             still does to them; None: tokens were chosen
    lengths  how many of its g tokens each row guessed; None: all
    told     what is known of these logits already, and what they are still to be adjusted by; None: nothing
    steps    that were made, one more than tokens if the state said that it is enough; None: as many as asked
    confidence  of each row, in [0, 1], how good its guess is taken to be, where that is known for nothing
    """

    tokens: Tensor
    logits: Tensor | None = None
    lengths: Sequence[int] | None = None
    told: Told | None = None
    steps: int | None = None
    confidence: Sequence[float] | None = None

    @classmethod
    def chosen(
        cls,
        guesses: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
        confidence: Sequence[float] | None = None,
    ) -> Draft:
        """From plain lists of chosen tokens, of any lengths."""
        g = max(map(len, guesses), default=0)
        padded = [[*guess, *[0] * (g - len(guess))] for guess in guesses]
        tokens = torch.tensor(padded, dtype=torch.int64, device=device).view(len(guesses), g)
        return cls(tokens, None, [len(guess) for guess in guesses], confidence=confidence)


@dataclass(frozen=True)
class State:
    """What is known when drafting begins. Row i of R is in slot rows[i], its name from start to end.

    rows            the slot of each row
    tokens          the text of each row, prompt and output; do not change it
    prompt_lengths  how many of them are the prompt
    sampling        how the drafter is to draw, per row
    seed            int64 `[R]`
    limits          most tokens of use for each row; guessing more is waste, no error
    vocab_size      V of the target, and of the logits in a Draft
    device          where the Draft is wanted
    own_noise       draw with the noise the target itself will draw with (rule "match")
    sources         what each row is written about, if the target has an encoder
    enough          a drafter may ask, before it draws a token, whether to leave it at those it has; with the
                    largest probability of each row's distribution. `Draws.enough` does
    after           filled by `Draws`: the samplings as they were after each token, where processors keep
                    state
    """

    rows: Sequence[int]
    tokens: Sequence[Sequence[int]]
    prompt_lengths: Sequence[int]
    sampling: Sequence[Sampling]
    seed: Tensor
    limits: Sequence[int]
    vocab_size: int
    device: torch.device
    own_noise: bool = False
    sources: Sequence[Source | None] = ()
    enough: Callable[[Sequence[float]], bool] | None = None
    after: list[list[Sampling]] = field(default_factory=list)


class Drafter(Protocol):
    """Anything that guesses. A drafter without memory derives from this and writes `propose` alone.

    One that costs next to nothing and chooses its tokens can say so by an attribute `free = True`: it is then
    asked before it is decided what is worth scoring of its guesses, at every iteration unless that takes too
    long. What it was not asked for is not committed either; it is in the text that it sees next.
    """

    def propose(self, state: State, g: int) -> Draft:
        """Up to g >= 1 tokens after each row's text."""

    def commit(self, accepted: Tensor, next_token: Tensor) -> None:
        """Of the rows last proposed for: `[R]` tokens kept, and the token that came after them."""
        return

    def reset(self, rows: Sequence[int]) -> None:
        """These slots are free; the next text in them is another."""
        return


class Draws:
    """Draws one token after another from logits, by the noise and the sampling of the state.

    draws = Draws(state, g)
    for i in range(g):
        if draws.enough(logits):        # [R, V]
            break
        tokens = draws.take(logits)     # [R]
    return draws.draft()
    """

    def __init__(self, state: State, g: int) -> None:
        self.state = state
        self._starts = [len(text) for text in state.tokens]
        self.tokens: list[Tensor] = []
        self._logits: list[Tensor] = []  # of each draw, `[R, V]`
        self._sound: list[Any] = []  # tensors or lists; of each draw, `[R]`: whether there was one to make
        self._greedy = all(one.greedy for one in state.sampling)
        # Tokens that sure choice or the target's own noise decides need no distribution.
        self.chosen = state.own_noise or self._greedy
        self._prefix = _room(state, g) if any(one.reads_prefix for one in state.sampling) else None
        self._neutral = all(one.neutral for one in state.sampling)
        self._drawn: list[Drawn] = []  # of each draw on a GPU
        # There the part of adjusting that depends on the position alone is the kernel's.
        self._shapes = None if self._neutral else [one.shape for one in one_for_all(state.sampling)]
        self._by_kernel = has_kernel(state.device) and not self.chosen
        self._adjusted: Tensor | None = None  # what the next token is drawn from, if someone has looked
        self._stopped = False
        if not self.chosen and state.device.type == "cpu":
            noise = random.halves(state.seed.tolist(), self._starts, g, Stream.DRAFT)
            self._u = [[row[i][0] for row in noise] for i in range(g)]

    def enough(self, logits: Tensor) -> bool:
        """Whether the policy would rather leave it at what was drawn than draw from these."""
        if self.state.enough is None:
            return False
        self._adjusted = self._look(logits)
        sure = (self._adjusted.amax(-1) - self._adjusted.logsumexp(-1)).exp()
        # Drawing finds out what is wrong with logits that are no numbers.
        self._stopped = bool(sure.isfinite().all()) and self.state.enough(sure.tolist())
        return self._stopped

    def take(self, logits: Tensor) -> Tensor:
        """The next token of each row from the draft's raw logits `[R, V or fewer or more]`."""
        state, i = self.state, len(self.tokens)
        adjusted = self._look(logits) if self._adjusted is None else self._adjusted
        self._adjusted = None
        if any(one.processors for one in state.sampling):
            state.after.append([one.fork() for one in state.sampling])
        if self._greedy:
            token = adjusted.argmax(-1)
            sound: Any = adjusted.amax(-1).isfinite()
        elif state.own_noise:
            noise = random.gumbel(state.seed, self._start + i, state.vocab_size)
            token = random.race(adjusted.float(), noise)
            sound = adjusted.amax(-1).isfinite()
        elif self._by_kernel:
            shapes = self._shapes if self._shapes is None or len(self._shapes) > 1 else self._shapes[0]
            drawn = sample(adjusted, seed=state.seed, position=self._start, step=i, sampling=shapes)
            token, sound = drawn.tokens, drawn.lse.isfinite()
            self._drawn.append(drawn)
            self._logits.append(adjusted)
        else:
            exact = adjusted.float()
            token, sound = random.draw_softmax(exact, self._u[i])
            self._logits.append(exact if adjusted.dtype is torch.float64 else adjusted)
        self.tokens.append(token)
        self._sound.append(sound)
        return token

    def _look(self, logits: Tensor) -> Tensor:
        """What the next token is drawn from."""
        state, i = self.state, len(self.tokens)
        logits = fit(logits, state.vocab_size)
        prefix = None
        if self._prefix is not None:
            if self.tokens:
                last = (self._start + i - 1)[:, None]
                self._prefix.tokens.scatter_(1, last, self.tokens[-1][:, None])
            prefix = Prefix(self._prefix.tokens, self._start + i, self._prefix.prompt_lengths)
        return logits if self._neutral else self._adjust(logits, prefix, shaped=not self._by_kernel)

    @cached_property
    def _start(self) -> Tensor:
        return on_device(self._starts, torch.int64, self.state.device)

    def _adjust(self, logits: Tensor, prefix: Prefix | None, shaped: bool) -> Tensor:
        rows = one_for_all(self.state.sampling)
        if shaped:
            return adjust(logits, rows if len(rows) > 1 else rows[0], prefix)
        if not any(one.logit_bias or one.reads_prefix for one in rows):
            return logits
        return process(logits[:, None], rows, prefix)[0][:, 0]

    def draft(self, lengths: Sequence[int] | None = None) -> Draft:
        """What was drawn. Where nothing was possible, or NaN, a row's draft ends before: that depends on q
        alone, never on the token."""
        if not self.tokens:
            self.usable = [0] * len(self.state.rows)
            return replace(Draft.chosen([[] for _ in self.state.rows], self.state.device), steps=1)
        logits = None if self.chosen else torch.stack(self._logits, dim=1)
        sound = self._sound
        if isinstance(sound[0], Tensor):
            sound = torch.stack(sound).tolist()
        self.usable = [sum(1 for _ in takewhile(bool, row)) for row in zip(*sound, strict=True)]
        if lengths is not None:
            self.usable = [min(pair) for pair in zip(lengths, self.usable, strict=True)]
        steps = None if self.state.enough is None else len(self.tokens) + self._stopped
        return Draft(torch.stack(self.tokens, dim=1), logits, self.usable, self._told(), steps)

    def _told(self) -> Told | None:
        if not self._drawn:
            return None
        cuts = [one.cut for one in self._drawn if one.cut is not None]
        ties = [one.tie for one in self._drawn if one.tie is not None]
        return Told(
            torch.stack([one.lse for one in self._drawn], dim=1),
            torch.stack(cuts, dim=1) if cuts else None,
            torch.stack(ties, dim=1) if ties else None,
            self._shapes,
        )


def has_kernel(device: torch.device) -> bool:
    """Whether a token there is drawn by `outpace.verify.sample`, which also adjusts."""
    return device.type != "cpu"


def check_draft(draft: Any, drafter: Any, rows: int, vocab_size: int, device: torch.device) -> None:
    """Raise an error that names what a drafter got wrong."""
    if not isinstance(draft, Draft):
        raise TypeError(
            f"drafter: {type(drafter).__name__}.propose returned {kind(draft)[:80]}; it must return an "
            "outpace.Draft, such as Draft.chosen(lists of token ids): docs/drafters.md"
        )
    tokens, logits = draft.tokens, draft.logits
    for name, value in (("tokens", tokens), ("logits", logits)):
        if not isinstance(value, Tensor) and (name, value) != ("logits", None):
            raise TypeError(
                f"draft: got {name} that are {kind(value)[:80]}, from {type(drafter).__name__}; they must be "
                "a tensor"
            )
    if tokens.dtype is not torch.int64 or tokens.dim() != 2 or tokens.shape[0] != rows:
        raise ValueError(
            f"draft: got tokens of {tokens.dtype} {tuple(tokens.shape)}; they must be int64 [{rows}, g]"
        )
    if draft.lengths is not None and len(draft.lengths) != rows:
        raise ValueError(f"draft: got {len(draft.lengths)} lengths; it must be one for each of {rows} rows")
    if draft.lengths is not None and not all(0 <= n <= tokens.shape[1] for n in draft.lengths):
        raise ValueError(f"draft: got lengths {draft.lengths} for {tokens.shape[1]} tokens a row")
    if logits is not None and logits.shape != (*tokens.shape, vocab_size):
        raise ValueError(
            f"draft: got logits {tuple(logits.shape)} for tokens {tuple(tokens.shape)}; they must be "
            f"{(*tokens.shape, vocab_size)}: `outpace.draft.base.fit` fits a vocabulary"
        )
    for name, value in (("tokens", tokens), ("logits", logits)):
        if value is not None and value.device != device:
            raise ValueError(f"draft: got {name} on {value.device}; they must be on {device}")
    if device.type == "cpu" and tokens.numel():
        flat = tokens.flatten().tolist()
        if min(flat) < 0 or max(flat) >= vocab_size:
            raise ValueError(
                f"draft: got token ids {min(flat)}..{max(flat)}; the target knows 0..{vocab_size - 1}"
            )


def fit(logits: Tensor, vocab_size: int) -> Tensor:
    """Vocabularies that differ by padding: ids the draft does not know are impossible, others are cut."""
    V = logits.shape[-1]
    if vocab_size > V:
        return torch.nn.functional.pad(logits, (0, vocab_size - V), value=-torch.inf)
    return logits if vocab_size == V else logits[..., :vocab_size]


def one_for_all(sampling: Sequence[Sampling]) -> list[Sampling]:
    """A single Sampling where all rows have the same: it is adjusted faster."""
    return list(sampling[:1] if all(one is sampling[0] for one in sampling) else sampling)


def _room(state: State, g: int) -> Prefix:
    """The rows' texts with room for g tokens more."""
    texts = Prefix.padded(state.tokens, state.prompt_lengths, state.device)
    return Prefix(torch.nn.functional.pad(texts.tokens, (0, g)), texts.lengths, texts.prompt_lengths)
