"""Counts of the steps of a decoder on some prompts, without the first steps of texts."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from outpace.engine.sequence import Step
from outpace.sampling import SamplingParams

BASELINE, AUTO, HEURISTIC = "0", "auto", "heuristic"  # no draft tokens, the decoder's own policy, ...
SKIPPED_STEPS = 2  # first steps of a text that are not counted


@dataclass(frozen=True)
class Cell:
    """A combination of draft, sampling and draft length to measure.

    Attributes:
        draft: Name of the draft.
        sampling: Sampling of the texts.
        num_draft_tokens: Number of draft tokens per step, ``"auto"`` or ``"heuristic"``.
    """

    draft: str
    sampling: SamplingParams
    num_draft_tokens: str

    def __str__(self) -> str:
        sampling = sampling_label(self.sampling.temperature, self.sampling.top_k, self.sampling.top_p)
        return f"{self.draft}, {sampling}, g = {self.num_draft_tokens}"

    @property
    def g(self) -> int | None:
        """Number of draft tokens if it is fixed, else None."""
        return int(self.num_draft_tokens) if self.num_draft_tokens.isdecimal() else None


@dataclass
class Run:
    """Result of one cell with one group of prompts, without the first steps of texts.

    Attributes:
        cell: The cell.
        group: Number of the group.
        texts: New tokens of each text, and the seconds that it waited for them.
        iterations: Steps of all sequences together.
        seconds: Seconds of the steps.
        draft_seconds: Seconds of drafting among them; 0 if a step is one graph.
        drafted: How often a sequence had each number of draft tokens in a step.
        accepted: Accepted draft tokens.
        rejected: Rejected draft tokens. Those after a rejected one are not counted.
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
    accepted: int = 0
    rejected: int = 0
    missing: int = 0

    @property
    def tokens(self) -> int:
        """New tokens of all texts."""
        return sum(tokens for tokens, _ in self.texts)


def count_steps(
    run: Run, steps: Iterable[Step], max_new_tokens: Sequence[int], skipped_steps: int = SKIPPED_STEPS
) -> Run:
    """Count steps into a run, without the first ones of each text.

    Args:
        run: Run to fill.
        steps: Steps of a decoder.
        max_new_tokens: Maximum number of new tokens of each sequence.
        skipped_steps: Number of first steps that are not counted.

    Returns:
        The run. If a text failed, it is an empty run, with a warning.
    """
    iteration, phases, seconds = 0, None, 0.0
    new_tokens = [0] * len(max_new_tokens)
    timed: dict[int, tuple[int, float]] = {}  # tokens and seconds of each sequence that count
    for step in steps:
        if step.output is not None and step.output.error is not None:
            warnings.warn(f"{run.cell}: prompts left out: {step.output.error}", stacklevel=2)
            return Run(run.cell, run.group)
        if step.phases is not phases:  # sequences of one step share one object
            iteration, phases, seconds = iteration + 1, step.phases, sum(step.phases.values())
            if iteration > skipped_steps:
                run.iterations += 1
                run.seconds += seconds
                run.draft_seconds += phases.get("draft", 0.0)
        left = (
            max_new_tokens[step.index] - new_tokens[step.index] - 1
        )  # draft tokens that could still be accepted
        new_tokens[step.index] += len(step.token_ids)
        if iteration <= skipped_steps:
            continue
        tokens, before = timed.get(step.index, (0, 0.0))
        timed[step.index] = tokens + len(step.token_ids), before + seconds
        run.drafted[step.num_draft_tokens] += 1
        run.accepted += step.num_accepted
        run.rejected += step.num_accepted < step.num_draft_tokens
        run.missing += step.num_accepted == step.num_draft_tokens < min(left, run.cell.g or 0)
    run.texts = list(timed.values())
    return run


def sampling_label(temperature: float, top_k: int, top_p: float) -> str:
    """Return a label for sampling parameters."""
    filters = (f", top-k {top_k}" if top_k else "") + (f", top-p {top_p:g}" if top_p < 1 else "")
    return f"temperature {temperature:g}{filters}"
