"""LocalEngine: the engine as the HTTP handlers see it: submit, await what comes, ask, abort.

A client of the Frontend in the same loop and the same process. One turn of the frontend wakes each run that has
news once, with everything that the turn brought for it. Of hundreds of runs a few wake at a time: between two such
groups the loop looks at its sockets, so that a probe or a new request does not wait for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

import msgspec

from ..ipc.errors import RequestError
from ..ipc.messages import Abort, Accepted, Delta, Deltas, FrontendMessage, Health, Submit
from .input_processor import InputProcessor
from .openai_run import Run
from .service import Frontend
from .trace_context import incoming_trace

RUNS_PER_GROUP = 32


class LocalEngine:
    """Invariant: a request id is here from its submit until its last answer has ended or its `run` is left."""

    def __init__(self, frontend: Frontend, wake: Callable[[], None]) -> None:
        """`wake` makes the frontend have a turn soon."""
        self._frontend = frontend
        self.wake = wake
        self._session = frontend.open_local(self._deliver)
        self._run_by_id: dict[str, tuple[Run, int]] = {}  # and the position of the submit in it
        self._to_wake: dict[Run, None] = {}  # in order; not empty: `_wake_group` is due

    @property
    def inputs(self) -> InputProcessor:
        return self._frontend.inputs

    @contextlib.contextmanager
    def run(self, submits: Sequence[Submit]) -> Iterator[Run]:
        """Submit all, which ask for the same number of answers each. Leaving this, for whatever reason, aborts what is
        still open.

        RequestError for an id that is in use."""
        for submit in submits:
            if submit.request_id in self._run_by_id:
                raise RequestError(f"request_id {submit.request_id} is open already: choose another")
        run, trace = Run(len(submits), submits[0].params.n), incoming_trace.get()
        for position, submit in enumerate(submits):
            self._run_by_id[submit.request_id] = (run, position)
        self._session.num_readers += 1
        try:
            for submit in submits:
                traced = msgspec.structs.replace(submit, **trace._asdict()) if trace.traceparent else submit
                self._frontend.on_local_message(self._session, traced)
            self.wake()
            yield run
        finally:
            self._session.num_readers -= 1
            for submit in submits:
                if self._run_by_id.pop(submit.request_id, None) is not None:
                    self._frontend.on_local_disconnect(self._session, submit.request_id)
            self.wake()

    def abort(self, request_id: str) -> int:
        """End a request, given by the id of its answer; its caller gets what there is. Returns how many submits."""
        found = [each for each in self._run_by_id if each == request_id or each.rpartition("/")[0] == request_id]
        for each in found:
            self._frontend.on_local_message(self._session, Abort(request_id=each))
        if found:
            self.wake()
        return len(found)

    def health(self) -> Health:
        return self._frontend.health()

    def _deliver(self, message: FrontendMessage) -> None:
        if isinstance(message, Deltas):
            for delta in message.deltas:
                self._put(delta.request_id, delta)
        elif isinstance(message, Accepted):
            self._put(message.request_id, message)

    def _put(self, request_id: str, update: Accepted | Delta) -> None:
        run, position = self._run_by_id.get(request_id, (None, 0))
        if run is None:
            return  # its caller is gone
        if not self._to_wake:
            asyncio.get_running_loop().call_soon(self._wake_group)
        self._to_wake[run] = None
        if run.put(position, update):
            del self._run_by_id[request_id]

    def _wake_group(self) -> None:
        group = list(itertools.islice(self._to_wake, RUNS_PER_GROUP))
        for run in group:
            del self._to_wake[run]
            run.wake()
        if self._to_wake:
            asyncio.get_running_loop().call_soon(self._wake_group)
