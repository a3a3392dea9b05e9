"""When the core asks its features which verb, and the effect of their answers, for a feature of the test's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tokenloom.core.features.crash_isolation import AdmissionNotes
from tokenloom.core.features.pause import Pause
from tokenloom.core.request import Ids, Request, WaitReason
from tokenloom.core.scheduling.result_processor import NewTokens
from tokenloom.core.scheduling.step.ledger import LedgerEntry
from tokenloom.core.scheduling.step.step_copies import StepCopies
from tokenloom.core.scheduling.step_feature import StepFeature, StepFeatures, StepPlan
from tokenloom.ipc.messages.base import FinishReason
from tokenloom.ipc.messages.workers import ModelRunnerOutput
from tokenloom.tests.core.harness import Harness, make_request

VERBS = [name for name in vars(StepFeature) if not name.startswith("_")]


def with_feature(feature: StepFeature, **options: Any) -> Harness:
    """Return a core that has this feature beside its own, as the last."""
    harness = Harness(**options)
    features = harness.core.features
    features.use([*features.in_order, feature])
    return harness


class Recorder(StepFeature):
    """Notes the verbs that tell of a request, and the ends of steps."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def arrive(self, request: Request) -> None:
        self.events.append(("arrive", request.key))

    def wait(self, request: Request) -> None:
        self.events.append(("wait", request.key))

    def holds(self, request: Request) -> bool:
        self.events.append(("holds", request.key))
        return False

    def admit(self, request: Request, num_computed: int) -> None:
        self.events.append(("admit", request.key, num_computed))

    def leave(self, request: Request, last_step: int) -> None:
        self.events.append(("leave", request.key, last_step))

    def end(self, request: Request, reason: FinishReason | None) -> None:
        self.events.append(("end", request.key, reason))

    def on_result(self, entry: LedgerEntry, output: ModelRunnerOutput, new_tokens: NewTokens) -> None:
        assert entry.step == output.step
        self.events.append(("on_result", entry.step))


def test_a_request_arrives_waits_is_admitted_leaves_and_ends_before_its_last_result_is_told() -> None:
    recorder = Recorder()
    harness = with_feature(recorder, steps_in_flight=1)
    harness.add(0, [1, 2, 3], 2)
    harness.run()
    life = [("arrive", 0), ("wait", 0), ("holds", 0), ("admit", 0, 0), ("on_result", 1)]
    assert recorder.events == [*life, ("leave", 0, 2), ("end", 0, "length"), ("on_result", 2)]


def test_a_preempted_request_leaves_and_waits_again_and_is_admitted_with_what_the_cache_has() -> None:
    recorder = Recorder()
    harness = with_feature(recorder, steps_in_flight=1, block_size=2)
    harness.add(0, [1, 2, 3, 4, 5], 4)
    harness.turn()
    recorder.events.clear()
    harness.core.scheduler.preempt(harness.core.scheduler.rows.requests()[0])
    harness.turn()
    assert recorder.events[:4] == [("leave", 0, 1), ("wait", 0), ("holds", 0), ("admit", 0, 4)]


@pytest.mark.parametrize("is_running", [True, False])
def test_a_request_that_another_attempt_replaces_ends_without_a_reason(is_running: bool) -> None:
    recorder = Recorder()
    harness = with_feature(recorder, steps_in_flight=1)
    harness.add(0, [1, 2, 3], 9)
    if is_running:
        harness.turn()
    recorder.events.clear()
    harness.add(0, [1, 2, 3], 9, attempt=1, outputs=harness.tokens[0][:])
    leave = [("leave", 0, 1)] if is_running else []
    assert recorder.events == [*leave, ("end", 0, None), ("arrive", 0), ("wait", 0)]


def test_an_aborted_request_ends_once_wherever_it_is() -> None:
    recorder = Recorder()
    harness = with_feature(recorder, max_num_seqs=1)
    for key in (0, 1):
        harness.add(key, [1, 2, 3], 9)
    harness.turn()
    for key in (0, 1):
        harness.abort(key)
    assert [event for event in recorder.events if event[0] == "end"] == [("end", 0, "abort"), ("end", 1, "abort")]


def test_a_feature_is_asked_for_the_verbs_that_it_defines_and_no_others() -> None:
    class OfOneVerb(StepFeature):
        def wait(self, request: Request) -> None: ...

    features, mine = StepFeatures(), OfOneVerb()
    features.use([StepFeature(), mine, OfOneVerb()])
    lists = {name.strip("_"): value for name, value in vars(features).items() if name != "in_order"}
    assert [name for name, bound in lists.items() if bound] == ["wait"] and lists["wait"][0] == mine.wait
    assert len(features.wait) == 2 and lists.keys() <= set(VERBS)


def test_every_verb_is_called_by_the_core() -> None:
    """A verb that nobody calls would be a promise without effect."""
    called = set[str]()

    def noting(name: str) -> Callable[..., Any]:
        verb = getattr(StepFeature, name)

        def note(self: StepFeature, *arguments: Any) -> Any:
            called.add(name)
            return arguments[1] if name == "cut" else verb(self, *arguments)

        note.__name__ = name
        return note

    harness = with_feature(type("OfAllVerbs", (StepFeature,), {name: noting(name) for name in VERBS})())
    for key in range(3):
        harness.add(key, list(range(9)), 4)
    harness.turns(2)
    harness.lose_worker()
    harness.run()
    harness.core.features.expire(0.0)
    assert [next_deadline() for next_deadline in harness.core.features.next_deadline]
    assert harness.core.progress(time.monotonic() + 9.0) is not None
    assert called == set(VERBS)


# ── answers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Holding(StepFeature):
    """Holds some requests."""

    def __init__(self, *keys: int) -> None:
        self.keys = set(keys)
        self.asked: list[int] = []

    def holds(self, request: Request) -> bool:
        self.asked.append(request.key)
        return request.key in self.keys


def test_a_held_request_waits_and_those_behind_it_run() -> None:
    feature = Holding(0)
    harness = with_feature(feature)
    for key in (0, 1):
        harness.add(key, [1, 2, 3], 2)
    for _ in range(9):
        harness.turn()
    assert harness.finished.keys() == {1}
    feature.keys.clear()
    harness.run_to_the_end()


def test_features_are_asked_in_order_up_to_the_first_that_holds() -> None:
    first, second = Holding(0), Holding()
    harness = with_feature(first, steps_in_flight=1)
    harness.core.features.use([*harness.core.features.in_order, second])
    for key in (0, 1):
        harness.add(key, [1, 2, 3], 2)
    harness.turn()
    assert first.asked == [0, 1] and second.asked == [1]


def test_an_admission_is_noted_once_and_not_for_a_request_that_a_pause_holds() -> None:
    noted, pause = list[int](), Pause()
    harness = with_feature(pause)
    notes = AdmissionNotes(lambda request: noted.append(request.key))
    harness.core.features.use([*harness.core.features.in_order, notes])
    harness.add(0, [1, 2, 3], 9)
    harness.turn()
    pause.mode = "wait"
    harness.add(1, [1, 2, 3], 2)
    harness.turns(2)
    assert noted == [0]
    pause.mode = None
    harness.run_to_the_end()
    assert noted == [0, 1]


@pytest.mark.parametrize(("mode", "num_cached", "is_held"), [("wait", -1, True), ("wait", 0, False), (None, -1, False)])
def test_a_pause_that_waits_holds_requests_that_have_never_run(mode: Any, num_cached: int, is_held: bool) -> None:
    pause = Pause()
    pause.mode = mode
    assert pause.holds(make_request(0, num_cached_tokens=num_cached)) is is_held


def test_a_feature_may_block_a_request_that_arrives() -> None:
    class Blocking(StepFeature):
        def arrive(self, request: Request) -> None:
            request.waits_for.add(WaitReason.BLOB)

    harness = with_feature(Blocking())
    harness.add(0, [1, 2, 3], 2)
    harness.turns(3)
    assert harness.core.scheduler.waiting.num_blocked == 1 and not harness.tokens[0]
    (request,) = harness.core.open_requests
    harness.core.scheduler.waiting.release(request, WaitReason.BLOB)
    harness.run_to_the_end()


class Limiting(StepFeature):
    """Lets rows compute few tokens."""

    def __init__(self, most: int, most_of_chunk: int) -> None:
        self.most, self.most_of_chunk = most, most_of_chunk
        self.asked: list[tuple[int, int]] = []

    def limit(self, ahead: Ids) -> None:
        ahead[ahead > self.most] = self.most

    def cut(self, request: Request, count: int, most: int) -> int:
        self.asked.append((count, most))
        return min(count, self.most_of_chunk)


def test_rows_compute_as_many_tokens_as_features_let_them() -> None:
    feature = Limiting(3, 5)
    harness = with_feature(feature, steps_in_flight=1, max_num_batched_tokens=16, max_num_seqs=4)
    harness.add(0, list(range(20)), 2)
    counts = []
    for _ in range(7):
        harness.core.step()
        entry = harness.core.scheduler.ledger.oldest
        counts += [] if entry is None else [entry.batch.num_tokens]
        harness.answer()
    assert counts == [5, 3, 3, 3, 3, 3, 1]  # the admission is cut, what a row has ahead limited
    assert feature.asked[0] == (16, 16), "the most is the budget"


class Later(StepFeature):
    def __init__(self, count: int) -> None:
        self.count = count

    def num_later(self) -> int:
        return self.count


@pytest.mark.parametrize(("num_later", "is_burst"), [(0, True), (2, False)])
def test_requests_that_come_later_are_no_burst_of_prompts(num_later: int, is_burst: bool) -> None:
    harness = with_feature(Later(num_later), steps_in_flight=1, max_num_batched_tokens=64, max_num_seqs=8)
    for key in range(5):
        harness.add(key, [1, 2, key], 40)
    harness.turns(3)
    throttle = harness.core.scheduler.prefill_throttle
    throttle.on_step(5, 0, 1.0)
    throttle.on_step(0, 128, 128.0)  # a prompt token takes as long as a decode step
    throttle._burst_steps = 0
    for key in (10, 11):
        harness.add(key, list(range(30)), 2)
    harness.core.step()
    entry = harness.core.scheduler.ledger.oldest
    assert entry is not None and (entry.batch.num_tokens > 30) is is_burst


class Ordering(StepFeature):
    """Has an order for the workers; `is_due` says so ahead, even if there is none."""

    def __init__(self) -> None:
        self.has_order = self.says_due = False
        self.numbers: list[int] = []

    def is_due(self) -> bool:
        return self.says_due

    def plan(self, step: StepPlan) -> None:
        self.numbers.append(step.number)
        if self.has_order:
            step.delta.copies = StepCopies(b"", b"", [], [], [])


def test_an_order_makes_a_step_without_rows_and_a_step_that_has_none_is_not_sent() -> None:
    feature = Ordering()
    harness = with_feature(feature)
    feature.has_order = True
    assert harness.core.step() == 0 and not feature.numbers, "nobody has said that a step is due"
    feature.has_order, feature.says_due = False, True
    assert harness.core.step() == 0 and feature.numbers == [1]
    feature.has_order = True
    assert harness.core.step() == 2 and feature.numbers == [1, 1, 2]
    entries = harness.core.scheduler.ledger.entries
    assert all(entry.copies is not None and not len(entry.batch.rows) for entry in entries)
    feature.has_order = feature.says_due = False
    harness.run()


class Delaying(StepFeature):
    is_delaying = True

    def delays_step(self) -> bool:
        return self.is_delaying


def test_a_delayed_step_is_sent_when_the_one_in_flight_is_back() -> None:
    feature = Delaying()
    harness = with_feature(feature, steps_in_flight=2)
    harness.add(0, [1, 2, 3], 9)
    assert [harness.core.step(), harness.core.step()] == [1, 0]
    harness.answer()
    assert harness.core.step() == 1
    feature.is_delaying = False
    assert harness.core.step() == 1
    harness.run_to_the_end()


def test_room_is_made_before_requests_are_admitted_and_not_in_steps_of_rows_alone() -> None:
    class MakingRoom(StepFeature):
        num_calls = 0

        def make_room(self) -> None:
            assert len(harness.core.scheduler.waiting) == 1
            self.num_calls += 1

    feature = MakingRoom()
    harness = with_feature(feature)
    harness.add(0, [1, 2, 3], 9)
    harness.turns(5)
    assert feature.num_calls == 1


# ── losses, reports and tests ────────────────────────────────────────────────────────────────────────────────────────


class AtWork(StepFeature):
    """Has something done for all requests that wait."""

    def __init__(self) -> None:
        self.lost: list[list[int]] = []
        self.steps: list[int | None] = []

    def in_work(self, oldest: LedgerEntry | None) -> list[Request]:
        self.steps.append(None if oldest is None else oldest.step)
        return list(harness_of[self].core.scheduler.waiting)

    def reset(self, lost: Sequence[LedgerEntry]) -> None:
        assert not harness_of[self].core.scheduler.rows.num_active, "a request has a row"
        self.lost.append([entry.step for entry in lost])


harness_of: dict[StepFeature, Harness] = {}


def test_lost_workers_were_at_work_for_the_rows_of_their_step_and_for_those_that_a_feature_names() -> None:
    feature = AtWork()
    harness = harness_of[feature] = with_feature(feature, max_num_seqs=1)
    for key in (0, 1):
        harness.add(key, [1, 2, 3], 9)
    harness.core.step()
    assert {request.key: count for request, count in harness.core.scheduler.in_work().items()} == {0: 3, 1: 3}
    assert feature.steps == [1]
    harness.lose_worker()
    assert feature.lost == [[1, 2]] or feature.lost == [[1]]
    harness.run_to_the_end()


@pytest.mark.parametrize(("fields", "is_right"), [({"num_waiting": 77}, True), ({"no_field": 1}, False)])
def test_a_report_is_a_part_of_the_progress(fields: dict[str, object], is_right: bool) -> None:
    class Reporting(StepFeature):
        def report(self) -> dict[str, object]:
            return fields

    core = with_feature(Reporting()).core
    if is_right:
        progress = core.progress(time.monotonic() + 9.0)
        assert progress is not None and progress.num_waiting == 77
    else:
        with pytest.raises(TypeError):
            core.progress(time.monotonic() + 9.0)


def test_the_first_deadline_of_a_feature_wakes_the_core_and_is_applied_by_its_clock() -> None:
    class Timed(StepFeature):
        def __init__(self, deadline: float | None) -> None:
            self.deadline = deadline

        def next_deadline(self) -> float | None:
            return self.deadline

        def expire(self, now: float) -> None:
            self.deadline = None if self.deadline is not None and now >= self.deadline else self.deadline

    timed = [Timed(3.0), Timed(None), Timed(2.0)]
    features = StepFeatures()
    features.use([*timed, StepFeature()])
    assert [next_deadline() for next_deadline in features.next_deadline] == [3.0, None, 2.0]
    features.expire(2.5)
    assert [each.deadline for each in timed] == [3.0, None, None]


def test_a_feature_that_disagrees_with_the_open_requests_is_found() -> None:
    class Forgetful(StepFeature):
        """Does not note the ends of requests."""

        def __init__(self) -> None:
            self.keys = set[int]()

        def arrive(self, request: Request) -> None:
            self.keys.add(request.key)

        def check_invariants(self, requests: Sequence[Request]) -> None:
            assert self.keys == {request.key for request in requests}

    harness = with_feature(Forgetful())
    harness.add(0, [1, 2, 3], 9)
    harness.core.scheduler.check_invariants()
    with pytest.raises(AssertionError):
        harness.run()
