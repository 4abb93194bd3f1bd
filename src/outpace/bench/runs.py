"""Counts of one way to decode some prompts, without the beginnings of texts."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outpace.engine.sequence import Step
from outpace.sampling import SamplingParams

PLAIN, AUTO, HEURISTIC = "0", "auto", "heuristic"  # draft lengths: the baseline, the decoder's policy, ...
BEGINNING = 2  # first steps of a text that are not counted


@dataclass(frozen=True)
class Cell:
    """One way to decode.

    Attributes:
        draft: Name of the draft.
        sampling: Sampling of the texts.
        length: Number of draft tokens, ``"auto"`` or ``"heuristic"``.
    """

    draft: str
    sampling: SamplingParams
    length: str

    def __str__(self) -> str:
        one = self.sampling
        return f"{self.draft}, {described(one.temperature, one.top_k, one.top_p)}, g = {self.length}"

    @property
    def g(self) -> int | None:
        """Number of draft tokens if it is fixed, else None."""
        return int(self.length) if self.length.isdecimal() else None


@dataclass
class Run:
    """Result of one cell with one group of prompts, without the beginnings of texts.

    Attributes:
        cell: The cell.
        group: Number of the group.
        texts: New tokens of each text, and the seconds that it waited for them.
        iterations: Steps of all sequences together.
        seconds: Seconds of the steps.
        draft_seconds: Seconds of drafting among them, where the two can be told apart.
        drafted: How often a sequence had each number of draft tokens in a step.
        kept: Accepted draft tokens.
        lost: Rejected draft tokens. Those after a rejected one are not counted.
        missing: Steps of a sequence in which all draft tokens were accepted, and the drafter proposed fewer
            than it could.
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
        """New tokens of all texts."""
        return sum(tokens for tokens, _ in self.texts)


def counted(run: Run, steps: Iterable[Step], room: Sequence[int], beginning: int = BEGINNING) -> Run:
    """Count steps into a run, without the first ones of each text.

    Args:
        run: Run to fill.
        steps: Steps of a decoder.
        room: Maximum number of new tokens of each sequence.
        beginning: Number of first steps that are not counted.

    Returns:
        The run. If a text failed, it is an empty run, with a warning.
    """
    iteration, phases, seconds = 0, None, 0.0
    written = [0] * len(room)
    waited: dict[int, tuple[int, float]] = {}  # tokens and seconds per row that count
    for step in steps:
        if step.output is not None and step.output.error is not None:
            warnings.warn(f"{run.cell}: prompts left out: {step.output.error}", stacklevel=2)
            return Run(run.cell, run.group)
        if step.phases is not phases:  # rows of one step share one object
            iteration, phases, seconds = iteration + 1, step.phases, sum(step.phases.values())
            if iteration > beginning:
                run.iterations += 1
                run.seconds += seconds
                run.draft_seconds += phases.get("draft", 0.0)
        left = room[step.row] - written[step.row] - 1  # draft tokens that are of use
        written[step.row] += len(step.token_ids)
        if iteration <= beginning:
            continue
        tokens, before = waited.get(step.row, (0, 0.0))
        waited[step.row] = tokens + len(step.token_ids), before + seconds
        run.drafted[step.num_draft_tokens] += 1
        run.kept += step.num_accepted
        run.lost += step.num_accepted < step.num_draft_tokens
        run.missing += step.num_accepted == step.num_draft_tokens < min(left, run.cell.g or 0)
    run.texts = list(waited.values())
    return run


def described(temperature: float, top_k: int, top_p: float) -> str:
    """Return sampling settings as text for people."""
    filters = (f", top-k {top_k}" if top_k else "") + (f", top-p {top_p:g}" if top_p < 1 else "")
    return f"temperature {temperature:g}{filters}"
