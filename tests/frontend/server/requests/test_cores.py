"""The Frontend with several cores: where requests go, also after the loss of a core."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest

from tokenloom.frontend.server.replicas.resume_pacer import FACTOR
from tokenloom.frontend.server.replicas.router import FIRST_RATE
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.errors import ErrorInfo
from tokenloom.ipc.messages.base import PROTOCOL_VERSION, Hello, Welcome
from tokenloom.ipc.messages.client import Control, Done, QueryFailed
from tokenloom.ipc.messages.core import (
    AbortRequests,
    EngineCoreOutputs,
    EngineCoreRequest,
    Finished,
    Load,
    Prefetch,
    Prefetched,
    Started,
)
from tokenloom.ipc.messages.orders import Order
from tokenloom.ipc.messages.supervisor import (
    CoreUp,
    DrainReplica,
    ReplicaDown,
    ReplicaDrained,
    Served,
    WorkersUp,
)
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.frontend.bench import Bench, new_submit

WELCOME = Welcome(protocol_version=PROTOCOL_VERSION, run_id="r")
LOST = "core of replica was lost"


class Sent(NamedTuple):
    """A request with its core."""

    core: int
    request: EngineCoreRequest

    @property
    def key(self) -> int:
        return self.request.children[0].key


class Fleet(Bench):
    """A Bench with `num_cores` cores."""

    def __init__(self, num_cores: int = 2, **options: Any) -> None:
        self.by_core: list[list[Any]] = [[] for _ in range(num_cores)]
        super().__init__(config=EngineConfig(data_parallel_size=num_cores, **options))
        for core in range(1, num_cores):
            self.frontend.on_core_message(WELCOME, core)
        self.turn()
        self.clear()

    def turn(self) -> None:
        num_before = len(self.to_core)
        super().turn()
        self.by_core[0] += self.to_core[num_before:]
        for messages, new in zip(self.by_core[1:], self.frontend.outbox.to_cores[1:], strict=True):
            messages += new
            new.clear()

    def clear(self) -> None:
        for messages in self.by_core:
            messages.clear()

    def sent(self) -> list[Sent]:
        """Return the requests at the cores since the last loss, core by core."""
        return [
            Sent(core, message)
            for core, messages in enumerate(self.by_core)
            for message in messages
            if isinstance(message, EngineCoreRequest)
        ]

    def send(self, request_id: str = "r", **fields: Any) -> Sent:
        before = self.sent()
        self.say(new_submit(request_id, **fields))
        return next(each for each in self.sent() if each not in before)

    def prefetches(self) -> list[tuple[int, Prefetch]]:
        return [(core, each) for core in range(2) for each in self.by_core[core] if isinstance(each, Prefetch)]

    def keys(self, core: int) -> list[int]:
        return [child.key for each in self.sent() if each.core == core for child in each.request.children]

    def aborts(self, core: int) -> list[int]:
        orders = [message for message in self.by_core[core] if isinstance(message, AbortRequests)]
        return [key for order in orders for key in order.keys]

    def from_core(self, core: int, message: Any) -> None:
        self.frontend.on_core_message(message, core)
        self.turn()

    def start(self, sent: Sent) -> Sent:
        self.from_core(sent.core, EngineCoreOutputs(accepted=[sent.key], started=[Started(key=sent.key)]))
        return sent

    def token(self, sent: Sent, start: int, token_id: int) -> None:
        columns = {"keys": sent.key, "starts": start, "counts": 1, "token_ids": token_id}
        outputs = {name: encode_ids([value]) for name, value in columns.items()}
        self.from_core(sent.core, EngineCoreOutputs(**outputs))

    def finish(self, sent: Sent, reason: Any = "stop", error: ErrorInfo | None = None) -> None:
        finished = [Finished(key=sent.key, reason=reason, error=error)]
        self.from_core(sent.core, EngineCoreOutputs(finished=finished))

    def order(self, message: Any) -> None:
        """Receive a message of the supervisor."""
        self.frontend.on_control_message(message)
        self.turn()

    def lose(self, core: int, **fields: Any) -> list[Sent]:
        """Lose a core; return the requests that are sent to others."""
        self.clear()
        self.order(ReplicaDown(replica=core, reason=LOST, **fields))
        return self.sent()

    def welcome(self, core: int) -> None:
        self.order(CoreUp(core_epoch=1, replica=core))
        self.from_core(core, WELCOME)

    def take_reports(self, kind: type[Any]) -> list[Any]:
        """Take the messages to the supervisor; return those of a type."""
        reports = list(self.frontend.outbox.to_supervisor)
        self.frontend.outbox.to_supervisor.clear()
        return [each for each in reports if isinstance(each, kind)]

    def given_up(self) -> str:
        """Return the id of the one request that ends, since it has ended three cores."""
        (delta,) = self.deltas()
        assert delta.error is not None and "3 times and was given up" in delta.error.message
        assert LOST in delta.error.message
        return delta.request_id


def test_an_answer_of_a_lost_core_goes_on_at_another_with_its_tokens_and_late_columns_change_nothing() -> None:
    fleet = Fleet()
    first = fleet.start(fleet.send(params={"seed": 5, "max_tokens": 9}))
    fleet.token(first, 0, 70)
    (second,) = fleet.lose(first.core, has_core=True)
    assert fleet.aborts(first.core) == [first.key], "the core lives, so that the answer has to be ended there"
    assert second.core != first.core and second.request.num_losses == 1
    (child,) = second.request.children
    assert decode_ids(child.output_token_ids).tolist() == [70] and child.seed == 5
    fleet.token(first, 1, 72)
    fleet.finish(first, "error", ErrorInfo("internal", "late"))
    fleet.token(second, 1, 71)
    fleet.finish(second, "length")
    deltas = fleet.deltas()
    assert b"".join(delta.token_ids for delta in deltas) == encode_ids([70, 71])
    assert deltas[-1].finish_reason == "length"


def test_prompts_with_a_long_common_beginning_go_to_one_core_and_others_spread() -> None:
    fleet, common = Fleet(3), "a city in France " * 40
    homes = set()
    for i in range(6):
        sent = fleet.start(fleet.send(f"s{i}", prompt=f"{common}{i}"))
        homes.add(sent.core)
        fleet.now += 0.05
        fleet.token(sent, 0, 70)
        fleet.finish(sent)
    assert len(homes) == 1
    others = [fleet.send(f"o{i}", prompt=f"{i} words " * 30).core for i in range(12)]
    assert all(others.count(core) >= 2 for core in range(3)), others
    assert len(fleet.send(params={"n": 5, "seed": 1}).request.children) == 5, "answers to one prompt stay together"


@pytest.mark.parametrize("num_cores", [1, 4])
def test_a_request_that_a_core_was_about_to_take_in_counts_as_in_work(num_cores: int) -> None:
    fleet = Fleet(num_cores)
    poison, other = fleet.send("poison"), fleet.send("other").core
    for num_losses in (1, 2):
        fleet.lose(poison.core, touched=[poison.key, 10_000])
        if num_cores == 1:
            fleet.welcome(0)
        found = sorted(fleet.sent(), key=lambda each: each.request.num_losses)
        losses = [each.request.num_losses for each in found]
        assert losses == ([0, num_losses] if poison.core == other else [num_losses])
        poison = found[-1]
        other = poison.core if num_cores == 1 else -1
    fleet.heard()
    fleet.lose(poison.core, touched=[poison.key])
    assert fleet.given_up() == "poison"


def test_a_request_that_ran_alone_before_the_one_that_ends_the_core_is_not_given_up() -> None:
    fleet = Fleet()
    fleet.lose(1)
    sent = [fleet.send(request_id) for request_id in ("poison", "innocent")]
    for num_losses in (1, 2, 3):
        poison, innocent = sent
        fleet.start(innocent)  # at last alone; its token is lost with the core
        fleet.heard()
        fleet.lose(0, touched=[poison.key])
        ended = fleet.deltas()
        fleet.welcome(0)
        sent = fleet.sent()
        assert num_losses == 3 or (ended, [each.request.num_losses for each in sent]) == ([], [num_losses] * 2)
    assert [(delta.request_id, delta.finish_reason) for delta in ended] == [("poison", "error")]
    assert [each.request.num_losses for each in sent] == [2]


def test_a_new_token_between_two_losses_clears_an_answer() -> None:
    fleet = Fleet(3)
    sent = fleet.send(params={"max_tokens": 99})
    for i in range(8):
        fleet.token(fleet.start(sent), i, 70)
        core = sent.core
        (sent,) = fleet.lose(core)
        fleet.welcome(core)
        assert sent.request.num_losses == 1


def test_without_any_core_requests_that_do_not_end_wait_for_the_first_that_comes_back() -> None:
    fleet = Fleet()
    core = fleet.start(fleet.send("old")).core
    fleet.lose(core)
    fleet.lose(1 - core)
    (shown,) = fleet.frontend.metrics.open_answers(9)
    assert fleet.frontend.abort_answer(shown["key"]), "as the dashboard does"
    fleet.say(new_submit("new"), new_submit("newer"))
    assert fleet.sent() == [] and not fleet.frontend.is_welcome(to_all=False)
    fleet.welcome(core)
    assert len(fleet.keys(core)) == 2 and isinstance(fleet.by_core[core][0], Hello)


def test_requests_of_a_lost_core_are_resumed_in_the_order_of_their_arrival_as_fast_as_another_computes_them() -> None:
    fleet, prompts, num_tokens = Fleet(), list[bytes](), 400
    fleet.lose(1)
    for i in range(60):
        fleet.now += 0.01
        prompts.append(encode_ids([i + 1] * num_tokens))
        fleet.send(f"r{i}", prompt_token_ids=prompts[-1])
    fleet.welcome(1)
    fleet.lose(0)
    resumed: list[int] = []
    for _ in range(28):
        fleet.turn()
        resumed.append(len(fleet.keys(1)))
        fleet.now += 0.1
    most = FACTOR * FIRST_RATE / num_tokens + 1
    assert 1 <= resumed[0] <= most < 60
    assert all(resumed[i + 10] - resumed[i] <= most for i in range(len(resumed) - 10))
    assert [each.request.prompt_token_ids for each in fleet.sent()] == prompts


def test_workers_that_come_back_get_requests_again_and_keep_theirs_if_there_is_no_other_core() -> None:
    fleet = Fleet()
    sent = fleet.send()
    fleet.lose(1 - sent.core)
    fleet.lose(sent.core, has_core=True)
    assert fleet.aborts(sent.core) == fleet.sent() == [], "its core keeps it until there are workers"
    fleet.order(WorkersUp(generation=1, replica=sent.core))
    fleet.token(sent, 0, 70)
    assert fleet.deltas() and fleet.send("next").core == sent.core


def test_a_frontend_tells_the_supervisor_once_that_it_serves() -> None:
    fleet = Fleet()
    for number in range(2):
        sent = fleet.start(fleet.send(f"r{number}"))
        assert fleet.take_reports(Served) == [], "a start is no answer"
        for token in range(2):
            fleet.token(sent, token, 70)
            assert fleet.take_reports(Served) == [Served()] * (number == token == 0)


def test_a_replica_that_drains_gets_nothing_new_and_keeps_its_answers_until_its_time_is_over() -> None:
    fleet = Fleet()
    sent = fleet.start(fleet.send(params={"max_tokens": 9}))
    core = sent.core
    fleet.token(sent, 0, 70)
    fleet.order(DrainReplica(replica=core, limit_s=2.0))
    assert all(fleet.send(f"n{i}").core != core for i in range(8))
    fleet.order(WorkersUp(generation=1, replica=core))  # they were lost and are back
    assert all(fleet.send(f"m{i}").core != core for i in range(8))
    fleet.token(sent, 1, 71)
    assert fleet.take_reports(ReplicaDrained) == []
    fleet.clear()
    fleet.now += 2.0
    fleet.turn()
    fleet.turn()
    assert fleet.take_reports(ReplicaDrained) == [ReplicaDrained(replica=core)] and fleet.aborts(core) == [sent.key]
    (again,) = fleet.sent()
    assert again.core != core and decode_ids(again.request.children[0].output_token_ids).tolist() == [70, 71]
    assert again.request.num_losses == 0
    assert fleet.lose(core) == [], "nothing was left there"
    fleet.welcome(core)
    assert core in {fleet.send(f"o{i}").core for i in range(8)}


def test_a_replica_without_answers_has_drained_at_once_and_one_whose_last_answer_ends_then() -> None:
    fleet = Fleet()
    sent = fleet.send()
    for replica in range(2):
        fleet.order(DrainReplica(replica=replica, limit_s=9.0))
    assert fleet.take_reports(ReplicaDrained) == [ReplicaDrained(replica=1 - sent.core)]
    fleet.finish(fleet.start(sent))
    fleet.turn()
    assert fleet.take_reports(ReplicaDrained) == [ReplicaDrained(replica=sent.core)]


def test_an_order_to_restart_replicas_goes_to_the_supervisor_if_there_are_several() -> None:
    fleet = Fleet()
    for query_id, replica in ((1, None), (2, 1)):
        fleet.say(Control(query_id=query_id, action="restart_replicas", replica=replica))
    assert [order.replica for order in fleet.take_reports(Order)] == [None, 1] and fleet.heard() == []
    (failed,) = Fleet(1).say(Control(query_id=1, action="restart_replicas"))
    assert isinstance(failed, QueryFailed) and "--data-parallel-size 2" in failed.error.message


@pytest.mark.parametrize("is_final", [False, True])
def test_a_prefetch_waits_for_a_new_core_but_not_for_one_that_is_given_up(is_final: bool) -> None:
    fleet = Fleet(kv_disk="/disk")
    fleet.say(Control(query_id=1, action="prefetch_kv", prompt_token_ids=encode_ids([5, 6])))
    ((core, message),) = fleet.prefetches()
    fleet.clear()
    fleet.lose(core, is_final=is_final)
    if is_final:
        assert fleet.heard() == [Done(query_id=1)]
    else:
        assert fleet.heard() == []
        fleet.welcome(core)
        assert fleet.prefetches() == [(core, message)]
        fleet.from_core(core, Prefetched(prefetch_id=message.prefetch_id, num_tokens=2))
        assert fleet.heard() == [Done(query_id=1, num_tokens=2)]


def test_the_work_of_other_frontends_at_a_core_counts_until_it_is_done() -> None:
    fleet = Fleet()

    def cores(first: int, num_requests: int) -> set[int]:
        prompts = [encode_ids([first, number]) for number in range(num_requests)]
        return {fleet.send(f"r{first}-{i}", prompt_token_ids=prompt).core for i, prompt in enumerate(prompts)}

    for busy in (0, 1):
        fleet.from_core(busy, Load(waiting_tokens=1_000_000, num_open=50))
        assert cores(busy, 6) == {1 - busy}
        fleet.from_core(busy, Load())
    assert cores(3, 12) == {0, 1}


def test_the_dashboard_shows_random_keys_that_stay_and_no_ids() -> None:
    fleet = Fleet()
    for name in ("alice-1", "alice-2"):
        fleet.send(name)

    def shown_keys() -> list[str]:
        return [each["key"] for each in fleet.frontend.metrics.open_answers(9)]

    first, second = keys = shown_keys()
    assert "alice" not in str(fleet.frontend.metrics.open_answers(9)) and first != second
    assert all(re.fullmatch("[0-9a-f]{32}", key) for key in keys) and shown_keys() == keys
    for guess in ("", "0", "1", first[:-1]):
        assert not fleet.frontend.abort_answer(guess)
    assert fleet.frontend.abort_answer(second) and not fleet.frontend.abort_answer(second)
    assert shown_keys() == [first]
