"""CrashIsolation: finds the request that makes workers crash, by bisection, so that all others can continue.

A worker group may fail for other reasons, so the first crash makes no suspects. When a request was in the crashing
step twice without a new token in between, the requests of that step become suspects: half of them run alone until
each has a new token. If the group crashes again, that half is bisected; if all get a token, the other half runs. A
request fails only after it crashed a group while it was alone in the step. A request that is
resubmitted after the loss of another core or its workers carries the number of these losses.
"""

from __future__ import annotations

from collections.abc import Callable

from ...ipc.messages.workers import ModelRunnerOutput
from ..request import Request, State
from ..scheduling.result_processor import NewTokens
from ..scheduling.step.ledger import LedgerEntry
from ..scheduling.step.rows import Rows
from ..scheduling.step_feature import StepFeature

CRASHES_TO_SUSPECT = 2
CRASHES_TO_FAIL = 3


class CrashIsolation(StepFeature):
    """Finder of the request that makes workers crash. Invariant: while suspects run, no other request is admitted;
    further suspects wait only while these run."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        # by request: its known tokens at its first crash, and its crashes without a new token between. Empty in an
        # engine without a recent crash.
        self.crashes_by_request: dict[Request, tuple[int, int]] = {}
        self._suspects: list[Request] = []
        self._next_suspects: list[list[Request]] = []

    def holds(self, request: Request) -> bool:
        """Return whether suspects run, and the request is not one of them."""
        self._take_next_suspects()
        return bool(self._suspects) and request not in self._suspects

    @property
    def has_suspects(self) -> bool:
        """Whether some requests are suspects now, so that all others are held."""
        return bool(self._suspects)

    def on_result(self, entry: LedgerEntry, output: ModelRunnerOutput, new_tokens: NewTokens) -> None:
        if self.crashes_by_request:
            self.on_progress(self._rows.known_tokens())

    def on_loss(self, num_tokens_of: dict[Request, int]) -> Request | None:
        """Record that the workers crashed while they computed these requests. Return the request that causes the
        crashes, once that is certain, for the caller to fail; else None. num_tokens_of: number of known tokens of each
        request."""
        num_crashes, in_step = 0, list(num_tokens_of)
        for request, num_tokens in num_tokens_of.items():
            at_first, count = self.crashes_by_request.get(request, (num_tokens, 0))
            self.crashes_by_request[request] = at_first, count + 1
            num_crashes = max(num_crashes, count + 1)
        if len(in_step) == 1 and num_crashes >= CRASHES_TO_FAIL:
            return in_step[0]
        if num_crashes >= CRASHES_TO_SUSPECT:
            rest = [request for request in self._suspects if request not in num_tokens_of]
            middle = (len(in_step) + 1) // 2
            self._next_suspects += [rest, in_step[middle:]]
            self._suspects = in_step[:middle]
        return None

    def suspect(self, requests: list[Request], num_losses: int) -> None:
        """Record how many cores or worker groups were lost elsewhere while they computed these new requests. From
        CRASHES_TO_SUSPECT losses on, each of the requests must run alone."""
        for request in reversed(requests):  # the first one, which may compute the prompt for all, is to run first
            self.crashes_by_request[request] = request.num_tokens, num_losses
            if num_losses >= CRASHES_TO_SUSPECT:
                self._next_suspects.append([request])
        self._take_next_suspects()

    def on_progress(self, num_tokens_of: dict[Request, int]) -> None:
        """Forget the crashes of requests that have a new token or are finished: they are not suspects. num_tokens_of:
        number of known tokens of each running request after a step."""
        self.crashes_by_request = {
            request: (at_first, count)
            for request, (at_first, count) in self.crashes_by_request.items()
            if request.state is not State.FINISHED and num_tokens_of.get(request, 0) <= at_first
        }
        self._suspects = [request for request in self._suspects if request in self.crashes_by_request]
        self._take_next_suspects()

    def _take_next_suspects(self) -> None:
        """Remove finished requests from the suspects; if none are left, continue with the part that was deferred
        last."""
        self._suspects = _unfinished(self._suspects)
        while not self._suspects and self._next_suspects:
            self._suspects = _unfinished(self._next_suspects.pop())


class AdmissionNotes(StepFeature):
    """Feature that records each request that is about to be admitted, so that it is known if the core then crashes."""

    def __init__(self, note: Callable[[Request], None]) -> None:
        self._note = note

    def holds(self, request: Request) -> bool:
        """Record a request that no feature before this one holds, and return False. In `admit` it would be too late:
        its prefix has been looked up by then."""
        self._note(request)
        return False


def _unfinished(requests: list[Request]) -> list[Request]:
    return [request for request in requests if request.state is not State.FINISHED]
