"""Lines of a sweep: measured results beside the predictions of theory.

Both predictions take one α for all draft lengths of a draft and a sampling. The simple one is theorem 3.8 of
Leviathan et al. 2023, as in their Table 4. It knows c, the time of a draft's forward pass, and no cost of
longer passes. A draft token that the drafter did not propose counts as rejected.

The other one takes the counted numbers of draft tokens. It uses separately measured times of forward passes,
drafting and verification, and no measured step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from outpace.bench import theory
from outpace.bench.prediction import Parts
from outpace.bench.runs import BASELINE, Cell, Run
from outpace.bench.spread import Rate, Spread, faster
from outpace.sampling import SamplingParams

TimedParts = dict[tuple[str, SamplingParams], Parts]
"""Parts of a step by draft and sampling."""

SPAN = 128  # tokens that latencies are reported for, as in Chen et al. 2023


@dataclass(frozen=True)
class SweepLine:
    """Results of one cell.

    ``mean_ms`` to ``deviation_ms`` are latencies of ``SPAN`` tokens, over texts.

    Attributes:
        num_draft_tokens: Number of draft tokens per step, or the name of a policy.
        texts: Number of texts.
        new_tokens: Tokens of all texts.
        acceptance: Fraction of proposed draft tokens that were accepted.
        alpha: Accepted draft tokens divided by verified ones; those after a rejected one are not verified.
        tokens_per_pass: Tokens of a sequence per step.
        loop_ms: Time of a step.
        c: Time of a draft's forward pass, relative to a step without speculation, for all draft
            lengths of this draft and sampling.
        speedup: Throughput relative to decoding without speculation.
        interval: 95 % confidence interval of ``speedup``.
        predicted: Speedup by α and the times of a step's parts, where the draft length is fixed.
        predicted_simple: Speedup by α and c.
    """

    draft: str
    temperature: float
    top_k: int
    top_p: float
    num_draft_tokens: str
    texts: int
    new_tokens: int
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    deviation_ms: float
    tokens_per_second: float
    acceptance: float | None
    alpha: float | None
    tokens_per_pass: float
    loop_ms: float
    c: float | None
    speedup: float
    interval: tuple[float, float] | None
    predicted: float | None
    predicted_simple: float | None


def figures(
    runs: Iterable[Run], parts: Mapping[tuple[str, SamplingParams], Parts] | None = None
) -> list[SweepLine]:
    """Return a line per cell that shares at least one group of prompts with the baseline.

    Lines are in the order in which cells first appear.
    """
    by_cell: dict[Cell, list[Run]] = {}
    for run in runs:
        if run.texts:
            by_cell.setdefault(run.cell, []).append(run)
    found = []
    for cell, cell_runs in by_cell.items():
        baseline = by_cell.get(Cell(cell.draft, cell.sampling, BASELINE), [])
        if any(_paired_rates(cell_runs, baseline)):
            fixed_runs = [
                run
                for other, runs_of_other in by_cell.items()
                if (other.draft, other.sampling) == (cell.draft, cell.sampling) and other.g
                for run in runs_of_other
            ]
            found.append(
                _figure(cell, cell_runs, baseline, fixed_runs, (parts or {}).get((cell.draft, cell.sampling)))
            )
    return found


def _figure(
    cell: Cell,
    cell_runs: Sequence[Run],
    baseline: Sequence[Run],
    fixed_runs: Sequence[Run],
    parts: Parts | None,
) -> SweepLine:
    """Return the line of a cell.

    ``alike`` are the runs of the same draft and sampling with a fixed number of draft tokens.
    """
    times = Spread.of([1e3 * SPAN * waited / tokens for run in cell_runs for tokens, waited in run.texts])
    tokens, seconds = sum(run.tokens for run in cell_runs), sum(run.seconds for run in cell_runs)
    drafted = draft_token_counts(cell_runs)
    speedup, interval = faster(*_paired_rates(cell_runs, baseline))
    alpha, c = acceptance_rate(fixed_runs), relative_draft_time(fixed_runs, baseline)
    predicted = simple = None
    if cell.g and alpha is not None and c is not None:
        predicted = None if parts is None else parts.speedup(alpha, drafted)
        simple = theory.speedup(acceptance_rate(fixed_runs, missing=True) or 0.0, cell.g, c)
    cell_alpha, proposed = acceptance_rate(cell_runs), sum(g * n for g, n in drafted.items())
    sampling = cell.sampling
    return SweepLine(
        cell.draft,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        cell.num_draft_tokens,
        sum(len(run.texts) for run in cell_runs),
        tokens,
        round(times.mean, 3),
        round(times.p50, 3),
        round(times.p90, 3),
        round(times.p99, 3),
        round(times.deviation, 3),
        round(tokens / seconds, 2),
        round(sum(run.accepted for run in cell_runs) / proposed, 4) if proposed else None,
        None if cell_alpha is None else round(cell_alpha, 4),
        round(tokens / drafted.total(), 4),
        round(1e3 * step_seconds(cell_runs), 4),
        None if c is None else round(c, 4),
        round(speedup, 4),
        None if interval is None else (round(interval[0], 4), round(interval[1], 4)),
        None if predicted is None else round(predicted, 4),
        None if simple is None else round(simple, 4),
    )


def _paired_rates(cell_runs: Sequence[Run], baseline: Sequence[Run]) -> tuple[list[Rate], list[Rate]]:
    """Return the rates of a cell and of the baseline by group, for groups that both have."""
    measured, reference = (
        {one.group: _rate(some, one.group) for one in some} for some in (cell_runs, baseline)
    )
    both = [group for group in measured if group in reference]
    return [measured[group] for group in both], [reference[group] for group in both]


def _rate(runs: Sequence[Run], group: int) -> Rate:
    some = [run for run in runs if run.group == group]
    return sum(run.tokens for run in some), sum(run.seconds for run in some)


def step_seconds(runs: Sequence[Run]) -> float:
    """Return the seconds of a step."""
    return sum(run.seconds for run in runs) / sum(run.iterations for run in runs)


def draft_token_counts(runs: Sequence[Run]) -> Counter[int]:
    """Return how often a sequence had each number of draft tokens in a step."""
    return sum((run.drafted for run in runs), Counter[int]())


def acceptance_rate(runs: Sequence[Run], missing: bool = False) -> float | None:
    """Return α: accepted draft tokens divided by verified ones; those after a rejected one are not verified.

    With ``missing``, draft tokens that were not proposed count as rejected.
    """
    accepted, rejected = sum(run.accepted for run in runs), sum(run.rejected for run in runs)
    rejected += sum(run.missing for run in runs) if missing else 0
    return accepted / (accepted + rejected) if accepted + rejected else None


def relative_draft_time(runs: Sequence[Run], baseline: Sequence[Run]) -> float | None:
    """Return c, the time of a draft's forward pass relative to a step without speculation.

    If a step is one graph, drafting has no time of its own. Then the runs with the fewest draft tokens count,
    and c is the time that each draft token adds to a step.
    """
    if not runs:
        return None
    drafting = sum(run.draft_seconds for run in runs)
    if drafting:
        steps = sum((run.cell.g or 0) * run.iterations for run in runs)
        return drafting / steps / step_seconds(baseline)
    g = min(run.cell.g or 0 for run in runs)
    return max(0.0, step_seconds([run for run in runs if run.cell.g == g]) / step_seconds(baseline) - 1) / g
