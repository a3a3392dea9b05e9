"""The life of requests as every StepFeature sees it, checked at each verb: a feature of the Harness's cores."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from tokenloom.core.request import Request
from tokenloom.core.scheduling.step_feature import StepFeature
from tokenloom.ipc.messages.base import FinishReason


class Stage(Enum):
    ARRIVED = auto()
    WAITING = auto()
    RUNNING = auto()
    LEFT = auto()


class Life(StepFeature):
    """Knows the stage of each open request. Counts how often each verb came."""

    def __init__(self) -> None:
        self.stages: dict[Request, Stage] = {}
        self.num_arrived = self.num_ended = self.num_admitted = self.num_left = self.num_held = 0

    def _move(self, request: Request, stage: Stage, *before: Stage) -> None:
        assert self.stages.get(request) in before, f"{stage} follows {self.stages.get(request)}"
        self.stages[request] = stage

    def arrive(self, request: Request) -> None:
        assert request not in self.stages, "a request arrives twice"
        self.stages[request] = Stage.ARRIVED
        self.num_arrived += 1

    def wait(self, request: Request) -> None:
        assert request.row < 0
        self._move(request, Stage.WAITING, Stage.ARRIVED, Stage.LEFT)

    def holds(self, request: Request) -> bool:
        assert self.stages[request] is Stage.WAITING and not request.waits_for
        self.num_held += 1
        return False

    def admit(self, request: Request, num_computed: int) -> None:
        assert request.row >= 0 and 0 <= num_computed < request.num_tokens and not request.waits_for
        self._move(request, Stage.RUNNING, Stage.WAITING)
        self.num_admitted += 1

    def leave(self, request: Request, last_step: int) -> None:
        assert request.row < 0 and not request.tables
        self._move(request, Stage.LEFT, Stage.RUNNING)
        self.num_left += 1

    def end(self, request: Request, reason: FinishReason | None) -> None:
        assert self.stages.pop(request) in (Stage.WAITING, Stage.LEFT), "it ends in its row, or twice"
        self.num_ended += 1

    def check_invariants(self, requests: Sequence[Request]) -> None:
        running = {request for request in requests if request.row >= 0}
        assert self.stages.keys() == set(requests), "a request has not arrived, or has not ended"
        assert {each for each, stage in self.stages.items() if stage is Stage.RUNNING} == running
        assert all(stage in (Stage.WAITING, Stage.RUNNING) for stage in self.stages.values())
        assert self.num_arrived == self.num_ended + len(requests), "each arrival has one end"
        assert self.num_admitted == self.num_left + len(running), "each admission has one leave"
