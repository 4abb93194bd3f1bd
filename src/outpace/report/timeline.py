"""The timeline of a real run, as in Leviathan et al. 2023, Figure 5."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from markupsafe import Markup

from outpace.report.words import format_value

Iteration = dict[str, Any]
Block = tuple[str, float, str]  # phase, seconds, label below

# Heights in pixels: phases differ in more than colour.
PHASES = {"draft": 24, "target": 40, "verify": 12, "other": 6}
FOOT = 60  # pixels from the top of a row to the foot of its blocks; token counts are below
ROW = 92  # pixels
MAX_STEPS, MAX_BLOCKS = 12, 72  # blocks stay distinguishable on a phone

BLOCK = Markup('<rect class="{}" x="{:.3f}%" y="{}" width="{:.3f}%" height="{}"/>')
TOKEN_COUNT = Markup('<text class="token-count" x="{:.3f}%" y="{}">{}</text>')
ROW_LABEL = Markup('<text x="0" y="{}">{}</text>')
KEY = Markup('<li><span class="key {}"></span>{} {:.0%}</li>')
SVG = Markup(
    '<svg class="trace" width="100%" height="{}" role="img" aria-label="{}, {} iterations">{}</svg>'
    '<ul class="legend">{}</ul>'
)


def first(iterations: Sequence[Iteration]) -> list[Iteration]:
    """Return the first steps, as many as are plotted."""
    steps: list[Iteration] = []
    blocks = 0
    for iteration in iterations[:MAX_STEPS]:
        blocks += iteration["num_draft_tokens"] + len(iteration["phases"]) - 1
        if steps and blocks > MAX_BLOCKS:
            break
        steps.append(iteration)
    return steps


def render(iterations: Sequence[Iteration], baseline_step: float | None) -> Markup:
    """Return a timeline with a block for each draft step and every other phase.

    The row below shows decoding of as many tokens without speculation. The legend has shares of the time. A
    first step without draft tokens is the prefill, which decoding without speculation has, too.

    Args:
        iterations: Steps of the trace.
        baseline_step: Seconds of a step without speculation; None leaves the row below out.
    """
    phases = [_phases(iteration) for iteration in iterations]
    totals = {phase: sum(seconds[phase] for seconds in phases) for phase in PHASES}
    speculative_seconds = sum(totals.values())
    tokens = sum(iteration["num_accepted"] + 1 for iteration in iterations)
    label = f"speculative: {tokens} tokens in {format_value(1000 * speculative_seconds, '.4g')} ms"
    speculative, baseline = _blocks(iterations), list[Block]()
    if baseline_step:
        prefill = list[Block]()
        if not iterations[0]["num_draft_tokens"]:  # the prefill sampled the first token
            prefill, tokens = [(phase, seconds, "") for phase, seconds in phases[0].items()], tokens - 1
        baseline = [*prefill, *[("target", baseline_step, "")] * tokens]
    baseline_seconds = sum(seconds for _, seconds, _ in baseline)
    longest = max(speculative_seconds, baseline_seconds) or 1.0
    rows, height = [*_row(0, label, speculative, longest)], ROW - 12
    if baseline:
        baseline_label = f"without speculation: {format_value(1000 * baseline_seconds, '.4g')} ms"
        label, height = f"{label}; {baseline_label}", ROW + FOOT + 4
        rows += _row(ROW, baseline_label, baseline, longest)
    keys = (
        KEY.format(phase, phase, seconds / (speculative_seconds or 1.0)) for phase, seconds in totals.items()
    )
    return SVG.format(height, label, len(iterations), Markup("").join(rows), Markup("").join(keys))


def _phases(iteration: Iteration) -> dict[str, float]:
    """Return the seconds of each phase; phases of unknown names count as other."""
    known = {phase: float(iteration["phases"].get(phase) or 0.0) for phase in PHASES}
    known["other"] += sum(seconds for phase, seconds in iteration["phases"].items() if phase not in PHASES)
    return known


def _blocks(iterations: Sequence[Iteration]) -> Iterator[Block]:
    for iteration in iterations:
        for phase, seconds in _phases(iteration).items():
            pieces = max(iteration["num_draft_tokens"], 1) if phase == "draft" else 1
            token_count = f"+{iteration['num_accepted'] + 1}" if phase == "target" else ""
            yield from [(phase, seconds / pieces, token_count)] * pieces


def _row(top: int, label: str, blocks: Iterable[Block], longest: float) -> Iterator[Markup]:
    """Return the label and the blocks of a row.

    Args:
        top: Pixels above the row.
        label: Label of the row.
        blocks: Blocks from left to right.
        longest: Seconds that the whole width stands for.
    """
    yield ROW_LABEL.format(top + 13, label)
    start = 0.0
    for phase, seconds, token_count in blocks:
        left, width, height = 100 * start / longest, 100 * seconds / longest, PHASES[phase]
        start += seconds
        if seconds:
            yield BLOCK.format(phase, left, top + FOOT - height, width, height)
        if token_count:
            yield TOKEN_COUNT.format(left + width / 2, top + FOOT + 14, token_count)
