"""The papers' curves, with a point for what was asked: needs `pip install 'outpace[plot]'`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from outpace import theory
from outpace.bench.pictures import backend

LENGTHS = (1, 3, 5, 7, 10)
COSTS = (0.01, 0.02, 0.05, 0.1)


def draw(path: Path, alpha: float, c: float) -> None:
    """Leviathan et al. 2023, figures 2 to 4: expected tokens, best lengths, speed and operations over α."""
    pyplot = backend()
    found, axes = pyplot.subplots(2, 2, figsize=(10, 7.5), layout="constrained")
    tokens, lengths, speed, operations = axes.flat
    share = np.linspace(0, 0.99, 199)
    best = theory.best_length(alpha, c)
    for g in LENGTHS:
        tokens.plot(share, theory.expected_tokens(share, g), label=f"g = {g}")
        speed.plot(share, theory.speedup(share, g, c), label=f"g = {g}")
        operations.plot(share, theory.operations(share, g, c), label=f"g = {g}")
    for cost in COSTS:
        lengths.plot(share, [theory.best_length(float(one), cost) for one in share], label=f"c = {cost:g}")
    tokens.plot(share, 1 / (1 - share), "k:", lw=1, label="no limit")
    speed.plot(share, theory.oracle_speedup(share, c), "k:", lw=1, label="oracle")
    tokens.set(title="expected tokens a pass", ylim=(1, 11))
    lengths.set(title="best g", ylim=(0, 40))
    speed.set(title=f"speed over plain decoding, c = {c:g}", ylim=(0, 10))
    operations.set(title=f"operations over plain decoding, ĉ = {c:g}", ylim=(1, 8))
    here = (
        (tokens, theory.expected_tokens(alpha, best)),
        (lengths, best),
        (speed, theory.speedup(alpha, best, c)),
        (operations, theory.operations(alpha, best, c)),
    )
    for axis, value in here:
        axis.plot([alpha], [value], "ko", ms=6, label=f"α = {alpha:g}, c = {c:g}, g = {best}")
        axis.set_xlabel("α")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    found.savefig(path)
    pyplot.close(found)
