"""CrashIsolation: finds the request that kills workers, by bisection, while all others go on.

A worker group may fail for other reasons, so the first crash makes no suspects. When a request was in the crashing
step twice without a new token in between, the requests of that step become suspects: half of them run alone until
each has a new token. If the group crashes again, that half is bisected; if all get a token, the other half runs. A
request fails only after it crashed a group while it was alone in the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from .request import Request, State

CRASHES_TO_SUSPECT = 2
CRASHES_TO_FAIL = 3


@dataclass
class _Record:
    num_tokens: int  # known at the first of these crashes
    num_crashes: int = 0  # crashes without a new token between


class CrashIsolation:
    """Invariant: while suspects run, no other request is admitted; more suspects wait only while others run."""

    def __init__(self) -> None:
        self._record_by_request: dict[Request, _Record] = {}
        self._suspects: list[Request] = []
        self._next_suspects: list[list[Request]] = []

    def is_held(self, request: Request) -> bool:
        """Whether the request must not be admitted to a row now."""
        self._take_next_suspects()
        return bool(self._suspects) and request not in self._suspects

    @property
    def has_suspects(self) -> bool:
        """Whether suspects are running."""
        return bool(self._suspects)

    @property
    def is_watching(self) -> bool:
        """Whether `on_progress` needs to be called; False in an engine without a recent crash."""
        return bool(self._record_by_request)

    def on_loss(self, num_tokens_of: dict[Request, int]) -> Request | None:
        """Record a crash of the group while it computed these requests, with their numbers of known tokens. Returns
        the request that causes the crashes, once that is certain; the caller fails it."""
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
        """Count a crash of this request; return how many there were without a new token between."""
        record = self._record_by_request.setdefault(request, _Record(num_tokens))
        record.num_crashes += 1
        return record.num_crashes

    def on_progress(self, num_tokens_of: dict[Request, int]) -> None:
        """Clear the requests that have a new token. num_tokens_of: known tokens of the running requests after a
        step."""
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
        """Remove finished requests from the suspects; if none are left, run the part that was put off last."""
        self._suspects = _unfinished(self._suspects)
        while not self._suspects and self._next_suspects:
            self._suspects = _unfinished(self._next_suspects.pop())


def _unfinished(requests: list[Request]) -> list[Request]:
    return [request for request in requests if request.state is not State.FINISHED]
