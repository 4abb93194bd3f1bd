"""What one way of writing came to with some prompts, as far as it is counted."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outpace.rows import Step
from outpace.sampling import Sampling

PLAIN, AUTO, HEURISTIC = "0", "auto", "heuristic"  # lengths: the yardstick, the decoder's own policy, ...
BEGINNING = 2  # iterations of a text that are not counted


@dataclass(frozen=True)
class Cell:
    """One way to write: `length` is a number of guesses, "auto" or "heuristic"."""

    draft: str
    sampling: Sampling
    length: str

    def __str__(self) -> str:
        one = self.sampling
        return f"{self.draft}, {described(one.temperature, one.top_k, one.top_p)}, g = {self.length}"

    @property
    def g(self) -> int | None:
        """If it is always the same."""
        return int(self.length) if self.length.isdecimal() else None


@dataclass
class Run:
    """What came of one cell with one group of prompts, but for the beginnings of texts.

    texts          of each, its new tokens, and the seconds that it waited for them
    iterations     of all rows together
    seconds        of the iterations, and of that, drafting, where the two can be told apart
    drafted        how many guesses rows had in iterations, and how often
    kept, lost     guesses that were judged: those after a lost one are not
    missing        iterations of a row that had room for more guesses than the drafter made, all of them kept
    """

    cell: Cell
    group: int
    texts: list[tuple[int, float]] = field(default_factory=list)
    iterations: int = 0
    seconds: float = 0.0
    draft_seconds: float = 0.0
    drafted: Counter[int] = field(default_factory=Counter)
    kept: int = 0
    lost: int = 0
    missing: int = 0

    @property
    def tokens(self) -> int:
        return sum(tokens for tokens, _ in self.texts)


def counted(run: Run, steps: Iterable[Step], room: Sequence[int], beginning: int = BEGINNING) -> Run:
    """What steps come to, but for so many iterations; `room` says how many tokens each row may have. Nothing,
    and a warning, if one of the texts could not be written."""
    iteration, phases, seconds = 0, None, 0.0
    written = [0] * len(room)
    waited: dict[int, tuple[int, float]] = {}  # of each row, tokens and seconds that count
    for step in steps:
        if step.output is not None and step.output.error is not None:
            warnings.warn(f"{run.cell}: prompts left out: {step.output.error}", stacklevel=2)
            return Run(run.cell, run.group)
        if step.phases is not phases:  # rows of one iteration have one and the same
            iteration, phases, seconds = iteration + 1, step.phases, sum(step.phases.values())
            if iteration > beginning:
                run.iterations += 1
                run.seconds += seconds
                run.draft_seconds += phases.get("draft", 0.0)
        left = room[step.row] - written[step.row] - 1  # guesses that are of use
        written[step.row] += len(step.tokens)
        if iteration <= beginning:
            continue
        tokens, before = waited.get(step.row, (0, 0.0))
        waited[step.row] = tokens + len(step.tokens), before + seconds
        run.drafted[step.drafted] += 1
        run.kept += step.accepted
        run.lost += step.accepted < step.drafted
        run.missing += step.accepted == step.drafted < min(left, run.cell.g or 0)
    run.texts = list(waited.values())
    return run


def described(temperature: float, top_k: int, top_p: float) -> str:
    """For people."""
    filters = (f", top-k {top_k}" if top_k else "") + (f", top-p {top_p:g}" if top_p < 1 else "")
    return f"temperature {temperature:g}{filters}"
