"""A real headless browser for the end-to-end tests: Chromium, driven by Playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

import pytest

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
needs_browser = pytest.mark.skipif(
    BROWSER is None,
    reason=f"none of {', '.join(BROWSERS)} is on this machine (Debian: apt-get install chromium-headless-shell)",
)


@contextlib.contextmanager
def open_page(width: int = 1400, height: int = 1000) -> Iterator:
    """Yields a page of a new browser. Its locators wait by themselves, and search in shadow trees, too."""
    with pytest.importorskip(
        "playwright.sync_api", reason="the package playwright is not installed"
    ).sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu", "--force-color-profile=srgb"]
        )
        try:
            page = browser.new_page(viewport={"width": width, "height": height})
            page.set_default_timeout(120_000)
            yield page
        finally:
            browser.close()
