"""Pages in a real browser, Debian's chromium, which these tests need."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""


@contextmanager
def opened(file: Path, **options: Any) -> Iterator[Any]:
    """Give a page that is ready, which must ask for nothing else and say nothing on its console."""
    if not CHROMIUM:
        pytest.skip("no chromium: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900}, **options)
        said, asked = list[str](), list[str]()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri())
        page.wait_for_selector("body[data-ready]")
        yield page
        assert said == []
        assert [url for url in asked if not url.startswith(("data:", "blob:"))] == [file.as_uri()]
        browser.close()


def event(page: Any, lane: str, time: float) -> tuple[float, float]:
    """Return where an event of the compute stream is on the screen, in the view that is shown."""
    found = page.evaluate(
        """([name, time]) => {
            const t = report.timeline, lane = t.lanes.find((l) => l.compute && l.name === name);
            t.box.scrollIntoView({ block: "nearest" });
            const box = t.canvas.getBoundingClientRect();
            return [box.x + t.x(time), box.y + lane.y - t.box.scrollTop + lane.h / 2];
        }""",
        [lane, time],
    )
    return found[0], found[1]


def settled(page: Any) -> None:
    """Wait until what was asked for is drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
