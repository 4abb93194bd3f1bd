"""One real run from its trace: where its time went, and its text."""

from __future__ import annotations

from outpace.report import timeline, tokens
from outpace.report.section import CaptionedFigure, Content, Section
from outpace.report.words import format_value, short_name


def sections(content: Content) -> list[Section]:
    """Return the sections on the time and the text of the run."""
    return [_time(content), _text(content)]


def single_token_ms(content: Content) -> float | None:
    """Return the milliseconds of the target's forward pass over one token of one sequence."""
    passes = content.get("passes") or ()
    return next((timing["ms"] for timing in passes if (timing["B"], timing["n"]) == (1, 1)), None)


def _time(content: Content) -> Section:
    trace = content.get("trace") or {}
    if not trace.get("iterations"):
        return Section("Where the time goes")
    pass_ms = single_token_ms(content)
    iterations = timeline.first(trace["iterations"])
    html = timeline.render(iterations, pass_ms / 1000 if pass_ms else None)
    caption = (
        f"The first {len(iterations)} iterations of a run with {short_name(trace.get('draft'))} at g = "
        f"{format_value(trace.get('g'))}, to scale (as in Leviathan et al. 2023, Figure 5): steps of the "
        "draft, then a pass of the target. The number below the pass counts the tokens of the iteration."
    )
    if trace.get("divided"):
        caption += " Each iteration is one graph, here divided by the times of its parts measured alone."
    if pass_ms:
        caption += (
            " The second row decodes as many tokens without speculation, at the time measured for a pass "
            "alone. One run is no measurement of speed."
        )
    return Section("Where the time goes", figures=[CaptionedFigure(html, caption, wide=True)])


def _text(content: Content) -> Section:
    trace = content.get("trace") or {}
    if not trace.get("pieces") or not trace.get("iterations"):
        return Section("Token by token")
    passes = len(trace["iterations"])
    count = sum(iteration["num_accepted"] + 1 for iteration in trace["iterations"])
    caption = (
        f"Text of that run, a line for each pass of the target: {passes} passes for {count} tokens (as in "
        "Leviathan et al. 2023, Figure 1)."
    )
    return Section(
        "Token by token", figures=[CaptionedFigure(tokens.render(trace["pieces"]), caption, wide=True)]
    )
