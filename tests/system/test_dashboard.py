"""The dashboard and the reference in headless Chromium: requests are listed and aborted, the API is listed; each page
also on a phone and in the dark."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
import pytest

from tokenloom.scripts.looks.screenshot_pages import Browser
from tokenloom.tests.support.today import some
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.launched import served
from tokenloom.tests.system.web_pages import (
    DEADLINE_S,
    KEY,
    READY,
    THEMES,
    browser,
    contrast,
    needs_chromium,
    open_page,
    wait_for,
)

pytestmark = needs_chromium

ENDLESS = {"prompt": "The", "max_tokens": 2000, "ignore_eos": True, "stream": True, "request_id": "endless"}


__all__ = ["browser"]  # a fixture

engine = served("--http", "0", "--api-key", KEY, "--num-kv-blocks", "400")


@contextmanager
def endless(url: str, **more: object) -> Iterator[list[str]]:
    """Stream until aborted and yield the lines received so far."""
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


@pytest.mark.parametrize("page", READY)
def test_a_page_asks_for_a_missing_key_and_accepts_it(browser: Browser, url: str, page: str) -> None:
    open_page(browser, url, page, "sessionStorage.clear()")
    wait_for(browser, "document.getElementById('locked')?.hidden === false")
    browser.evaluate(f"document.getElementById('key').value = {json.dumps(KEY)}")
    browser.evaluate("document.querySelector('#key-form button').click()")
    wait_for(browser, f"{READY[page]} && document.getElementById('locked').hidden")
    browser.complaints.clear()  # Chromium logs the 401


def test_running_requests_are_listed_and_their_buttons_abort_them(browser: Browser, url: str) -> None:
    open_page(browser, url, "dashboard")
    with endless(url, n=2) as lines:
        wait_for(browser, "document.querySelectorAll('#requests tr').length === 2")
        wait_for(browser, "document.querySelectorAll('#kv-map .k2, #kv-map .k3').length > 0")
        wait_for(browser, "parseFloat(document.getElementById('generated').textContent) > 0")
        wait_for(browser, "document.getElementById('running').textContent === '2'")
        wait_for(browser, "/ms|s/.test(document.getElementById('ttft').textContent)")
        shown = browser.evaluate("document.querySelector('#requests td').textContent")
        assert re.fullmatch("[0-9a-f]{8}", shown)  # of a random key: the id is for its caller alone
        assert browser.evaluate("document.getElementById('ttft-note').textContent").startswith("p99 ")
        guesses = browser.evaluate("document.getElementById('guesses-note').textContent")
        assert re.search(r"\d of .*\d.* tokens", guesses)
        browser.evaluate("document.querySelector('#requests button').click()")
        wait_for(browser, "document.querySelectorAll('#requests tr').length === 0")
    assert '"finish_reason":"abort"' in "".join(lines)
    wait_for(browser, "document.getElementById('ended').textContent.includes('abort')")
    assert browser.complaints == []


def test_the_dashboard_shows_the_engines_blocks_and_phases(browser: Browser, url: str) -> None:
    open_page(browser, url, "dashboard")
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


@pytest.mark.parametrize(
    ("theme", "is_dark", "width", "height", "is_phone"),
    some([(*theme, *size) for theme in THEMES for size in ((1280, 900, False), (390, 844, True), (320, 640, True))], 2),
)
def test_the_dashboard_is_readable_at_any_width_in_both_themes(
    browser: Browser, url: str, theme: str, is_dark: bool, width: int, height: int, is_phone: bool
) -> None:
    browser.resize(width, height, is_phone)
    open_page(browser, url, "dashboard", query=f"?theme={theme}")
    assert browser.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    cut = "[...document.querySelectorAll('.value')].filter(n => n.scrollWidth > n.clientWidth + 1).map(n => n.id)"
    assert browser.evaluate(cut) == []
    with endless(url):
        wait_for(browser, "document.querySelectorAll('#requests button').length === 1")
        right = browser.evaluate("document.querySelector('#requests button').getBoundingClientRect().right")
        assert right <= width, "the button that aborts is out of sight"
        tops = [f"document.getElementById('{name}').getBoundingClientRect().top" for name in ("now", "open", "latency")]
        now, answers, latency = (browser.evaluate(top) for top in tops)
        assert (now < answers < latency) == is_phone, "on a phone open answers follow the numbers of now"
        browser.evaluate("document.querySelector('#requests button').click()")
    for selector in ("body", ".card .label", ".card .value", "#state", "#phases td"):
        assert contrast(browser, selector) >= 4.5, f"{selector} cannot be read in {theme}"
    luminance = browser.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(luminance) < 200) == is_dark
    assert browser.complaints == []


def test_the_dashboard_shows_the_minutes_before_it_was_opened(browser: Browser, url: str) -> None:
    with endless(url) as lines:
        wait_until(lambda: len(history(url)) >= 3 and len(lines) > 0)  # an abort before it is open would miss it
    open_page(browser, url, "dashboard")
    wait_for(browser, "history.length > 2 && history.slice(0, -1).some(point => point.generated > 0)")
    assert browser.evaluate("samples.every((s, i) => !i || s.uptime_s >= samples[i - 1].uptime_s)")
    assert browser.complaints == []


def history(url: str) -> list[dict[str, object]]:
    """Return the history that a page loads when it is opened."""
    headers = {"authorization": f"Bearer {KEY}"}
    data = httpx2.get(f"{url}/dashboard/data?history=1", headers=headers, timeout=DEADLINE_S).json()
    found: list[dict[str, object]] = data["history"]
    return found


def test_an_idle_chart_has_a_readable_axis_and_no_tile_is_alone_in_its_row(browser: Browser, url: str) -> None:
    for width, columns in ((1400, 4), (900, 4), (400, 2)):
        browser.resize(width, 900, width == 400)
        open_page(browser, url, "dashboard")
        assert (
            browser.evaluate("getComputedStyle(document.getElementById('now')).gridTemplateColumns").count("px")
            == columns
        )
    assert browser.evaluate("document.documentElement.scrollWidth") <= 400
    axes = (
        "[...document.querySelectorAll('#charts svg')].map(chart => "
        "[...chart.querySelectorAll('text')].slice(0, 3).map(label => label.textContent))"
    )
    for labels in browser.evaluate(axes):
        assert len(set(labels)) == 3, labels
    margin = "getComputedStyle(document.getElementById('locked')).marginBottom"
    assert browser.evaluate(margin) == "10px"
    browser.resize(1280, 900, False)


@pytest.mark.parametrize(
    ("page", "theme", "is_dark"), some([(page, *theme) for page in ("chat", "docs") for theme in THEMES], 1)
)
def test_the_other_pages_are_readable_at_any_width_in_both_themes(
    browser: Browser, url: str, page: str, theme: str, is_dark: bool
) -> None:
    for width in (1400, 900, 400):
        browser.resize(width, 800, width == 400)
        browser.call("Page.navigate", url=f"{url}/{page}?theme={theme}")
        wait_for(browser, "document.readyState === 'complete' && !!document.querySelector('#message, #paths details')")
        if page == "docs":
            browser.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, f"{page} scrolls sideways at {width}"
        for selector in ("body", ".soft", "a"):
            assert contrast(browser, selector) >= 4.5, f"{selector} cannot be read in {theme}"
    luminance = browser.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(luminance) < 200) == is_dark
    browser.resize(1280, 900, False)
