"""Pause: holds requests while an engine pauses.

Modes keep and abort: no step is made until the pause ends, so no request need be held. Mode wait: only requests that
have run before continue; the others are held.
"""

from __future__ import annotations

from ...ipc.messages.base import PauseMode
from ..request import Request
from ..scheduling.step_feature import StepFeature


class Pause(StepFeature):
    """Feature that owns the mode of the pause; None: there is no pause."""

    def __init__(self) -> None:
        self.mode: PauseMode | None = None

    def holds(self, request: Request) -> bool:
        return self.mode == "wait" and request.num_cached_tokens < 0
