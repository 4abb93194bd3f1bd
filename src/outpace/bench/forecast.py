"""Lines of a sweep: measured results beside the predictions of theory.

Both predictions take one α for all lengths of a draft and a sampling. The simple one is theorem 3.8 of
Leviathan et al. 2023, as in their Table 4. It knows c, the time of a draft's forward pass, and no cost of
longer passes. A draft token that the drafter did not propose counts as rejected.

The other one takes the numbers of draft tokens as they were. It uses the times of forward passes, drafting
and verification by themselves, and no measured step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from outpace.bench import theory
from outpace.bench.prediction import Parts
from outpace.bench.runs import PLAIN, Cell, Run
from outpace.bench.spread import Rate, Spread, faster
from outpace.sampling import SamplingParams

Known = dict[tuple[str, SamplingParams], Parts]
"""Parts of a step by draft and sampling."""

SPAN = 128  # tokens that latencies are reported for, as in Chen et al. 2023


@dataclass(frozen=True)
class SweepLine:
    """Results of one cell.

    ``mean_ms`` to ``deviation_ms`` are latencies of ``SPAN`` tokens over texts, as each text waited.

    Attributes:
        acceptance: Fraction of proposed draft tokens that were accepted.
        alpha: Fraction accepted of the draft tokens that no rejected one precedes.
        tokens_per_pass: Tokens of a sequence per step.
        loop_ms: Time of a step.
        c: Time of a draft's forward pass, relative to a step without speculation, for all lengths of this
            draft and sampling.
        speedup: Throughput relative to decoding without speculation.
        interval: 95 % confidence interval of ``speedup``.
        predicted: Speedup by α and the times of a step's parts, where the draft length is fixed.
        predicted_simple: Speedup by α and c.
    """

    draft: str
    temperature: float
    top_k: int
    top_p: float
    length: str
    texts: int
    tokens: int
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
    for cell, mine in by_cell.items():
        plain = by_cell.get(Cell(cell.draft, cell.sampling, PLAIN), [])
        if any(_paired(mine, plain)):
            alike = [
                one
                for other, theirs in by_cell.items()
                if (other.draft, other.sampling) == (cell.draft, cell.sampling) and other.g
                for one in theirs
            ]
            found.append(_figure(cell, mine, plain, alike, (parts or {}).get((cell.draft, cell.sampling))))
    return found


def _figure(
    cell: Cell, mine: Sequence[Run], plain: Sequence[Run], alike: Sequence[Run], parts: Parts | None
) -> SweepLine:
    """Return the line of a cell.

    ``alike`` are the runs of the same draft and sampling with a fixed number of draft tokens.
    """
    times = Spread.of([1e3 * SPAN * waited / tokens for run in mine for tokens, waited in run.texts])
    tokens, seconds = sum(run.tokens for run in mine), sum(run.seconds for run in mine)
    drafted = proposals(mine)
    speedup, interval = faster(*_paired(mine, plain))
    alpha, c = judged(alike), step_cost(alike, plain)
    predicted = simple = None
    if cell.g and alpha is not None and c is not None:
        predicted = None if parts is None else parts.speedup(alpha, drafted)
        simple = theory.speedup(judged(alike, missing=True) or 0.0, cell.g, c)
    own, made = judged(mine), sum(g * n for g, n in drafted.items())
    sampling = cell.sampling
    return SweepLine(
        cell.draft,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        cell.length,
        sum(len(run.texts) for run in mine),
        tokens,
        round(times.mean, 3),
        round(times.p50, 3),
        round(times.p90, 3),
        round(times.p99, 3),
        round(times.deviation, 3),
        round(tokens / seconds, 2),
        round(sum(run.kept for run in mine) / made, 4) if made else None,
        None if own is None else round(own, 4),
        round(tokens / drafted.total(), 4),
        round(1e3 * loop(mine), 4),
        None if c is None else round(c, 4),
        round(speedup, 4),
        None if interval is None else (round(interval[0], 4), round(interval[1], 4)),
        None if predicted is None else round(predicted, 4),
        None if simple is None else round(simple, 4),
    )


def _paired(mine: Sequence[Run], plain: Sequence[Run]) -> tuple[list[Rate], list[Rate]]:
    """Return the rates of both by group, for groups that both have."""
    ours, theirs = ({one.group: _rate(some, one.group) for one in some} for some in (mine, plain))
    both = [group for group in ours if group in theirs]
    return [ours[group] for group in both], [theirs[group] for group in both]


def _rate(runs: Sequence[Run], group: int) -> Rate:
    some = [run for run in runs if run.group == group]
    return sum(run.tokens for run in some), sum(run.seconds for run in some)


def loop(runs: Sequence[Run]) -> float:
    """Return the seconds of a step."""
    return sum(run.seconds for run in runs) / sum(run.iterations for run in runs)


def proposals(runs: Sequence[Run]) -> Counter[int]:
    """Return how often a sequence had each number of draft tokens in a step."""
    return sum((run.drafted for run in runs), Counter[int]())


def judged(runs: Sequence[Run], missing: bool = False) -> float | None:
    """Return α, the fraction accepted of the draft tokens that no rejected one precedes.

    With ``missing``, draft tokens that were not proposed count as rejected.
    """
    kept, lost = sum(run.kept for run in runs), sum(run.lost for run in runs)
    lost += sum(run.missing for run in runs) if missing else 0
    return kept / (kept + lost) if kept + lost else None


def step_cost(runs: Sequence[Run], plain: Sequence[Run]) -> float | None:
    """Return c, the time of a draft's forward pass relative to a step without speculation.

    Where drafting cannot be told apart, the runs with the fewest draft tokens count. c is then the time that
    each of these adds to a step.
    """
    if not runs:
        return None
    drafting = sum(run.draft_seconds for run in runs)
    if drafting:
        steps = sum((run.cell.g or 0) * run.iterations for run in runs)
        return drafting / steps / loop(plain)
    g = min(run.cell.g or 0 for run in runs)
    return max(0.0, loop([run for run in runs if run.cell.g == g]) / loop(plain) - 1) / g
