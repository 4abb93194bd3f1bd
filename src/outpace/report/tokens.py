"""The text of a run, coloured by the origin of each token, as in Leviathan et al. 2023, Figure 1."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

KINDS = {
    "accepted": "an accepted draft token",
    "correction": "the target's token after a rejected draft token",
    "bonus": "the target's token after accepted draft tokens",
    "target": "without draft tokens",
}
MAX_LINES = 40

PIECE = Markup('<span class="{}">{}</span>')
LINE = Markup("<li>{}</li>")
KEY = Markup('<li><span class="{0}">{0}</span> {1}</li>')
TEXT = Markup('<ol class="tokens">{}</ol>{}<ul class="legend">{}</ul>')
MORE = Markup("<p>… and {} lines more.</p>")


def lines(pieces: Sequence[Sequence[str]]) -> list[list[tuple[str, str]]]:
    """Return the pieces of text of each step, which ends with the target's own token."""
    steps: list[list[tuple[str, str]]] = [[]]
    for text, kind in pieces:
        steps[-1].append((text.replace("\n", "⏎"), kind if kind in KINDS else "target"))
        if kind != "accepted":
            steps.append([])
    return [step for step in steps if step]


def render(pieces: Sequence[Sequence[str]]) -> Markup:
    """Return the text as HTML, a line for each step, with a legend."""
    steps = lines(pieces)
    items = [LINE.format(Markup("").join(PIECE.format(kind, text) for text, kind in step)) for step in steps]
    present = {kind for step in steps for _, kind in step}
    keys = [KEY.format(kind, meaning) for kind, meaning in KINDS.items() if kind in present]
    more = MORE.format(len(items) - MAX_LINES) if len(items) > MAX_LINES else ""
    return TEXT.format(Markup("").join(items[:MAX_LINES]), more, Markup("").join(keys))
