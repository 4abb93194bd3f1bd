"""The timeline of a real run, as in Leviathan et al. 2023, Figure 5."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from markupsafe import Markup

from outpace.report.words import said

Iteration = dict[str, Any]
Block = tuple[str, float, str]  # phase, seconds, label below

# Heights in pixels: phases differ in more than colour.
PHASES = {"draft": 24, "target": 40, "verify": 12, "other": 6}
FOOT = 60  # pixels to the foot of a row's blocks: words are above, numbers of tokens below
ROW = 92
MOST, BLOCKS = 12, 72  # steps, and blocks in them, that can be told apart on a phone

BLOCK = Markup('<rect class="{}" x="{:.3f}%" y="{}" width="{:.3f}%" height="{}"/>')
BELOW = Markup('<text class="brought" x="{:.3f}%" y="{}">{}</text>')
WORDS = Markup('<text x="0" y="{}">{}</text>')
KEY = Markup('<li><span class="key {}"></span>{} {:.0%}</li>')
WHOLE = Markup(
    '<svg class="trace" width="100%" height="{}" role="img" aria-label="{}, {} iterations">{}</svg>'
    '<ul class="legend">{}</ul>'
)


def first(iterations: Sequence[Iteration]) -> list[Iteration]:
    """Return the first steps, as many as are plotted."""
    found: list[Iteration] = []
    blocks = 0
    for one in iterations[:MOST]:
        blocks += one["num_draft_tokens"] + len(one["phases"]) - 1
        if found and blocks > BLOCKS:
            break
        found.append(one)
    return found


def draw(iterations: Sequence[Iteration], plain: float | None) -> Markup:
    """Return a timeline with a block for each draft step and every other phase.

    The row below is decoding as many tokens without speculation. The legend has shares of the time. A first
    step without draft tokens is the prefill, which decoding without speculation has, too.

    Args:
        iterations: Steps of the trace.
        plain: Seconds of a step without speculation; None leaves the row below out.
    """
    each = [_phases(one) for one in iterations]
    shares = {phase: sum(one[phase] for one in each) for phase in PHASES}
    spent = sum(shares.values())
    tokens = sum(one["num_accepted"] + 1 for one in iterations)
    words = f"speculating: {tokens} tokens in {said(1000 * spent, '.4g')} ms"
    blocks, alone = _blocks(iterations), list[Block]()
    if plain:
        begun = list[Block]()
        if not iterations[0]["num_draft_tokens"]:  # its token came with the prompt
            begun, tokens = [(phase, seconds, "") for phase, seconds in each[0].items()], tokens - 1
        alone = [*begun, *[("target", plain, "")] * tokens]
    slow = sum(seconds for _, seconds, _ in alone)
    whole = max(spent, slow) or 1.0
    rows, height = [*_row(0, words, blocks, whole)], ROW - 12
    if alone:
        without = f"plain decoding: {said(1000 * slow, '.4g')} ms"
        words, height = f"{words}; {without}", ROW + FOOT + 4
        rows += _row(ROW, without, alone, whole)
    keys = (KEY.format(phase, phase, seconds / (spent or 1.0)) for phase, seconds in shares.items())
    return WHOLE.format(height, words, len(iterations), Markup("").join(rows), Markup("").join(keys))


def _phases(one: Iteration) -> dict[str, float]:
    """Return the seconds of each phase; phases of unknown names count as other."""
    found = {phase: float(one["phases"].get(phase) or 0.0) for phase in PHASES}
    found["other"] += sum(seconds for phase, seconds in one["phases"].items() if phase not in PHASES)
    return found


def _blocks(iterations: Sequence[Iteration]) -> Iterator[Block]:
    for one in iterations:
        for phase, seconds in _phases(one).items():
            pieces = max(one["num_draft_tokens"], 1) if phase == "draft" else 1
            below = f"+{one['num_accepted'] + 1}" if phase == "target" else ""
            yield from [(phase, seconds / pieces, below)] * pieces


def _row(top: int, words: str, blocks: Iterable[Block], whole: float) -> Iterator[Markup]:
    yield WORDS.format(top + 13, words)
    at = 0.0
    for phase, seconds, below in blocks:
        left, width, height = 100 * at / whole, 100 * seconds / whole, PHASES[phase]
        at += seconds
        if seconds:
            yield BLOCK.format(phase, left, top + FOOT - height, width, height)
        if below:
            yield BELOW.format(left + width / 2, top + FOOT + 14, below)
