"""Orders: carries out the orders that change the engine as a whole, from their arrival to their reply.

    queued ──▶ sent, to the replicas that it `waits` for ──▶ done
       └────────────────────┴──────────────────────────────▶ failed

One is sent at a time, after those before it; only clear_kv_cache is sent at once. A new holding of the workers is
recorded before it is sent, and again when they have it, so that replacements of lost processes start with the right
one. If a replica is lost while it carries out a sleep or wake_up, the order is sent to it once more; a reload fails
there, and the old weights stay. If a client has lost its frontend and sends an order again, this joins the first one or
gets the recorded reply.

Knows no sockets and no processes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Literal, Protocol, TypeVar

from ....ipc.errors import ErrorInfo, InternalError, TokenloomError, error_info
from ....ipc.messages.base import Holding, MemoryTag
from ....ipc.messages.orders import MEMORY_ACTIONS, WORKERS_ACTIONS, Held, Hold, Order, Ordered, joint_error
from ...checkpoint.search import Then
from .replicas.holdings import Holdings

MAX_REPLIES = 256  # replies that are recorded
_ALL: list[MemoryTag] = ["weights", "kv_cache"]

State = Literal["queued", "sent", "done", "failed"]
_MOVES: dict[State, set[State]] = {
    "queued": {"sent", "failed"},
    "sent": {"done", "failed"},
    "done": set(),
    "failed": set(),
}


class OrderedReplica(Protocol):
    @property
    def number(self) -> int: ...

    @property
    def holdings(self) -> Holdings: ...


ReplicaT = TypeVar("ReplicaT", bound=OrderedReplica)


class Replicas(Protocol[ReplicaT]):
    @property
    def alive(self) -> Sequence[ReplicaT]:
        """The replicas that were not given up."""

    def is_up(self, replica: ReplicaT) -> bool:
        """Return whether a replica has a core and workers that take orders."""


class _OpenOrder:
    """An order that has no reply yet. `waits`: replicas that have not carried it out; `unsent`: those of them to which
    it is sent when they are up."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.state: State = "queued"
        self.model_folder = ""  # folder of the new weights, for a reload
        self.num_replicas = 0
        self.waits: set[int] = set()
        self.unsent: set[int] = set()
        self.lost: set[int] = set()  # replicas that were lost while they carried it out
        self.errors: dict[int, ErrorInfo] = {}  # of replicas that refused it, or failed

    def move(self, state: State) -> None:
        assert state in _MOVES[self.state], f"an order cannot go from {self.state} to {state}"
        self.state = state

    def hold(self, holdings: Holdings) -> Hold:
        """Return the message to a core, which depends on the present holdings of its workers."""
        order = self.order
        return Hold(
            order_id=order.order_id, action=order.action, mode=order.mode, holding=self._holding(holdings.asleep)
        )

    def _holding(self, asleep: list[MemoryTag]) -> Holding | None:
        order = self.order
        if order.action == "sleep":
            asleep = _ALL
        elif order.action == "wake_up":
            asleep = [tag for tag in asleep if order.tags is not None and tag not in order.tags]
        elif order.action != "reload":
            return None
        return Holding(model_folder=self.model_folder, asleep=asleep, drops_pages=order.sleep_level > 1)


class Orders(Generic[ReplicaT]):
    """Owner of the open orders, and of the last MAX_REPLIES replies. Call `go_on` once a turn."""

    def __init__(
        self,
        replicas: Replicas[ReplicaT],
        find: Callable[[str, Then], None],
        send: Callable[[int, Hold], None],
        reply: Callable[[Ordered], None],
        restart: Callable[[int | None], None],
        reload_frontends: Callable[[], None],
    ) -> None:
        """find: searches for a checkpoint and calls its Then with the folder, or with an error. send: sends a Hold to
        the core of a replica. reply: sends a reply to all frontends and cores. restart: starts to restart a replica, or
        all if None; the caller calls `on_restarted` at the end. reload_frontends: starts to replace the frontends; the
        caller calls `on_reloaded` at the end."""
        self._replicas, self._find = replicas, find
        self._send, self._reply, self._restart = send, reply, restart
        self._reload_frontends = reload_frontends
        self._open: dict[str, _OpenOrder] = {}  # by id
        self._queue: deque[_OpenOrder] = deque()  # the first one is sent
        self._replies: dict[str, Ordered] = {}  # by id, the oldest first

    def add(self, order: Order) -> None:
        """Carry out an order after those in the queue, or reply again to one that was carried out. A reload joins the
        queue when its checkpoint is found."""
        if (ordered := self._replies.get(order.order_id)) is not None:
            self._reply(ordered)
        elif order.order_id not in self._open:
            opened = self._open[order.order_id] = _OpenOrder(order)
            if order.action == "reload":
                self._find(order.model, lambda found: self._on_found(opened, found))
            elif order.action == "clear_kv_cache":
                self._begin(opened)
            else:
                self._enqueue(opened)

    def _on_found(self, opened: _OpenOrder, found: str | TokenloomError) -> None:
        if isinstance(found, str):
            opened.model_folder = found
            self._enqueue(opened)
        else:
            self._end(opened, error_info(found))

    def _enqueue(self, opened: _OpenOrder) -> None:
        self._queue.append(opened)
        if len(self._queue) == 1:
            self._begin(opened)

    def _begin(self, opened: _OpenOrder) -> None:
        opened.move("sent")
        order = opened.order
        if order.action == "restart_replicas":
            self._restart(order.replica)
            return
        if order.action == "reload_frontends":
            self._reload_frontends()
            return
        opened.waits = {each.number for each in self._replicas.alive if order.replica in (None, each.number)}
        opened.unsent = set(opened.waits)
        opened.num_replicas = len(opened.waits)
        if opened.waits:
            self.go_on()
        else:  # its only replica was given up
            self._end(opened, None)

    def go_on(self) -> None:
        """Send open orders to the replicas that were not up before and are now."""
        for opened in [*self._open.values()]:
            for replica in self._replicas.alive:
                if replica.number in opened.unsent and self._replicas.is_up(replica):
                    self._send_to(replica, opened)

    def _send_to(self, replica: ReplicaT, opened: _OpenOrder) -> None:
        opened.unsent.discard(replica.number)
        hold = opened.hold(replica.holdings)
        if hold.holding is not None:
            replica.holdings.begin_change(hold.holding)
        self._send(replica.number, hold)

    def on_held(self, replica: ReplicaT, held: Held) -> None:
        """Record that a replica has carried out an order or refused it; after the last replica, reply."""
        opened = self._open.get(held.order_id)
        if opened is None or replica.number not in opened.waits - opened.unsent:
            return
        if held.error is not None:
            opened.errors[replica.number] = held.error
        elif opened.order.action in MEMORY_ACTIONS:
            replica.holdings.complete_change()
        self._drop(opened, replica.number)

    def on_restarted(self, failure: str) -> None:
        """Reply to the order to restart replicas, which has ended. `failure`: the reason why they were not restarted,
        or ""."""
        error = ErrorInfo("request", f"replicas were not restarted: {failure}") if failure else None
        self._end(self._queue[0], error)

    def on_reloaded(self, failure: str) -> None:
        """Reply to the order to replace the frontends, which has ended. `failure`: the reason why not all were
        replaced, or ""."""
        error = error_info(InternalError(failure)) if failure else None
        self._end(self._queue[0], error)

    def on_lost(self, replica: ReplicaT, reason: str, *, has_core: bool) -> None:
        """Send the orders that a lost replica was carrying out once more, or let them fail there. has_core: only its
        workers are lost; its core continues orders that need no workers."""
        number = replica.number
        is_final = all(each.number != number for each in self._replicas.alive)
        for opened in [*self._open.values()]:
            action = opened.order.action
            if is_final and number in opened.waits:
                self._drop(opened, number)
            elif number in opened.waits - opened.unsent and (action in WORKERS_ACTIONS or not has_core):
                self._lose(opened, number, reason)

    def _lose(self, opened: _OpenOrder, number: int, reason: str) -> None:
        action = opened.order.action
        if action in ("pause", "resume"):
            error = ErrorInfo("dead", "the core was replaced: try again")
        elif action == "reload":
            error = error_info(InternalError(f"the new weights were not read everywhere, the old ones stay: {reason}"))
        elif action in ("start_profile", "stop_profile"):
            error = error_info(
                InternalError(f"{action} failed, no profile is running: the workers ended or lost their core: {reason}")
            )
        elif number not in opened.lost:
            opened.lost.add(number)
            opened.unsent.add(number)
            return
        else:
            error = error_info(InternalError(f"{action} failed twice and nothing has changed: {reason}"))
        opened.errors[number] = error
        self._drop(opened, number)

    def _drop(self, opened: _OpenOrder, number: int) -> None:
        """Stop waiting for a replica to carry out an order; reply if it was the last one."""
        opened.waits.discard(number)
        opened.unsent.discard(number)
        if not opened.waits:
            self._end(opened, joint_error(opened.order.action, opened.errors, opened.num_replicas))

    def _end(self, opened: _OpenOrder, error: ErrorInfo | None) -> None:
        opened.move("done" if error is None else "failed")
        order_id = opened.order.order_id
        del self._open[order_id]
        ordered = self._replies[order_id] = Ordered(order_id=order_id, error=error)
        if len(self._replies) > MAX_REPLIES:
            del self._replies[next(iter(self._replies))]
        self._reply(ordered)
        if self._queue and self._queue[0] is opened:
            self._queue.popleft()
            if self._queue:
                self._begin(self._queue[0])
