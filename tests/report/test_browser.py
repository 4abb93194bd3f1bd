"""The page in a real browser, where there is a Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outpace.report import files
from outpace.report.page import page
from tests.report.written import evaluated, measured, save_journal, swept, tuned

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
A4 = 718  # pixels of its width, within the margins

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as run:
        found = run.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that a page may have; batches, dtypes and rules differ, and a name is long."""
    made = tmp_path_factory.mktemp("page") / "report.html"
    chosen = tuned()
    chosen["candidates"] += [
        chosen["candidates"][0] | {"draft": f"some-organisation/A-Rather-Long-Name-{B}B", "batch": B}
        | {"dtype": "float16", "rule": "token", "why": "expected to pay, " * 5}
        for B in (4, 8)
    ]  # fmt: skip
    run = files.read(Path(save_journal(made.with_name("run.jsonl"), evaluated())))
    contents = [("t", chosen), ("s", swept()), ("m", measured()), ("e", run)]
    made.write_text(page(contents), encoding="utf-8")
    return made


@pytest.mark.parametrize("width", [390, 1200])
def test_nothing_is_wider_than_the_screen_nor_comes_from_elsewhere(
    browser: Any, path: Path, width: int
) -> None:
    tab = browser.new_page(viewport={"width": width, "height": 844})
    said: list[str] = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("request", lambda request: said.append(request.url))
    tab.goto(path.as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    assert said == [path.as_uri()]


@pytest.mark.parametrize("width", [390, 1200])
def test_every_cell_picture_and_word_lies_within_the_screen(browser: Any, path: Path, width: int) -> None:
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


def test_on_a_phone_a_cell_has_its_head_above_it(browser: Any, path: Path) -> None:
    tab = browser.new_page(viewport={"width": 390, "height": 844})
    tab.goto(path.as_uri())
    shown = """() => [...document.querySelectorAll('td[data-head=why]')].map(
        e => getComputedStyle(e, '::before').content)"""
    assert set(tab.evaluate(shown)) == {'"why"'}
    wide = browser.new_page(viewport={"width": 1200, "height": 844})
    wide.goto(path.as_uri())
    assert set(wide.evaluate(shown)) == {"none"}


def test_nothing_is_cut_off_in_print(browser: Any, path: Path) -> None:
    tab = browser.new_page(viewport={"width": A4, "height": 1000})
    tab.goto(path.as_uri())
    tab.emulate_media(media="print", color_scheme="dark")
    assert tab.evaluate("document.documentElement.scrollWidth") == A4
    wide = "[...document.querySelectorAll('*')].filter(e => e.scrollWidth > e.clientWidth + 1 && "
    wide += "['auto', 'scroll', 'hidden'].includes(getComputedStyle(e).overflowX)).map(e => e.className)"
    assert tab.evaluate(wide) == []  # nobody can scroll on paper
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") in (
        "rgb(255, 255, 255)", "rgba(0, 0, 0, 0)",
    )  # fmt: skip
    assert tab.pdf(format="A4").startswith(b"%PDF")
