"""Each order is carried out once, after those before it, and has one reply, whatever is lost meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tokenloom.frontend.launcher.supervisor.launcher import CORE, FRONTEND, WORKERS
from tokenloom.frontend.launcher.supervisor.orders import MAX_REPLIES, Orders
from tokenloom.frontend.launcher.supervisor.replicas.holdings import Holdings
from tokenloom.ipc.errors import ErrorInfo, RequestError, TokenloomError
from tokenloom.ipc.messages.base import Holding
from tokenloom.ipc.messages.orders import Held, Hold, Order, Ordered
from tokenloom.ipc.messages.supervisor import Progress, ReplaceWorkers, ReplicaDown
from tokenloom.tests.frontend.launcher.supervisor.remote_engine import RemoteEngine

REFUSED = ErrorInfo("request", "it cannot")


class FakeReplica:
    def __init__(self, number: int) -> None:
        self.number, self.holdings = number, Holdings("/one")


class Rig:
    """Replicas, and the owner of their orders."""

    def __init__(self, num_replicas: int = 1) -> None:
        self.alive = [FakeReplica(number) for number in range(num_replicas)]
        self.away: set[int] = set()  # numbers of replicas that are not up
        self.sent: list[tuple[int, Hold]] = []
        self.replies: list[Ordered] = []
        self.restarts: list[int | None] = []
        self.num_reloads = 0
        self.searches: dict[str, Callable[[str | TokenloomError], None]] = {}  # by model
        self.orders = Orders(
            self, self.searches.__setitem__, self._send, self.replies.append, self.restarts.append, self._reload
        )

    def is_up(self, replica: FakeReplica) -> bool:
        return replica.number not in self.away

    def _reload(self) -> None:
        self.num_reloads += 1

    def _send(self, number: int, hold: Hold) -> None:
        if hold.holding is not None:
            assert self.alive[number].holdings.is_changing, "it is recorded first"
        self.sent.append((number, hold))

    def add(self, order_id: str, action: Any, **fields: Any) -> None:
        self.orders.add(Order(order_id=order_id, action=action, **fields))

    def reload(self, order_id: str, folder: str = "/two") -> None:
        self.add(order_id, "reload", model=folder)
        self.searches.pop(folder)(folder)

    def take_sent(self) -> list[tuple[int, str]]:
        sent, self.sent = self.sent, []
        return [(number, hold.order_id) for number, hold in sent]

    def held(self, order_id: str, number: int = 0, **fields: Any) -> None:
        self.orders.on_held(self.alive[number], Held(order_id=order_id, **fields))

    def lose(self, number: int = 0, *, has_core: bool = False, is_back: bool = True) -> None:
        """Lose a replica's core, or its workers alone; the next turn finds it back."""
        self.away.add(number)
        self.orders.on_lost(self.alive[number], "lost", has_core=has_core)
        self.orders.go_on()
        if is_back:
            self.away.discard(number)
            self.orders.go_on()

    def take_errors(self) -> dict[str, str]:
        """Take the replies; return their errors by the ids of the orders."""
        replies, self.replies[:] = [*self.replies], []
        return {each.order_id: "" if each.error is None else each.error.message for each in replies}


def test_orders_are_carried_out_one_after_the_other_and_each_has_one_reply() -> None:
    rig = Rig(2)
    rig.add("a", "pause", mode="wait")
    rig.add("b", "resume")
    assert rig.take_sent() == [(0, "a"), (1, "a")]
    rig.held("a")
    rig.held("a")
    assert rig.sent == [] and rig.replies == [], "replica 1 is not done"
    rig.held("a", 1)
    assert rig.take_errors() == {"a": ""} and rig.take_sent() == [(0, "b"), (1, "b")]


def test_a_clear_of_the_caches_waits_for_no_other_order() -> None:
    rig = Rig()
    rig.add("a", "pause", mode="wait")
    rig.add("b", "clear_kv_cache")
    assert rig.take_sent() == [(0, "a"), (0, "b")]
    rig.held("b")
    assert rig.take_errors() == {"b": ""}


def test_an_order_sent_again_joins_the_first_one_or_gets_the_recorded_reply() -> None:
    rig = Rig()
    for _ in range(2):
        rig.add("a", "sleep")
    assert rig.take_sent() == [(0, "a")]
    rig.held("a", error=REFUSED)
    rig.add("a", "sleep")
    assert rig.replies == [Ordered(order_id="a", error=REFUSED)] * 2 and rig.sent == []
    for number in range(MAX_REPLIES):
        rig.add(str(number), "resume")
        rig.held(str(number))
    rig.sent.clear()
    rig.add("a", "sleep")
    assert rig.take_sent() == [(0, "a")], "records have an end"


def test_what_replicas_hold_follows_from_what_they_held_and_is_known_when_they_say_so() -> None:
    rig = Rig()
    holdings = rig.alive[0].holdings
    rig.add("a", "sleep", sleep_level=2)
    assert rig.sent[-1][1].holding == Holding(asleep=["weights", "kv_cache"], drops_pages=True)
    assert holdings.asleep == []
    rig.held("a", generation=0)
    rig.add("b", "wake_up", tags=["weights"])
    assert rig.sent[-1][1].holding == Holding(asleep=["kv_cache"])
    rig.held("b", generation=0)
    rig.reload("c")
    assert rig.sent[-1][1].holding == Holding(model_folder="/two", asleep=["kv_cache"])
    assert holdings.model_folder == "/one"
    rig.held("c", generation=0)
    assert (holdings.model_folder, holdings.asleep, holdings.is_changing) == ("/two", ["kv_cache"], False)
    rig.add("d", "wake_up")
    assert rig.sent[-1][1].holding == Holding()


def test_a_reload_waits_for_its_checkpoint_and_holds_up_no_other_order() -> None:
    rig = Rig()
    rig.add("a", "reload", model="/two")
    rig.add("b", "reload", model="/bad")
    rig.add("c", "resume")
    assert rig.take_sent() == [(0, "c")]
    rig.searches["/bad"](RequestError("it is bad"))
    rig.searches["/two"]("/two")
    assert rig.take_errors() == {"b": "it is bad"} and rig.sent == []
    rig.held("c")
    assert rig.take_sent() == [(0, "a")]


@pytest.mark.parametrize("has_core", [False, True])
def test_a_sleep_amid_which_a_replica_is_lost_is_sent_once_more(has_core: bool) -> None:
    rig = Rig(2)
    rig.add("a", "sleep")
    rig.take_sent()
    rig.lose(has_core=has_core, is_back=False)
    assert rig.sent == []
    rig.lose(has_core=has_core)  # it is lost again before it has got it
    assert rig.take_sent() == [(0, "a")]
    rig.held("a", 1)
    rig.lose(has_core=has_core)
    assert rig.sent == [] and "sleep failed at replica 0 of 2" in rig.replies[0].error.message  # type: ignore[union-attr]
    assert "sleep failed twice and nothing has changed: lost" in rig.take_errors()["a"]


@pytest.mark.parametrize("has_core", [False, True])
def test_a_reload_amid_which_a_replica_is_lost_fails(has_core: bool) -> None:
    rig = Rig()
    rig.reload("a")
    rig.lose(has_core=has_core)
    assert "the old ones stay: lost" in rig.take_errors()["a"]
    rig.held("a", generation=0)
    assert rig.alive[0].holdings.model_folder == "/one" and rig.replies == []


def test_a_core_without_workers_goes_on_with_what_needs_none_and_a_lost_one_is_not_paused() -> None:
    rig = Rig()
    rig.add("a", "pause")
    rig.add("b", "clear_kv_cache")
    rig.take_sent()
    rig.lose(has_core=True)
    assert rig.sent == [] and rig.replies == []
    rig.lose()
    assert rig.take_errors() == {"a": "the core was replaced: try again"} and rig.take_sent() == [(0, "b")]


@pytest.mark.parametrize("action", ["start_profile", "stop_profile"])
def test_a_profile_ends_with_a_lost_replica(action: str) -> None:
    rig = Rig()
    rig.add("a", action)
    rig.lose(has_core=True)
    assert f"{action} failed, no profile is running" in rig.take_errors()["a"]


def test_an_order_waits_for_a_replica_that_is_away_but_not_for_one_that_is_given_up() -> None:
    rig = Rig(3)
    rig.away = {0, 1}
    rig.add("a", "reset_prefix_cache")
    assert rig.take_sent() == [(2, "a")]
    rig.held("a", 2)
    rig.away.discard(0)
    rig.orders.go_on()
    assert rig.take_sent() == [(0, "a")]
    rig.held("a", 0)
    given_up = rig.alive.pop(1)
    assert rig.replies == []
    rig.orders.on_lost(given_up, "lost", has_core=False)
    assert rig.take_errors() == {"a": ""}


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ([1], "sleep failed at replica 1 of 3, which is as it was before; the others have carried it out: "),
        ([0, 1, 2], "it cannot"),
    ],
)
def test_an_order_has_the_errors_of_its_replicas(failing: list[int], message: str) -> None:
    rig = Rig(3)
    rig.add("a", "sleep")
    for number in range(3):
        rig.held("a", number, error=REFUSED if number in failing else None)
    assert rig.take_errors()["a"].startswith(message)


def test_an_order_for_one_replica_goes_to_it_alone() -> None:
    rig = Rig(2)
    rig.add("a", "sleep", replica=1)
    assert rig.take_sent() == [(1, "a")]


def test_a_restart_is_an_order_among_others() -> None:
    rig = Rig(2)
    rig.add("a", "restart_replicas", replica=1)
    rig.add("b", "restart_replicas")
    rig.add("c", "resume")
    assert rig.restarts == [1] and rig.sent == []
    rig.orders.on_restarted("")
    assert rig.restarts == [1, None] and rig.take_errors() == {"a": ""}
    rig.orders.on_restarted("there is one")
    assert rig.take_errors() == {"b": "replicas were not restarted: there is one"} and len(rig.sent) == 2


def test_a_reload_of_the_frontends_is_an_order_among_others() -> None:
    rig = Rig(1)
    rig.add("a", "reload_frontends")
    rig.add("b", "reload_frontends")
    assert rig.num_reloads == 1 and rig.sent == []
    rig.orders.on_reloaded("")
    assert rig.num_reloads == 2 and rig.take_errors() == {"a": ""}
    rig.orders.on_reloaded("it has not come up")
    assert rig.take_errors() == {"b": "it has not come up"}


# ── with a supervisor ────────────────────────────────────────────────────────────────────────────────────────────────

SLEEP = Order(order_id="1", action="sleep")
ASLEEP = ["--asleep", "weights", "kv_cache"]


def holds(engine: RemoteEngine) -> list[int]:
    """Return how many orders each core so far has got."""
    return [sum(isinstance(each, Hold) for each in core.received) for core in engine.of(CORE)]


def run_steps(engine: RemoteEngine, *steps: tuple[Callable[[], bool], Callable[[], object]]) -> None:
    """Let the supervisor run until each condition has held in turn; its action follows at once."""
    left = [*steps]

    def turn() -> bool:
        if left and left[0][0]():
            left.pop(0)[1]()
        return not left

    engine.run_until(turn)


def reply_of(engine: RemoteEngine) -> Ordered | None:
    found = [each for each in engine.frontends[-1].received if isinstance(each, Ordered)]
    return found[-1] if found else None


def test_a_core_lost_amid_a_sleep_takes_its_workers_with_it_and_the_next_one_gets_the_order(
    engine: RemoteEngine,
) -> None:
    engine.start()
    first = engine.core
    engine.frontends[0].send(SLEEP)
    run_steps(
        engine,
        (lambda: holds(engine) == [1], first.end),
        (lambda: holds(engine) == [1, 1], lambda: engine.core.send(Held(order_id="1", generation=1))),
        (lambda: reply_of(engine) is not None, lambda: None),
    )
    assert reply_of(engine) == Ordered(order_id="1") and len(engine.workers) == 2 * 2
    assert engine.core.spec.arguments[-1] == "--asleep", "as before the order"
    assert engine.frontends[0].progress.is_asleep, "and so are those that follow"


@pytest.mark.parametrize("role", [CORE, WORKERS])
def test_a_reload_amid_which_core_or_workers_are_lost_fails_and_the_old_weights_come_back(
    engine: RemoteEngine, role: Any
) -> None:
    engine.start()
    engine.supervisor._orders._find = lambda model, then: then(model)
    engine.frontends[0].send(Order(order_id="1", action="reload", model="/two"))
    run_steps(
        engine,
        (lambda: holds(engine) == [1], lambda: engine.of(role)[-1].end()),
        (lambda: reply_of(engine) is not None and len(engine.workers) == 4, lambda: None),
    )
    ordered = reply_of(engine)
    assert ordered is not None and ordered.error is not None and "the old ones stay" in ordered.error.message
    assert all("/two" not in each.spec.arguments for each in engine.processes)


def test_a_client_whose_frontend_is_lost_gets_the_recorded_reply_from_the_next_one(engine: RemoteEngine) -> None:
    engine.start()
    first = engine.frontends[0]
    first.send(SLEEP)
    run_steps(
        engine,
        (lambda: holds(engine) == [1], first.end),
        (lambda: len(engine.of(FRONTEND)) == 2, lambda: engine.core.send(Held(order_id="1", generation=0))),
        (lambda: engine.frontends[1].has(Progress), lambda: engine.frontends[1].send(SLEEP)),
        (lambda: reply_of(engine) is not None, lambda: None),
    )
    assert reply_of(engine) == Ordered(order_id="1") and holds(engine) == [1]


def test_a_core_whose_workers_were_lost_with_a_new_holding_is_replaced_too(engine: RemoteEngine) -> None:
    engine.start()
    first = engine.core
    engine.frontends[0].send(SLEEP)
    run_steps(
        engine,
        (lambda: holds(engine) == [1], lambda: first.send(ReplaceWorkers(generation=0, reason="lost"))),
        # the core had sent it before it knew of the loss
        (lambda: engine.frontends[0].has(ReplicaDown), lambda: first.send(Held(order_id="1", generation=0))),
        (lambda: holds(engine) == [1, 1], lambda: engine.core.send(Held(order_id="1", generation=1))),
        (lambda: reply_of(engine) is not None, lambda: None),
    )
    assert reply_of(engine) == Ordered(order_id="1") and first.is_closed
    assert engine.core.spec.arguments[-1] == "--asleep"
