"""ControlDesk: pause, resume, reload, sleep, wake up and an empty prefix cache, one after the other.

A pause is done when nothing is in flight; a reload pauses, lets every rank read the new weights in the numbered stream
of steps, and makes all that was computed or cached before void. To fall asleep and to wake up are reloads, too: of
nothing, and of what was there. Requests stay: they go on from their tokens. The end of each is what the supervisor says
of it, who names what new workers hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ...ipc.errors import InternalError, error_info
from ...ipc.messages.base import Holding, MemoryTag
from ...ipc.messages.core import ControlDone, EngineControl
from ..engine import EngineCore

_ALL: list[MemoryTag] = ["weights", "kv_cache"]


class ControlDesk:
    """At most one order is under way. `tick` is called once a turn; `reload` makes all ranks hold what it
    is given."""

    def __init__(
        self, engine: EngineCore, reply: Callable[[int, ControlDone], None], reload: Callable[[Holding], None]
    ) -> None:
        self._engine, self._reply, self._reload = engine, reply, reload
        self._orders: deque[tuple[int, EngineControl]] = deque()
        self._is_reloading = False
        self._num_losses = 0  # of workers, by the order that is under way
        self._was_paused = False

    def add(self, owner: int, order: EngineControl) -> None:
        self._orders.append((owner, order))
        if len(self._orders) == 1:
            self._begin()

    def _begin(self) -> None:
        _, order = self._orders[0]
        self._was_paused, self._num_losses = self._engine.is_paused, 0
        if order.action == "resume":
            self._engine.resume()
        elif order.action == "reset_prefix_cache":
            self._engine.reset_prefix_cache()
        elif order.action != "wake_up":  # before it, no step runs anyway
            self._engine.pause("keep" if order.action == "reload" else order.mode)

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    def tick(self) -> None:
        """Go on with the orders as far as the engine is quiet. There are workers."""
        while self._orders and not self._is_reloading:
            _, order = self._orders[0]
            if order.action in ("pause", "reload", "sleep") and not self._engine.is_quiet:
                return
            asleep = self._asleep_after(order)
            if order.action == "reload" or asleep != self._engine.asleep:
                self._is_reloading = True
                self._engine.forget_computed()
                self._reload(Holding(model_folder=order.model_folder, asleep=asleep, drops_pages=order.sleep_level > 1))
            elif order.action == "sleep":
                self._end_reload(None)
            else:
                self._finish()

    def _asleep_after(self, order: EngineControl) -> list[MemoryTag]:
        if order.action == "sleep":
            return _ALL
        if order.action == "wake_up":
            awake = _ALL if order.tags is None else order.tags
            return [tag for tag in self._engine.asleep if tag not in awake]
        return self._engine.asleep

    def on_reloaded(self) -> None:
        """Every rank holds what it shall, and so will those that take their place."""
        if self._is_reloading:
            self._engine.asleep = self._asleep_after(self._orders[0][1])
            self._end_reload(None)

    def on_workers_lost(self, reason: str) -> None:
        """The group ended; the next one holds what was held before. To fall asleep or to wake up is tried once more."""
        if not self._is_reloading:
            return
        action = self._orders[0][1].action
        self._num_losses += 1
        if action == "reload":
            what = "the workers ended while they read the new weights, the old ones stay"
        elif self._num_losses < 2:
            self._is_reloading = False
            return
        else:
            what = f"{action} failed twice and nothing has changed: the workers ended"
        self._end_reload(InternalError(f"{what}: {reason}"))

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
