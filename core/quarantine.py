"""Finds the request that kills workers, by halving, while all others go on.

A group may be lost for reasons of its own, so the first loss accuses nobody. When a request was in the failing step
twice without getting a token in between, the requests of that step are accused: half of them stand trial, and until
each has got a token nobody else runs. If the group is lost again, the trial is halved; if all get on, the next half
stands trial. Only a request that was alone in the failing step is convicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .request import Request, State

CRASHES_TO_SUSPECT = 2
CRASHES_TO_CONVICT = 3


@dataclass
class _Record:
    num_tokens: int  # known at the last loss
    num_crashes: int  # losses in a row without a new token between


class Quarantine:
    """Invariant: while anyone is on trial, all others are held."""

    def __init__(self) -> None:
        self._record_by_request: dict[Request, _Record] = {}
        self._on_trial: list[Request] = []
        self._next_trials: list[list[Request]] = []

    def is_held(self, request: Request) -> bool:
        """Whether it must not be admitted to a row now."""
        if self._on_trial:
            self._on_trial = [each for each in self._on_trial if each.state is not State.FINISHED]
            self._begin_next_trial()
        return bool(self._on_trial) and request not in self._on_trial

    @property
    def has_trial(self) -> bool:
        """Whether anyone is on trial, or will be."""
        return bool(self._on_trial or self._next_trials)

    @property
    def is_watching(self) -> bool:
        """Whether `on_progress` has anything to learn; False in an engine that has lost no group lately."""
        return bool(self._record_by_request)

    def on_loss(self, lost: Iterable[Request]) -> Request | None:
        """The group was lost while it computed these requests; returns the culprit once it is certain."""
        in_step = [request for request in lost if request.state is not State.FINISHED]
        for request in in_step:
            self._note(request)
        if len(in_step) == 1 and self._record_by_request[in_step[0]].num_crashes >= CRASHES_TO_CONVICT:
            self._on_trial = [request for request in self._on_trial if request is not in_step[0]]
            self._begin_next_trial()
            return in_step[0]
        if max((self._record_by_request[request].num_crashes for request in in_step), default=0) >= CRASHES_TO_SUSPECT:
            self._halve(in_step)
        return None

    def _halve(self, accused: list[Request]) -> None:
        rest = [request for request in self._on_trial if request not in accused]
        middle = (len(accused) + 1) // 2
        self._next_trials += [group for group in (rest, accused[middle:]) if group]
        self._on_trial = accused[:middle]

    def _note(self, request: Request) -> None:
        record = self._record_by_request.get(request)
        if record is None or request.num_tokens > record.num_tokens:
            self._record_by_request[request] = _Record(request.num_tokens, 1)
        else:
            record.num_crashes += 1

    def on_progress(self, num_tokens_of: dict[Request, int]) -> None:
        """Known tokens of the running requests after a step: who got on is cleared."""
        for request in list(self._record_by_request):
            if self._has_got_on(request, num_tokens_of):
                del self._record_by_request[request]
        self._on_trial = [request for request in self._on_trial if request in self._record_by_request]
        self._begin_next_trial()

    def _has_got_on(self, request: Request, num_tokens_of: dict[Request, int]) -> bool:
        if request.state is State.FINISHED:
            return True
        return num_tokens_of.get(request, 0) > self._record_by_request[request].num_tokens

    def _begin_next_trial(self) -> None:
        """The half that was put off last comes first; nothing happens while a trial is on."""
        while not self._on_trial and self._next_trials:
            self._on_trial = [request for request in self._next_trials.pop() if request.state is not State.FINISHED]
