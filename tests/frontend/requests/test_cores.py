"""The Frontend with several cores: where requests go, also after the loss of a core."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tokenloom.frontend.replicas.resume_pacer import FACTOR
from tokenloom.frontend.replicas.router import FIRST_RATE
from tokenloom.ipc.codec import decode_ids, encode_ids
from tokenloom.ipc.config.engine_config import EngineConfig
from tokenloom.ipc.errors import ErrorInfo
from tokenloom.ipc.messages.base import PROTOCOL_VERSION, Hello, Welcome
from tokenloom.ipc.messages.client import Control, Done, QueryFailed
from tokenloom.ipc.messages.core import (
    AbortRequests,
    ControlDone,
    EngineControl,
    EngineCoreOutputs,
    EngineCoreRequest,
    Finished,
    Load,
    Started,
)
from tokenloom.ipc.messages.supervisor import (
    CoreUp,
    DrainReplica,
    ReplicaDown,
    ReplicaDrained,
    ReplicasRestarted,
    RestartReplicas,
    Served,
    WorkersUp,
)
from tokenloom.tests.frontend.bench import Bench, new_submit

WELCOME = Welcome(protocol_version=PROTOCOL_VERSION, run_id="r")
LOST = "core of replica was lost"


class Fleet(Bench):
    """A Bench with `num_cores` cores."""

    def __init__(self, num_cores: int = 2) -> None:
        self.by_core: list[list[Any]] = [[] for _ in range(num_cores)]
        super().__init__(config=EngineConfig(data_parallel_size=num_cores))
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

    def abort_shown(self) -> bool:
        """Abort the only open answer as the dashboard does."""
        (shown,) = self.frontend.metrics.open_answers(9)
        return self.frontend.abort_answer(shown["key"])

    def send(self, request_id: str, **fields: Any) -> tuple[int, EngineCoreRequest]:
        """Submit a request; return the core that gets it, and its message."""
        before = [len(messages) for messages in self.by_core]
        self.say(new_submit(request_id, **fields))
        return self.last(before)

    def last(self, before: list[int] | None = None) -> tuple[int, EngineCoreRequest]:
        found = [
            (core, message)
            for core, messages in enumerate(self.by_core)
            for message in messages[0 if before is None else before[core] :]
            if isinstance(message, EngineCoreRequest)
        ]
        return found[-1]

    def from_core(self, core: int, **columns: Any) -> None:
        self.frontend.on_core_message(EngineCoreOutputs(**columns), core)
        self.turn()

    def start(self, core: int, key: int) -> None:
        self.from_core(core, accepted=[key], started=[Started(key=key)])

    def token(self, core: int, key: int, start: int, token_id: int) -> None:
        columns = {"keys": key, "starts": start, "counts": 1, "token_ids": token_id}
        self.from_core(core, **{name: encode_ids([value]) for name, value in columns.items()})

    def lose(self, core: int, **fields: Any) -> None:
        self.clear()
        self.frontend.on_control_message(ReplicaDown(replica=core, reason=LOST, **fields))
        self.turn()

    def welcome(self, core: int) -> None:
        self.frontend.on_control_message(CoreUp(core_epoch=1, replica=core))
        self.frontend.on_core_message(WELCOME, core)
        self.turn()

    def keys(self, core: int) -> list[int]:
        """The keys of all requests that were sent to a core."""
        requests = [message for message in self.by_core[core] if isinstance(message, EngineCoreRequest)]
        return [child.key for request in requests for child in request.children]

    def aborts(self, core: int) -> list[int]:
        orders = [message for message in self.by_core[core] if isinstance(message, AbortRequests)]
        return [key for order in orders for key in order.keys]


def test_an_answer_of_a_lost_core_goes_on_at_another_with_its_tokens() -> None:
    fleet = Fleet()
    first, request = fleet.send("r", params={"seed": 5, "max_tokens": 9})
    key = request.children[0].key
    fleet.start(first, key)
    fleet.token(first, key, 0, 70)
    fleet.lose(first)
    second, again = fleet.last()
    assert second != first and again.num_losses == 1
    (child,) = again.children
    assert decode_ids(child.output_token_ids).tolist() == [70] and child.seed == 5
    fleet.token(second, child.key, 1, 71)
    fleet.from_core(second, finished=[Finished(key=child.key, reason="length")])
    deltas = fleet.deltas()
    assert b"".join(delta.token_ids for delta in deltas) == encode_ids([70, 71])
    assert deltas[-1].finish_reason == "length"


def test_late_columns_of_a_core_that_no_longer_owns_an_answer_change_nothing() -> None:
    fleet = Fleet()
    first, request = fleet.send("r")
    key = request.children[0].key
    fleet.start(first, key)
    fleet.lose(first, has_core=True)
    assert fleet.aborts(first) == [key], "the core lives, so that the answer has to be ended there"
    fleet.heard()
    fleet.token(first, key, 0, 70)
    fleet.from_core(first, finished=[Finished(key=key, reason="error", error=ErrorInfo("internal", "late"))])
    assert fleet.deltas() == []
    second, again = fleet.last()
    fleet.token(second, again.children[0].key, 0, 71)
    assert [delta.token_ids for delta in fleet.deltas()] == [encode_ids([71])]


def test_answers_of_one_request_stay_together() -> None:
    fleet = Fleet(3)
    _, request = fleet.send("r", params={"n": 5, "seed": 1})
    assert len(request.children) == 5 and sum(map(len, map(fleet.keys, range(3)))) == 5


def test_prompts_with_a_long_common_beginning_go_to_one_core_and_others_spread() -> None:
    fleet, common = Fleet(3), "a city in France " * 40
    homes = []
    for i in range(6):
        core, request = fleet.send(f"s{i}", prompt=f"{common}{i}")
        homes.append(core)
        key = request.children[0].key
        fleet.start(core, key)
        fleet.now += 0.05
        fleet.token(core, key, 0, 70)
        fleet.from_core(core, finished=[Finished(key=key, reason="stop")])
    assert len(set(homes)) == 1
    others = [fleet.send(f"o{i}", prompt=f"{i} words " * 30)[0] for i in range(12)]
    assert all(others.count(core) >= 2 for core in range(3)), others


def test_a_request_that_ends_three_cores_is_given_up_and_others_go_on() -> None:
    fleet = Fleet(4)
    core, request = fleet.send("poison")
    for num_losses in (1, 2):
        fleet.start(core, request.children[0].key)
        fleet.lose(core)
        core, request = fleet.last()
        assert request.num_losses == num_losses
    innocent = next(f"i{i}" for i in range(99) if fleet.send(f"i{i}")[0] == core)  # it waits there
    fleet.start(core, request.children[0].key)
    fleet.heard()
    fleet.lose(core)
    (delta,) = fleet.deltas()
    assert delta.request_id == "poison" and delta.error is not None
    assert "3 times and was given up" in delta.error.message and LOST in delta.error.message
    (moved,) = [message for messages in fleet.by_core for message in messages if isinstance(message, EngineCoreRequest)]
    assert moved.num_losses == 0, f"{innocent} was not computed"


@pytest.mark.parametrize("num_cores", [1, 4])
def test_a_request_that_a_core_was_about_to_take_in_counts_as_in_work(num_cores: int) -> None:
    fleet = Fleet(num_cores)
    core, request = fleet.send("poison")
    other, _ = fleet.send("other")
    for num_losses in (1, 2):
        fleet.lose(core, touched=[request.children[0].key, 10_000])
        if num_cores == 1:
            fleet.welcome(core)
        requests = [
            message for messages in fleet.by_core for message in messages if isinstance(message, EngineCoreRequest)
        ]
        assert sorted(each.num_losses for each in requests) == [0, num_losses] if core == other else [num_losses]
        request = max(requests, key=lambda each: each.num_losses)
        core = next(i for i, messages in enumerate(fleet.by_core) if request in messages)
        other = core if num_cores == 1 else -1
    fleet.heard()
    fleet.lose(core, touched=[request.children[0].key])
    (delta,) = fleet.deltas()
    assert delta.request_id == "poison" and delta.error is not None
    assert "3 times and was given up" in delta.error.message


def test_a_request_that_ran_alone_before_the_one_that_ends_the_core_is_not_given_up() -> None:
    fleet = Fleet()
    fleet.lose(1)
    poison, innocent = (fleet.send(request_id)[1] for request_id in ("poison", "innocent"))
    for num_losses in (1, 2, 3):
        fleet.start(0, innocent.children[0].key)  # at last alone; its token is lost with the core
        fleet.heard()
        fleet.lose(0, touched=[poison.children[0].key])
        ended = fleet.deltas()
        fleet.welcome(0)
        sent = [each for each in fleet.by_core[0] if isinstance(each, EngineCoreRequest)]
        if num_losses < 3:
            assert ended == [] and [each.num_losses for each in sent] == [num_losses] * 2
            poison, innocent = sent
    assert [(delta.request_id, delta.finish_reason) for delta in ended] == [("poison", "error")]
    assert [each.num_losses for each in sent] == [2]


def test_a_new_token_between_two_losses_clears_an_answer() -> None:
    fleet = Fleet(3)
    core, request = fleet.send("r", params={"max_tokens": 99})
    for i in range(8):
        key = request.children[0].key
        fleet.start(core, key)
        fleet.token(core, key, i, 70)
        fleet.lose(core)
        fleet.welcome(core)
        core, request = fleet.last()
        assert request.num_losses == 1


def test_without_any_core_requests_wait_for_the_first_that_comes_back() -> None:
    fleet = Fleet()
    core, request = fleet.send("old")
    fleet.start(core, request.children[0].key)
    fleet.lose(core)
    fleet.lose(1 - core)
    fleet.say(new_submit("new"))
    assert fleet.keys(0) == fleet.keys(1) == [] and not fleet.frontend.is_welcome(to_all=False)
    fleet.welcome(core)
    assert len(fleet.keys(core)) == 2 and isinstance(fleet.by_core[core][0], Hello)


def test_requests_of_a_lost_core_are_resumed_in_the_order_of_their_arrival_as_fast_as_another_computes_them() -> None:
    fleet, sent = Fleet(), list[str]()
    fleet.lose(1)
    for i in range(60):
        fleet.now += 0.01
        fleet.say(new_submit(f"r{i}", prompt=None, prompt_token_ids=encode_ids([i + 1] * 400)))
        sent.append(fleet.last()[1].prompt_token_ids.hex())
    num_tokens = len(sent[0]) // 8
    fleet.welcome(1)
    fleet.lose(0)
    resumed: list[int] = []
    for _ in range(28):
        fleet.turn()
        resumed.append(len(fleet.keys(1)))
        fleet.now += 0.1
    most = FACTOR * FIRST_RATE / num_tokens + 1
    assert 1 <= resumed[0] <= most < 60
    for i in range(len(resumed) - 10):
        assert resumed[i + 10] - resumed[i] <= most
    assert resumed[-1] == 60
    requests = [message for message in fleet.by_core[1] if isinstance(message, EngineCoreRequest)]
    assert [request.prompt_token_ids.hex() for request in requests] == sent


def test_a_request_that_ends_while_it_waits_to_be_resumed_is_sent_nowhere() -> None:
    fleet = Fleet()
    core, _ = fleet.send("r")
    fleet.lose(1 - core)
    fleet.lose(core)
    assert fleet.abort_shown()
    fleet.welcome(core)
    assert fleet.keys(core) == []


def test_workers_that_come_back_get_requests_again_and_keep_theirs_if_there_is_no_other_core() -> None:
    fleet = Fleet()
    core, request = fleet.send("r")
    fleet.lose(1 - core)
    fleet.lose(core, has_core=True)
    assert fleet.aborts(core) == fleet.keys(core) == [], "its core keeps it until there are workers"
    fleet.frontend.on_control_message(WorkersUp(generation=1, replica=core))
    fleet.token(core, request.children[0].key, 0, 70)
    assert fleet.deltas() and fleet.send("next")[0] == core


def test_requests_without_a_core_go_to_the_one_whose_workers_come_back_first() -> None:
    fleet = Fleet()
    fleet.lose(1)
    fleet.lose(0, has_core=True)
    fleet.say(new_submit("new"))
    assert fleet.keys(0) == fleet.keys(1) == []
    fleet.frontend.on_control_message(WorkersUp(generation=1, replica=1))  # its core is not back yet
    fleet.turn()
    assert fleet.keys(0) == fleet.keys(1) == []
    fleet.frontend.on_control_message(WorkersUp(generation=1, replica=0))
    fleet.turn()
    assert len(fleet.keys(0)) == 1 and fleet.keys(1) == []


def test_an_aborted_request_is_aborted_at_its_own_core() -> None:
    fleet = Fleet()
    core, request = fleet.send("r")
    assert fleet.abort_shown()
    fleet.turn()
    assert fleet.aborts(core) == [request.children[0].key] and fleet.aborts(1 - core) == []


def control(fleet: Fleet, query_id: int, action: Any) -> int:
    """Send a command; return its id at the cores, which all get it."""
    fleet.clear()
    fleet.say(Control(query_id=query_id, action=action))
    found = [[each for each in messages if isinstance(each, EngineControl)] for messages in fleet.by_core]
    (control_id,) = {each.control_id for messages in found for each in messages}
    assert [len(messages) for messages in found] == [1] * len(found)
    return control_id


def test_a_command_is_for_all_cores_and_done_when_all_have_carried_it_out() -> None:
    fleet = Fleet(3)
    control_id = control(fleet, 1, "reset_prefix_cache")
    for core in range(3):
        assert fleet.heard() == []
        fleet.frontend.on_core_message(ControlDone(control_id=control_id), core)
        fleet.turn()
    (done,) = fleet.heard()
    assert isinstance(done, Done) and done.query_id == 1
    control_id = control(fleet, 2, "sleep")
    for core in range(3):
        error = ErrorInfo("request", "it cannot") if core == 1 else None
        fleet.frontend.on_core_message(ControlDone(control_id=control_id, error=error), core)
    fleet.turn()
    (failed,) = fleet.heard()
    assert isinstance(failed, QueryFailed)
    assert "sleep failed at replica 1 of 3, which is as it was before; the others have" in failed.error.message
    assert failed.error.message.endswith(". it cannot")


def test_a_reload_that_fails_everywhere_has_the_error_of_a_replica() -> None:
    fleet = Fleet(2)
    control_id = control(fleet, 1, "wake_up")
    for core in range(2):
        error = ErrorInfo("request", f"it cannot at {core}")
        fleet.frontend.on_core_message(ControlDone(control_id=control_id, error=error), core)
    fleet.turn()
    (failed,) = fleet.heard()
    assert isinstance(failed, QueryFailed) and failed.error.message == "it cannot at 0"


def test_a_frontend_tells_the_supervisor_once_that_it_serves() -> None:
    fleet = Fleet()
    reports = fleet.frontend.outbox.to_supervisor
    for number in range(2):
        core, request = fleet.send(f"r{number}")
        fleet.start(core, request.children[0].key)
        assert len(reports) == number, "a start is no answer"
        for token in range(2):
            fleet.token(core, request.children[0].key, token, 70)
            assert reports == [Served()]


def drained(fleet: Fleet) -> list[int]:
    """Take the replicas that the frontend has reported as drained."""
    reports = fleet.frontend.outbox.to_supervisor
    found = [each.replica for each in reports if isinstance(each, ReplicaDrained)]
    reports.clear()
    return found


def test_a_replica_that_drains_gets_nothing_new_and_keeps_its_answers_until_its_time_is_over() -> None:
    fleet = Fleet()
    core, request = fleet.send("r", params={"max_tokens": 9})
    key = request.children[0].key
    fleet.start(core, key)
    fleet.token(core, key, 0, 70)
    fleet.frontend.on_control_message(DrainReplica(replica=core, limit_s=2.0))
    assert all(fleet.send(f"n{i}")[0] != core for i in range(8))
    fleet.frontend.on_control_message(WorkersUp(generation=1, replica=core))  # they were lost and are back
    assert all(fleet.send(f"m{i}")[0] != core for i in range(8))
    fleet.token(core, key, 1, 71)
    assert drained(fleet) == []
    fleet.clear()
    fleet.now += 2.0
    fleet.turn()
    fleet.turn()
    assert drained(fleet) == [core] and fleet.aborts(core) == [key]
    elsewhere, again = fleet.last()
    assert elsewhere != core and decode_ids(again.children[0].output_token_ids).tolist() == [70, 71]
    assert again.num_losses == 0
    fleet.lose(core)
    assert fleet.keys(1 - core) == [], "nothing was left there"
    fleet.welcome(core)
    assert core in {fleet.send(f"o{i}")[0] for i in range(8)}


def test_a_replica_without_answers_has_drained_at_once_and_one_whose_last_answer_ends_then() -> None:
    fleet = Fleet()
    core, request = fleet.send("r")
    for replica in range(2):
        fleet.frontend.on_control_message(DrainReplica(replica=replica, limit_s=9.0))
    fleet.turn()
    assert drained(fleet) == [1 - core]
    fleet.start(core, request.children[0].key)
    fleet.from_core(core, finished=[Finished(key=request.children[0].key, reason="stop")])
    fleet.turn()
    assert drained(fleet) == [core]


def test_an_order_to_restart_replicas_is_answered_by_the_supervisor() -> None:
    fleet = Fleet()
    for query_id, replica in ((1, None), (2, 1)):
        fleet.say(Control(query_id=query_id, action="restart_replicas", replica=replica))
    orders = [each for each in fleet.frontend.outbox.to_supervisor if isinstance(each, RestartReplicas)]
    assert [order.replica for order in orders] == [None, 1] and fleet.heard() == []
    fleet.frontend.on_control_message(ReplicasRestarted(replica=1, error=ErrorInfo("request", "it cannot")))
    fleet.turn()
    (failed,) = fleet.heard()
    assert isinstance(failed, QueryFailed) and failed.query_id == 2
    fleet.frontend.on_control_message(ReplicasRestarted())
    fleet.turn()
    (done,) = fleet.heard()
    assert isinstance(done, Done) and done.query_id == 1


def test_one_replica_alone_is_not_restarted() -> None:
    fleet = Fleet(1)
    (failed,) = fleet.say(Control(query_id=1, action="restart_replicas"))
    assert isinstance(failed, QueryFailed) and "--data-parallel-size 2" in failed.error.message


@pytest.mark.parametrize("is_final", [False, True])
def test_a_command_waits_for_a_new_core_but_not_for_one_that_is_given_up(is_final: bool) -> None:
    fleet = Fleet()
    control_id = control(fleet, 1, "reset_prefix_cache")
    fleet.frontend.on_core_message(ControlDone(control_id=control_id), 0)
    fleet.lose(1, is_final=is_final)
    if not is_final:
        assert fleet.heard() == []
        fleet.welcome(1)
        assert any(isinstance(message, EngineControl) for message in fleet.by_core[1])
        fleet.frontend.on_core_message(ControlDone(control_id=control_id), 1)
        fleet.turn()
    (done,) = fleet.heard()
    assert isinstance(done, Done)
    if is_final:
        fleet.say(Control(query_id=2, action="reset_prefix_cache"))
        assert fleet.heard() == [] and any(isinstance(message, EngineControl) for message in fleet.by_core[0])


def test_the_work_of_other_frontends_at_a_core_counts_until_it_is_done() -> None:
    fleet = Fleet()
    for busy in (0, 1):
        fleet.frontend.on_core_message(Load(waiting_tokens=1_000_000, num_open=50), busy)
        cores = [fleet.send(f"r{busy}-{number}", prompt_token_ids=encode_ids([busy, number]))[0] for number in range(6)]
        assert set(cores) == {1 - busy}
        fleet.frontend.on_core_message(Load(), busy)
    cores = [fleet.send(f"last-{number}", prompt_token_ids=encode_ids([3, number]))[0] for number in range(12)]
    assert set(cores) == {0, 1}


def test_the_dashboard_shows_random_keys_that_stay_and_no_ids() -> None:
    fleet = Fleet()
    for name in ("alice-1", "alice-2"):
        fleet.send(name)
    shown = fleet.frontend.metrics.open_answers(9)
    assert "alice" not in str(shown) and len({each["key"] for each in shown}) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", each["key"]) for each in shown)
    assert [each["key"] for each in fleet.frontend.metrics.open_answers(9)] == [each["key"] for each in shown]
    for guess in ("", "0", "1", shown[0]["key"][:-1]):
        assert not fleet.frontend.abort_answer(guess)
    assert fleet.frontend.abort_answer(shown[1]["key"]) and not fleet.frontend.abort_answer(shown[1]["key"])
    assert [each["key"] for each in fleet.frontend.metrics.open_answers(9)] == [shown[0]["key"]]
