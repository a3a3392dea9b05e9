"""A browser for tests of the web pages, and what they look at there."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tokenloom.scripts.looks.screenshot_pages import Browser, find_chromium
from tokenloom.tests.support.waiting import wait_until

DEADLINE_S = 30.0
KEY = "sk-dash"
THEMES = (("light", False), ("dark", True))
needs_chromium = pytest.mark.skipif(find_chromium() is None, reason="chromium is not installed")
READY = {  # pages that ask for the key
    "dashboard": "document.getElementById('state')?.textContent === 'ready'",
    "chat": "document.documentElement?.dataset.isReady && "
    "document.getElementById('model').textContent.includes('tokenloom-demo')",
}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_chromium()
    assert program is not None
    browser = Browser(program, str(tmp_path_factory.mktemp("profile")))
    browser.open_page()
    yield browser
    browser.close()


def wait_for(browser: Browser, expression: str) -> None:
    wait_until(lambda: browser.evaluate(expression), expression, DEADLINE_S)


def open_page(browser: Browser, url: str, page: str, script: str = "", query: str = "") -> None:
    """Open a page, run a script there and open the page again."""
    browser.call("Page.navigate", url=f"{url}/{page}{query}")
    wait_for(browser, "document.readyState === 'complete' && !!document.getElementById('key-form')")
    browser.evaluate(script or f"sessionStorage.setItem('loom-key', {json.dumps(KEY)})")
    browser.call("Page.navigate", url=f"{url}/{page}{query}")
    if not script:
        wait_for(browser, READY[page])


def contrast(browser: Browser, selector: str) -> float:
    """Return the contrast of the text with its background, by WCAG's formula."""
    script = (
        """
    (() => {
      const node = document.querySelector(%s);
      let behind = node;
      const colour = n => getComputedStyle(n).backgroundColor;
      while (behind.parentElement && /rgba\\(.*, 0\\)/.test(colour(behind))) behind = behind.parentElement;
      const parse = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
      return [parse(getComputedStyle(node).color), parse(colour(behind))];
    })()
    """.replace("\\\\", "\\")
        % json.dumps(selector)
    )
    lights = []
    for colour in browser.evaluate(script):
        channels = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
        lights.append(0.2126 * channels[0] + 0.7152 * channels[1] + 0.0722 * channels[2])
    return (max(lights) + 0.05) / (min(lights) + 0.05)
