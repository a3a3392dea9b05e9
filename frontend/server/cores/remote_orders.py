"""RemoteOrders: carries out the orders of a gateway's clients.

A gateway does not reach the supervisors of its engines, so that each order goes to all cores, and each core passes it
on to its supervisor. When a core comes back, it gets the open orders again that it has not replied to. Its engine
carries out each only once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from ....ipc.errors import EngineDead, ErrorInfo, RequestError, TokenloomError, error_info
from ....ipc.messages.orders import Order, Ordered, joint_error


class OrderedCore(Protocol):
    @property
    def is_used(self) -> bool: ...

    def send(self, messages: Sequence[Order]) -> None: ...


class _OpenOrder:
    """An order, and the numbers of the cores that have not replied to it."""

    def __init__(self, order: Order, num_cores: int) -> None:
        self.order = order
        self.waits = {*range(num_cores)}
        self.errors: dict[int, ErrorInfo] = {}  # of the engines that refused it, or failed


class RemoteOrders:
    """Owner of the orders that a core has not replied to. A core's number is its place in `cores`."""

    def __init__(self, cores: Sequence[OrderedCore], reply: Callable[[Ordered], None]) -> None:
        self._cores, self._reply = cores, reply
        self._open: dict[str, _OpenOrder] = {}  # by id

    def add(self, order: Order) -> None:
        """Send an order to all cores. Reply with an error at once if a core is not there, or if a reload does not name
        an absolute path, which must exist on every machine."""
        error: TokenloomError | None = None
        if order.action == "reload" and not order.model.startswith("/"):
            where = "engines of a gateway reload the same path on each machine; put the checkpoint there and name it so"
            error = RequestError(f"{order.model!r:.200} is no absolute path: {where}")
        elif not all(core.is_used for core in self._cores):
            error = EngineDead("an engine of this gateway is away, and an order goes to all: try again when it is back")
        if error is not None:
            self._reply(Ordered(order_id=order.order_id, error=error_info(error)))
            return
        self._open[order.order_id] = _OpenOrder(order, len(self._cores))
        for number in range(len(self._cores)):
            self._send(number, order)

    def _send(self, number: int, order: Order) -> None:
        """Send an order under an id of its own: two cores may be replicas of one engine."""
        self._cores[number].send([msgspec.structs.replace(order, order_id=f"{order.order_id}/{number}")])

    def on_ordered(self, number: int, ordered: Ordered) -> None:
        """Record the reply of a core; after the last one, reply to the client."""
        opened = self._open.get(ordered.order_id.rpartition("/")[0])
        if opened is not None and number in opened.waits:
            self._drop(number, opened, ordered.error)

    def on_used(self, number: int) -> None:
        """Send a core that has come back the open orders that it has not replied to."""
        for opened in self._open.values():
            if number in opened.waits:
                self._send(number, opened.order)

    def on_lost(self, number: int, reason: str) -> None:
        """Stop waiting for a lost core to reload: when it comes back, it loads the weights that the other cores
        have."""
        for opened in [*self._open.values()]:
            if opened.order.action == "reload" and number in opened.waits:
                self._drop(number, opened, ErrorInfo("dead", reason))

    def _drop(self, number: int, opened: _OpenOrder, error: ErrorInfo | None) -> None:
        opened.waits.discard(number)
        if error is not None:
            opened.errors[number] = error
        if not opened.waits:
            order = opened.order
            del self._open[order.order_id]
            self._reply(
                Ordered(order_id=order.order_id, error=joint_error(order.action, opened.errors, len(self._cores)))
            )
