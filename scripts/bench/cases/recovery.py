"""Measure recovery: from the kill of a process to the next token of a stream that it served.

    engine-launch bench recovery 135m --rounds 5

One client streams four long answers. Each round kills worker, core and frontend with SIGKILL, one after the other,
each once all streams have resumed; the time runs on the killer's clock until the client receives the next token.
The phases are those of the last worker replacement. All flags of engine-launch are taken.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from pathlib import Path

from tokenloom import AsyncClient, SamplingParams
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.scripts.bench.runner import Case, Setup
from tokenloom.scripts.bench.workload import Workload, flags_of

NUM_STREAMS = 4
NUM_PROMPT_TOKENS = 256
CALM_S = 1.0  # between two kills, counted from the first token after the previous kill
RECOVERY_S = 60.0
ROLES = ("worker 0", "core", "frontend")


class Streams:
    """Long background answers, one after the other; `last_token_at` is the latest arrival of any token."""

    def __init__(self, address: str, workload: Workload) -> None:
        self.last_token_at = 0.0
        self._is_stopping = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(address, workload)), daemon=True)
        self._thread.start()

    async def _run(self, address: str, workload: Workload) -> None:
        async with AsyncClient(address, reconnect_timeout_s=RECOVERY_S) as client:
            await asyncio.gather(*(self._stream(client, prompt, workload.num_out) for prompt in workload.prompts(0)))

    async def _stream(self, client: AsyncClient, prompt: list[int], num_out: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=num_out, ignore_eos=True)
        while not self._is_stopping:
            async for _ in client.generate(prompt, params):
                self.last_token_at = time.monotonic()
                if self._is_stopping:
                    return

    def wait_token(self, after: float) -> float:
        """Wait for a token that arrives later than `after`; return its arrival time, to 2 ms."""
        while self.last_token_at <= after:
            if time.monotonic() > after + RECOVERY_S:
                raise SystemExit(f"no token within {RECOVERY_S:g} s")
            time.sleep(0.002)
        return self.last_token_at

    def stop(self) -> None:
        self._is_stopping = True
        self._thread.join(RECOVERY_S)


def kill(engine: Engine, role: str, streams: Streams) -> float:
    """Kill a process; return the seconds until the next token. Tokens that arrive within 0.1 s were already on their
    way and do not count."""
    process = engine.find(role)
    assert process is not None, f"{role} is not running"
    begun = time.monotonic()
    process.kill()
    time.sleep(0.1)
    return streams.wait_token(begun + 0.1) - begun


def measure(setup: Setup) -> None:
    flags = flags_of({"model": str(setup.folder), **setup.options})
    workload = Workload(NUM_STREAMS, NUM_PROMPT_TOKENS, 512, setup.workload.vocab_size)
    runtime = setup.stack.enter_context(tempfile.TemporaryDirectory())
    engine = setup.stack.enter_context(Engine(Path(runtime), flags))
    engine.wait_ready()
    streams = Streams(engine.address, workload)
    streams.wait_token(time.monotonic())
    for number in range(1, setup.arguments.rounds + 1):
        for role in ROLES:
            time.sleep(CALM_S)
            setup.report.add(round=number, killed=role, next_token_s=kill(engine, role, streams))
    streams.stop()
    engine.stop()
    setup.report.note("phases", [line for line in engine.lines if "worker 0:" in line][-5:])


CASE = Case("recovery", measure)
