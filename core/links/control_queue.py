"""ControlDesk: pause, resume and reload, one after the other.

A pause is done when nothing is in flight; a reload pauses, lets every rank read the new weights in the numbered stream
of steps, and makes all that was computed or cached before void. Requests stay: they go on from their tokens. The end of
a reload is what the supervisor says of it, who names the weights that new workers read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ...ipc.errors import InternalError, error_info
from ...ipc.messages.core import ControlDone, EngineControl
from ..engine import EngineCore


class ControlDesk:
    """At most one order is under way. `tick` is called once a turn; `reload` starts a reload of all ranks."""

    def __init__(
        self, engine: EngineCore, reply: Callable[[int, ControlDone], None], reload: Callable[[str], None]
    ) -> None:
        self._engine, self._reply, self._reload = engine, reply, reload
        self._orders: deque[tuple[int, EngineControl]] = deque()
        self._is_reloading = False
        self._was_paused = False

    def add(self, owner: int, order: EngineControl) -> None:
        self._orders.append((owner, order))
        if len(self._orders) == 1:
            self._begin()

    def _begin(self) -> None:
        _, order = self._orders[0]
        self._was_paused = self._engine.is_paused
        if order.action == "resume":
            self._engine.resume()
        else:
            self._engine.pause("keep" if order.action == "reload" else order.mode)

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    def tick(self) -> None:
        """Go on with the orders as far as the engine is quiet. There are workers."""
        while self._orders and not self._is_reloading:
            _, order = self._orders[0]
            if order.action != "resume" and not self._engine.is_quiet:
                return
            if order.action == "reload":
                self._is_reloading = True
                self._engine.forget_computed()
                self._reload(order.model_folder)
            else:
                self._finish()

    def on_reloaded(self) -> None:
        """Every rank has the new weights, and so will those that take their place."""
        self._end_reload(None)

    def on_workers_lost(self, reason: str) -> None:
        """The group ended; the next one has the weights from before."""
        if self._is_reloading:
            self._end_reload(
                InternalError(f"the workers ended while they read the new weights, the old ones stay: {reason}")
            )

    def _end_reload(self, error: InternalError | None) -> None:
        self._is_reloading = False
        if not self._was_paused:
            self._engine.resume()
        self._finish(error)

    def _finish(self, error: InternalError | None = None) -> None:
        owner, order = self._orders.popleft()
        self._reply(owner, ControlDone(control_id=order.control_id, error=None if error is None else error_info(error)))
        if self._orders:
            self._begin()
