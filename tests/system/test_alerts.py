"""Every alert fires in a real Prometheus when its fault is caused in a real engine, and none fires otherwise.

The rules are those of docs/operate/dashboards/alerts.yml with a clock 30 times as fast: each duration is divided.
"""

from __future__ import annotations

import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx2
import psutil
import pytest

from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.launched import LaunchedEngine
from tokenloom.tests.system.prometheus import Prometheus

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]

RULES = Path(__file__).parents[2] / "docs/operate/dashboards" / "alerts.yml"
SPEED = 30
PATIENCE_S = 90.0
EXPECTED = {
    ("TokenloomErrors", "busy"),
    ("TokenloomRefusing", "busy"),
    ("TokenloomSlowFirstToken", "busy"),
    ("TokenloomKvFull", "full"),
    ("TokenloomStalled", "lost"),
    ("TokenloomDown", "lost"),
    ("TokenloomRestartLoop", "lost"),
}


def faster(rules: str) -> str:
    """Return the rules with every duration divided by SPEED."""
    milliseconds = {"s": 1000, "m": 60_000}

    def divide(match: re.Match[str]) -> str:
        return f"{match[1]}{int(match[2]) * milliseconds[match[3]] // SPEED}ms{match[4]}"

    return re.sub(r"(\[|for: )(\d+)([sm])(\]|$)", divide, rules, flags=re.MULTILINE)


class Alerts:
    """Collects the alerts that have fired, by name and model."""

    def __init__(self, prometheus: Prometheus) -> None:
        self._prometheus = prometheus
        self.seen: set[tuple[str, str]] = set()

    def wait_firing(self, wanted: set[tuple[str, str]]) -> None:
        def fire() -> bool:
            alerts = self._prometheus.ask("alerts")["alerts"]
            firing = [alert["labels"] for alert in alerts if alert["state"] == "firing"]
            self.seen |= {(labels["alertname"], labels["model_name"]) for labels in firing}
            return wanted <= self.seen

        wait_until(fire, f"not all of {wanted} fire", PATIENCE_S)


@contextmanager
def load(url: str, num_clients: int, **body: object) -> Iterator[None]:
    """Send completions without a pause from `num_clients` clients at once."""
    is_over = threading.Event()

    def ask() -> None:
        with httpx2.Client(base_url=url, timeout=PATIENCE_S) as http:
            while not is_over.is_set():
                with suppress(httpx2.HTTPError):  # the engine is being stopped
                    http.post("/v1/completions", json={"prompt": "The", "ignore_eos": True} | body)

    threads = [threading.Thread(target=ask) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join(PATIENCE_S)


def launch(stack: ExitStack, folder: Path, name: str, *options: str) -> tuple[LaunchedEngine, str]:
    runtime = folder / name
    runtime.mkdir()
    engine = stack.enter_context(LaunchedEngine(runtime, "--http", "0", "--served-model-name", name, *options))
    return engine, engine.wait_http()


def kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()


def test_every_alert_fires_on_its_fault_and_only_then(tmp_path: Path) -> None:
    with ExitStack() as stack:
        _, well = launch(stack, tmp_path, "well")
        _, busy = launch(stack, tmp_path, "busy", "--max-num-seqs", "1", "--max-waiting-requests", "5")
        _, full = launch(stack, tmp_path, "full", "--num-kv-blocks", "130", "--max-num-seqs", "16")
        sick, lost = launch(stack, tmp_path, "lost", "--step-timeout-s", "1000", "--start-timeout-s", "100")
        targets = [url.removeprefix("http://") for url in (well, busy, full, lost)]
        alerts = Alerts(stack.enter_context(Prometheus(tmp_path, targets, faster(RULES.read_text()))))
        worker = sick.child("worker 0")
        with load(well, 1, max_tokens=8), load(lost, 1, max_tokens=2000):
            worker.send_signal(signal.SIGSTOP)  # its step never ends
            stack.callback(kill, worker)
            with (
                load(busy, 8, max_tokens=400),  # 1 runs, 5 wait, the others are refused
                load(busy, 1, max_tokens=400, timeout_s=0.05),
                load(full, 16, max_tokens=400),  # 16 times 26 blocks
            ):
                wanted = {each for each in EXPECTED if each[1] in ("busy", "full")}
                alerts.wait_firing(wanted | {("TokenloomStalled", "lost")})
            for _ in range(4):
                core = sick.child("core")
                core.kill()  # the next core waits for the stopped worker
                core.wait(PATIENCE_S)
            alerts.wait_firing(EXPECTED)
            sick.process.kill()
            kill(worker)
        assert alerts.seen == EXPECTED, "an alert fires without its fault"
