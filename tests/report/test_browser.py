"""The page in a real browser, where there is a Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outpace.report import files
from outpace.report.page import page
from tests.report.sample_results import evaluated, measured, save_journal, swept, tuned

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
A4 = 718  # pixels of its width, within the margins

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as run:
        chromium = run.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every part, candidates that differ in all settings, and a long name."""
    html = tmp_path_factory.mktemp("page") / "report.html"
    tuning = tuned()
    tuning["candidates"] += [
        tuning["candidates"][0] | {"draft": f"some-organisation/A-Rather-Long-Name-{B}B", "batch": B}
        | {"dtype": "float16", "rule": "token", "why": "expected to pay, " * 5}
        for B in (4, 8)
    ]  # fmt: skip
    run = files.read(Path(save_journal(html.with_name("run.jsonl"), evaluated())))
    contents = [("t", tuning), ("s", swept()), ("m", measured()), ("e", run)]
    html.write_text(page(contents), encoding="utf-8")
    return html


@pytest.mark.parametrize("width", [390, 1200])
def test_page_fits_the_screen_width_and_loads_no_other_file(browser: Any, path: Path, width: int) -> None:
    tab = browser.new_page(viewport={"width": width, "height": 844})
    messages_and_urls: list[str] = []
    tab.on("console", lambda message: messages_and_urls.append(message.text))
    tab.on("request", lambda request: messages_and_urls.append(request.url))
    tab.goto(path.as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert messages_and_urls == [path.as_uri()]


@pytest.mark.parametrize("width", [390, 1200])
def test_every_cell_figure_and_paragraph_lies_within_the_screen(browser: Any, path: Path, width: int) -> None:
    tab = browser.new_page(viewport={"width": width, "height": 844})
    tab.goto(path.as_uri())
    outside = """width => [...document.querySelectorAll('td, p, pre, h1, h2, figcaption, svg, li')].filter(
        e => {
            const box = e.getBoundingClientRect(), cut = e.scrollWidth > e.clientWidth + 1;
            return box.width < 1 || box.left < -0.5 || box.right > width + 0.5 || cut;
        }
    ).map(e => e.outerHTML.slice(0, 100))"""
    assert tab.evaluate(outside, width) == []
    assert tab.evaluate("document.querySelectorAll('td').length") > 300
    scrolled = "[...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length"
    assert tab.evaluate(scrolled) == 0


def test_table_cells_have_their_column_heads_above_them_on_a_phone(browser: Any, path: Path) -> None:
    tab = browser.new_page(viewport={"width": 390, "height": 844})
    tab.goto(path.as_uri())
    heads = """() => [...document.querySelectorAll('td[data-head=why]')].map(
        e => getComputedStyle(e, '::before').content)"""
    assert set(tab.evaluate(heads)) == {'"why"'}
    wide = browser.new_page(viewport={"width": 1200, "height": 844})
    wide.goto(path.as_uri())
    assert set(wide.evaluate(heads)) == {"none"}


def test_print_cuts_nothing_off(browser: Any, path: Path) -> None:
    tab = browser.new_page(viewport={"width": A4, "height": 1000})
    tab.goto(path.as_uri())
    tab.emulate_media(media="print", color_scheme="dark")
    assert tab.evaluate("document.documentElement.scrollWidth") == A4
    cut_off = "[...document.querySelectorAll('*')].filter(e => e.scrollWidth > e.clientWidth + 1 && "
    cut_off += "['auto', 'scroll', 'hidden'].includes(getComputedStyle(e).overflowX)).map(e => e.className)"
    assert tab.evaluate(cut_off) == []  # paper cannot be scrolled
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") in (
        "rgb(255, 255, 255)", "rgba(0, 0, 0, 0)",
    )  # fmt: skip
    assert tab.pdf(format="A4").startswith(b"%PDF")
