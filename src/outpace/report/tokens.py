"""The text of a run, coloured by the origin of each token, as in Leviathan et al. 2023, Figure 1."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

KINDS = {
    "accepted": "an accepted draft token",
    "correction": "the target's token after a rejected draft token",
    "bonus": "the target's token after accepted draft tokens",
    "plain": "without draft tokens",
}
MOST = 40  # lines

PIECE = Markup('<span class="{}">{}</span>')
LINE = Markup("<li>{}</li>")
KEY = Markup('<li><span class="{0}">{0}</span> {1}</li>')
WHOLE = Markup('<ol class="tokens">{}</ol>{}<ul class="legend">{}</ul>')
MORE = Markup("<p>… and {} lines more.</p>")


def lines(pieces: Sequence[Sequence[str]]) -> list[list[tuple[str, str]]]:
    """Return pieces of text by the step that they came with, which ends with the target's own token."""
    found: list[list[tuple[str, str]]] = [[]]
    for text, kind in pieces:
        found[-1].append((text.replace("\n", "⏎"), kind if kind in KINDS else "plain"))
        if kind != "accepted":
            found.append([])
    return [one for one in found if one]


def draw(pieces: Sequence[Sequence[str]]) -> Markup:
    """Return the text as HTML, a line for each step, with a legend."""
    every = lines(pieces)
    made = [LINE.format(Markup("").join(PIECE.format(kind, text) for text, kind in one)) for one in every]
    there = {kind for one in every for _, kind in one}
    keys = [KEY.format(kind, what) for kind, what in KINDS.items() if kind in there]
    more = MORE.format(len(made) - MOST) if len(made) > MOST else ""
    return WHOLE.format(Markup("").join(made[:MOST]), more, Markup("").join(keys))
