"""RequestManager: opens, resumes, ends and refuses the requests of clients.

A Submit is read by a coroutine (request_reader.py) and sent to the core; ending the request closes the coroutine, at
whatever it waits for. Outputs of the core become unsent updates of the client's session. Knows no frames and no
sockets.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from ....ipc.errors import Draining, ErrorInfo, Overloaded, TokenloomError, error_info
from ....ipc.messages.base import FinishReason, Refused
from ....ipc.messages.client import Accepted, Delta, Submit
from ....ipc.messages.core import EngineCoreOutputs
from ....ipc.messages.supervisor import ReplicaDown
from ....ipc.notes.deadly import ReadingNote
from ....ipc.process.log import is_worth_a_line
from ...forms.prompts import MAX_REQUEST_ID_CHARACTERS, check_request_id
from ..helpers.task import run
from ..helpers.thread_pool import error_of
from ..prompts.input_processor import InputProcessor
from ..replicas.resume_queue import ResumeQueue
from .client_session import ClientLoss
from .cores import NOWHERE, Cores
from .engine_metrics import EngineMetrics
from .output_processor import OutputProcessor
from .request_reader import RequestReader
from .request_state import RequestState, Session
from .session_table import SessionTable

logger = logging.getLogger("tokenloom.frontend")

RETRY_S = 2.0  # after a refusal by a gateway without an engine: as long as a quick restart takes
LOSSES_TO_FAIL = 3  # of cores or worker groups, without a new token in between, as in a core's crash isolation
MAX_REFUSALS = 1 << 17  # unsent refusals of a client; with more it counts as dead


@dataclass(eq=False)
class RequestManager:
    """All open requests.

    Invariant: a request is open in exactly one session; its unfinished answers are in `_outputs`; while its core is up,
    all of them have been sent to it.
    """

    _sessions: SessionTable
    _inputs: InputProcessor
    _reader: RequestReader
    _outputs: OutputProcessor  # tokens to text
    _cores: Cores
    _metrics: EngineMetrics
    _counts: Counter[str]  # further events, for the metrics
    _note: ReadingNote  # of the request that is read now; `bound` keeps it for what comes back later
    _unix_time: Callable[[], float]
    max_refusals: int = MAX_REFUSALS
    is_draining: bool = False  # refuse new requests, finish open ones
    next_resume_at: float = math.inf  # when to call `resume_waiting`; monotonic seconds
    _resumes: ResumeQueue[RequestState] = field(default_factory=lambda: ResumeQueue(_waits_for_core))

    # ── in ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, session: Session, submit: Submit) -> None:
        """Open, resume or refuse a request. A later attempt replaces an open one; a repeated Submit changes nothing."""
        known = session.request_by_id.get(submit.request_id)
        if known is not None:
            if submit.attempt <= known.submit.attempt:
                self._on_duplicate(known, submit)
                return
            self.forget(known, "replaced")
        try:
            check_request_id(submit.request_id)
            if not submit.children:
                self._check_new(submit)
            self._inputs.media_limits.check(submit)
        except TokenloomError as error:
            self.refuse(session, submit.request_id[:MAX_REQUEST_ID_CHARACTERS], error_info(error))
            return
        self._counts["requests"] += 1
        if submit.waited_s is not None:
            submit = msgspec.structs.replace(submit, arrival_time=self._unix_time() - submit.waited_s, waited_s=None)
        request = RequestState(session, submit, self._expires_at(submit), self._note.current)
        session.request_by_id[submit.request_id] = request
        self._sessions.open_lease(session)
        request.opening = run(self._note.slices(self._open(request)))

    def _expires_at(self, submit: Submit) -> float:
        """Return the unix time until which media and prompt of a request may be read, by its timeouts."""
        now = self._unix_time()
        arrived_at = submit.arrival_time if 0 < submit.arrival_time < now else now
        return arrived_at + self._inputs.wait_s(submit.params)

    def _check_new(self, submit: Submit) -> None:
        """Raise an error for a first attempt if the engine shuts down or a gateway has none, and for too large an n."""
        if self.is_draining and submit.attempt == 0:
            raise Draining("the engine is shutting down and accepts no new requests: use another engine", 5.0)
        if self._cores.are_remote and not self._cores.is_up and submit.attempt == 0:
            raise Overloaded("no engine of this gateway is there: ask again later", RETRY_S)
        self._inputs.limits.check_share(1, submit.params.n)

    def _on_duplicate(self, known: RequestState, submit: Submit) -> None:
        """Handle a Submit of an open id: repeat its Accepted, ignore an older attempt, refuse another request."""
        if not known.is_same(submit):
            reason = f"request_id {submit.request_id} is already open with another prompt or other parameters"
            known.session.send(Refused(error=ErrorInfo("request", reason)))
        elif known.is_accepted and submit.attempt == known.submit.attempt:
            self._send_accepted(known)

    async def _open(self, request: RequestState) -> None:
        """Read a request and send it to a core, or end it with its error."""
        session = request.session
        try:
            processed = await self._reader.read(request)
            ended = self._outputs.add(request, processed, self._unix_time())
        except Exception as error:
            self._outputs.remove(request)
            self._on_unread(request, error_of(error))
            return
        self._metrics.on_open(request)
        for answer in ended:
            session.unsent[answer.key] = answer
        self._sessions.mark(session)
        if request.is_finished:
            self._send_accepted(request)
            del session.request_by_id[request.request_id]
            request.close()
        else:
            self._cores.submit(request)
            if request.core == NOWHERE:
                self._wait_for_core(request)

    def _on_unread(self, request: RequestState, error: TokenloomError) -> None:
        """End a request that could not be read: with its error, or as timed out."""
        if isinstance(error, Overloaded) and self._unix_time() >= request.expires_at:
            self._send_accepted(request)
            self.end(request, "timeout")
        else:
            self._fail(request, error)

    def _fail(self, request: RequestState, error: TokenloomError) -> None:
        """End a request that has no answers yet with its error."""
        del request.session.request_by_id[request.request_id]
        request.close()
        self.refuse(request.session, request.request_id, error_info(error))

    def _send_accepted(self, request: RequestState) -> None:
        """Send Accepted to the client, without tokens if the request timed out before it was tokenized."""
        processed, submit = request.processed, request.submit
        request.session.send(
            Accepted(
                request_id=request.request_id,
                attempt=submit.attempt,
                prompt_token_ids=b"" if processed is None else processed.prompt.token_ids,
                prompt=submit.prompt if processed is None else processed.prompt.text,
                seed=submit.params.seed or 0 if processed is None else processed.children[0].seed,
                adapter_digest=b"" if request.adapter is None else request.adapter.digest,
            )
        )

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def abort(self, session: Session, request_id: str, cause: str) -> None:
        """End a request with "abort" if it is open. `cause`: a label of the metrics."""
        request = session.request_by_id.get(request_id)
        if request is not None:
            self.end(request, "abort", cause=cause)

    def end(self, request: RequestState, reason: FinishReason, error: ErrorInfo | None = None, cause: str = "") -> None:
        """End all answers of a request at once; the client gets the unsent updates and the reason. `cause` of an abort
        is a label of the metrics."""
        session, now = request.session, self._unix_time()
        self._remove(request)
        for answer in request.answers:
            if answer.finish_reason is None:
                answer.finish(reason, now, error)
                self._metrics.on_end(answer, cause)
                session.unsent[answer.key] = answer
        self._sessions.mark(session)
        if not request.answers:
            indices = [child.index for child in request.submit.children] or range(request.submit.params.n)
            if error is not None:  # it ends all answers
                indices = indices[:1]
            lasts = [Delta(request_id=request.request_id, index=i, finish_reason=reason, error=error) for i in indices]
            self._end_without_answers(session, lasts)
        request.close()

    def refuse(self, session: Session, request_id: str, error: ErrorInfo) -> None:
        """Send the client an error as the only delta of a request that has no answers, and count the refusal."""
        self._counts["refused_requests"] += 1
        self._metrics.on_refused(error.kind)
        self._end_without_answers(session, [Delta(request_id=request_id, finish_reason="error", error=error)])

    def _end_without_answers(self, session: Session, lasts: Sequence[Delta]) -> None:
        """Queue the last deltas of a request. A client with more than `max_refusals` of them unsent is dropped."""
        session.refusals += lasts
        self._sessions.mark(session)
        self._sessions.open_lease(session)
        if len(session.refusals) > self.max_refusals:
            self.drop(session, "slow", f"{len(session.refusals)} errors unsent, at most {self.max_refusals} may be")

    def forget(self, request: RequestState, cause: str) -> None:
        """Remove a request without a message to its client, which has replaced it or is gone. `cause`: see `abort`."""
        self._remove(request)
        for answer in request.answers:
            self._metrics.on_end(answer, cause)
            request.session.unsent.pop(answer.key, None)
        request.close()

    def _remove(self, request: RequestState) -> None:
        """Remove a request from its session and the core."""
        del request.session.request_by_id[request.request_id]
        self._cores.abort(request.core, self._outputs.remove(request))

    def drop(self, session: Session, cause: ClientLoss, detail: str) -> None:
        """Remove a client and all its requests, without a message to it. `detail`: the numbers, for the log."""
        num_requests = len(session.request_by_id)
        self._counts[f"clients_{cause}"] += 1
        self._counts[f"requests_aborted_{cause}"] += num_requests
        if num_requests or (cause == "slow" and is_worth_a_line(self._counts["clients_slow"])):
            logger.warning("a client is %s (%s): its %d requests were ended", cause, detail, num_requests)
        for request in list(session.request_by_id.values()):
            self.forget(request, cause)
        self._sessions.remove(session)

    # ── the core ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _sent(self) -> list[RequestState]:
        """Return the open requests that are tokenized."""
        requests = (request for session in self._sessions for request in session.request_by_id.values())
        return [request for request in requests if request.processed is not None]

    def resubmit_all(self, core: int) -> None:
        """Send its requests, with their output so far, to a core that does not know this frontend, and those that
        found no core."""
        for request in self._sent():
            if request.core == core:
                self._cores.resubmit(request)
        self.resume_waiting()

    def resume_waiting(self) -> None:
        """Send requests that wait for a core to the best ones, in the order of their arrival, as fast as these get on.
        Call it again at `next_resume_at`."""
        self.next_resume_at = self._cores.resume_waiting(self._resumes)

    def count_losses(self, down: ReplicaDown) -> None:
        """Count the loss of a core or its workers for the requests that were in work there. One that was in
        LOSSES_TO_FAIL losses, in the last one alone, ends with an error. If the core was about to start one alone, no
        other counts: it had a token by then, which may have been lost on its way."""
        requests = [request for request in self._sent() if request.core == down.replica]
        touched = {answer.request for key in down.touched if (answer := self._outputs.answer_by_key.get(key))}
        alone = [request for request in requests if request in touched and request.was_alone]
        for request in alone or requests:
            for answer in request.answers:
                if self._cores.was_in_work(answer.key, down):
                    answer.count_loss()
            if request.num_losses >= LOSSES_TO_FAIL and request.was_alone:
                what = f"this request has ended a core or its workers {LOSSES_TO_FAIL} times and was given up"
                text = f"request {request.request_id}: {what}; last: {down.reason}"
                self.end(request, "error", ErrorInfo("internal", text))

    def move_all(self, down: ReplicaDown) -> None:
        """Let the requests of a core that is lost, or has lost its workers, go on at others, in the order of their
        arrival."""
        if self._cores.has_any or not down.has_core:
            self._move_from(down.replica)

    def _move_from(self, core: int) -> None:
        for request in [request for request in self._sent() if request.core == core]:
            self._take_back(request)
        self.resume_waiting()

    def take_drained(self, now: float) -> list[int]:
        """Let the answers of cores go on at others whose time to drain is over at `now`, in monotonic seconds. Return
        the cores that have drained."""
        if self._cores.next_drain_end == math.inf:
            return []
        for core in self._cores.drains_over(now):
            self._move_from(core)
        return self._cores.take_drained({request.core for request in self._sent()})

    def _take_back(self, request: RequestState) -> None:
        """Take a request from its core, for `resume_waiting`."""
        session, by_old_key = request.session, self._outputs.rekey(request)
        self._cores.abort(request.core, list(by_old_key))
        for old, answer in by_old_key.items():
            self._metrics.on_rekeyed(old, answer.key)
            if session.unsent.pop(old, None) is not None:
                session.unsent[answer.key] = answer
        self._wait_for_core(request)

    def _wait_for_core(self, request: RequestState) -> None:
        assert request.processed is not None, "it is tokenized"
        request.core = NOWHERE
        self._resumes.add(request.processed.core.arrival_time, request)

    def on_outputs(self, core: int, outputs: EngineCoreOutputs) -> None:
        """Apply a message of a core. Raises ProtocolError, without any change, if its columns disagree."""
        result = self._outputs.process(outputs, self._unix_time())
        self._metrics.on_outputs(outputs.started, result.answers)
        self._cores.on_outputs(outputs.started, result.answers)
        self._counts["gaps"] += result.num_gaps
        for request in result.accepted:
            self._send_accepted(request)
        session: Session | None = None
        finished: list[RequestState] = []
        for answer in result.answers:
            request = answer.request
            request.session.unsent[answer.key] = answer
            if request.session is not session:
                session = request.session
                self._sessions.mark(session)
            if answer.finish_reason is not None:
                self._metrics.on_end(answer)
                if request.is_finished:
                    request.session.request_by_id.pop(request.request_id, None)
                    finished.append(request)
        for request in finished:
            request.close()
        if result.to_abort:
            self._cores.abort(core, result.to_abort)


def _waits_for_core(request: RequestState) -> bool:
    return request.core == NOWHERE and bool(request.answers)
