"""Holdings: the weights and memory that all workers hold, so that replacement workers start with the same."""

from __future__ import annotations

import logging

from .....ipc.messages.base import Holding, MemoryTag

logger = logging.getLogger("tokenloom.supervisor")


class Holdings:
    """Content of the workers' memory: the weights in `model_folder` and the KV pool, except the parts in `asleep`.

    During a change (reload, sleep, wake-up) both attributes keep the old values until all ranks have finished.
    """

    def __init__(self, model_folder: str) -> None:
        self.model_folder = model_folder
        self.asleep: list[MemoryTag] = []
        self._next: Holding | None = None

    @property
    def is_changing(self) -> bool:
        return self._next is not None

    def begin_change(self, holding: Holding) -> None:
        """Record that the ranks are being ordered to hold `holding`. Until all have finished, the content of their
        memory is uncertain."""
        self._next = holding

    def complete_change(self) -> None:
        """Record that all ranks hold the weights and memory of the change that has begun. Workers that start later hold
        the same."""
        if self._next is not None:
            self.model_folder, self.asleep = self._next.model_folder or self.model_folder, self._next.asleep
            self._next = None
            asleep = " and ".join(self.asleep) or "nothing"
            logger.info("serves the weights in %s now; asleep: %s", self.model_folder, asleep)

    def abandon_change(self) -> None:
        """Discard a change that has begun: new workers load the old values."""
        self._next = None
