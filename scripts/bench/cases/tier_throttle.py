"""Measure the first token of prompts whose blocks come from a slow source: no slower than computing them.

    engine-launch bench tier_throttle 135m --lengths 512,2048 --rates 1,4,16,64 --redis redis-server

Redis stands behind a proxy that passes so many MB/s. One engine computes each prompt twice, so that Redis gets its
blocks; a second one, behind the proxy, and a third one without tiers then get the prompt, in turn: first the one, in
the next round the other. Both have computed a prompt of each length before. Per round and cell, prompts are new.
Printed: for each cell the median ratio of the second's time to the third's, and how many of the prompt's tokens were
found.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import socket
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

from tokenloom import LLM, SamplingParams
from tokenloom.scripts.bench.cases.tiers import IDLE_S, is_up, redis_server, wait_until
from tokenloom.scripts.bench.report import median
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.scripts.bench.workload import FIRST_ID, vocab_size

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
CHUNK = 1 << 16
WRITTEN_S = 2.0  # for the first engine's blocks to arrive


class ThrottledProxy:
    """Proxy between a TCP port and a unix socket. From the socket it passes at most `bytes_per_s` over all
    connections."""

    def __init__(self, target: Path) -> None:
        self.bytes_per_s = 1e9
        self._target, self._free_at, self._lock = target, 0.0, threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(str(self._target))
                threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
                threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, is_slow: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                if is_slow:
                    self._wait(len(data))
                sink.sendall(data)
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _wait(self, num_bytes: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + num_bytes / self.bytes_per_s
            delay = self._free_at - now
        time.sleep(delay)

    def close(self) -> None:
        self._listener.close()


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Return the seconds of a request for one token, and the number of its prompt tokens found in a cache."""
    begun = time.perf_counter()
    (output,) = llm.generate([{"prompt_token_ids": prompt}], ONE_TOKEN, use_tqdm=False)
    return time.perf_counter() - begun, output.num_cached_tokens or 0


def new_prompt(name: str, vocab: int, length: int) -> list[int]:
    return random.Random(name).choices(range(FIRST_ID, vocab), k=length)


def measure(setup: Setup) -> None:
    asked, stack = setup.arguments, setup.stack
    folder = Path(tempfile.mkdtemp(prefix="throttle-"))
    address = folder / "redis.sock"
    ratios: dict[tuple[int, int], list[float]] = defaultdict(list)
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    stack.enter_context(redis_server(asked.redis, folder))
    proxy = ThrottledProxy(address)
    stack.callback(proxy.close)
    options = {"max_model_len": max(asked.lengths) + 16, **setup.options}
    places = (f"unix://{address}", f"redis://127.0.0.1:{proxy.port}")
    writer, reader = (
        stack.enter_context(LLM(setup.folder, **{**options, "kv_remote": place}))  # type: ignore[arg-type]
        for place in places
    )
    off = stack.enter_context(LLM(setup.folder, **options))  # type: ignore[arg-type]
    for llm in (writer, reader):
        wait_until(lambda llm=llm: is_up(llm), "the tier does not open")  # type: ignore[misc]
    vocab = vocab_size(setup.folder)
    for length in asked.lengths:
        for llm in (reader, off):
            first_token(llm, new_prompt(f"warm-up {length}", vocab, length))
    time.sleep(IDLE_S)
    cells = list(enumerate(itertools.product(asked.rates, asked.lengths)))
    for number, (cell, (rate, length)) in itertools.product(range(asked.rounds), cells):
        prompt = new_prompt(f"{number} {rate} {length}", vocab, length)
        for _ in range(2):
            first_token(writer, prompt)
        time.sleep(WRITTEN_S)
        proxy.bytes_per_s = rate * 1e6
        order = (off, reader) if (cell + number) % 2 else (reader, off)  # of a cell, another one each round
        took = {llm: first_token(llm, prompt) for llm in order}
        ratios[rate, length].append(took[reader][0] / took[off][0])
        found[rate, length].append(took[reader][1])
    for (rate, length), values in ratios.items():
        tokens = found[rate, length]
        setup.report.add(
            MB_per_s=rate, tokens=length, of_computed=median(values), most=max(values), found=median(tokens) / length
        )


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


OPTIONS = {
    "--lengths": ((512, 2048), "prompt tokens, with commas between", numbers),
    "--rates": ((1, 4, 16, 64), "MB/s of the source, with commas between", numbers),
    "--redis": (shutil.which("redis-server") or "redis-server", "the redis-server to start"),
}
CASE = Case("throttled tier", measure, OPTIONS, dtype="bfloat16")
