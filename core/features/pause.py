"""Pause: an engine that is to become quiet.

keep and abort: no step is made until the end of the pause, so that no request need be held; wait: only requests that
have run before go on.
"""

from __future__ import annotations

from ...ipc.messages.base import PauseMode
from ..request import Request
from ..scheduling.step_feature import StepFeature


class Pause(StepFeature):
    """Owns the mode; None: there is no pause."""

    def __init__(self) -> None:
        self.mode: PauseMode | None = None

    def holds(self, request: Request) -> bool:
        return self.mode == "wait" and request.num_cached_tokens < 0
