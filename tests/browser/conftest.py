"""Fixtures that open a page in headless Chromium, and fail on errors, messages and requests of the page."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Starts Chromium, or skips the tests if it or playwright is not installed."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next((found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("Chromium is not installed: the pages are not tested in a browser")
    with api.sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        except api.Error as error:
            pytest.skip(f"Chromium does not start: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def open_file(browser: Any) -> Iterator[Callable[..., Any]]:
    """Returns a function that opens a file, by default in light colours and without animation.

    The script runs before those of the page.
    """
    contexts: list[Any] = []
    problems: list[str] = []

    def opened(path: Path, width: int = 1280, script: str = "", **options: Any) -> Any:
        settings = {"color_scheme": "light", "reduced_motion": "reduce", **options}
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, **settings))
        contexts[-1].add_init_script(script)
        page = contexts[-1].new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: problems.append(request.url) if request.url != url else None)
        url = path.resolve().as_uri()
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert problems == []
