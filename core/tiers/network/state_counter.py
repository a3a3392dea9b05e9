"""StateCounter: the state of a source, which several threads change."""

from __future__ import annotations

import threading
from typing import Any

from msgspec.structs import replace

from ....ipc.messages.tier import SourceName, SourceState


class StateCounter:
    """Counter of a source's state. `state`: the present state."""

    def __init__(self, name: SourceName) -> None:
        self._lock = threading.Lock()
        self.state = SourceState(name=name)

    def add(self, **amounts: float) -> None:
        """Add amounts to totals, by the totals' names."""
        with self._lock:
            self.state = replace(self.state, **{name: getattr(self.state, name) + n for name, n in amounts.items()})

    def reject(self, reason: str) -> None:
        """Count an object that was rejected for this reason."""
        with self._lock:
            rejected = self.state.rejected
            self.state = replace(self.state, rejected={**rejected, reason: rejected.get(reason, 0) + 1})

    def set(self, **values: Any) -> None:
        """Set fields of the state."""
        with self._lock:
            self.state = replace(self.state, **values)
