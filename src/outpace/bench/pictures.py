"""What draws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outpace.files import check_out


def backend(picture: Path | None = None) -> Any:
    """matplotlib, without a screen; it must be able to draw such a picture there."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("a plot needs matplotlib: pip install 'outpace[plot]'") from error
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib import pyplot

    if picture is not None:
        from matplotlib.figure import Figure

        kinds = sorted(Figure().canvas.get_supported_filetypes())
        if picture.suffix[1:].lower() not in kinds:
            raise ValueError(f"--plot: {picture}: it must end in one of .{', .'.join(kinds)}")
        check_out("--plot", picture)
    return pyplot
