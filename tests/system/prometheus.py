"""A real Prometheus server that scrapes engines, and its API."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx2

START_S = 30.0
STOP_S = 20.0
INTERVAL = "500ms"


class Prometheus:
    """Owns the process. `folder` takes its configuration, data and log; `rules` is a file of alerts."""

    def __init__(self, folder: Path, targets: list[str], rules: str) -> None:
        """`targets`: URLs of the engines."""
        (folder / "alerts.yml").write_text(rules)
        config = {
            "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
            "rule_files": [str(folder / "alerts.yml")],
            "scrape_configs": [
                {
                    "job_name": "tokenloom",
                    "static_configs": [{"targets": [url.removeprefix("http://") for url in targets]}],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        options = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            ["prometheus", *options, f"--web.listen-address={self._address}"],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def ask(self, path: str, **parameters: str) -> dict[str, Any]:
        """Return the data of /api/v1/PATH once the server is ready; AssertionError with its message if it refuses."""
        deadline = time.monotonic() + START_S
        while True:
            assert self._process.poll() is None, "prometheus has ended"
            assert time.monotonic() < deadline, "prometheus does not answer"
            try:
                answer = httpx2.get(f"http://{self._address}/api/v1/{path}", params=parameters, timeout=5.0)
            except httpx2.TransportError:  # it is not listening yet
                continue
            if answer.status_code == 503:  # it is loading its storage
                continue
            assert answer.json()["status"] == "success", (parameters, answer.text)
            return dict(answer.json()["data"])

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return an expression's current samples."""
        return list(self.ask("query", query=expression)["result"])

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(STOP_S)
        self._log.close()
