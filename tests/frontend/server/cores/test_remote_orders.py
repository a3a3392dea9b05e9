"""A gateway's order goes to all its engines, once to each, and has one reply."""

from __future__ import annotations

from collections.abc import Sequence

from tokenloom.frontend.server.cores.remote_orders import RemoteOrders
from tokenloom.ipc.errors import ErrorInfo
from tokenloom.ipc.messages.orders import Order, Ordered

SLEEP = Order(order_id="a", action="sleep")
RELOAD = Order(order_id="a", action="reload", model="/two")


class FakeCore:
    def __init__(self) -> None:
        self.is_used = True
        self.received: list[str] = []  # ids

    def send(self, messages: Sequence[Order]) -> None:
        self.received += [order.order_id for order in messages]


class Rig:
    """Two cores of a gateway."""

    def __init__(self) -> None:
        self.cores = [FakeCore(), FakeCore()]
        self.replies: list[Ordered] = []
        self.orders = RemoteOrders(self.cores, self.replies.append)

    def ordered(self, number: int, error: ErrorInfo | None = None) -> None:
        self.orders.on_ordered(number, Ordered(order_id=f"a/{number}", error=error))

    def take_error(self) -> ErrorInfo | None:
        """Take the only reply; return its error."""
        (reply,) = self.replies
        self.replies.clear()
        return reply.error


def test_each_engine_gets_an_order_under_its_own_id_and_the_last_reply_ends_it() -> None:
    rig = Rig()
    rig.orders.add(SLEEP)
    assert [core.received for core in rig.cores] == [["a/0"], ["a/1"]]
    rig.ordered(0)
    rig.ordered(0)
    assert rig.replies == []
    rig.ordered(1, ErrorInfo("request", "it cannot"))
    error = rig.take_error()
    assert error is not None and error.message.startswith("sleep failed at replica 1 of 2")


def test_an_engine_that_comes_back_gets_its_open_orders_again() -> None:
    rig = Rig()
    rig.orders.add(SLEEP)
    rig.ordered(0)
    rig.orders.on_lost(1, "gone")
    for number in (0, 1):
        rig.orders.on_used(number)
    assert [core.received for core in rig.cores] == [["a/0"], ["a/1", "a/1"]]
    rig.ordered(1)
    assert rig.replies == [Ordered(order_id="a")]


def test_a_reload_does_not_wait_for_a_lost_engine() -> None:
    rig = Rig()
    rig.orders.add(RELOAD)
    rig.ordered(0)
    rig.orders.on_lost(1, "gone")
    error = rig.take_error()
    assert error is not None and error.kind == "dead" and error.message.endswith("gone")


def test_an_order_needs_all_engines_and_a_reload_a_folder_of_every_machine() -> None:
    rig = Rig()
    rig.orders.add(Order(order_id="a", action="reload", model="two"))
    error = rig.take_error()
    assert error is not None and error.kind == "request" and "'two' is no absolute path" in error.message
    rig.cores[1].is_used = False
    rig.orders.add(SLEEP)
    error = rig.take_error()
    assert error is not None and error.kind == "dead" and "an engine of this gateway is away" in error.message
    assert rig.cores[0].received == []
