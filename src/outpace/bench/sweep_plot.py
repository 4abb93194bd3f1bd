"""Plots of a sweep; needs ``pip install 'outpace[plot]'``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outpace.bench.curves import backend
from outpace.bench.forecast import SPAN, SweepLine
from outpace.bench.runs import sampling_label

Kind = tuple[str, float, int, float]


def save_plot(figures: Sequence[SweepLine], path: Path) -> None:
    """Plot a sweep over g, as in Chen et al. 2023, Figure 1.

    The panels are latency with its P90, the fraction of a forward pass that became text, and the time of a
    step. Policies are horizontal lines.
    """
    pyplot = backend()
    found, (latency, acceptance, step_time) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    kinds = list(dict.fromkeys(map(kind_of, figures)))
    for i, kind in enumerate(kinds):
        lines, colour, name = [one for one in figures if kind_of(one) == kind], f"C{i}", name_of(kind)
        fixed = sorted(
            (one for one in lines if one.num_draft_tokens.isdecimal()),
            key=lambda one: int(one.num_draft_tokens),
        )
        g = [int(one.num_draft_tokens) for one in fixed]
        latency.plot(g, [one.mean_ms for one in fixed], "o-", ms=4, color=colour, label=name)
        low, high = [one.mean_ms for one in fixed], [one.p90_ms for one in fixed]
        latency.fill_between(g, low, high, color=colour, alpha=0.15, label="to P90")
        for one, dashes in zip(
            (one for one in lines if not one.num_draft_tokens.isdecimal()), ("--", ":"), strict=False
        ):
            latency.axhline(
                one.mean_ms, color=colour, ls=dashes, lw=1, label=f"{name}, {one.num_draft_tokens}"
            )
        of_pass = [one.tokens_per_pass / (int(one.num_draft_tokens) + 1) for one in fixed]
        acceptance.plot(g, of_pass, "o-", ms=4, color=colour, label=f"{name}: tokens, of g + 1")
        known = [(int(one.num_draft_tokens), one.alpha) for one in fixed if one.alpha is not None]
        acceptance.plot(
            *zip(*known, strict=True) if known else ([], []), ":", color=colour, label=f"{name}: α"
        )
        step_time.plot(g, [one.loop_ms for one in fixed], "o-", ms=4, color=colour, label=name)
    latency.set(title=f"latency of {SPAN} tokens", ylabel="ms")
    acceptance.set(title="acceptance", ylim=(0, 1.05))
    step_time.set(title="time of a step", ylabel="ms")
    for axis in (latency, acceptance, step_time):
        axis.set_xlabel("draft tokens per step, g")
        axis.set_xticks(
            sorted({int(one.num_draft_tokens) for one in figures if one.num_draft_tokens.isdecimal()})
        )
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    for axis in (latency, step_time):
        axis.set_ylim(0, None)
    found.savefig(path)
    pyplot.close(found)


def kind_of(one: SweepLine) -> Kind:
    """Return the draft and the sampling settings of a figure."""
    return one.draft, one.temperature, one.top_k, one.top_p


def name_of(kind: Kind) -> str:
    """Return the name of a kind in legends."""
    return f"{kind[0]}, {sampling_label(*kind[1:])}"
