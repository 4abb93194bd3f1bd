"""The page shows the contents of its files, and loads nothing else."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from outpace.bench import theory
from outpace.checks.errors import format_small
from outpace.report import timeline, tokens
from outpace.report.answer import answers
from outpace.report.page import page
from outpace.report.section import Speed
from outpace.report.source import source
from tests.report.markup import Markup
from tests.report.sample_results import DRAFTS, measured, swept, tuned

EVIL = "<script>alert('$x$ & \"y\"')</script>"


@pytest.fixture(scope="module")
def full_page() -> str:
    return page([("tune.json", tuned()), ("sweep.json", swept()), ("alpha.json", measured())])


def answer_of(contents: list[dict[str, Any]]) -> str:
    """Return the first answer for some files."""
    files = [(str(i), content) for i, content in enumerate(contents)]
    return next((answer.words for answer in answers(files)), "")


def measured_only(*parts: str) -> dict[str, Any]:
    """Return a measurement that ended early, with only some of its parts."""
    all_parts = ("drafts", "passes", "verify", "trace")
    return {name: value for name, value in measured().items() if name in parts or name not in all_parts}


def test_page_is_well_formed_and_self_contained(full_page: str) -> None:
    found = Markup(full_page)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in found.tags}
    for _, attributes in found.tags:
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert "http" not in full_page
    assert "@import" not in full_page
    assert all(one.startswith("#") for one in re.findall(r"url\(([^)]*)\)", full_page))
    names = [attributes["id"] for _, attributes in found.tags if "id" in attributes]
    assert len(set(names)) == len(names)
    used = {(one.get("href") or "#")[1:] for one in found.all("use")}
    assert used <= set(names)


def test_page_has_every_section_from_the_answer_to_the_commands(full_page: str) -> None:
    found = Markup(full_page)
    assert found.titles == [
        "Tuning candidates",
        "Speed by g, greedy",
        "Speed by g, temperature 1",
        "How often draft tokens are accepted",
        "What the formulas say",
        "Acceptance by position",
        "What a pass costs",
        "Where the time goes",
        "Token by token",
        "How this was measured",
    ]
    for words in ("Speculative decoding of org/Target-7B", "on Some GPU <80 GB>", tuned()["verdict"]):
        assert words in found.words
    for content in (measured(), swept(), tuned()):
        assert content["command"] in found.words
    assert "torch 2.12.0, transformers 5.17.0, outpace 0.1.0" in found.words
    assert "not complete" not in found.words


def test_every_figure_has_alternative_text_and_a_caption(full_page: str) -> None:
    found = Markup(full_page)
    figures = [one for one in found.all("svg") if one["role"] == "img"]
    assert len(figures) == 2 * 4 + 4 + 3 + 1 + 1
    assert all(one["aria-label"] for one in figures)
    assert (
        len(found.all("figcaption")) == len(found.all("figure")) == len(figures) + 1
    )  # the text of the run is a figure without an svg
    position = next(one for one in figures if (one["aria-label"] or "").startswith("accepted, by position"))
    assert "Draft-0.5B: 1: 0.812, 2: 0.802, 3: 0.792, 4: 0.782" in (position["aria-label"] or "")
    assert (
        "#0" not in re.sub(r'(href="|url\()#', "", full_page).split("</style>")[1]
    )  # colour placeholders are replaced


def test_page_shows_the_numbers_of_the_files(full_page: str) -> None:
    rows = Markup(full_page).rows
    for one in swept()["figures"]:
        start = [one["draft"], one["num_draft_tokens"]]
        interval = "" if one["num_draft_tokens"] == "0" else " ({:.2f}–{:.2f})".format(*one["interval"])
        assert any(row[:2] == start and row[4] == f"{one['speedup']:.2f}{interval}" for row in rows)
        times = next(row for row in rows if row[:2] == start and row[-2:] == ["40", "5120"])
        assert times[2] == (f"{one['mean_ms']:.0f}" if one["mean_ms"] >= 1000 else f"{one['mean_ms']:.1f}")
        assert times[9] == ("–" if one["num_draft_tokens"] == "0" else f"{one['acceptance']:.2f}")
    for name, (alpha, step) in DRAFTS.items():
        c = step / measured()["passes"][0]["ms"]
        known = f"{alpha:.3f} ({alpha - 0.011:.3f}–{alpha + 0.012:.3f})"
        row = next(row for row in rows if row[:3] == [name, "1", known])
        assert row[-1] == format_small(c)
    assert ["Draft-0.5B", "code", "0.863 (0.812–0.912)", "5120"] in rows
    for one in tuned()["candidates"]:
        row = next(row for row in rows if row[0] == one["draft"] and row[-1] == one["why"])
        assert row[1] == one["num_draft_tokens"]
        assert row[2].startswith(f"{one['expected']:.2f}")


def test_chosen_candidate_and_fastest_rows_are_marked(full_page: str) -> None:
    marked = [one for one in Markup(full_page).all("tr") if one.get("class") == "chosen"]
    assert len(marked) == 1 + 2 * 2  # tune; speeds and times of two samplings


@pytest.mark.parametrize(
    ("part", "titles"),
    [
        ("drafts", ["How often draft tokens are accepted", "Acceptance by position"]),
        ("passes", ["What a pass costs"]),
        ("verify", ["What a pass costs"]),
        ("trace", ["Where the time goes", "Token by token"]),
    ],
)
def test_page_of_an_early_ended_measurement_has_the_sections_of_its_parts(
    part: str, titles: list[str]
) -> None:
    """The section on formulas needs drafts and passes."""
    assert Markup(page([("m.json", measured_only(part))])).titles == [*titles, "How this was measured"]


def test_page_names_an_incomplete_file() -> None:
    content = measured_only("verify") | {"complete": False}
    assert "m.json is not complete" in Markup(page([("m.json", content)])).words


def test_draft_without_measurements_is_a_row_of_dashes() -> None:
    content = measured_only("drafts")
    content["drafts"] = [
        {"draft": "lookup", "lenience": 1.0, "alpha": None, "by_position": [], "blocks": None}
    ]
    del content["machine"], content["command"], content["target"]
    assert ["lookup", "1", *["–"] * 9] in Markup(page([("m.json", content)])).rows


def test_titles_have_file_names_if_several_files_are_of_a_kind() -> None:
    found = Markup(page([("a.json", measured_only("verify")), ("b.json", measured_only("verify"))]))
    assert found.titles[:2] == ["What a pass costs: a.json", "What a pass costs: b.json"]


def test_names_and_texts_from_files_are_escaped() -> None:
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
    evil[2]["trace"] |= {"draft": EVIL, "pieces": [[EVIL, "accepted"], [EVIL, '"><script>']]}
    html = page([(f"{EVIL}.json", content) for content in evil])
    found = Markup(html)
    assert "<script" not in html
    assert found.words.count(EVIL) > 20
    assert not found.all("script")


def test_files_without_results_raise_an_error() -> None:
    with pytest.raises(ValueError, match=r"results: nothing was measured yet in m.json, s.json"):
        page([("m.json", measured_only()), ("s.json", swept() | {"figures": []})])


def test_answer_comes_from_tune_then_sweep_then_alpha() -> None:
    fast, slow = swept(), swept()
    assert answer_of([measured(), fast, tuned()]) == tuned()["verdict"]
    undecided = tuned() | {"chosen": None, "verdict": "Whether it pays is not known: there was no time."}
    assert answer_of([undecided]) == undecided["verdict"]
    assert answer_of([undecided, fast]) == answer_of([fast])
    best = theory.speedup(0.812, 6, 1.9 / 20.5)
    answer = f"Draft with org/Draft-0.5B, g = 6, greedy: {best:.2f} times as fast as without speculation"
    assert answer_of([measured(), fast]).startswith(answer)
    for one in slow["figures"]:
        one |= {"speedup": one["speedup"] / 4, "interval": None}
    assert answer_of([measured(), slow]).startswith(
        "Do not speculate: the best that was measured, org/Draft-0.5B"
    )
    for one in slow["figures"]:
        one |= {"speedup": 1.01, "interval": [0.97, 1.05]}
    assert answer_of([slow]).startswith("It is not sure that speculation pays")
    answer = "Draft with org/Draft-0.5B, g = 5: 2.13 times as fast as without speculation (2.08 to 2.19"
    assert answer_of([measured()]).startswith(answer)
    lenient = measured()
    lenient["drafts"] = [
        one | {"best_g": 0, "predicted": 1.0, "predicted_interval": None} for one in lenient["drafts"]
    ]
    lenient["drafts"].append(lenient["drafts"][0] | {"lenience": 0.1, "best_g": 5, "predicted": 3.0})
    assert answer_of([lenient]).startswith("Do not speculate")  # lenience 0.1 is faster, but not exact
    assert answer_of([measured_only("passes")]) == ""


def test_draft_is_recommended_only_if_it_pays_in_all_of_alphas_interval() -> None:
    content = measured()
    fast, sure = content["drafts"]
    fast["predicted_interval"] = [0.71, 2.9]
    assert answer_of([content]).startswith("Draft with ngram:texts.arpa, g = 3: 1.31 times as fast")
    sure["predicted_interval"] = [1.0, 1.4]
    assert answer_of([content]).startswith(
        "It is not known whether speculation pays: org/Draft-0.5B, g = 5: 2.13 times as fast as without "
        "speculation (0.71 to 2.90 over α's interval)"
    )
    for one in (fast, sure):
        one |= {"best_g": 0, "predicted": 1.0}
    assert answer_of([content]).startswith(
        "It is not known whether speculation pays: org/Draft-0.5B is expected to be 0.71 to 2.90 times"
    )
    for one in (fast, sure):
        one["predicted_interval"] = [1.0, 1.0]
    assert answer_of([content]).startswith("Do not speculate")


def paragraphs(html: str, css_class: str) -> list[str]:
    """Return the paragraphs of a CSS class, in their order."""
    found = re.findall(rf'<p class="{css_class}">(.*?)</p>', html, re.DOTALL)
    return [" ".join(paragraph.split()) for paragraph in found]


def test_every_section_names_its_prompts_model_machine_and_date(full_page: str) -> None:
    sources = paragraphs(full_page, "source")
    assert len(sources) == 1 + full_page.count("<section>")  # the answer, too
    for one in sources:
        assert one.endswith("org/Target-7B, bfloat16; Some GPU &lt;80 GB&gt;; 2026-11-02.")
    assert sources[0].startswith(
        "Measured on: 40 prompts of questions.jsonl; at most 64 new tokens each; greedy;"
    )
    costs = full_page[full_page.index("What a pass costs") :]
    assert "Measured on: random tokens;" in costs


@pytest.mark.parametrize(
    ("data", "count", "prompts"),
    [
        ({"name": "built-in", "rows": 12, "left_out": 0}, 12, "12 built-in prompts"),
        ({"name": "--prompt", "rows": 1, "left_out": 0}, 1, "1 prompt given with --prompt"),
        ({"name": "a.jsonl", "rows": 9, "left_out": 2}, 7, "7 prompts of a.jsonl"),
        (None, 3, "3 prompts, built in or given with --prompt"),
    ],
)
def test_source_names_the_prompts_as_the_file_records_them(
    data: dict[str, Any] | None, count: int, prompts: str
) -> None:
    content = swept() | {"data": data, "prompts": count}
    del content["date"]
    found = source(content)
    assert (found["prompts"], found["date"]) == (prompts, "date not recorded")


def other_prompts() -> dict[str, Any]:
    """Return a sweep of the draft that `tuned` chose, with other prompts and another outcome."""
    content = swept() | {"data": {"name": "built-in", "rows": 12, "left_out": 0}, "prompts": 12}
    content["figures"] = [one for one in content["figures"] if one["temperature"] == 0]
    for one in content["figures"]:
        if (one["draft"], one["num_draft_tokens"]) == ("org/Draft-0.5B", "auto"):
            one |= {"speedup": 0.92, "interval": [0.85, 0.99]}
    return content


def test_note_names_the_prompts_that_differ_between_two_sections() -> None:
    html = page([("t.json", tuned()), ("s.json", other_prompts())])
    section = html[html.index("Speed by g, greedy</h2>") :]
    (note,) = paragraphs(section, "note")
    assert "“Tuning candidates” also has speeds of org/Draft-0.5B, g = 5" in note
    assert "prompts: 40 prompts of questions.jsonl there, 12 built-in prompts here" in note
    assert "verified 2.07 (1.98 to 2.15) there, speedup 0.92 (0.85 to 0.99) here" in note


def test_note_says_that_conditions_are_the_same_if_no_setting_differs() -> None:
    greedy = measured() | {"sampling": {"temperature": 0.0}, "new_tokens": 2560}
    html = page([("t.json", tuned()), ("m.json", greedy)])
    (note,) = [one for one in paragraphs(html, "note") if one.startswith("“Tuning candidates”")]
    assert "It was measured under the same conditions as far as the files tell, at another time." in note


def test_speeds_within_each_others_intervals_do_not_contradict() -> None:
    assert Speed("a", 1.03, (0.92, 1.14)).contradicts(Speed("b", 0.97, (0.90, 1.05))) is False
    assert Speed("a", 1.52, (1.3, 1.7)).contradicts(Speed("b", 0.92, (0.8, 1.4))) is True
    assert Speed("a", 1.52, (1.4, 1.7)).contradicts(Speed("b", 1.2, (1.1, 1.3))) is True
    assert Speed("a", 1.5).contradicts(Speed("b", 0.9, (0.8, 1.0))) is True
    assert Speed("a", 1.004).contradicts(Speed("b", 0.996)) is False  # both are shown as 1.00


def test_several_agreeing_sections_are_named_in_one_sentence() -> None:
    files = [(f"{n}.json", swept() | {"prompts": n}) for n in (10, 20, 30)]
    for _, content in files:
        content["figures"] = [one for one in content["figures"] if one["temperature"] == 0]
    assert paragraphs(page(files), "note")[-1] == (
        "Also with speeds of the same drafts: “Speed by g, greedy: 10.json” (other prompts); “Speed by g, "
        "greedy: 20.json” (other prompts)."
    )


def test_answer_names_the_section_that_contradicts_it() -> None:
    answer, *_ = paragraphs(page([("t.json", tuned()), ("s.json", other_prompts())]), "note")
    assert answer == (
        "But “Speed by g, greedy” has speedup 0.92 (0.85 to 0.99) for org/Draft-0.5B, g = auto, with 12 "
        "built-in prompts."
    )
    agreeing = page([("t.json", tuned()), ("m.json", measured())])
    assert "But “" not in agreeing
    none = tuned() | {"verdict": "Do not speculate.", "chosen": {"draft": "none", "num_draft_tokens": "0"}}
    contradictions = paragraphs(page([("t.json", none), ("s.json", swept())]), "note")
    assert contradictions[0].startswith("But “Speed by g, greedy” has speedup")


def test_each_of_several_tune_files_has_its_own_answer() -> None:
    slow = tuned() | {"target": "other", "verdict": "Do not speculate: nothing pays."}
    shown = paragraphs(page([("a.json", tuned()), ("b.json", slow)]), "answer")
    assert shown == [f"a.json: {tuned()['verdict']}", "b.json: Do not speculate: nothing pays."]


def test_interval_stands_in_the_cell_of_its_own_value() -> None:
    rows = Markup(page([("t.json", tuned())])).rows
    heads = rows[0]
    assert heads == ["draft", "g", "expected", "verified", "why"]
    cells = [dict(zip(heads, row, strict=True)) for row in rows[1:]]
    assert [(one["expected"], one["verified"]) for one in cells] == [
        ("2.21", "2.07 (1.98–2.15)"), ("2.30", "2.02 (1.95–2.09)"), ("0.81 (0.70–0.95)", "–"),
    ]  # fmt: skip


def test_prediction_at_best_g_0_does_not_show_the_interval_of_another_g() -> None:
    content = measured_only("drafts")
    content["drafts"][0] |= {"best_g": 0, "predicted": 1.0, "predicted_interval": [0.6, 1.6]}
    content["drafts"][0]["by_batch"] = [
        {"B": 1, "best_g": 0, "predicted": 1.0, "predicted_interval": [0.6, 1.6]}
    ]
    rows = Markup(page([("m.json", content)])).rows
    assert any(row[0] == "org/Draft-0.5B" and row[-2] == "1.00" for row in rows)
    payoff = "not known whether it pays, 0.60 to 1.60 times as fast over α's interval"
    assert ["Draft-0.5B", "1", payoff] in rows


def test_figures_have_letters_and_captions_do_not_mention_left_or_right(full_page: str) -> None:
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", full_page, re.DOTALL)
    assert [one[:10] for one in captions[:4]] == [f"<b>({letter})</b> "[:10] for letter in "abcd"]
    for one in captions:
        assert not re.search(r"\b(left|middle|right)\b", one)


def loop_caption(loop_ms: list[float]) -> str:
    """Return the caption of the plot of iteration times, for times at g = 0, 1, 2, ..."""
    content = swept()
    rows = [row for row in content["figures"] if row["temperature"] == 0 and row["draft"] == "org/Draft-0.5B"]
    content["figures"] = [row | {"loop_ms": ms} for row, ms in zip(rows, loop_ms, strict=False)]
    html = page([("s.json", content)])
    found = re.search(r"</b> (Time of an iteration\..*?)</figcaption>", html)
    return found[1] if found else ""


@pytest.mark.parametrize(
    ("loop_ms", "trend"),
    [
        ([50.0, 50.5, 49.9, 51.0], "is level within 5%: 50 at g = 0, 51 at g = 3"),
        ([50.0, 60.0, 70.0, 80.0], "rises at every point: 50 at g = 0, 80 at g = 3"),
        ([80.0, 70.0, 60.0, 50.0], "falls at every point: 80 at g = 0, 50 at g = 3"),
        ([50.0, 80.0, 60.0, 70.0], "neither rises nor falls throughout: 50 at g = 0, 70 at g = 3"),
    ],
)
def test_caption_describes_the_trend_of_the_line(loop_ms: list[float], trend: str) -> None:
    assert loop_caption(loop_ms) == f"Time of an iteration. Draft-0.5B {trend}."


def test_formulas_section_explains_why_its_best_g_differs_from_the_measured_one(full_page: str) -> None:
    section = full_page[full_page.index("<h2>What the formulas say") :]
    section = section[: section.index("</section>")]
    words = Markup(section).words
    assert "assume that a pass over g + 1 tokens costs as much as one over a single token" in words
    assert "B = 1: a pass over 17 tokens takes 1.10 times as long as one over a single token." in words
    assert "They differ because the formulas assume that every pass costs the same" in words
    alpha, step = DRAFTS["org/Draft-0.5B"]
    c = step / measured()["passes"][0]["ms"]
    g = theory.best_length(alpha, c, 32)
    assert g != 5
    thm = f"{theory.speedup(alpha, g, c):.2f}"
    assert ["Draft-0.5B", f"{alpha:.3f}", format_small(c), str(g), thm, "5", "2.13"] in Markup(section).rows
    assert f"c = {format_small(c)}" in section  # among the curves
    assert "by measured times" in section


def test_timeline_blocks_are_to_scale() -> None:
    iterations = [
        {"phases": {"target": 0.06, "other": 0.01}, "num_draft_tokens": 0, "num_accepted": 0},  # prefill
        {
            "phases": {"draft": 0.02, "target": 0.03, "unknown": 0.01},
            "num_draft_tokens": 2,
            "num_accepted": 2,
        },
    ]
    html = Markup(str(timeline.render(iterations, 0.03)))
    blocks = [(one["class"], one["x"], one["width"]) for one in html.all("rect")]
    total = 0.07 + 3 * 0.03
    at = [0.0, 0.06, 0.07, 0.08, 0.09, 0.12]
    wide = [0.06, 0.01, 0.01, 0.01, 0.03, 0.01]
    kinds = ["target", "other", "draft", "draft", "target", "other"]
    assert blocks[:6] == [
        (kind, f"{100 * x / total:.3f}%", f"{100 * width / total:.3f}%")
        for kind, x, width in zip(kinds, at, wide, strict=True)
    ]
    assert [kind for kind, _, _ in blocks[6:]] == [
        "target",
        "other",
        *["target"] * 3,
    ]  # the baseline has the prefill, too
    assert "speculative: 4 tokens in 130 ms" in html.words
    assert "without speculation: 160 ms" in html.words
    assert "draft 15%" in html.words


def test_token_view_has_one_line_per_step() -> None:
    pieces = [
        ["a", "accepted"],
        ["b", "correction"],
        ["c", "target"],
        ["d\n", "accepted"],
        ["e", "bonus"],
        ["f", "accepted"],
    ]
    steps = tokens.lines(pieces)
    assert [[text for text, _ in step] for step in steps] == [["a", "b"], ["c"], ["d⏎", "e"], ["f"]]
    many = Markup(str(tokens.render([["x", "correction"]] * 50)))
    assert "… and 10 lines more" in many.words
