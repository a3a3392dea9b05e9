"""Take pictures of the web pages of a loaded engine: dashboard, chat and docs, light and dark, on desktop and phone.

    scripts/looks/screenshot_pages.py OUT_FOLDER [--seconds 20] [--pages docs chat] [--model FILE]

Starts an engine on the demo model, or another, keeps a dozen streams running for the dashboard, drives headless
Chromium over its debugging pipe. Pictures are WebP, small enough for a repository. Exits 0 with a message if Chromium
is not installed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.chaos.load_http import Load

View = tuple[str, int, int, bool]  # name, width and height in CSS pixels, whether it is a phone
VIEWS: dict[str, list[View]] = {
    "dashboard": [("desktop", 1280, 1920, False), ("phone", 390, 2760, True)],
    "chat": [("desktop", 900, 520, False), ("phone", 390, 700, True)],
    "docs": [("desktop", 1000, 800, False), ("phone", 390, 700, True)],
}
QUALITY = 32  # of WebP: text stays clean
QUESTIONS = ("What is the capital of Peru?", "And what is the capital of Norway?")
PATIENCE_S = 30.0
NUM_STREAMS = 12
BUSY_S = 3600.0  # longer than the pictures take


class Browser:
    """Chromium behind its debugging pipe: JSON with a zero byte after each message."""

    def __init__(self, program: str, profile: str) -> None:
        from_us, to_browser = os.pipe()
        from_browser, to_us = os.pipe()
        os.set_inheritable(from_us, True)
        os.set_inheritable(to_us, True)
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        command = 'exec 3<&"$1" 4>&"$2"; shift 2; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", str(from_us), str(to_us), program, "--remote-debugging-pipe", *flags],
            pass_fds=[from_us, to_us],
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        self._in, self._out = from_browser, to_browser
        self._buffer = b""
        self._num_calls = 0
        self._session = ""
        self.complaints: list[object] = []  # errors of the page, and violations of its content policy

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """Call a command and return its result."""
        self._num_calls += 1
        message: dict[str, object] = {"id": self._num_calls, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._num_calls:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(answer["params"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._in], [], [], PATIENCE_S)[0], "Chromium says nothing"
            self._buffer += os.read(self._in, 1 << 20)
        message, _, self._buffer = self._buffer.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded

    def open_page(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Runtime.enable")
        self.call("Log.enable")

    def evaluate(self, expression: str) -> Any:
        """Evaluate a JavaScript expression in the page and return its value."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, expression
            time.sleep(0.1)

    def resize(self, width: int, height: int, is_phone: bool) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=is_phone,
        )

    def picture(self, width: int, height: int, is_phone: bool) -> bytes:
        self.resize(width, height, is_phone)
        time.sleep(2.5)  # until the page redraws after its next poll
        return base64.b64decode(self.call("Page.captureScreenshot", format="webp", quality=QUALITY)["data"])

    def close(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)
        os.close(self._in)
        os.close(self._out)


def prepare_dashboard(browser: Browser, seconds: float) -> None:
    time.sleep(seconds)  # the charts fill


def prepare_chat(browser: Browser, seconds: float) -> None:
    """Hold a short conversation."""
    time.sleep(1.0)
    browser.evaluate("document.getElementById('new').click()")  # conversations outlive the page
    browser.evaluate("document.getElementById('temperature').value = '0'")
    for question in QUESTIONS:
        browser.evaluate(f"document.getElementById('message').value = {json.dumps(question)}")
        browser.evaluate("document.getElementById('send').click()")
        time.sleep(3.0)


def prepare_docs(browser: Browser, seconds: float) -> None:
    """Open the chats' entry, stream the answer to its example, and make room for the first fields."""
    browser.wait("document.documentElement?.dataset.isReady === 'true'")
    browser.evaluate("location.hash = '#post/v1/chat/completions'")
    browser.wait("!!document.querySelector('details[open] .check input')")
    browser.evaluate("document.querySelector('details[open] .check input').click()")
    browser.evaluate("document.querySelector('details[open] form.try').requestSubmit()")
    browser.wait("document.querySelector('details[open] [role=status]').textContent.startsWith('200 OK')")
    time.sleep(1.0)
    browser.evaluate("document.querySelector('details[open] .answer').style.maxHeight = '80px'")


PREPARE = {"dashboard": prepare_dashboard, "chat": prepare_chat, "docs": prepare_docs}


def find_chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def take(browser: Browser, url: str, page: str, theme: str, arguments: argparse.Namespace) -> None:
    """Write the pictures of a page in a theme."""
    name, width, height, is_phone = VIEWS[page][0]
    browser.resize(width, height, is_phone)
    browser.call("Page.navigate", url=f"{url}/{page}?theme={theme}")
    PREPARE[page](browser, arguments.seconds)
    for name, width, height, is_phone in VIEWS[page]:
        path: Path = arguments.folder / f"{page}-{name}-{theme}.webp"
        path.write_bytes(browser.picture(width, height, is_phone))
        print(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the history in the pictures")
    parser.add_argument("--pages", nargs="+", choices=[*VIEWS], default=[*VIEWS], help="default: all")
    parser.add_argument("--model", help="default: the demo model")
    arguments = parser.parse_args()
    program = find_chromium()
    if program is None:
        print("no Chromium here: nothing is made")
        return 0
    arguments.folder.mkdir(parents=True, exist_ok=True)
    options = ["--http", "0", "--num-threads", "1", "--num-kv-blocks", "600"]
    if arguments.model:
        options += ["--model", arguments.model, "--max-model-len", "2048"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Engine(Path(folder), options) as engine:
        engine.wait_ready()
        browser = Browser(program, f"{folder}/profile")
        browser.open_page()
        for page in sorted(arguments.pages, key="chat docs dashboard".index):  # the load would slow the others down
            if page == "dashboard":
                load = Load(engine.url).run(NUM_STREAMS, BUSY_S)
                threading.Thread(target=asyncio.run, args=(load,), daemon=True).start()
            for theme in ("light", "dark"):
                take(browser, engine.url, page, theme, arguments)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of open streams would block a normal exit
