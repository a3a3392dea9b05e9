"""Measure how long images of 20 MB hold the frontend's loop: pings of another client while they are uploaded.

A process of its own sends a ping each millisecond; the longest round trip during an upload is at least the longest hold
of the loop. Without other load a round trip takes about 0.2 ms. `quiet` is the same without an upload.

    engine-launch bench uploads --uploads 5
"""

from __future__ import annotations

import base64
import io
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import httpx2
import numpy as np
import zmq
from PIL import Image

from tokenloom import Client, SamplingParams
from tokenloom.ipc.codec import encode
from tokenloom.ipc.messages.base import PROTOCOL_VERSION, Hello, Ping
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.bench.report import ROOT
from tokenloom.scripts.bench.runner import Case, Setup

DEMO = ROOT / "demo" / "vision"
SIDE = 2600  # pixels; 20.3 MB of noise
INTERVAL_S = 0.001
DEADLINE_S = 60.0
QUIET_S = 1.0
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


class Prober:
    """A process that pings the engine until `close`."""

    def __init__(self, address: str) -> None:
        command = [sys.executable, "-P", "-m", __name__, address]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.read(1)  # the first reply has come

    def close(self) -> array[float]:
        """Return the pings: monotonic seconds of each, then the seconds to its reply."""
        output, _ = self._process.communicate(timeout=DEADLINE_S)
        return array("d", output)


def probe(address: str) -> None:
    """Ping until stdin closes, then print the pings."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    socket.send(encode(Hello(protocol_version=PROTOCOL_VERSION)))
    socket.recv()
    sys.stdout.buffer.write(b"+")
    sys.stdout.buffer.flush()
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    pings = array("d")
    while not ended.is_set():
        begun = time.monotonic()
        socket.send(encode(Ping()))
        socket.recv()
        pings.extend((begun, time.monotonic() - begun))
        time.sleep(INTERVAL_S)
    sys.stdout.buffer.write(pings.tobytes())
    context.destroy(linger=0)


def noise(seed: int) -> bytes:
    """Return a PNG of 20 MB."""
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=0)
    return buffer.getvalue()


def longest_trips(address: str, uploads: list[Callable[[], object]]) -> list[float]:
    """Run uploads one after the other; return the longest round trip during each, in ms."""
    spans: list[tuple[float, float]] = []
    prober = Prober(address)
    for upload in uploads:
        begun = time.monotonic()
        upload()
        spans.append((begun, time.monotonic()))
    pings = prober.close()
    times = list(zip(pings[::2], pings[1::2], strict=True))
    return [1000 * max(trip for at, trip in times if at < end and at + trip > begun) for begun, end in spans]


def by_client(client: Client, data: bytes) -> Callable[[], object]:
    prompt = {"prompt": "<image>", "multi_modal_data": {"image": data}}
    return lambda: client.generate(prompt, ONE_TOKEN, use_tqdm=False)


def by_http(url: str, data: bytes) -> Callable[[], object]:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(data).decode()}}
    body = json.dumps({"messages": [{"role": "user", "content": [image]}], "max_tokens": 1}).encode()

    def upload() -> None:
        headers = {"content-type": "application/json"}
        httpx2.post(f"{url}/v1/chat/completions", content=body, headers=headers, timeout=DEADLINE_S).raise_for_status()

    return upload


def measure_engine(address: str, url: str, num_uploads: int) -> dict[str, list[float]]:
    """Return the longest round trips in ms by the way of the uploads."""
    quiet: list[Callable[[], object]] = [lambda: time.sleep(QUIET_S)] * num_uploads
    with Client(address) as client:
        by_client(client, noise(0))()  # starts the processes
        by_http(url, noise(1))()
        ways = {
            "quiet": quiet,
            "client": [by_client(client, noise(10 + index)) for index in range(num_uploads)],
            "HTTP": [by_http(url, noise(100 + index)) for index in range(num_uploads)],
        }
        return {way: longest_trips(address, uploads) for way, uploads in ways.items()}


def measure(setup: Setup) -> None:
    options = ["--model", str(DEMO), "--http", "0", "--num-threads", "1", "--device", "cpu"]
    with tempfile.TemporaryDirectory() as folder, Engine(Path(folder), options) as engine:
        engine.wait_ready()
        for way, trips in measure_engine(engine.address, engine.url, setup.arguments.uploads).items():
            setup.report.add(way=way, median_ms=statistics.median(trips), worst_ms=max(trips))
            setup.report.note(f"{way}: ms of each upload", trips)


CASE = Case("uploads", measure, {"--uploads": (5, "of each way")}, model="", rounds=0)

if __name__ == "__main__":
    probe(sys.argv[1])
