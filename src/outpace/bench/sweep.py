"""How long texts take, for every draft, sampling and length, measured in turn.

Each prompt, or group of them, is a round in which all cells write about it, one after the other and another
one first each time: what slows a machine down slows all alike. Of a text neither its first iteration is
counted, which is the prompt's, nor the second, in which a draft reads the prompt.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

from outpace.bench import cost
from outpace.bench.forecast import Known
from outpace.bench.prediction import Parts
from outpace.bench.runs import AUTO, BEGINNING, HEURISTIC, PLAIN, Cell, Run, counted
from outpace.decode import Decoder, WithModel
from outpace.length import Fixed, Heuristic, Length
from outpace.rows import Step
from outpace.sampling import Sampling

LENGTHS = (PLAIN, "1", "2", "3", "5", "8", "12", AUTO)
WARM = 4  # iterations of a fixed length before anything is counted; a policy writes a whole text


class Sweep:
    """All cells over all prompts.

    decoders    by the name of the draft; their own length policy is "auto"
    samplings   how texts are drawn
    lengths     numbers of guesses, "auto", "heuristic"; plain decoding is always among them
    prompts     token ids
    tokens      new tokens of a text at most
    batch       prompts that are written about at a time; the last ones are filled up with the first
    repeats     how often all prompts come
    ignore_eos  go on after end-of-text
    beginning   iterations of a text that are not counted
    """

    def __init__(
        self,
        decoders: Mapping[str, Decoder],
        samplings: Sequence[Sampling],
        lengths: Sequence[str],
        prompts: Sequence[Sequence[int]],
        *,
        tokens: int = 128,
        batch: int = 1,
        repeats: int = 1,
        seed: int = 0,
        ignore_eos: bool = False,
        beginning: int = BEGINNING,
    ) -> None:
        if not prompts:
            raise ValueError("prompts: there are none")
        if not decoders or any(decoder.drafter is None for decoder in decoders.values()):
            raise ValueError(
                "draft: got none, which is plain decoding, and part of every sweep; name a draft"
            )
        self.decoders = decoders
        lengths = list(dict.fromkeys((PLAIN, *lengths)))
        self.cells = [
            Cell(draft, sampling, length)
            for draft in decoders
            for sampling in dict.fromkeys(samplings)
            for length in lengths
        ]
        check_lengths(lengths, tokens)
        # Policies learn: each cell has its own.
        self.writers = {cell: _writer(cell, decoders[cell.draft]) for cell in self.cells}
        self.prompts, self.tokens, self.ignore_eos = prompts, tokens, ignore_eos
        self.groups = grouped(len(prompts), batch)
        self.repeats, self.seed, self.beginning = repeats, seed, beginning

    @property
    def blocks(self) -> list[list[Cell]]:
        """Cells that take turns: all; but an engine's caches are large, so that then drafts come one after
        the other."""
        if all(decoder._engines is None for decoder in self.decoders.values()):
            return [self.cells]
        return [[cell for cell in self.cells if cell.draft == draft] for draft in self.decoders]

    @property
    def total(self) -> int:
        """Rounds that there are."""
        return len(self.blocks) * self.repeats * len(self.groups)

    def rounds(self, tell: Callable[[str], None] = lambda line: None) -> Iterator[list[Run]]:
        """What all cells of a block came to with one group of prompts, group after group."""
        for i, block in enumerate(self.blocks):
            # What needs the most room first, or an engine would be made several times.
            for cell in sorted(block, key=lambda one: -self.writers[one].length.most):
                tell(f"warming up: {cell}")
                self.warm(cell)
            turns = self.repeats * len(self.groups)
            for turn in range(turns):
                repeat, group = divmod(turn, len(self.groups))
                runs = []
                for cell in rotated(block, turn):
                    tell(f"round {i * turns + turn + 1} of {self.total}: {cell}")
                    runs.append(self.run(cell, group, repeat))
                yield runs

    def warm(self, cell: Cell, short: bool = False) -> None:
        """Nothing that is made once is made while something is timed. The longest text is the one that most
        room is made for; a short one does where only an engine would have to be made anew."""
        pick = min if short else max
        chosen = pick(range(len(self.prompts)), key=lambda i: len(self.prompts[i]))
        group = next(i for i, members in enumerate(self.groups) if chosen in members)
        few = None if cell.g is None else WARM * len(self.groups[group])
        with contextlib.closing(self._steps(cell, group, 0)) as steps:
            for _ in itertools.islice(steps, few):
                pass

    def run(self, cell: Cell, group: int, repeat: int = 0) -> Run:
        """Write about a group of prompts."""
        steps = self._steps(cell, group, repeat)
        context = self.decoders[cell.draft].scorer.context
        room = [min(self.tokens, context - len(self.prompts[i])) for i in self.groups[group]]
        return counted(Run(cell, group), steps, room, self.beginning)

    def _steps(self, cell: Cell, group: int, repeat: int) -> Generator[Step]:
        members = self.groups[group]
        first = self.seed + (repeat * len(self.groups) + group) * len(members)
        return self.writers[cell].stream(
            [list(self.prompts[i]) for i in members],
            cell.sampling,
            seed=list(range(first, first + len(members))),
            max_new_tokens=self.tokens,
            ignore_eos=self.ignore_eos,
        )


def timed(sweep: Sweep, found: Known, tell: Callable[[str], None] = lambda line: None) -> None:
    """What iterations of each draft and sampling consist of, each part by itself: after a text half of which
    is written."""
    B = len(sweep.groups[0])
    lengths = sorted({0, *(cell.g for cell in sweep.cells if cell.g is not None)})
    middle = sorted(map(len, sweep.prompts))[len(sweep.prompts) // 2] + sweep.tokens // 2
    passes: list[cost.Pass] = []
    for draft, decoder in sweep.decoders.items():
        tell(f"timing parts: {draft}")
        scorers = [
            decoder.scorer,
            *([decoder.drafter.scorer] if isinstance(decoder.drafter, WithModel) else []),
        ]
        room = min(one.context for one in scorers) - max(cost.STEP_ROOM, lengths[-1] + 1)
        if room < 1:
            continue
        context = min(middle, room)
        if not passes or decoder._engines is not None:
            passes = cost.curve(decoder, [g + 1 for g in lengths], [B], context)
        drafting = cost.drafting(decoder, B, context)
        for sampling in dict.fromkeys(cell.sampling for cell in sweep.cells):
            drawn = cost.draws(decoder, sampling)
            verify = cost.verification(decoder, lengths, [B], sampling, drawn)
            found[draft, sampling] = Parts(B, drafting, passes, verify)
        cost.let_go(decoder)


def grouped(prompts: int, batch: int) -> list[list[int]]:
    """Prompts, so many at a time; the last ones are filled up with the first."""
    return [[i % prompts for i in range(first, first + batch)] for first in range(0, prompts, batch)]


def rotated(cells: Sequence[Cell], turn: int) -> list[Cell]:
    """Another one comes first each time."""
    first = turn % len(cells)
    return [*cells[first:], *cells[:first]]


def _writer(cell: Cell, own: Decoder) -> Decoder:
    """A decoder of this cell, with the models and caches of the one for its draft."""
    length: Length = copy.deepcopy(own.length)
    if cell.g is not None:
        length = Fixed(cell.g)
    elif cell.length == HEURISTIC:
        length = Heuristic()
    drafter = None if cell.length == PLAIN else own.drafter
    made = Decoder(
        own.scorer,
        drafter,
        own.tokenizer,
        rule=own.rule,
        lenience=own.lenience,
        length=length,
        engine=False,
    )
    made._engines = own._engines  # an engine is the same for all lengths, and too large to have several
    return made


def check_lengths(lengths: Sequence[str], tokens: int) -> None:
    """Whether something of texts of so many tokens is left to be counted, with each."""
    for length in lengths:
        if not length.isdecimal() and length not in (AUTO, HEURISTIC):
            raise ValueError(f"length: got {length!r}; it must be a number, {AUTO} or {HEURISTIC}")
    longest = max(lengths, key=least_tokens)
    needed = least_tokens(longest)
    if tokens < needed:
        why = f"the first {needed - 1} tokens of a text are not timed"
        if longest in (PLAIN, AUTO, HEURISTIC):
            raise ValueError(f"max_new_tokens: got {tokens}; it must be at least {needed}, as {why}")
        raise ValueError(
            f"length: got {longest} for texts of {tokens} tokens, but with it {why}; name a shorter one "
            f"(--length), or at least {needed} tokens (--max-new-tokens {needed})"
        )


def least_tokens(length: str) -> int:
    """Return the fewest new tokens that a text needs so that this draft length can be timed."""
    return BEGINNING * ((int(length) if length.isdecimal() else 0) + 1) + 1
