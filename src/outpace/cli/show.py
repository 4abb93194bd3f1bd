"""Text on a screen, told apart by how each token came about, and figures about it."""

from __future__ import annotations

import os
import sys
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outpace.rows import Step
    from outpace.stats import Stats

# kind: what it means, colour, marks around it
KINDS = {
    "kept": ("a guess that was kept", "green", "[", "]"),
    "correction": ("the target's own token after a wrong guess", "red", "{", "}"),
    "bonus": ("the target's own token after right guesses", "cyan", "<", ">"),
    "plain": ("nothing was guessed", "", "", ""),
}
CODES = {"green": "32", "red": "31", "cyan": "36", "dim": "2"}
_part = ""  # of the work, that was said last


class Painter:
    """Writes text with colours, with marks, or as it is."""

    def __init__(self, stream: IO[str], *, no_color: bool = False, marks: bool = False) -> None:
        self._stream = stream
        dark = no_color or bool(os.environ.get("NO_COLOR"))
        self.marks = marks or (no_color and stream.isatty())
        self.colors = stream.isatty() and not dark and not self.marks
        self._kinds: list[str] = []
        self._open = "plain"
        self.history: list[tuple[str, str]] = []  # pieces of text and their kinds

    def step(self, step: Step) -> None:
        self._kinds += step.kinds
        for token, text in step.pieces or []:
            self.write(text, self._kinds[token])
        self._stream.flush()

    def write(self, text: str, kind: str = "plain") -> None:
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
        """The text is over."""
        self._close()
        self._kinds = []
        self.history.append(("\n", "plain"))
        self._stream.write("\n")
        self._stream.flush()

    def _close(self) -> None:
        if self.marks:
            self._stream.write(KINDS[self._open][3])
        self._open = "plain"

    def legend(self) -> str | None:
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
    """A console of the rich library for tables, that does not hide a closed pipe."""
    from rich.console import Console

    class Screen(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Screen(file=stream, highlight=False, markup=False)


def note(line: str) -> None:
    """A line about the work, beside the text."""
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        line = f"\033[{CODES['dim']}m{line}\033[0m"
    print(line, file=sys.stderr, flush=True)


def figures(stats: Stats) -> str:
    """The statistics line."""
    parts = [
        f"{stats.new_tokens} tokens",
        f"{stats.tokens_per_second:.1f} tokens/s",
        f"{stats.tokens_per_call:.2f} tokens per target pass",
    ]
    if stats.drafted:
        places = zip(stats.accepted_by_position, stats.drafted_by_position, strict=True)
        shares = [f"{kept / tried:.0%}" for kept, tried in places if tried]
        shown = " ".join(shares[:8]) + (" ..." if len(shares) > 8 else "")
        parts.append(f"kept {stats.accepted} of {stats.drafted} guesses (by position {shown})")
    return " | ".join(parts)


def as_json(stats: Stats) -> dict[str, Any]:
    derived = ("acceptance", "tokens_per_call", "tokens_per_second", "seconds")
    return vars(stats) | {name: getattr(stats, name) for name in derived}


def progress(line: str) -> None:
    """Overwrite the last such line, on a terminal; an empty one wipes it. Elsewhere there is a line for each
    part of the work, which is what stands before a colon."""
    global _part
    if sys.stderr.isatty():
        print(f"\r{line:60.60}" if line else "\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)
        return
    before, _part = _part, line.partition(":")[0]
    if _part and _part != before:
        note(line)
