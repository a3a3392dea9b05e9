"""The dashboard in headless Chromium: what it shows is what runs, on a phone and in the dark, and its button aborts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

from tokenloom.scripts.screenshot_dashboard import Browser, find_chromium
from tokenloom.tests.system.launched import LaunchedEngine

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="chromium is not installed")

DEADLINE_S = 30.0
KEY = "sk-dash"
ENDLESS = {"prompt": "The", "max_tokens": 2000, "ignore_eos": True, "stream": True, "request_id": "endless"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = ("--http", "0", "--api-key", KEY, "--num-kv-blocks", "400")
    with LaunchedEngine(tmp_path_factory.mktemp("dashboard"), *options) as engine:
        yield engine.wait_http()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find_chromium()
    assert program is not None
    browser = Browser(program, str(tmp_path_factory.mktemp("profile")))
    browser.open_page()
    yield browser
    browser.close()


def wait_for(browser: Browser, expression: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not browser.evaluate(expression):
        assert time.monotonic() < deadline, (expression, browser.evaluate("document.body.innerText"))


def open_dashboard(browser: Browser, url: str, query: str = "") -> None:
    """With the key that the page asks for."""
    browser.call("Page.navigate", url=f"{url}/dashboard{query}")
    wait_for(browser, "document.readyState === 'complete' && !!document.getElementById('key-form')")
    browser.evaluate(f"sessionStorage.setItem('loom-key', {json.dumps(KEY)})")
    browser.call("Page.navigate", url=f"{url}/dashboard{query}")
    wait_for(browser, "document.getElementById('state')?.textContent === 'ready'")


@contextmanager
def endless(url: str, **more: object) -> Iterator[list[str]]:
    """A stream that runs until it is aborted; its lines as they come."""
    lines: list[str] = []

    def read() -> None:
        headers = {"authorization": f"Bearer {KEY}"}
        with httpx2.stream(
            "POST", f"{url}/v1/completions", json=ENDLESS | more, headers=headers, timeout=DEADLINE_S
        ) as answer:
            lines.extend(line for line in answer.iter_lines() if line)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield lines
    finally:
        headers = {"authorization": f"Bearer {KEY}"}
        httpx2.post(f"{url}/abort", json={"request_id": "cmpl-endless"}, headers=headers, timeout=DEADLINE_S)
        thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_without_the_key_the_page_asks_for_it_and_takes_it(browser: Browser, url: str) -> None:
    browser.call("Page.navigate", url=f"{url}/dashboard")
    wait_for(browser, "document.getElementById('state')?.textContent === 'locked'")
    assert not browser.evaluate("document.getElementById('locked').hidden")
    browser.evaluate(f"document.getElementById('key').value = {json.dumps(KEY)}")
    browser.evaluate("document.querySelector('#key-form button').click()")
    wait_for(browser, "document.getElementById('state').textContent === 'ready'")
    assert browser.evaluate("document.getElementById('locked').hidden")
    browser.complaints.clear()  # Chromium logs the 401


def test_what_runs_is_shown_and_its_button_ends_it(browser: Browser, url: str) -> None:
    open_dashboard(browser, url)
    with endless(url, n=2) as lines:
        wait_for(browser, "document.querySelectorAll('#requests tr').length === 2")
        wait_for(browser, "document.querySelectorAll('#kv-map .k2, #kv-map .k3').length > 0")
        wait_for(browser, "parseFloat(document.getElementById('generated').textContent) > 0")
        wait_for(browser, "document.getElementById('running').textContent === '2'")
        wait_for(browser, "/ms|s/.test(document.getElementById('ttft').textContent)")
        assert browser.evaluate("document.querySelector('#requests td').textContent") == "cmpl-endless"
        assert browser.evaluate("document.getElementById('ttft-note').textContent").startswith("p99 ")
        browser.evaluate("document.querySelector('#requests button').click()")
        wait_for(browser, "document.querySelectorAll('#requests tr').length === 0")
    assert '"finish_reason":"abort"' in "".join(lines)
    wait_for(browser, "document.getElementById('ended').textContent.includes('abort')")
    assert browser.complaints == []


def test_blocks_and_phases_are_those_of_the_engine(browser: Browser, url: str) -> None:
    open_dashboard(browser, url)
    wait_for(browser, "document.querySelectorAll('#kv-map i').length > 0")
    num_cells = browser.evaluate("document.querySelectorAll('#kv-map i').length")
    assert num_cells == 200 and browser.evaluate("document.getElementById('kv-map-note').textContent").endswith("in 2")
    wait_for(browser, "document.querySelectorAll('#phases tr').length > 5")
    rows = browser.evaluate("[...document.querySelectorAll('#phases tr')].map(row => row.innerText.split('\\t'))")
    assert {row[0] for row in rows} == {"core", "frontend", "worker 0"}
    assert {"load weights", "tokenizer loaded", "workers joined"} <= {row[1] for row in rows}
    sticks_out = (
        "[...document.querySelectorAll('.phase i')].some(bar => bar.getBoundingClientRect().right > "
        "bar.parentNode.getBoundingClientRect().right + 1)"
    )
    assert not browser.evaluate(sticks_out)


@pytest.mark.parametrize(("theme", "is_dark"), [("light", False), ("dark", True)])
@pytest.mark.parametrize(("width", "height", "is_phone"), [(1280, 900, False), (390, 844, True), (320, 640, True)])
def test_the_page_is_readable_at_any_width_in_both_themes(
    browser: Browser, url: str, theme: str, is_dark: bool, width: int, height: int, is_phone: bool
) -> None:
    browser.resize(width, height, is_phone)
    open_dashboard(browser, url, f"?theme={theme}")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    cut = "[...document.querySelectorAll('.value')].filter(n => n.scrollWidth > n.clientWidth + 1).map(n => n.id)"
    assert browser.evaluate(cut) == []
    with endless(url):
        wait_for(browser, "document.querySelectorAll('#requests button').length === 1")
        right = browser.evaluate("document.querySelector('#requests button').getBoundingClientRect().right")
        assert right <= width, "the button that aborts is out of sight"
        browser.evaluate("document.querySelector('#requests button').click()")
    for selector in ("body", ".card .label", ".card .value", "#state", "#phases td"):
        assert contrast(browser, selector) >= 4.5, f"{selector} cannot be read in {theme}"
    luminance = browser.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(luminance) < 200) == is_dark
    assert browser.complaints == []


def contrast(browser: Browser, selector: str) -> float:
    """Of the text with what is behind it, as WCAG counts it."""
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


def test_the_pictures_in_the_documents_are_there() -> None:
    folder = Path(__file__).parents[2] / "docs" / "dashboards" / "pictures"
    for name in ("desktop-light", "desktop-dark", "phone-light", "phone-dark"):
        assert (folder / f"dashboard-{name}.png").read_bytes()[:4] == b"\x89PNG"
