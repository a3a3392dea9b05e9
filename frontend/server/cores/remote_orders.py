"""RemoteOrders: a gateway's orders. It has no supervisor of its engines, so each order goes to all cores, which pass it
on to theirs. An engine carries out an order once: one that comes back gets those again that it has not replied to.
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
    """An order, and the cores without a reply."""

    def __init__(self, order: Order, num_cores: int) -> None:
        self.order = order
        self.waits = {*range(num_cores)}
        self.errors: dict[int, ErrorInfo] = {}  # of the engines that refused it, or failed


class RemoteOrders:
    """Owns the orders that some engine has not replied to. A core's number is its place in `cores`."""

    def __init__(self, cores: Sequence[OrderedCore], reply: Callable[[Ordered], None]) -> None:
        self._cores, self._reply = cores, reply
        self._open: dict[str, _OpenOrder] = {}  # by id

    def add(self, order: Order) -> None:
        """Send an order to all cores. Each must be there, and a folder to reload must be on every machine."""
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
        """Note the reply of an engine; reply after the last one."""
        opened = self._open.get(ordered.order_id.rpartition("/")[0])
        if opened is not None and number in opened.waits:
            self._drop(number, opened, ordered.error)

    def on_used(self, number: int) -> None:
        """Send open orders to a core that has come back, and has not replied to them."""
        for opened in self._open.values():
            if number in opened.waits:
                self._send(number, opened.order)

    def on_lost(self, number: int, reason: str) -> None:
        """Wait no more for the reload of a lost engine: it reads the weights of the others when it is back."""
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
