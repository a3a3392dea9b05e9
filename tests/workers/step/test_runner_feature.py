"""A verb goes to the features that define it, in their order, and an order to one that carries it out, or to none."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import msgspec
import pytest
from torch import Tensor

from tokenloom.ipc.errors import ProtocolError
from tokenloom.ipc.messages.adapter import FillSlot
from tokenloom.ipc.messages.base import BulkArray
from tokenloom.ipc.messages.media import Encode
from tokenloom.ipc.messages.workers import Pooled, SchedulerOutput
from tokenloom.scripts.bench.engine_steps import Calls
from tokenloom.tests.workers.random_schedule import execute, frame, message, new_row, new_runner
from tokenloom.workers.step.runner_feature import REFUSALS, BegunStep, RunnerFeature
from tokenloom.workers.step.step_inputs import StepInputs

FIRST = message([0], [3], [], [new_row(0, [5, 6, 7])], [0, 0, 9, 0, 0, 10])
ORDERS = {
    "stores": frame(1, 1),
    "loads": frame(1, 1),
    "fills": [FillSlot(slot=1, digest=b"d", folder="/a")],
    "encodes": [Encode(entry=1, digest=b"d", grid=(1, 1, 1), num_embeds=1, first_piece=0, num_pieces=1)],
}


class Noting(RunnerFeature):
    """Notes its calls of three verbs."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def begin(self, step: SchedulerOutput, begun: BegunStep) -> None:
        begun.enter(f"{self.name}'s stage")
        self.notes.append(f"{self.name} begins")

    def update(self, step: SchedulerOutput) -> None:
        self.notes.append(f"{self.name} updates")

    def clear(self) -> None:
        self.notes.append(f"{self.name} clears")


class NotingAll(Noting):
    """Notes its calls of all verbs, and gives the result a vector."""

    orders = tuple(REFUSALS)

    def beside(self, step: SchedulerOutput) -> AbstractContextManager[object]:
        self.notes.append(f"{self.name} is beside")
        return nullcontext()

    def prepare(self, inputs: StepInputs) -> StepInputs:
        self.notes.append(f"{self.name} prepares {inputs.token_ids.tolist()}")
        return inputs

    def read_hidden(self, hidden: Tensor, inputs: StepInputs, begun: BegunStep) -> None:
        self.notes.append(f"{self.name} reads {len(hidden)}")
        begun.pooled.append(Pooled(row=4, vector=BulkArray(dtype="float32", shape=[0], data=b"")))


def test_a_step_asks_the_features_that_define_a_verb_in_their_order() -> None:
    notes = list[str]()
    runner = new_runner(features=[Noting("a", notes), NotingAll("b", notes), RunnerFeature()])
    assert [each.row for each in runner.execute(FIRST).pooled] == [4]
    started = ["b is beside", "a begins", "b begins", "a updates", "b updates"]
    assert notes == [*started, "b prepares [5, 6, 7]", "b reads 3"]
    notes.clear()
    runner.execute(message())
    runner.clear()
    assert notes == [*started, "a clears", "b clears"]


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_without_its_feature_is_refused_before_rows_change(order: str) -> None:
    step = msgspec.structs.replace(FIRST, **{order: ORDERS[order]})
    runner = new_runner(features=[Noting("a", [])])
    with pytest.raises(ProtocolError, match=REFUSALS[order]):
        runner.start(step)
    assert runner.stage == "begin" and runner._batch.num_active == 0
    runner = new_runner(features=[NotingAll("b", [])])
    assert execute(runner, step).rows == [0]


def test_a_feature_costs_no_call_at_verbs_that_it_does_not_define() -> None:
    counts = []
    for features in ([], [RunnerFeature()]):
        runner = new_runner(features=features)
        runner.execute(FIRST)
        runner.execute(message([0], [1]))
        with Calls() as calls:
            runner.execute(message([0], [1]))
        counts.append(calls.count)
    assert counts[0] == counts[1]
