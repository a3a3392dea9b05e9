"""Frontend: text in, text out, between clients and the core. The frontend without its sockets.

Every event has a handler; `tick` ends a turn; what is to be sent waits in the outbox. Whoever owns the sockets (the
process, or the in-process engine) calls the handlers and empties the outbox after each tick. All calls come from one
thread. Never imports torch; knows no blocks and no workers.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ..ipc.codec import Decoder, encode
from ..ipc.engine_spec import EngineSpec
from ..ipc.errors import Draining, ErrorInfo, ProtocolError, TokenloomError, error_info
from ..ipc.messages import (
    PING_INTERVAL_S,
    PROTOCOL_VERSION,
    Abort,
    AbortRequests,
    Accepted,
    ClientMessage,
    CoreToFrontend,
    CoreUp,
    Credit,
    Delta,
    Detokenize,
    Drain,
    EngineCoreOutputs,
    FinishReason,
    FrontendMessage,
    FrontendToCore,
    GetHealth,
    GetInfo,
    Hello,
    Initialize,
    Ping,
    Pong,
    Progress,
    Refused,
    Submit,
    SupervisorToChild,
    Tokenize,
    Unknown,
    Welcome,
)
from .background import Background, Completion
from .chat import ChatTemplate
from .client_session import ClientSession
from .detokenizer import DetokenizerFactory
from .input_processor import MAX_REQUEST_ID_CHARACTERS, InputProcessor, Prompt, is_heavy
from .malformed import read_request_id
from .output_processor import OutputProcessor, RequestState
from .query_processor import QueryProcessor
from .session_table import NEVER, SessionTable
from .tokenizer import Tokenizer

logger = logging.getLogger("tokenloom.frontend")

MAX_REFUSALS = 1 << 17  # ends of requests that wait for a client's credit; beyond, it is taken for dead


@dataclass
class Outbox:
    """What the owner of the sockets has to send, in this order."""

    to_clients: list[tuple[bytes, bytes]] = field(default_factory=list)  # identity, frame
    to_core: list[FrontendToCore] = field(default_factory=list)


class Frontend:
    """Owns the client sessions and every open request.

    Invariant: a request is open in exactly one session; its unfinished answers are in the output processor; while the
    core has said Welcome, it has been told of every one of them.
    """

    def __init__(
        self,
        spec: EngineSpec,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        wake: Callable[[], None],
        *,
        monotonic: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        """`wake` is called from another thread and must lead to `on_wakeup`."""
        self.outbox = Outbox()
        self.counts: Counter[str] = Counter()
        self._spec = spec
        self._monotonic = monotonic
        self._unix_time = unix_time
        self._inputs = InputProcessor(spec, tokenizer, chat_template)
        detokenizers = None if tokenizer is None else DetokenizerFactory(tokenizer)
        self._outputs = OutputProcessor(detokenizers, self._inputs.eos_token_ids)
        self._background = Background(wake)
        self._queries = QueryProcessor(spec, self._inputs, self._background)
        self._decoder: Decoder[ClientMessage] = Decoder(ClientMessage)
        self._sessions = SessionTable()
        self._is_core_up = False
        self._is_draining = False
        self._next_ping_at = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether the core has welcomed this frontend."""
        return self._is_core_up

    @property
    def num_open_requests(self) -> int:
        return sum(len(session.request_by_id) for session in self._sessions)

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────

    def on_client_frame(self, identity: bytes, frame: bytes) -> None:
        """One message of a client. Nothing in it can raise."""
        session = self._sessions.get(identity)
        if session is not None:
            session.last_seen = self._monotonic()
        try:
            message = self._decoder.decode(frame)
        except ProtocolError as error:
            self._on_malformed(identity, session, frame, str(error))
            return
        if isinstance(message, Hello):
            self._greet(identity, session, message)
        elif session is None:
            self._send(identity, Unknown())
        else:
            self._on_message(session, message)

    def _on_message(self, session: ClientSession, message: ClientMessage) -> None:
        if isinstance(message, Submit):
            self._submit(session, message)
        elif isinstance(message, Credit):
            self._credit(session, message.count)
        elif isinstance(message, Abort):
            self._abort(session, message.request_id)
        elif isinstance(message, Ping):
            self._send(session.identity, Pong())
        elif isinstance(message, (Tokenize, Detokenize, GetHealth, GetInfo)):
            self._queries.answer(
                message, self._is_core_up, self._monotonic(), lambda reply: self._send(session.identity, reply)
            )

    def _credit(self, session: ClientSession, count: int) -> None:
        if count < 0:
            self.counts["malformed_client_frames"] += 1
            error = ErrorInfo("protocol", f"credit.count is {count}, it must not be negative")
            self._send(session.identity, Refused(error=error))
            return
        session.credit(count)
        self._sessions.mark(session)

    def on_client_gone(self, identity: bytes) -> None:
        """A send found no such peer, or one that does not read."""
        session = self._sessions.get(identity)
        if session is not None:
            self._drop(session, "gone")

    def _greet(self, identity: bytes, session: ClientSession | None, hello: Hello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            message = (
                f"the client speaks protocol version {hello.protocol_version}, this engine speaks {PROTOCOL_VERSION}: "
                "use the client of the engine's release"
            )
            self._send(identity, Refused(error=ErrorInfo("protocol", message)))
            return
        if session is None:
            self._sessions.add(identity, self._monotonic())
        else:
            session.restart()
            self._sessions.mark(session)
        self._send(identity, Welcome(protocol_version=PROTOCOL_VERSION, run_id=self._spec.run_id))

    def count_malformed(self, peer: str, error: ProtocolError) -> None:
        """A frame of the engine's own makes no sense: logged the 1st, 2nd, 4th, 8th … time."""
        name = f"malformed_{peer}_frames"
        self.counts[name] += 1
        if self.counts[name].bit_count() == 1:
            logger.warning("from the %s, the %d. time: %s", peer, self.counts[name], error)

    def _on_malformed(self, identity: bytes, session: ClientSession | None, frame: bytes, reason: str) -> None:
        """A Submit whose id can be read is answered under that id, so that its sender sees which field is wrong."""
        self.counts["malformed_client_frames"] += 1
        request_id = None if session is None else read_request_id(frame)
        if session is not None and request_id is not None and request_id not in session.request_by_id:
            self._refuse(session, request_id, ErrorInfo("request", reason))
        else:
            self._send(identity, Refused(error=ErrorInfo("protocol", reason)))

    def _send(self, identity: bytes, message: FrontendMessage) -> None:
        self.outbox.to_clients.append((identity, encode(message)))

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _submit(self, session: ClientSession, submit: Submit) -> None:
        if not 0 < len(submit.request_id) <= MAX_REQUEST_ID_CHARACTERS:
            reason = (
                f"request_id has {len(submit.request_id)} characters, it must have 1 to {MAX_REQUEST_ID_CHARACTERS}"
            )
            self._refuse(session, submit.request_id[:MAX_REQUEST_ID_CHARACTERS], ErrorInfo("request", reason))
            return
        known = session.request_by_id.get(submit.request_id)
        if known is not None:
            if submit.attempt <= known.submit.attempt:
                self._repeat(session, known, submit)
                return
            self._forget(session, known)
        if self._is_draining and submit.attempt == 0 and not submit.children:
            error = Draining("the engine is shutting down and takes no new requests: ask another one", 5.0)
            self._refuse(session, submit.request_id, error_info(error))
            return
        self.counts["requests"] += 1
        request = RequestState(session.identity, submit)
        session.request_by_id[submit.request_id] = request
        self._sessions.open_lease(session)
        try:
            self._tokenize(session, request)
        except TokenloomError as error:
            self._fail(session, request, error)

    def _repeat(self, session: ClientSession, known: RequestState, submit: Submit) -> None:
        """The id is open. A message sent twice, or overtaken by a later attempt, is fine; another request is not."""
        if not known.is_same(submit):
            reason = f"request_id {submit.request_id} is open already with another prompt or other parameters"
            self._send(session.identity, Refused(error=ErrorInfo("request", reason)))
        elif known.is_accepted and submit.attempt == known.submit.attempt:
            self._tell_accepted(known)

    def _tokenize(self, session: ClientSession, request: RequestState) -> None:
        submit, inputs = request.submit, self._inputs
        if not is_heavy(submit.prompt, submit.chat):
            self._start(session, request, inputs.tokenize(submit.prompt, submit.prompt_token_ids, submit.chat))
            return

        def job() -> Completion:
            try:
                result: Prompt | TokenloomError = inputs.tokenize(submit.prompt, submit.prompt_token_ids, submit.chat)
            except TokenloomError as error:
                result = error
            return lambda: self._on_tokenized(session, request, result)

        self._background.submit(job)

    def _on_tokenized(self, session: ClientSession, request: RequestState, result: Prompt | TokenloomError) -> None:
        if session.request_by_id.get(request.request_id) is not request:
            return  # aborted or replaced meanwhile
        try:
            if isinstance(result, TokenloomError):
                raise result
            self._start(session, request, result)
        except TokenloomError as error:
            self._fail(session, request, error)

    def _start(self, session: ClientSession, request: RequestState, prompt: Prompt) -> None:
        now = self._unix_time()
        processed = self._inputs.process(request.submit, prompt, now)
        ended = self._outputs.add(request, processed, now)
        for answer in ended:
            session.unsent[answer.key] = answer
        self._sessions.mark(session)
        if request.is_finished:
            self._tell_accepted(request)
            del session.request_by_id[request.request_id]
        elif self._is_core_up:
            self.outbox.to_core.append(request.to_core())

    def _tell_accepted(self, request: RequestState) -> None:
        processed = request.processed
        assert processed is not None
        accepted = Accepted(
            request_id=request.request_id,
            attempt=request.submit.attempt,
            prompt_token_ids=processed.prompt.token_ids,
            prompt=processed.prompt.text,
            seed=processed.children[0].seed,
        )
        self._send(request.identity, accepted)

    def _abort(self, session: ClientSession, request_id: str) -> None:
        request = session.request_by_id.get(request_id)
        if request is not None:
            self._end(session, request, "abort")

    def _end(
        self, session: ClientSession, request: RequestState, reason: FinishReason, error: ErrorInfo | None = None
    ) -> None:
        """End every answer of a request here and now; the client gets what it has not got, and the reason."""
        del session.request_by_id[request.request_id]
        self._abort_in_core(self._outputs.remove(request))
        now = self._unix_time()
        for answer in request.answers:
            if answer.finish_reason is None:
                answer.finish(reason, now, error)
                session.unsent[answer.key] = answer
        self._sessions.mark(session)
        if not request.answers:
            self._end_unanswered(session, request.request_id, reason, error)

    def _fail(self, session: ClientSession, request: RequestState, error: TokenloomError) -> None:
        self.counts["refused_requests"] += 1
        self._end(session, request, "error", error_info(error))

    def _refuse(self, session: ClientSession, request_id: str, error: ErrorInfo) -> None:
        """End a request that was never opened."""
        self.counts["refused_requests"] += 1
        self._end_unanswered(session, request_id, "error", error)

    def _end_unanswered(
        self, session: ClientSession, request_id: str, reason: FinishReason, error: ErrorInfo | None
    ) -> None:
        session.refusals.append(Delta(request_id=request_id, finish_reason=reason, error=error))
        self._sessions.mark(session)
        self._sessions.open_lease(session)
        if len(session.refusals) > MAX_REFUSALS:
            self._drop(session, "slow")

    def _forget(self, session: ClientSession, request: RequestState) -> None:
        """Drop a request without a word to its client, which has replaced it or is gone."""
        del session.request_by_id[request.request_id]
        self._abort_in_core(self._outputs.remove(request))
        for answer in request.answers:
            session.unsent.pop(answer.key, None)

    def _abort_in_core(self, keys: list[int]) -> None:
        if keys and self._is_core_up:
            self.outbox.to_core.append(AbortRequests(keys=keys))

    def _drop(self, session: ClientSession, cause: str) -> None:
        """A client is no more: end what it owned."""
        num_requests = len(session.request_by_id)
        self.counts[f"clients_{cause}"] += 1
        self.counts[f"requests_aborted_{cause}"] += num_requests
        if num_requests:
            logger.warning("a client is %s: its %d requests end", cause, num_requests)
        for request in list(session.request_by_id.values()):
            self._forget(session, request)
        self._sessions.remove(session)

    # ── core ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def connect(self) -> None:
        """Say Hello to the core, at the start and when there is a new one."""
        spec = self._spec
        hello = Hello(protocol_version=PROTOCOL_VERSION, run_id=spec.run_id, fingerprint=spec.fingerprint)
        self.outbox.to_core.append(hello)

    def on_core_message(self, message: CoreToFrontend) -> None:
        """One message of the core. Raises the core's error when it refuses this frontend."""
        if isinstance(message, EngineCoreOutputs):
            self._on_outputs(message)
        elif isinstance(message, Welcome):
            self._is_core_up = True
            self._submit_all()
        elif isinstance(message, Unknown):
            if self._is_core_up:
                self.counts["core_lost"] += 1
                self._is_core_up = False
                self.connect()
        elif isinstance(message, Refused):
            raise message.error.to_exception()

    def _submit_all(self) -> None:
        """A core that does not know us gets every open request, with the tokens that it has."""
        for session in self._sessions:
            for request in session.request_by_id.values():
                if request.processed is not None:
                    self.outbox.to_core.append(request.to_core())

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        try:
            news = self._outputs.process(outputs, self._unix_time())
        except ProtocolError as error:
            self.count_malformed("core", error)
            return
        self.counts["gaps"] += news.num_gaps
        for request in news.accepted:
            self._tell_accepted(request)
        for answer in news.answers:
            session = self._sessions.get(answer.request.identity)
            assert session is not None, "an answer leaves the output processor with its session"
            session.unsent[answer.key] = answer
            self._sessions.mark(session)
            if answer.finish_reason is not None and answer.request.is_finished:
                session.request_by_id.pop(answer.request.request_id, None)
        self._abort_in_core(news.to_abort)

    # ── supervisor, threads, time ────────────────────────────────────────────────────────────────────────────────

    def on_control_message(self, message: SupervisorToChild) -> None:
        """Stop is the process's own business, after `stop`; the rest is not for a frontend."""
        if isinstance(message, Initialize):
            self._queries.on_initialize(message)
        elif isinstance(message, Progress):
            self._queries.on_progress(message, self._monotonic())
        elif isinstance(message, CoreUp):
            self._is_core_up = False
            self.connect()
        elif isinstance(message, Drain):
            self._is_draining = True

    def on_wakeup(self) -> None:
        """Take back what threads have done."""
        for complete in self._background.take():
            complete()

    def stop(self, reason: str) -> None:
        """The engine ends: every open request fails with `reason`."""
        for session in list(self._sessions):
            for request in list(session.request_by_id.values()):
                self._end(session, request, "error", ErrorInfo("dead", reason))
        self.outbox.to_clients += self._sessions.take_frames()
        self._background.close()

    def tick(self, now: float, *, check_leases: bool = True) -> None:
        """End a turn: leases, the ping to the core, one Deltas message per client. `now` in monotonic seconds.

        `check_leases` is for turns in which all that clients sent has been read.
        """
        if check_leases:
            for session in self._sessions.take_silent(now):
                self._drop(session, "silent")
        if self._outputs.answer_by_key and self._is_core_up and now >= self._next_ping_at:
            self._next_ping_at = now + PING_INTERVAL_S
            self.outbox.to_core.append(Ping())
        self.outbox.to_clients += self._sessions.take_frames()

    def seconds_to_tick(self, now: float) -> float | None:
        """How long the loop may sleep; None: until something comes."""
        next_at = self._sessions.next_lease_end
        if self._outputs.answer_by_key and self._is_core_up:
            next_at = min(next_at, self._next_ping_at)
        return None if next_at == NEVER else max(0.0, next_at - now)
