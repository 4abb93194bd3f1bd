"""What draws."""

from __future__ import annotations

from typing import Any


def backend() -> Any:
    """matplotlib, without a screen."""
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("a plot needs matplotlib: pip install 'outpace[plot]'") from error
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib import pyplot

    return pyplot
