"""The coloured text as an SVG, for a README."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from outpace.cli.show import KINDS
from outpace.files import write_whole

WIDTH = 92  # characters


def draw(pieces: Sequence[tuple[str, str]], figures: str, path: Path) -> None:
    """Write text pieces, each with its kind, with legend and figures below."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False)
    text = Text()
    for piece, kind in pieces:
        shown = "".join(one for one in piece if one >= " " or one in "\n\t")  # XML has no other characters
        text.append(shown, style=KINDS[kind][1] or None)
    console.print(text)
    for what, color, _, _ in KINDS.values():
        console.print(Text("■ ", style=color or "default").append(what, style="dim"))
    console.print(Text(figures, style="dim"))
    write_whole(path, console.export_svg(title="outpace generate"))
