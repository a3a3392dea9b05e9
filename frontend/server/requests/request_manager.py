"""RequestManager: opens, resumes, ends and refuses the requests of clients.

For each Submit a coroutine reads the request (request_reader.py) and sends it to a core. If the request ends before
that, the coroutine is closed where it waits. Outputs of the core become unsent updates of the client's session. Knows
no frames and no sockets.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from ....ipc.codec import num_ids
from ....ipc.errors import Draining, ErrorInfo, Overloaded, TokenloomError, error_info
from ....ipc.messages.base import FinishReason, Refused
from ....ipc.messages.client import Accepted, Delta, Submit
from ....ipc.messages.core import EngineCoreOutputs
from ....ipc.messages.supervisor import ReplicaDown
from ....ipc.notes.deadly import ReadingNote
from ....ipc.process.log import is_worth_a_line
from ...forms.prompts import MAX_REQUEST_ID_CHARACTERS, check_request_id
from ...listening.keys.key_ledger import KeyLedger, OpenUse
from ..helpers.task import error_of, run
from ..prompts.input_processor import InputProcessor
from ..replicas.resume_queue import ResumeQueue
from ..reuse.difference import difference
from ..reuse.seen_prompts import SeenPrompts
from .client_session import ClientLoss
from .cores import NOWHERE, Cores
from .engine_metrics import EngineMetrics
from .output_processor import OutputProcessor
from .request_reader import RequestReader
from .request_state import RequestState, Session
from .session_table import SessionTable

logger = logging.getLogger("tokenloom.frontend")

RETRY_S = 2.0  # Retry-After of a gateway without an engine: the duration of a quick restart
LOSSES_TO_FAIL = 3  # losses of cores or worker groups between two new tokens; as CRASHES_TO_FAIL in the core
CHARGED_TOKENS = 16  # of an answer that are charged to its API key together; the rest is when the request closes
MAX_REFUSALS = 1 << 17  # most unsent refusals of a client; a client with more is dropped


@dataclass(eq=False)
class RequestManager:
    """Owner of all open requests.

    Invariant: an open request is in exactly one session. Once it is read, its unfinished answers are in `_outputs`, and
    its core, if that is up, has got all of them.
    """

    _sessions: SessionTable
    _inputs: InputProcessor
    _reader: RequestReader
    _outputs: OutputProcessor  # tokens to text
    _cores: Cores
    _metrics: EngineMetrics
    _counts: Counter[str]  # event counts for the metrics
    _note: ReadingNote  # record of the request that is being worked on
    _unix_time: Callable[[], float]
    _ledger: KeyLedger | None = None  # of the API keys with names
    max_refusals: int = MAX_REFUSALS
    is_draining: bool = False  # whether new requests are refused, while open ones are finished
    next_resume_at: float = math.inf  # when to call `resume_waiting` next; monotonic seconds
    _seen: SeenPrompts = field(default_factory=SeenPrompts)
    _resumes: ResumeQueue[RequestState] = field(default_factory=lambda: ResumeQueue(_waits_for_core))

    # ── in ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, session: Session, submit: Submit) -> None:
        """Open, resume or refuse a request. A Submit with a higher attempt replaces the open request with its id; one
        with the same or a lower attempt changes nothing."""
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
            use = self._open_use(session, submit)
        except TokenloomError as error:
            self.refuse(session, submit.request_id[:MAX_REQUEST_ID_CHARACTERS], error_info(error))
            return
        self._counts["requests"] += 1
        if submit.waited_s is not None:
            submit = msgspec.structs.replace(submit, arrival_time=self._unix_time() - submit.waited_s, waited_s=None)
        request = RequestState(session, submit, self._expires_at(submit), self._note.current)
        request.use = use
        if use is not None:
            request.at_close(use.close)
        session.request_by_id[submit.request_id] = request
        self._sessions.open_lease(session)
        request.opening = run(self._note.slices(self._open(request)))

    def _open_use(self, session: Session, submit: Submit) -> OpenUse | None:
        """Count a request for its API key, if that has a name. RateLimited if it is new, and the key has too many."""
        key = session.key_of(submit.request_id)
        if self._ledger is None or key is None or not key.name:
            return None
        return self._ledger.open(key, submit.request_id, goes_on=bool(submit.children))

    def _expires_at(self, submit: Submit) -> float:
        """Return the unix time at which a request times out if its media and prompt have not been read by then."""
        now = self._unix_time()
        arrived_at = submit.arrival_time if 0 < submit.arrival_time < now else now
        return arrived_at + self._inputs.wait_s(submit.params)

    def _check_new(self, submit: Submit) -> None:
        """Check a new request. Raise Draining if the engine shuts down or Overloaded if this gateway has no engine,
        both only for a first attempt; RequestError if `n` is too large."""
        if self.is_draining and submit.attempt == 0:
            raise Draining("the engine is shutting down and accepts no new requests: use another engine", 5.0)
        if self._cores.are_remote and not self._cores.is_up and submit.attempt == 0:
            raise Overloaded("no engine of this gateway is there: ask again later", RETRY_S)
        self._inputs.limits.check_share(1, submit.params.n)

    def _on_duplicate(self, known: RequestState, submit: Submit) -> None:
        """Handle a Submit with the id of the open request `known` and no higher attempt: repeat Accepted for an equal
        attempt, ignore a lower one, and reply Refused if it asks for something else."""
        if not known.is_same(submit):
            reason = f"request_id {submit.request_id} is already open with another prompt or other parameters"
            known.session.send(Refused(error=ErrorInfo("request", reason)))
        elif known.is_accepted and submit.attempt == known.submit.attempt:
            self._send_accepted(known)

    async def _open(self, request: RequestState) -> None:
        """Read a request and send it to a core. If it cannot be read, end it with the error."""
        session = request.session
        try:
            processed = await self._reader.read(request)
            if request.use is not None:
                request.use.begin(num_ids(processed.prompt.token_ids), goes_on=bool(request.submit.children))
            added = self._outputs.add(request, processed, self._unix_time())
        except Exception as error:
            self._outputs.remove(request)
            self._on_unread(request, error_of(error))
            return
        self._metrics.on_open(request)
        if processed.core.pooling is None:
            caller = session.caller_of(request.request_id)
            seen, earlier = self._seen.visit(caller, request.submit, processed.prompt.token_ids)
            request.seen_prompt = seen
            request.difference = None if earlier is None else difference(earlier, seen)
        for answer in added.ended:
            session.unsent[answer.key] = answer
        self._sessions.mark(session)
        if request.submit.has_echo or request.is_finished:
            self._send_accepted(request)  # before the echo, for which no core is needed
            request.is_accepted = True
            session.echoes += added.echo
        if request.is_finished:
            del session.request_by_id[request.request_id]
            request.close()
        else:
            self._cores.submit(request)
            if request.core == NOWHERE:
                self._wait_for_core(request)

    def _on_unread(self, request: RequestState, error: TokenloomError) -> None:
        """End a request that could not be read: as timed out if it has waited past `expires_at`, else with the
        error."""
        if isinstance(error, Overloaded) and self._unix_time() >= request.expires_at:
            self._send_accepted(request)
            self.end(request, "timeout")
        else:
            self._fail(request, error)

    def _fail(self, request: RequestState, error: TokenloomError) -> None:
        """End a request that has no answers yet, with an error."""
        del request.session.request_by_id[request.request_id]
        request.close()
        self.refuse(request.session, request.request_id, error_info(error))

    def _send_accepted(self, request: RequestState) -> None:
        """Send Accepted to the client; without prompt tokens if the request timed out before it was tokenized."""
        processed, submit = request.processed, request.submit
        request.session.send(
            Accepted(
                request_id=request.request_id,
                attempt=submit.attempt,
                prompt_token_ids=b"" if processed is None else processed.prompt.token_ids,
                prompt=submit.prompt if processed is None else processed.prompt.text,
                seed=submit.params.seed or 0 if processed is None else processed.children[0].seed,
                adapter_digest=b"" if request.adapter is None else request.adapter.digest,
                begins_in_thought=self._begins_in_thought(request),
                media_digests=request.media_digests,
            )
        )

    def _begins_in_thought(self, request: RequestState) -> bool:
        if request.processed is None or request.submit.chat is None:
            return False
        return self._inputs.thoughts.of_request(request.submit).are_open(request.processed.prompt.token_ids)

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────

    def abort(self, session: Session, request_id: str, cause: str) -> None:
        """End a request with finish reason "abort", if it is open. `cause`: metric label."""
        request = session.request_by_id.get(request_id)
        if request is not None:
            self.end(request, "abort", cause=cause)

    def end(self, request: RequestState, reason: FinishReason, error: ErrorInfo | None = None, cause: str = "") -> None:
        """End all answers of a request at once. The client gets the unsent updates, then the reason and the error.
        `cause`: metric label of an abort."""
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
            if error is not None:  # one delta with an error ends all answers
                indices = indices[:1]
            lasts = [Delta(request_id=request.request_id, index=i, finish_reason=reason, error=error) for i in indices]
            self._end_without_answers(session, lasts)
        request.close()

    def refuse(self, session: Session, request_id: str, error: ErrorInfo) -> None:
        """Send the client an error as the only delta of a request without answers, and count the refusal."""
        self._counts["refused_requests"] += 1
        self._metrics.on_refused(error.kind)
        self._end_without_answers(session, [Delta(request_id=request_id, finish_reason="error", error=error)])

    def _end_without_answers(self, session: Session, lasts: Sequence[Delta]) -> None:
        """Queue the final deltas `lasts` of a request without answers. Drop a client with more than `max_refusals`
        unsent."""
        session.refusals += lasts
        self._sessions.mark(session)
        self._sessions.open_lease(session)
        if len(session.refusals) > self.max_refusals:
            self.drop(session, "slow", f"{len(session.refusals)} errors unsent, at most {self.max_refusals} may be")

    def forget(self, request: RequestState, cause: str) -> None:
        """Remove a request without a message to its client, which has replaced the request or is gone. `cause`: metric
        label."""
        self._remove(request)
        for answer in request.answers:
            self._metrics.on_end(answer, cause)
            request.session.unsent.pop(answer.key, None)
        request.close()

    def _remove(self, request: RequestState) -> None:
        """Remove a request from its session and `_outputs`, and abort its unfinished answers on its core."""
        del request.session.request_by_id[request.request_id]
        self._cores.abort(request.core, self._outputs.remove(request))

    def drop(self, session: Session, cause: ClientLoss, detail: str) -> None:
        """Remove a client and all its requests, without a message to it. `detail`: explanation for the log."""
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
        """Return the open requests that have been read: each was sent to a core, or waits for one."""
        requests = (request for session in self._sessions for request in session.request_by_id.values())
        return [request for request in requests if request.processed is not None]

    def resubmit_all(self, core: int) -> None:
        """Send the requests of core `core`, which does not know this frontend, to it again, with their output so far;
        then resume the requests that have no core."""
        for request in self._sent():
            if request.core == core:
                self._cores.resubmit(request)
        self.resume_waiting()

    def resume_waiting(self) -> None:
        """Send requests that wait for a core to the best cores, in the order of their arrival and at the rate that the
        cores can take. Must be called again at `next_resume_at`."""
        self.next_resume_at = self._cores.resume_waiting(self._resumes)

    def count_losses(self, down: ReplicaDown) -> None:
        """Count the loss of a core or its workers for the answers that were being computed there. A request ends with
        an error after LOSSES_TO_FAIL losses without a new token, if the core had isolated it before the last one.

        If the core was about to start an isolated request, only that request counts: all others had a new token by
        then, which may not have arrived here."""
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
        """Move the requests of a core that is lost, or has lost its workers, to other cores, in the order of their
        arrival. If there is none and only the workers are lost, the requests stay."""
        if self._cores.has_any or not down.has_core:
            self._move_from(down.replica)

    def _move_from(self, core: int) -> None:
        for request in [request for request in self._sent() if request.core == core]:
            self._take_back(request)
        self.resume_waiting()

    def take_drained(self, now: float) -> list[int]:
        """Move the answers of draining cores whose time is over to other cores; return the cores that have finished
        draining. `now`: monotonic seconds."""
        if self._cores.next_drain_end == math.inf:
            return []
        for core in self._cores.drains_over(now):
            self._move_from(core)
        return self._cores.take_drained({request.core for request in self._sent()})

    def _take_back(self, request: RequestState) -> None:
        """Take a request from its core, so that `resume_waiting` gives it to another."""
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
        """Apply outputs of a core. ProtocolError, before any change, if their columns do not match in length."""
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
            if request.use is not None and len(answer.token_ids) % CHARGED_TOKENS == 0:
                request.use.charge(request.num_output_tokens)
            if request.session is not session:
                session = request.session
                self._sessions.mark(session)
            if answer.finish_reason is not None:
                self._metrics.on_end(answer)
                if answer.index == 0 and request.seen_prompt is not None:
                    request.seen_prompt.add_answer(answer.token_ids)
                    if (report := request.cache_report(answer)) is not None:
                        self._metrics.answers.on_cache_report(request.request_id, report)
                if request.is_finished:
                    request.session.request_by_id.pop(request.request_id, None)
                    finished.append(request)
        for request in finished:
            request.close()
        if result.to_abort:
            self._cores.abort(core, result.to_abort)


def _waits_for_core(request: RequestState) -> bool:
    return request.core == NOWHERE and bool(request.answers)
