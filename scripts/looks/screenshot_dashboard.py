"""Take pictures of a loaded engine's dashboard and of its chat: both themes, desktop and phone width.

    scripts/looks/screenshot_dashboard.py OUT_FOLDER [--seconds 20]

Starts an engine on the demo model, keeps a dozen streams running, drives headless Chromium over its debugging pipe.
Exits 0 with a message if Chromium is not installed.
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

VIEWS = [("desktop", 1280, 1920, False), ("phone", 390, 2760, True)]
CHAT_SIZE = (900, 520)
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

    def resize(self, width: int, height: int, is_phone: bool) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if is_phone else 1,
            mobile=is_phone,
        )

    def picture(self, width: int, height: int, is_phone: bool) -> bytes:
        self.resize(width, height, is_phone)
        time.sleep(2.5)  # until the page redraws after its next poll
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE_S)
        os.close(self._in)
        os.close(self._out)


def chat_picture(browser: Browser, url: str) -> bytes:
    """Hold a short conversation on the page at `url`; return a picture of it."""
    browser.resize(*CHAT_SIZE, False)
    browser.call("Page.navigate", url=url)
    time.sleep(1.0)
    browser.evaluate("document.getElementById('new').click()")  # conversations outlive the page
    browser.evaluate("document.getElementById('temperature').value = '0'")
    for question in QUESTIONS:
        browser.evaluate(f"document.getElementById('message').value = {json.dumps(question)}")
        browser.evaluate("document.getElementById('send').click()")
        time.sleep(2.0)
    return browser.picture(*CHAT_SIZE, False)


def find_chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the history in the pictures")
    arguments = parser.parse_args()
    program = find_chromium()
    if program is None:
        print("no Chromium here: nothing is made")
        return 0
    arguments.folder.mkdir(parents=True, exist_ok=True)
    options = ["--http", "0", "--num-threads", "1", "--num-kv-blocks", "600"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Engine(Path(folder), options) as engine:
        engine.wait_ready()
        load = Load(engine.url).run(NUM_STREAMS, BUSY_S)
        threading.Thread(target=asyncio.run, args=(load,), daemon=True).start()
        browser = Browser(program, f"{folder}/profile")
        browser.open_page()
        for theme in ("light", "dark"):
            browser.call("Page.navigate", url=f"{engine.url}/dashboard?theme={theme}")
            time.sleep(arguments.seconds)
            for name, width, height, is_phone in VIEWS:
                path = arguments.folder / f"dashboard-{name}-{theme}.png"
                path.write_bytes(browser.picture(width, height, is_phone))
                print(path)
            path = arguments.folder / f"chat-{theme}.png"
            path.write_bytes(chat_picture(browser, f"{engine.url}/chat?theme={theme}"))
            print(path)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of open streams would block a normal exit
