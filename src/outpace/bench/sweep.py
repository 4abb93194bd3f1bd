"""Latency of texts for every draft, sampling and draft length, measured in turn.

Each prompt, or group of prompts, is a round. All cells decode it one after the other, and another one is
first each time. So what slows a machine down slows all alike. The first two steps of a text are not counted.
In the first the target prefills the prompt, in the second a draft does.
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
from outpace.decoder import Decoder, WithModel
from outpace.engine.sequence import Step
from outpace.policy import DraftLengthPolicy, Fixed, Heuristic
from outpace.sampling import SamplingParams

LENGTHS = (PLAIN, "1", "2", "3", "5", "8", "12", AUTO)
WARM = 4  # warm-up steps with a fixed draft length; a policy generates a whole text


class Sweep:
    """All cells over all prompts.

    Args:
        decoders: Decoders by the name of the draft. Their own draft-length policy is ``"auto"``.
        samplings: Sampling settings of texts.
        lengths: Numbers of draft tokens, ``"auto"``, ``"heuristic"``. Decoding without speculation is always
            among them.
        prompts: Token ids of each prompt.
        tokens: Maximum number of new tokens of a text.
        batch: Prompts per group. The last group is filled up with the first prompts.
        repeats: How often all prompts are run.
        seed: Seed of the first text.
        ignore_eos: Whether texts go on after end-of-text.
        beginning: First steps of a text that are not counted.

    Raises:
        ValueError: There are no prompts or no drafters, or a length does not suit the number of tokens.
    """

    def __init__(
        self,
        decoders: Mapping[str, Decoder],
        samplings: Sequence[SamplingParams],
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
        """Lists of cells that take turns.

        All cells take turns. But where there are engines, whose caches are large, drafts come one after the
        other.
        """
        if all(decoder.engines is None for decoder in self.decoders.values()):
            return [self.cells]
        return [[cell for cell in self.cells if cell.draft == draft] for draft in self.decoders]

    @property
    def total(self) -> int:
        """Number of rounds."""
        return len(self.blocks) * self.repeats * len(self.groups)

    def rounds(self, tell: Callable[[str], None] = lambda line: None) -> Iterator[list[Run]]:
        """Yield the runs of all cells of a block with one group of prompts, group after group."""
        for i, block in enumerate(self.blocks):
            # Cells with the longest drafts first, or an engine would be built several times.
            for cell in sorted(block, key=lambda one: -self.writers[one].policy.max_draft_tokens):
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
        """Warm up a cell, so that nothing is built or captured while something is timed.

        The longest text needs the largest caches. A short one is enough where only an engine would have to be
        built anew.
        """
        pick = min if short else max
        chosen = pick(range(len(self.prompts)), key=lambda i: len(self.prompts[i]))
        group = next(i for i, members in enumerate(self.groups) if chosen in members)
        few = None if cell.g is None else WARM * len(self.groups[group])
        with contextlib.closing(self._steps(cell, group, 0)) as steps:
            for _ in itertools.islice(steps, few):
                pass

    def run(self, cell: Cell, group: int, repeat: int = 0) -> Run:
        """Decode a group of prompts with a cell, and count its steps."""
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
    """Time the parts of a step for each draft and sampling, each part by itself.

    The context is a text half of which is generated.

    Args:
        sweep: The sweep.
        found: Receives the parts by draft and sampling.
        tell: Called with each progress message.
    """
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
        if not passes or decoder.engines is not None:
            passes = cost.curve(decoder, [g + 1 for g in lengths], [B], context)
        drafting = cost.drafting(decoder, B, context)
        for sampling in dict.fromkeys(cell.sampling for cell in sweep.cells):
            drawn = cost.draws(decoder, sampling)
            verify = cost.verification(decoder, lengths, [B], sampling, drawn)
            found[draft, sampling] = Parts(B, drafting, passes, verify)
        cost.let_go(decoder)


def grouped(prompts: int, batch: int) -> list[list[int]]:
    """Return groups of ``batch`` prompts; the last group is filled up with the first prompts."""
    return [[i % prompts for i in range(first, first + batch)] for first in range(0, prompts, batch)]


def rotated(cells: Sequence[Cell], turn: int) -> list[Cell]:
    """Return the cells with another one first at each turn."""
    first = turn % len(cells)
    return [*cells[first:], *cells[:first]]


def _writer(cell: Cell, own: Decoder) -> Decoder:
    """Return a decoder of this cell, with the models and caches of the decoder of its draft."""
    length: DraftLengthPolicy = copy.deepcopy(own.policy)
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
        num_draft_tokens=length,
        engine=False,
    )
    made.engines = own.engines  # an engine is the same for all lengths, and too large to have several
    return made


def check_lengths(lengths: Sequence[str], tokens: int) -> None:
    """Raise unless texts of this many tokens leave steps to count, with each draft length."""
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
