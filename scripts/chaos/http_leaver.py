"""A client that leaves its stream at random, also while nobody serves, and reads on from the last event's id."""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import httpx2

RESUME_S = 120
STAY_S, AWAY_S = 1.5, 3.0  # longest times on a connection, and between two
_ID = re.compile(rb"^id: (.*)\n", re.MULTILINE)
_WHOLE = re.compile(rb"^id: .*\n(?:.+\n)+\n", re.MULTILINE)


async def stay_and_leave(path: str, body: dict[str, Any], url: str, patience_s: float) -> bytes:
    """Return all events of a stream, without their ids. ConnectionError if a connection is cut before this client
    leaves, or refused."""
    reading, draw = _Reading(), random.Random()
    async with httpx2.AsyncClient(base_url=url, timeout=patience_s, trust_env=False) as client:
        request = client.build_request("POST", path, json=body, headers={"x-stream-resume": f"{RESUME_S}"})
        while True:
            try:
                async with asyncio.timeout(draw.uniform(0, STAY_S) if reading.stream_id else None):
                    await reading.read(client, request)
                return _ID.sub(b"", reading.events)
            except TimeoutError:
                reading.drop_half_part()
            await asyncio.sleep(draw.uniform(0, AWAY_S))
            headers = {"last-event-id": reading.last_id}
            request = client.build_request("GET", f"/v1/streams/{reading.stream_id}", headers=headers)


class _Reading:
    """The events that a client has. It leaves its first connection as soon as it knows the stream's id and has an
    event."""

    def __init__(self) -> None:
        self.events = b""
        self.stream_id = ""

    @property
    def last_id(self) -> str:
        found = _ID.findall(self.events)
        return found[-1].decode() if found else f"{self.stream_id}/0.0"

    async def read(self, client: httpx2.AsyncClient, request: httpx2.Request) -> None:
        """Read to the end of the answer."""
        is_first = not self.stream_id
        response = await client.send(request, stream=True)
        try:
            if response.status_code != 200:
                raise ConnectionError(f"status {response.status_code}: {await response.aread()!r:.300}")
            async for part in response.aiter_raw():
                self.events += part
                if is_first and _ID.search(self.events):
                    self.stream_id = response.headers["x-stream-id"]
                    raise TimeoutError
        finally:
            await response.aclose()

    def drop_half_part(self) -> None:
        """Drop the events behind the last whole one with an id: they come again."""
        ends = [found.end() for found in _WHOLE.finditer(self.events)]
        self.events = self.events[: ends[-1]] if ends else b""
