"""Finds the request that kills workers, by halving, while all others go on.

A group may be lost for reasons of its own, so the first loss accuses nobody. When a request was in the failing step
twice without getting a token in between, the requests of that step are accused: half of them stand trial, and until
each has got a token nobody else runs. If the group is lost again, the trial is halved; if all get on, the next half
stands trial. Only a request that was alone in the failing step is convicted.
"""

from __future__ import annotations

from dataclasses import dataclass

from .request import Request, State

CRASHES_TO_SUSPECT = 2
CRASHES_TO_FAIL = 3


@dataclass
class _Record:
    num_tokens: int  # known at the first of these losses
    num_crashes: int = 0  # losses in a row without a new token between


class CrashIsolation:
    """Invariant: while anyone is on trial, all others are held; nobody is to be while nobody is."""

    def __init__(self) -> None:
        self._record_by_request: dict[Request, _Record] = {}
        self._suspects: list[Request] = []
        self._next_suspects: list[list[Request]] = []

    def is_held(self, request: Request) -> bool:
        """Whether it must not be admitted to a row now."""
        self._take_next_suspects()
        return bool(self._suspects) and request not in self._suspects

    @property
    def has_suspects(self) -> bool:
        """Whether anyone is on trial."""
        return bool(self._suspects)

    @property
    def is_watching(self) -> bool:
        """Whether `on_progress` has anything to learn; False in an engine that has lost no group lately."""
        return bool(self._record_by_request)

    def on_loss(self, num_tokens_of: dict[Request, int]) -> Request | None:
        """The group was lost while it computed these requests, with so many known tokens; returns the culprit, which is
        to end, once it is certain."""
        num_crashes = max((self._note(*each) for each in num_tokens_of.items()), default=0)
        in_step = list(num_tokens_of)
        if len(in_step) == 1 and num_crashes >= CRASHES_TO_FAIL:
            return in_step[0]
        if num_crashes >= CRASHES_TO_SUSPECT:
            self._bisect(in_step)
        return None

    def _bisect(self, accused: list[Request]) -> None:
        rest = [request for request in self._suspects if request not in accused]
        middle = (len(accused) + 1) // 2
        self._next_suspects += [rest, accused[middle:]]
        self._suspects = accused[:middle]

    def _note(self, request: Request, num_tokens: int) -> int:
        """One more loss of this request; returns how many there were without a new token between."""
        record = self._record_by_request.setdefault(request, _Record(num_tokens))
        record.num_crashes += 1
        return record.num_crashes

    def on_progress(self, num_tokens_of: dict[Request, int]) -> None:
        """Known tokens of the running requests after a step: who got on is cleared."""
        for request in list(self._record_by_request):
            if self._has_got_on(request, num_tokens_of):
                del self._record_by_request[request]
        self._suspects = [request for request in self._suspects if request in self._record_by_request]
        self._take_next_suspects()

    def _has_got_on(self, request: Request, num_tokens_of: dict[Request, int]) -> bool:
        if request.state is State.FINISHED:
            return True
        return num_tokens_of.get(request, 0) > self._record_by_request[request].num_tokens

    def _take_next_suspects(self) -> None:
        """Who has ended stands trial no more; when nobody is left, the half that was put off last comes."""
        self._suspects = _unfinished(self._suspects)
        while not self._suspects and self._next_suspects:
            self._suspects = _unfinished(self._next_suspects.pop())


def _unfinished(requests: list[Request]) -> list[Request]:
    return [request for request in requests if request.state is not State.FINISHED]
