"""Output on the terminal: text coloured by the origin of each token, statistics, progress."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from outpace.checks.files import write_atomic

if TYPE_CHECKING:
    from outpace.engine.sequence import Step
    from outpace.engine.stats import Stats
    from outpace.policy import DraftLengthPolicy

# kind of token: meaning, colour, opening and closing mark
KINDS = {
    "accepted": ("an accepted draft token", "green", "[", "]"),
    "correction": ("the target's token after a rejected draft token", "red", "{", "}"),
    "bonus": ("the target's token after accepted draft tokens", "cyan", "<", ">"),
    "target": ("without draft tokens", "", "", ""),
}
CODES = {"green": "32", "red": "31", "cyan": "36", "dim": "2"}
SVG_WIDTH = 92  # characters
_last_part = ""  # the part of the work that `progress` reported last


class Painter:
    """Writer of text with colours, with marks, or without either.

    Args:
        stream: Stream to write to.
        no_color: Whether to use marks instead of colours on a terminal.
        marks: Whether to use marks instead of colours everywhere.

    Attributes:
        marks: Whether it writes marks.
        colors: Whether it writes colours.
        history: Pieces of text and their kinds.
    """

    def __init__(self, stream: IO[str], *, no_color: bool = False, marks: bool = False) -> None:
        self._stream = stream
        without_color = no_color or bool(os.environ.get("NO_COLOR"))
        self.marks = marks or (no_color and stream.isatty())
        self.colors = stream.isatty() and not without_color and not self.marks
        self._kinds: list[str] = []
        self._open = "target"
        self.history: list[tuple[str, str]] = []  # pieces of text and their kinds

    def step(self, step: Step) -> None:
        """Write the text of a step."""
        self._kinds += step.kinds
        for token, text in step.pieces or []:
            self.write(text, self._kinds[token])
        self._stream.flush()

    def write(self, text: str, kind: str = "target") -> None:
        """Write a piece of text of one kind."""
        self.history.append((text, kind))
        if kind != self._open:
            self._close()
            self._open = kind
            if self.marks:
                self._stream.write(KINDS[kind][2])
        if self.colors and KINDS[kind][1]:
            text = f"\033[{CODES[KINDS[kind][1]]}m{text}\033[0m"
        self._stream.write(text)

    def end(self) -> None:
        """End the text with a newline."""
        self._close()
        self._kinds = []
        self.history.append(("\n", "target"))
        self._stream.write("\n")
        self._stream.flush()

    def _close(self) -> None:
        if self.marks:
            self._stream.write(KINDS[self._open][3])
        self._open = "target"

    def legend(self) -> str | None:
        """Return the legend of the colours or marks; None without them."""
        if self.colors:
            return "   ".join(
                f"\033[{CODES[color]}m{color}\033[0m {what}" for what, color, _, _ in KINDS.values() if color
            )
        if self.marks:
            return "   ".join(
                f"{left}marked{right} {what}" for what, _, left, right in KINDS.values() if left
            )
        return None


def screen(stream: IO[str]) -> Any:
    """Return a console of the rich library that raises an error if the pipe is closed."""
    from rich.console import Console

    class Screen(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Screen(file=stream, highlight=False, markup=False)


def note(line: str) -> None:
    """Print a line about the work on stderr; stdout has the text alone."""
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        line = f"\033[{CODES['dim']}m{line}\033[0m"
    print(line, file=sys.stderr, flush=True)


def stats_line(stats: Stats) -> str:
    """Return the statistics line."""
    parts = [
        f"{stats.new_tokens} tokens",
        f"{stats.tokens_per_second:.1f} tokens/s",
        f"{stats.tokens_per_pass:.2f} tokens per target pass",
    ]
    if stats.draft_tokens:
        positions = zip(stats.accepted_by_position, stats.draft_tokens_by_position, strict=True)
        rates = [f"{accepted / drafted:.0%}" for accepted, drafted in positions if drafted]
        shown = " ".join(rates[:8]) + (" ..." if len(rates) > 8 else "")
        parts.append(
            f"accepted {stats.accepted_tokens} of {stats.draft_tokens} draft tokens (by position {shown})"
        )
    return " | ".join(parts)


def policy_lines(stats: Stats, policy: DraftLengthPolicy) -> list[str]:
    """Return what the steps of a request took by their number of draft tokens, and what the policy knows."""
    lines = [f"{'draft tokens':>12}  {'steps':>6}  {'ms per step':>11}"]
    counted = zip(stats.steps_by_num_draft_tokens, stats.seconds_by_num_draft_tokens, strict=True)
    for g, (steps, seconds) in enumerate(counted):
        if steps:
            lines.append(f"{g:>12}  {steps:>6}  {1e3 * seconds / steps:>11.2f}")
    lines.append(
        f"{stats.speculative_share:.0%} of the steps were speculative; exploration took about "
        f"{stats.exploration_seconds:.3f} of {stats.seconds:.3f} s"
    )
    return [*lines, f"policy: {policy.describe()}"]


def as_json(stats: Stats) -> dict[str, Any]:
    """Return statistics with derived values, for JSON."""
    derived = ("acceptance_rate", "tokens_per_pass", "speculative_share", "tokens_per_second", "seconds")
    return vars(stats) | {name: getattr(stats, name) for name in derived}


def progress(line: str) -> None:
    """Show a line about the progress on stderr.

    On a terminal it replaces the line before it, and an empty line clears it. Elsewhere only the first line
    of each part of the work is printed. The part is the text before the colon.
    """
    global _last_part
    if sys.stderr.isatty():
        print(f"\r{line:60.60}" if line else "\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)
        return
    before, _last_part = _last_part, line.partition(":")[0]
    if _last_part and _last_part != before:
        note(line)


def write_svg(pieces: Sequence[tuple[str, str]], statistics: str, path: Path) -> None:
    """Write an SVG of text pieces, each with its kind, above a legend and statistics."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=SVG_WIDTH, file=io.StringIO(), force_terminal=True, highlight=False)
    text = Text()
    for piece, kind in pieces:
        shown = "".join(one for one in piece if one >= " " or one in "\n\t")  # XML allows no others
        text.append(shown, style=KINDS[kind][1] or None)
    console.print(text)
    for what, color, _, _ in KINDS.values():
        console.print(Text("■ ", style=color or "default").append(what, style="dim"))
    console.print(Text(statistics, style="dim"))
    write_atomic(path, console.export_svg(title="outpace generate"))
