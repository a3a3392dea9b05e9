"""StepRoom: the base of features that bound the tokens of their kind of requests in a step."""

from __future__ import annotations

from ..request import Request
from ..scheduling.step_feature import StepFeature, StepPlan


class StepRoom(StepFeature):
    """Owner of the tokens that the kind still has in the next step. The feature's `limit` takes those of running
    requests from them, its `admit` names a request, and `cut` takes those of that one's first chunk."""

    def __init__(self) -> None:
        self._left: int | None = None  # tokens of the next step that the kind may still have; None: not known yet
        self._admitted: Request | None = None  # the last one of the kind that was admitted

    def _rest(self) -> int:
        """Return how many tokens are left of the next step, also if `limit` was not asked."""
        raise NotImplementedError

    def cut(self, request: Request, count: int, most: int) -> int:
        if request is not self._admitted:
            return count
        self._admitted = None
        left = self._rest()
        count = min(count, left)
        self._left = left - count
        return count

    def plan(self, step: StepPlan) -> None:
        self._left = None
