"""Bystanders of an attack: streams over HTTP and of the client library, which time each token.

A process of its own, so that the attack's work does not delay it. On each line of stdin it prints the gaps since the
line before as JSON, and the streams that were cut; it ends with stdin. A gap is the time from a token to the next one
of its stream, or if the wait for a first token counts, from the request.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import subprocess
import sys
import threading
import time
from urllib.parse import urlsplit

from tokenloom import Client, SamplingParams, TokenloomError

PATIENCE_S = 120.0
NUM_TOKENS = 600
PROMPT = "The capital of France is"


class Bystanders:
    """Threads that each stream one answer after the other. A lock guards `_gaps` and `_cuts`."""

    def __init__(self, url: str, address: str, num_http: int, num_library: int, counts_first: bool) -> None:
        self._url, self._address, self._counts_first = url, address, counts_first
        self._lock = threading.Lock()
        self._gaps: list[float] = []
        self._cuts: list[str] = []
        self._last_at: dict[int, float] = {}  # by thread: its last token, or the request
        self._is_over = threading.Event()
        works = [self._stream_http] * num_http + [self._stream_library] * num_library
        self._threads = [threading.Thread(target=self._run, args=(work,), daemon=True) for work in works]
        for thread in self._threads:
            thread.start()

    def take(self) -> dict[str, object]:
        """Return and forget the gaps in seconds, with those that have not ended yet, and the cuts."""
        with self._lock:
            now = time.monotonic()
            open_gaps = [now - last_at for last_at in self._last_at.values()]
            found: dict[str, object] = {"gaps": [*self._gaps, *open_gaps], "cuts": self._cuts}
            self._gaps, self._cuts = [], []
        return found

    def _run(self, work: object) -> None:
        assert callable(work)
        while not self._is_over.is_set():
            try:
                self._begin()
                work()
            except (OSError, http.client.HTTPException, TokenloomError) as error:
                with self._lock:
                    self._cuts.append(f"{type(error).__name__}: {error}")

    def _begin(self) -> None:
        with self._lock:
            self._last_at[threading.get_ident()] = time.monotonic() if self._counts_first else math.inf

    def _note(self) -> None:
        now, thread = time.monotonic(), threading.get_ident()
        with self._lock:
            self._gaps.append(max(now - self._last_at[thread], 0.0))
            self._last_at[thread] = now

    def _stream_http(self) -> None:
        parts = urlsplit(self._url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE_S)
        body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True}
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer, last = connection.getresponse(), b""
            if answer.status != 200:
                raise http.client.HTTPException(f"status {answer.status}: {answer.read(200)!r}")
            while piece := answer.read1(1 << 16):
                self._note()
                last = piece
            if b"[DONE]" not in last:
                raise http.client.HTTPException(f"a stream ended with {last[-80:]!r}")

    def _stream_library(self) -> None:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        with Client(self._address, reconnect_timeout_s=PATIENCE_S) as client:
            for _ in client.stream(PROMPT, params):
                self._note()


class Watch:
    """The process of the bystanders, seen by the attack."""

    def __init__(self, url: str, address: str, num_http: int, num_library: int, *, counts_first: bool = True) -> None:
        words = [url, address, str(num_http), str(num_library), str(int(counts_first))]
        command = [sys.executable, "-P", __file__, *words]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")

    def take(self) -> tuple[list[float], list[str]]:
        """Return the gaps in seconds and the cut streams since the last call."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found = json.loads(self._process.stdout.readline())
        return found["gaps"], found["cuts"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> int:
    url, address, *numbers = sys.argv[1:]
    num_http, num_library, counts_first = map(int, numbers)
    bystanders = Bystanders(url, address, num_http, num_library, bool(counts_first))
    for _ in sys.stdin:
        print(json.dumps(bystanders.take()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
