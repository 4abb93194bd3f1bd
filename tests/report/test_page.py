"""The page has what the files have, as they have it, and nothing from elsewhere."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from outpace import theory
from outpace.report import timeline, tokens
from outpace.report.page import page
from outpace.report.verdict import verdict
from tests.report.markup import Markup
from tests.report.written import DRAFTS, measured, swept, tuned

EVIL = "<script>alert('$x$ & \"y\"')</script>"


@pytest.fixture(scope="module")
def whole() -> str:
    return page([("tune.json", tuned()), ("sweep.json", swept()), ("measure.json", measured())])


def only(*parts: str) -> dict[str, Any]:
    """A measurement that was ended early."""
    every = ("drafts", "passes", "verify", "trace")
    return {name: one for name, one in measured().items() if name in parts or name not in every}


def test_it_is_well_formed_and_needs_nothing_beside_it(whole: str) -> None:
    found = Markup(whole)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in found.tags}
    for _, attributes in found.tags:
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert "http" not in whole
    assert "@import" not in whole
    assert all(one.startswith("#") for one in re.findall(r"url\(([^)]*)\)", whole))
    names = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(set(names)) == len(names)
    used = {(one.get("href") or "#")[1:] for one in found.all("use")}
    assert used <= set(names)


def test_it_has_every_section_from_the_answer_to_the_commands(whole: str) -> None:
    found = Markup(whole)
    assert found.titles == [
        "What was tried",
        "Speed by g, greedy",
        "Speed by g, temperature 1",
        "How often guesses are kept",
        "What the formulas say",
        "Acceptance by position",
        "What a pass costs",
        "Where the time goes",
        "Token by token",
        "How this was measured",
    ]
    for said in ("Speculative decoding of org/Target-7B", "on Some GPU <80 GB>", tuned()["verdict"]):
        assert said in found.words
    for one in (measured(), swept(), tuned()):
        assert one["command"] in found.words
    assert "torch 2.12.0, transformers 5.17.0, outpace 0.1.0" in found.words
    assert "not complete" not in found.words


def test_every_figure_has_words_and_a_caption(whole: str) -> None:
    found = Markup(whole)
    figures = [one for one in found.all("svg") if one["role"] == "img"]
    assert len(figures) == 2 * 4 + 4 + 3 + 1 + 1
    assert all(one["aria-label"] for one in figures)
    assert (
        len(found.all("figcaption")) == len(found.all("figure")) == len(figures) + 1
    )  # the text is no picture
    position = next(one for one in figures if (one["aria-label"] or "").startswith("kept, by position"))
    assert "Draft-0.5B: 1: 0.812, 2: 0.802, 3: 0.792, 4: 0.782" in (position["aria-label"] or "")
    assert "#0" not in re.sub(r'(href="|url\()#', "", whole).split("</style>")[1]  # stand-ins are replaced


def test_numbers_are_those_of_the_files(whole: str) -> None:
    rows = Markup(whole).rows
    for one in swept()["figures"]:
        start = [one["draft"], one["length"], f"{one['speedup']:.2f}"]
        row = next(row for row in rows if row[:3] == start and f"{one['mean_ms']:.1f}" in row)
        interval = one["interval"] and "{:.2f} to {:.2f}".format(*one["interval"])
        assert row[3] == (interval or "–")
        assert row[-2:] == ["40", "5120"]
        assert row[7] == ("–" if one["length"] == "0" else f"{one['acceptance']:.3f}")
    for name, (alpha, step) in DRAFTS.items():
        c = step / measured()["passes"][0]["ms"]
        row = next(row for row in rows if row[:3] == [name, "1", f"{alpha:.3f}"])
        assert row[3:5] == [f"{alpha - 0.011:.3f} to {alpha + 0.012:.3f}", f"{c:.3g}"]
    assert ["Draft-0.5B", "0.863 (0.81 to 0.91)", "0.759"] in rows
    for one in tuned()["candidates"]:
        row = next(row for row in rows if row[0] == one["draft"] and row[-1] == one["why"])
        assert row[1:3] == [one["length"], f"{one['expected']:.2f}"]


def test_what_was_chosen_is_marked(whole: str) -> None:
    assert len([one for one in Markup(whole).all("tr") if one.get("class") == "chosen"]) == 3


@pytest.mark.parametrize(
    ("part", "titles"),
    [
        ("drafts", ["How often guesses are kept", "Acceptance by position"]),
        ("passes", ["What a pass costs"]),
        ("verify", ["What a pass costs"]),
        ("trace", ["Where the time goes", "Token by token"]),
    ],
)
def test_sections_are_those_of_the_parts_that_are_there(part: str, titles: list[str]) -> None:
    """The formulas need a cost, and a cost both drafts and passes."""
    assert Markup(page([("m.json", only(part))])).titles == [*titles, "How this was measured"]


def test_what_is_not_complete_says_so() -> None:
    content = only("verify") | {"complete": False}
    assert "m.json is not complete" in Markup(page([("m.json", content)])).words


def test_a_draft_of_which_nothing_is_known_yet_is_a_row_of_dashes() -> None:
    content = only("drafts")
    content["drafts"] = [
        {"draft": "lookup", "lenience": 1.0, "alpha": None, "by_position": [], "blocks": None}
    ]
    del content["machine"], content["command"], content["target"]
    assert ["lookup", "1", *["–"] * 8] in Markup(page([("m.json", content)])).rows


def test_several_files_of_a_kind_are_told_apart() -> None:
    found = Markup(page([("a.json", only("verify")), ("b.json", only("verify"))]))
    assert found.titles[:2] == ["What a pass costs: a.json", "What a pass costs: b.json"]


def test_names_and_texts_are_words_and_never_markup() -> None:
    evil: list[dict[str, Any]] = [copy.deepcopy(one) for one in (tuned(), swept(), measured())]
    for content in evil:
        content["target"] = content["command"] = EVIL
        content["machine"] = {"device": EVIL}
        for one in (*content.get("drafts", ()), *content.get("candidates", ()), *content.get("figures", ())):
            one["draft"] = EVIL
    evil[1]["figures"] = evil[1]["figures"][:3]
    evil[0] |= {"verdict": EVIL, "config": EVIL, "chosen": None}
    evil[2]["drafts"] = evil[2]["drafts"][:1]
    evil[2]["drafts"][0] |= {"blocks": None, "autocorrelation": []}
    evil[2]["drafts"][0]["by_domain"] = {EVIL: {"alpha": 0.5}}
    evil[2]["trace"] |= {"draft": EVIL, "pieces": [[EVIL, "kept"], [EVIL, '"><script>']]}
    made = page([(f"{EVIL}.json", one) for one in evil])
    found = Markup(made)
    assert "<script" not in made
    assert found.words.count(EVIL) > 20
    assert not found.all("script")


def test_nothing_to_draw_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"results: there is nothing to draw in m.json, s.json"):
        page([("m.json", only()), ("s.json", swept() | {"figures": []})])


def test_the_verdict_is_the_best_there_is() -> None:
    fast, slow = swept(), swept()
    assert verdict([measured(), fast, tuned()]) == tuned()["verdict"]
    open_ = tuned() | {"chosen": None, "verdict": "Whether it pays is not known: there was no time."}
    assert verdict([open_]) == open_["verdict"]
    assert verdict([open_, fast]) == verdict([fast])
    best = theory.speedup(0.812, 6, 1.9 / 20.5)
    said = f"Guess with org/Draft-0.5B, g = 6, greedy: {best:.2f} times as fast as plain decoding"
    assert verdict([measured(), fast]).startswith(said)
    for one in slow["figures"]:
        one |= {"speedup": one["speedup"] / 4, "interval": None}
    assert verdict([measured(), slow]).startswith(
        "Do not speculate: the best that was measured, org/Draft-0.5B"
    )
    for one in slow["figures"]:
        one |= {"speedup": 1.01, "interval": [0.97, 1.05]}
    assert verdict([slow]).startswith("It is not sure that speculation pays")
    said = "Guess with org/Draft-0.5B, g = 5: 2.13 times as fast as plain decoding (2.08 to 2.19 over α's"
    assert verdict([measured()]).startswith(said)
    lenient = measured()
    lenient["drafts"] = [
        one | {"best_g": 0, "predicted": 1.0, "predicted_interval": None} for one in lenient["drafts"]
    ]
    lenient["drafts"].append(lenient["drafts"][0] | {"lenience": 0.1, "best_g": 5, "predicted": 3.0})
    assert verdict([lenient]).startswith("Do not speculate")  # what is faster is not exact
    assert verdict([only("passes")]) == ""


def test_a_draft_is_recommended_only_if_it_pays_in_all_of_the_interval_of_alpha() -> None:
    content = measured()
    fast, sure = content["drafts"]
    fast["predicted_interval"] = [0.71, 2.9]
    assert verdict([content]).startswith("Guess with ngram:texts.arpa, g = 3: 1.31 times as fast")
    sure["predicted_interval"] = [1.0, 1.4]
    assert verdict([content]).startswith(
        "It is not known whether speculation pays: org/Draft-0.5B, g = 5: 2.13 times as fast as plain "
        "decoding (0.71 to 2.90 over α's interval)"
    )
    for one in (fast, sure):
        one |= {"best_g": 0, "predicted": 1.0}
    assert verdict([content]).startswith(
        "It is not known whether speculation pays: org/Draft-0.5B is expected to be 0.71 to 2.90 times"
    )
    for one in (fast, sure):
        one["predicted_interval"] = [1.0, 1.0]
    assert verdict([content]).startswith("Do not speculate")


def test_blocks_of_the_trace_are_to_scale() -> None:
    iterations = [
        {"phases": {"target": 0.06, "other": 0.01}, "drafted": 0, "accepted": 0},  # the prompt
        {"phases": {"draft": 0.02, "target": 0.03, "unknown": 0.01}, "drafted": 2, "accepted": 2},
    ]
    drawn = Markup(str(timeline.draw(iterations, 0.03)))
    blocks = [(one["class"], one["x"], one["width"]) for one in drawn.all("rect")]
    whole = 0.07 + 3 * 0.03
    at = [0.0, 0.06, 0.07, 0.08, 0.09, 0.12]
    wide = [0.06, 0.01, 0.01, 0.01, 0.03, 0.01]
    kinds = ["target", "other", "draft", "draft", "target", "other"]
    assert blocks[:6] == [
        (kind, f"{100 * x / whole:.3f}%", f"{100 * width / whole:.3f}%")
        for kind, x, width in zip(kinds, at, wide, strict=True)
    ]
    assert [kind for kind, _, _ in blocks[6:]] == [
        "target",
        "other",
        *["target"] * 3,
    ]  # reads the prompt, too
    assert "speculating: 4 tokens in 130 ms" in drawn.words
    assert "plain decoding: 160 ms" in drawn.words
    assert "draft 15%" in drawn.words


def test_a_line_of_text_is_an_iteration() -> None:
    pieces = [
        ["a", "kept"],
        ["b", "correction"],
        ["c", "plain"],
        ["d\n", "kept"],
        ["e", "bonus"],
        ["f", "kept"],
    ]
    made = tokens.lines(pieces)
    assert [[text for text, _ in one] for one in made] == [["a", "b"], ["c"], ["d⏎", "e"], ["f"]]
    many = Markup(str(tokens.draw([["x", "correction"]] * 50)))
    assert "… and 10 lines more" in many.words
