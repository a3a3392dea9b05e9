"""Clients that stream requests without end, each through a proxy, and compare every answer with its undisturbed one."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tokenloom import AsyncClient, RequestOutput
from tokenloom.scripts.chaos.proxy import Proxy
from tokenloom.tests.support.chaos_work import Work, difference

STOP_S = 120.0


@dataclass
class Tally:
    """The clients' results so far; written only by their event loop."""

    last_token_at: list[float]  # of each client
    finished: Counter[str] = field(default_factory=Counter)  # by kind of work
    num_tokens: int = 0
    num_cached: int = 0  # tokens of prompts that were found in a cache
    differences: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class Clients:
    """Clients and proxies on an event loop of their own, in a thread that this class owns."""

    def __init__(
        self, address: str, folder: Path, num: int, work: list[Work], calm: list[RequestOutput], seed: int
    ) -> None:
        self.num = num
        self.tally = Tally([0.0] * num)
        self._work, self._calm, self._seed = work, calm, seed
        self._is_stopping = False
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        target = address.removeprefix("ipc://")
        self._proxies = [Proxy(f"{folder}/client-{i}.sock", target) for i in range(num)]
        self._holds: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._live, name="clients")
        self._thread.start()

    @property
    def last_token_at(self) -> float:
        return max(self.tally.last_token_at)

    def hold(self, client: int, seconds: float) -> None:
        """Delay all traffic between one client and the engine for `seconds`; do not wait for it."""
        self._loop.call_soon_threadsafe(self._hold, client, seconds)

    def cut(self, client: int) -> None:
        """Break the connection of one client."""
        self._loop.call_soon_threadsafe(self._proxies[client].cut)

    def stop(self) -> int:
        """Let each client finish its open requests; return 1 if any did not finish in time, else 0. These are
        cancelled."""
        self._is_stopping = True
        self._thread.join(STOP_S)
        is_hung = self._thread.is_alive()
        if is_hung:
            self._loop.call_soon_threadsafe(self._streams.cancel)
            self._thread.join()
        return int(is_hung)

    def _hold(self, client: int, seconds: float) -> None:
        task = self._loop.create_task(self._proxies[client].hold(seconds))
        self._holds.add(task)
        task.add_done_callback(self._holds.discard)

    def _live(self) -> None:
        """Run the clients. Their open coroutines are cancelled before the loop is closed: else they would end later,
        without a loop."""
        with self._runner, contextlib.suppress(asyncio.CancelledError):
            self._runner.run(self._run())

    async def _run(self) -> None:
        for proxy in self._proxies:
            await proxy.start()
        self._streams = asyncio.gather(*(self._stream(client) for client in range(self.num)))
        try:
            await self._streams
            await asyncio.gather(*self._holds)
        finally:
            for proxy in self._proxies:
                await proxy.close()

    async def _stream(self, number: int) -> None:
        rng, tally = random.Random(f"{self._seed} {number}"), self.tally
        async with AsyncClient(f"ipc://{self._proxies[number].path}", reconnect_timeout_s=STOP_S) as client:
            while not self._is_stopping:
                index = rng.randrange(len(self._work))
                work, output = self._work[index], None
                try:
                    async for newest in client.generate(work.form, work.params, lora_request=work.lora_request):
                        output = newest
                        tally.last_token_at[number] = time.monotonic()
                except Exception as error:
                    tally.failures.append(f"{_name(work)}: {type(error).__name__}: {error}")
                    continue
                assert output is not None
                tally.finished[work.kind] += 1
                tally.num_tokens += sum(len(answer.token_ids) for answer in output.outputs)
                tally.num_cached += output.num_cached_tokens
                found = difference(self._calm[index], output)
                if found is not None:
                    tally.differences.append(f"{_name(work)}: {found}")


def _name(work: Work) -> str:
    name = f"{work.kind} with {work.adapter}" if work.adapter else work.kind
    return f"{name} about {len(work.images)} images" if work.images else name
