"""The page in a real browser, where there is a Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outpace.report.page import page
from tests.report.written import measured, swept, tuned

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
    made = tmp_path_factory.mktemp("page") / "report.html"
    made.write_text(page([("t", tuned()), ("s", swept()), ("m", measured())]), encoding="utf-8")
    return made


@pytest.mark.parametrize("width", [390, 1280])
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
