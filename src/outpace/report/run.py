"""One real run from its trace: where its time went, and its text."""

from __future__ import annotations

from outpace.report import timeline, tokens
from outpace.report.section import Content, Figure, Section
from outpace.report.words import said, short


def sections(content: Content) -> list[Section]:
    """Return the sections on the time and the text of the run."""
    return [_time(content), _text(content)]


def plain_ms(content: Content) -> float | None:
    """Return the milliseconds of the target's forward pass over one token of one sequence."""
    passes = content.get("passes") or ()
    return next((one["ms"] for one in passes if (one["B"], one["n"]) == (1, 1)), None)


def _time(content: Content) -> Section:
    trace = content.get("trace") or {}
    if not trace.get("iterations"):
        return Section("Where the time goes")
    plain = plain_ms(content)
    iterations = timeline.first(trace["iterations"])
    drawn = timeline.draw(iterations, plain / 1000 if plain else None)
    words = (
        f"The first {len(iterations)} iterations of a run with {short(trace.get('draft'))} at g = "
        f"{said(trace.get('g'))}, to scale (as in Leviathan et al. 2023, Figure 5): steps of the draft, "
        "then a pass of the target. Below the pass is how many tokens came of both."
    )
    if trace.get("divided"):
        words += " Each iteration is one graph, here divided by what its parts take by themselves."
    if plain:
        words += (
            " The second row is plain decoding of as many tokens, at the time measured for a pass alone. "
            "One run is no measurement of speed."
        )
    return Section("Where the time goes", figures=[Figure(drawn, words, wide=True)])


def _text(content: Content) -> Section:
    trace = content.get("trace") or {}
    if not trace.get("pieces") or not trace.get("iterations"):
        return Section("Token by token")
    passes = len(trace["iterations"])
    count = sum(one["num_accepted"] + 1 for one in trace["iterations"])
    words = (
        f"Text of that run, a line for each pass of the target: {passes} passes for {count} tokens (as in "
        "Leviathan et al. 2023, Figure 1)."
    )
    return Section("Token by token", figures=[Figure(tokens.draw(trace["pieces"]), words, wide=True)])
