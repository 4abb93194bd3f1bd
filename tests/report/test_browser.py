"""The page in a real browser, where there is one: `pip install playwright`, and a Chromium."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from outpace.report.page import page
from tests.report.written import measured, swept, tuned

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_screen_nor_comes_from_elsewhere(tmp_path: Path, width: int) -> None:
    path = tmp_path / "report.html"
    path.write_text(page([("t", tuned()), ("s", swept()), ("m", measured())]), encoding="utf-8")
    with playwright.sync_playwright() as run:
        browser = run.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": width, "height": 844})
        said: list[str] = []
        tab.on("console", lambda message: said.append(message.text))
        tab.on("request", lambda request: said.append(request.url))
        tab.goto(path.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") == width
        assert said == [path.as_uri()]
        browser.close()
