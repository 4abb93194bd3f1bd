"""Latency of texts for every draft, sampling and draft length, measured in turn.

Each prompt, or group of prompts, is a round. All cells decode it one after the other, and another one is
first each time. So a slow phase of the machine slows all of them. The first two steps of a text are not
counted. In the first the target prefills the prompt, in the second a draft does.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

from outpace.bench import cost
from outpace.bench.forecast import TimedParts
from outpace.bench.prediction import Parts
from outpace.bench.runs import AUTO, BASELINE, HEURISTIC, SKIPPED_STEPS, Cell, Run, count_steps
from outpace.decoder import Decoder
from outpace.engine.sequence import Step
from outpace.policy import DraftLengthPolicy, Fixed, Heuristic
from outpace.sampling import SamplingParams

DRAFT_LENGTHS = (BASELINE, "1", "2", "3", "5", "8", "12", AUTO)
WARM_UP_STEPS = 4  # warm-up steps with a fixed draft length; a policy generates a whole text


class Sweep:
    """All cells over all prompts.

    Args:
        decoders: Decoders by the name of the draft. Their own draft-length policy is ``"auto"``.
        samplings: Sampling settings of texts.
        draft_lengths: Numbers of draft tokens, ``"auto"``, ``"heuristic"``. The baseline is always added.
        prompts: Token ids of each prompt.
        max_new_tokens: Maximum number of new tokens of a text.
        batch: Prompts per group. The last group is filled up with the first prompts.
        repeats: How often all prompts are run.
        seed: Seed of the first text.
        ignore_eos: Whether texts go on after end-of-text.
        skipped_steps: First steps of a text that are not counted.

    Raises:
        ValueError: There are no prompts or no drafters, or texts are too short for a draft length.
    """

    def __init__(
        self,
        decoders: Mapping[str, Decoder],
        samplings: Sequence[SamplingParams],
        draft_lengths: Sequence[str],
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 128,
        batch: int = 1,
        repeats: int = 1,
        seed: int = 0,
        ignore_eos: bool = False,
        skipped_steps: int = SKIPPED_STEPS,
    ) -> None:
        if not prompts:
            raise ValueError("prompts: there are none")
        if not decoders or any(decoder.drafter is None for decoder in decoders.values()):
            raise ValueError("draft: got none, which is the baseline and part of every sweep; name a draft")
        self.decoders = decoders
        draft_lengths = list(dict.fromkeys((BASELINE, *draft_lengths)))
        self.cells = [
            Cell(draft, sampling, num_draft_tokens)
            for draft in decoders
            for sampling in dict.fromkeys(samplings)
            for num_draft_tokens in draft_lengths
        ]
        check_draft_lengths(draft_lengths, max_new_tokens)
        # Policies learn, so each cell has its own.
        self.cell_decoders = {cell: _cell_decoder(cell, decoders[cell.draft]) for cell in self.cells}
        self.prompts, self.max_new_tokens, self.ignore_eos = prompts, max_new_tokens, ignore_eos
        self.groups = grouped(len(prompts), batch)
        self.repeats, self.seed, self.skipped_steps = repeats, seed, skipped_steps

    @property
    def blocks(self) -> list[list[Cell]]:
        """Lists of cells that take turns.

        Without graphs, all cells take turns. With graphs, each draft has a KV cache of its own for the
        target, so the drafts are measured one after the other.
        """
        if not any(decoder.uses_graphs for decoder in self.decoders.values()):
            return [self.cells]
        return [[cell for cell in self.cells if cell.draft == draft] for draft in self.decoders]

    @property
    def total(self) -> int:
        """Number of rounds."""
        return len(self.blocks) * self.repeats * len(self.groups)

    def rounds(self, tell: Callable[[str], None] = lambda line: None) -> Iterator[list[Run]]:
        """Yield the runs of all cells of a block with one group of prompts, group after group."""
        for i, block in enumerate(self.blocks):
            # Cells with the longest drafts first, or the KV cache would grow several times.
            for cell in sorted(block, key=lambda one: -self.cell_decoders[one].policy.max_draft_tokens):
                tell(f"warming up: {cell}")
                self.warm_up(cell)
            turns = self.repeats * len(self.groups)
            for turn in range(turns):
                repeat, group = divmod(turn, len(self.groups))
                runs = []
                for cell in rotated(block, turn):
                    tell(f"round {i * turns + turn + 1} of {self.total}: {cell}")
                    runs.append(self.run(cell, group, repeat))
                yield runs

    def warm_up(self, cell: Cell, short: bool = False) -> None:
        """Warm up a cell, so that nothing is built or captured while something is timed.

        The longest prompt needs the largest KV cache. A short one is enough if the KV cache cannot grow.
        """
        pick = min if short else max
        prompt = pick(range(len(self.prompts)), key=lambda i: len(self.prompts[i]))
        group = next(i for i, members in enumerate(self.groups) if prompt in members)
        num_steps = None if cell.g is None else WARM_UP_STEPS * len(self.groups[group])
        with contextlib.closing(self._steps(cell, group, 0)) as steps:
            for _ in itertools.islice(steps, num_steps):
                pass

    def run(self, cell: Cell, group: int, repeat: int = 0) -> Run:
        """Decode a group of prompts with a cell, and count its steps."""
        steps = self._steps(cell, group, repeat)
        context = self.decoders[cell.draft].scorer.context
        max_new_tokens = [
            min(self.max_new_tokens, context - len(self.prompts[i])) for i in self.groups[group]
        ]
        return count_steps(Run(cell, group), steps, max_new_tokens, self.skipped_steps)

    def _steps(self, cell: Cell, group: int, repeat: int) -> Generator[Step]:
        members = self.groups[group]
        first = self.seed + (repeat * len(self.groups) + group) * len(members)
        return self.cell_decoders[cell].stream(
            [list(self.prompts[i]) for i in members],
            cell.sampling,
            seed=list(range(first, first + len(members))),
            max_new_tokens=self.max_new_tokens,
            ignore_eos=self.ignore_eos,
        )


def time_parts(sweep: Sweep, found: TimedParts, tell: Callable[[str], None] = lambda line: None) -> None:
    """Time the parts of a step for each draft and sampling, each part by itself.

    The context is as long as a median prompt with half of its new tokens.

    Args:
        sweep: The sweep.
        found: Receives the parts by draft and sampling.
        tell: Called with each progress message.
    """
    B = len(sweep.groups[0])
    draft_lengths = sorted({0, *(cell.g for cell in sweep.cells if cell.g is not None)})
    median_tokens = sorted(map(len, sweep.prompts))[len(sweep.prompts) // 2] + sweep.max_new_tokens // 2
    passes: list[cost.Pass] = []
    for draft, decoder in sweep.decoders.items():
        tell(f"timing parts: {draft}")
        draft_scorer = None if decoder.drafter is None else decoder.drafter.scorer
        contexts = [one.context for one in (decoder.scorer, draft_scorer) if one is not None]
        most = min(contexts) - max(cost.DRAFTING_TOKENS, draft_lengths[-1] + 1)
        if most < 1:
            continue
        context = min(median_tokens, most)
        if not passes or decoder.uses_graphs:
            passes = cost.curve(decoder, [g + 1 for g in draft_lengths], [B], context)
        drafting = cost.drafting(decoder, B, context)
        for sampling in dict.fromkeys(cell.sampling for cell in sweep.cells):
            sampled = cost.drafts_are_sampled(decoder, sampling)
            verify = cost.verification(decoder, draft_lengths, [B], sampling, sampled)
            found[draft, sampling] = Parts(B, drafting, passes, verify)
        decoder.release()


def grouped(prompts: int, batch: int) -> list[list[int]]:
    """Return groups of ``batch`` prompts; the last group is filled up with the first prompts."""
    return [[i % prompts for i in range(first, first + batch)] for first in range(0, prompts, batch)]


def rotated(cells: Sequence[Cell], turn: int) -> list[Cell]:
    """Return the cells with another one first at each turn."""
    first = turn % len(cells)
    return [*cells[first:], *cells[:first]]


def _cell_decoder(cell: Cell, decoder: Decoder) -> Decoder:
    """Return a decoder of this cell, with the models and KV caches of the decoder of its draft."""
    if cell.num_draft_tokens == BASELINE:
        return Decoder(
            decoder.scorer,
            None,
            decoder.tokenizer,
            rule=decoder.rule,
            lenience=decoder.lenience,
            engine=decoder.uses_graphs,
            kv_cache_bytes=decoder.scorer.cache.max_bytes,
        )
    policy: DraftLengthPolicy = copy.deepcopy(decoder.policy)
    if cell.g is not None:
        policy = Fixed(cell.g)
    elif cell.num_draft_tokens == HEURISTIC:
        policy = Heuristic()
    return decoder.with_policy(policy)


def check_draft_lengths(draft_lengths: Sequence[str], max_new_tokens: int) -> None:
    """Raise unless texts of this many tokens leave steps to count, with each draft length."""
    for num_draft_tokens in draft_lengths:
        if not num_draft_tokens.isdecimal() and num_draft_tokens not in (AUTO, HEURISTIC):
            raise ValueError(
                f"num_draft_tokens: got {num_draft_tokens!r}; it must be a number, {AUTO} or {HEURISTIC}"
            )
    longest = max(draft_lengths, key=least_tokens)
    needed = least_tokens(longest)
    if max_new_tokens < needed:
        why = f"the first {needed - 1} tokens of a text are not timed"
        if longest in (BASELINE, AUTO, HEURISTIC):
            raise ValueError(f"max_new_tokens: got {max_new_tokens}; it must be at least {needed}, as {why}")
        raise ValueError(
            f"num_draft_tokens: got {longest} for texts of {max_new_tokens} tokens, but with it {why}; name "
            f"a smaller number, or at least {needed} tokens (--max-new-tokens {needed})"
        )


def least_tokens(num_draft_tokens: str) -> int:
    """Return the fewest new tokens that a text needs so that this draft length can be timed."""
    return SKIPPED_STEPS * ((int(num_draft_tokens) if num_draft_tokens.isdecimal() else 0) + 1) + 1
