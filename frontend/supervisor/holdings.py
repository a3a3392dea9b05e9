"""Holdings: what every worker holds in memory, for those that take its place; while it changes, what is from before."""

from __future__ import annotations

import logging

from ...ipc.messages.base import Holding, MemoryTag
from ...ipc.messages.supervisor import Reloaded, Reloading

logger = logging.getLogger("tokenloom.supervisor")


class Holdings:
    """Weights of `model_folder` and the KV pool, but for what is `asleep`."""

    def __init__(self, model_folder: str) -> None:
        self.model_folder = model_folder
        self.asleep: list[MemoryTag] = []
        self._next: Holding | None = None

    @property
    def is_changing(self) -> bool:
        return self._next is not None

    def note(self, message: Reloading | Reloaded) -> None:
        """A change begins, or has come to its end on all ranks."""
        if isinstance(message, Reloading):
            self._next = message.holding
        elif self._next is not None:
            self.model_folder, self.asleep = self._next.model_folder or self.model_folder, self._next.asleep
            self._next = None
            asleep = " and ".join(self.asleep) or "nothing"
            logger.info("serves the weights in %s now; asleep: %s", self.model_folder, asleep)

    def abandon_change(self) -> None:
        """New workers hold what was held before."""
        self._next = None
