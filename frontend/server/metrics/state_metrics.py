"""StateMetrics: metrics of the state folder, read when they are shown.

All frontends show the same values, from the database. Only engines with a state folder have it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from ....ipc.codec import JsonObject
from ....ipc.errors import TokenloomError
from ....ipc.spec.config.engine_spec import EngineSpec
from ...state.usage import StateUsage
from .registry import Gauge, Metric

PATIENCE_S = 1.0  # of a scrape for the database


class StateMetrics:
    """Owner of the gauges. `read` is set once the state is open; until then all values are 0."""

    def __init__(self) -> None:
        self.read: Callable[[], Awaitable[StateUsage]] | None = None
        self._usage = StateUsage()
        self.metrics: list[Metric] = [
            Gauge("state_files", "Files in the state folder.", lambda: self._usage.num_files),
            Gauge("state_file_bytes", "Bytes of the files in the state folder.", lambda: self._usage.file_bytes),
            Gauge("state_responses", "Stored responses.", lambda: self._usage.num_responses),
            Gauge("state_open_responses", "Responses that are being made.", lambda: self._usage.num_open_responses),
            Gauge("state_response_bytes", "Bytes of stored responses.", lambda: self._usage.response_bytes),
            Gauge("state_free_bytes", "Free bytes of the state folder's disk.", lambda: self._usage.free_bytes),
        ]

    @classmethod
    def of(cls, spec: EngineSpec) -> StateMetrics | None:
        return None if spec.config.state_dir is None else cls()

    async def refresh(self) -> None:
        """Read the values anew; keep the former ones if that fails or takes longer than PATIENCE_S."""
        if self.read is not None:
            with contextlib.suppress(TokenloomError, TimeoutError, OSError):
                self._usage = await asyncio.wait_for(self.read(), PATIENCE_S)

    def summary(self) -> JsonObject:
        """Return the dashboard's data."""
        return dict(self._usage._asdict())
