"""EngineState: all that a frontend stores beyond its own life, opened for one frontend."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from ...ipc.errors import TokenloomError
from ...ipc.spec.config.engine_spec import EngineSpec
from .batches.store import reader_of
from .database import Database
from .files import Files
from .folder import FILES
from .responses import ResponseStore
from .usage import StateUsage

logger = logging.getLogger("tokenloom.state")

SWEEP_S = 600.0  # between looks for files that have expired or were left


class EngineState:
    """Owner of the database and of all that is stored with it. Without a state folder there are responses alone."""

    def __init__(self, spec: EngineSpec, index: int = 0) -> None:
        """`index`: of the frontend."""
        config = spec.config
        self.database = Database.of_engine(spec)
        self.responses = ResponseStore(self.database, config, index)
        self.files: Files | None = None
        if config.state_dir is not None:
            self.files = Files(self.database, Path(config.state_dir) / FILES, config.file_quota_bytes, [reader_of])

    async def usage(self) -> StateUsage:
        return await self.database.read(lambda database: StateUsage.read(database, self.database.path.parent))

    async def sweep(self) -> None:
        """Remove files that have expired or were left, now and every SWEEP_S, until it is cancelled."""
        while self.files is not None:
            try:
                await self.files.sweep()
            except TokenloomError as error:
                logger.warning("expired files stay for now: %s", error)
            await asyncio.sleep(SWEEP_S)

    def close(self) -> None:
        """Wait for the calls that were begun, and close all."""
        if self.files is not None:
            self.files.close()
        self.database.close()
