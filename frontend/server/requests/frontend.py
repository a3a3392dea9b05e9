"""Frontend: turns clients' requests into tokens for the core, and the core's tokens into text. It owns no sockets.

The owner of the sockets (FrontendProcess or InProcessEngine) calls a handler for each event and `tick` at the end of
each turn (loop iteration), then sends the messages of the outbox. All calls come from one thread. Never imports torch;
knows no blocks and no workers.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable

from ....ipc.errors import ErrorInfo, ProtocolError
from ....ipc.messages.base import LEASE_S, PING_INTERVAL_S, Hello, Ping, Pong, Refused, Unknown, Welcome
from ....ipc.messages.client import (
    Abort,
    AdapterQuery,
    ClientMessage,
    Control,
    Credit,
    FrontendMessage,
    Health,
    PutMedium,
    Submit,
)
from ....ipc.messages.core import CoreToFrontend, EngineCoreOutputs, Load, Prefetched
from ....ipc.messages.orders import Ordered
from ....ipc.messages.supervisor import (
    CoreUp,
    Drain,
    DrainReplica,
    Initialize,
    Progress,
    ReplicaDown,
    ReplicaDrained,
    SetLogLevel,
    StartPhase,
    StartPhases,
    SupervisorToChild,
    WorkersUp,
)
from ....ipc.notes.deadly import ReadingNote
from ....ipc.process.awake_clock import AwakeClock, steady_time
from ....ipc.sockets.channel import count_malformed
from ....ipc.spec.config.engine_spec import EngineSpec
from ...listening.keys.api_keys import ApiKeys
from ...listening.keys.key_ledger import ledger_of
from ..adapters.manager import AdapterManager
from ..answer_forms.held_forms import HeldForms
from ..helpers.intake import new_intake_helper
from ..helpers.pool import HelperPool
from ..helpers.task import run
from ..metrics.key_metrics import KeyMetrics
from ..metrics.tracing import new_tracing
from ..prompts.input_processor import InputProcessor
from ..prompts.prompt_reader import PromptReader
from ..text.chat_template import ChatTemplate
from ..text.tokenizer import Tokenizer
from .client_frames import ClientFrames
from .client_session import NEVER, Caller, ClientLoss, LocalSession
from .control import ControlProxy
from .core_client import FrontendOutbox
from .cores import Cores
from .engine_metrics import EngineMetrics
from .media.media_input import MediaInput
from .media.media_manager import MediaManager
from .output_processor import OutputProcessor
from .queries import QueryProcessor
from .request_manager import RequestManager
from .request_reader import RequestReader
from .request_state import RequestState, Session
from .session_table import SessionTable


class Frontend:
    """Owner of the client sessions and of all components of a frontend. Passes each event to the component for it."""

    def __init__(
        self,
        spec: EngineSpec,
        tokenizer: Tokenizer | None,
        chat_template: ChatTemplate | None,
        wake: Callable[[], None],
        media: MediaInput | None = None,
        note: ReadingNote | None = None,
        *,
        identity: bytes = b"",
        index: int = 0,
        monotonic: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = steady_time,
    ) -> None:
        """`wake` is called from other threads and must cause a call of `on_wakeup`. `media`: how media are read; None
        if the model takes only text. `note`: record of the requests being worked on; default: one in memory only.
        `identity`, `index`: those of this frontend among the engine's frontends."""
        self.note = note = note or ReadingNote()
        self.keys = ApiKeys(spec.config.api_key, spec.config.api_key_file, monotonic)
        self._ledger = ledger_of(spec, index, monotonic)
        self._sessions = SessionTable()
        self.outbox = FrontendOutbox(to_clients=self._sessions.outbox)
        self.counts: Counter[str] = Counter()
        self.start_phases: list[StartPhase] = []
        self.log_level = spec.config.log_level  # level of all processes, as the supervisor has set it
        self._spec, self._monotonic = spec, monotonic
        prepare = str if media is None else media.placeholders.before_tokenization
        self.inputs = InputProcessor(spec, tokenizer, chat_template, prepare)
        self.intake = HelperPool(wake, lambda: new_intake_helper(spec), monotonic=monotonic, note=note)
        self.forms = HeldForms(spec, chat_template, self.intake, on_known=self.inputs.take_form)
        self.prompts = PromptReader(self.inputs, self.intake)
        self.media = MediaManager(spec, wake, media)
        self._outputs = outputs = OutputProcessor(
            self.inputs.detokenizers, self.inputs.eos_token_id, note, index, key_step=spec.config.api_server_count
        )
        self.adapters = AdapterManager(
            spec, wake, monotonic, unix_time, lambda: bool(outputs.answer_by_key), index, note
        )
        self._cores = Cores(spec, self.outbox, monotonic, unix_time)
        self._tracing = new_tracing(spec)
        self.metrics = EngineMetrics(spec, self._queue_depths, self._tracing, self.counts, self.adapters.names_of)
        self.key_metrics = None if self._ledger is None else KeyMetrics(self.keys, self._ledger)
        if self.key_metrics is not None:
            self.metrics.registry.metrics += self.key_metrics.metrics
        self.shared = self.metrics.share(spec, index, identity.decode(), lambda: self.num_open_requests)
        self._awake_clock = AwakeClock(PING_INTERVAL_S, monotonic)  # read in each turn
        self._queries = QueryProcessor(
            spec, self.prompts, self.forms, self._cores, self.metrics, self._awake_clock.look
        )
        placeholders = None if media is None else media.placeholders
        self.reader = RequestReader(self.adapters, self.media, placeholders, self.prompts, unix_time)
        self._requests = RequestManager(
            self._sessions,
            self.inputs,
            self.reader,
            self._outputs,
            self._cores,
            self.metrics,
            self.counts,
            note,
            unix_time,
            self._ledger,
        )
        self._controls = ControlProxy(
            spec, self._cores, self.adapters, self.prompts, self.reader.expand, self.outbox, note
        )
        self._client_frames = ClientFrames(
            spec, self._sessions, self._requests, self.counts, note, monotonic, self.on_message
        )
        self._ticked_at = 0.0  # monotonic seconds
        self._drains_at = NEVER  # earliest time at which draining may end; monotonic seconds

    def is_welcome(self, *, to_all: bool) -> bool:
        """Return whether a core, or with `to_all` every core except those given up, has welcomed this frontend."""
        return self._cores.are_all_up if to_all else self._cores.is_up

    @property
    def model_names(self) -> list[str]:
        """The names of the served model. Answers show the first one."""
        return self._spec.model_names

    def health(self) -> Health:
        return self._queries.health()

    @property
    def is_drained(self) -> bool:
        """Whether draining is complete: the time in which clients may reconnect is over, and no client has open work.
        The outbox may still hold messages."""
        return self._monotonic() >= self._drains_at and not any(session.has_open_work for session in self._sessions)

    @property
    def is_busy(self) -> bool:
        """Whether requests are open or adapters are being loaded."""
        return bool(self.num_open_requests or self.adapters.is_loading)

    @property
    def num_open_requests(self) -> int:
        return sum(len(session.request_by_id) for session in self._sessions)

    def _queue_depths(self) -> dict[str, float]:
        requests = [request for session in self._sessions for request in session.request_by_id.values()]
        return {
            "clients": sum(session.num_in_flight for session in self._sessions),
            "core": sum(request.processed is not None and not request.is_accepted for request in requests),
        }

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────

    def on_client_frame(self, identity: bytes, frame: bytes | memoryview) -> None:
        """Handle one frame of a client. Does not raise, whatever the frame contains. A PutMedium refers to the frame's
        memory: the bytes of the medium are not copied."""
        self._client_frames.read(identity, frame)

    def on_message(self, session: Session, message: ClientMessage) -> None:
        """Handle a message of a client that has a session; a Hello is ignored."""
        if isinstance(message, Submit):
            self._requests.submit(session, message)
        elif isinstance(message, Credit):
            self._credit(session, message.count)
        elif isinstance(message, PutMedium):
            self.media.put(message)
        elif isinstance(message, Abort):
            self._requests.abort(session, message.request_id, "client")
        elif isinstance(message, Ping):
            session.send(Pong())
        elif isinstance(message, Control):
            self._controls.submit(message, lambda reply: session.send(reply))
        elif isinstance(message, AdapterQuery):
            run(self.note.slices(self.adapters.answer(message, session.send)))
        elif not isinstance(message, Hello):
            run(self.note.slices(self._queries.answer(message, session.owner_of(""), session.send)))

    def _credit(self, session: Session, count: int) -> None:
        if count < 0:
            self.counts["malformed_client_frames"] += 1
            session.send(Refused(error=ErrorInfo("protocol", f"credit.count is {count}, it must not be negative")))
            return
        session.credit(count)
        self._sessions.mark(session)

    def open_local(
        self, deliver: Callable[[FrontendMessage], None], find_caller: Callable[[str], Caller] = lambda _: Caller()
    ) -> LocalSession[RequestState]:
        """Add an in-process client and return its session. `deliver` is called with each message to it; its own
        messages are passed to `on_message`. `find_caller` returns, for a request id, the address and API key of the
        HTTP request that sent it."""
        session: LocalSession[RequestState] = LocalSession(secrets.token_bytes(16), deliver, find_caller)
        self._sessions.add_local(session)
        return session

    def on_local_disconnect(self, session: LocalSession[RequestState], request_id: str) -> None:
        """Abort a request because its HTTP caller has disconnected."""
        self._requests.abort(session, request_id, "disconnect")

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused, since the engine ends."""
        return self._requests.is_draining

    def abort_answer(self, shown_key: str) -> bool:
        """Abort the request of an open answer, of any client, by its key on the dashboard. Returns False if there is no
        such answer."""
        key = self.metrics.find_answer(shown_key)
        answer = None if key is None else self._outputs.answer_by_key.get(key)
        if answer is not None:
            self._requests.end(answer.request, "abort", cause="operator")
        return answer is not None

    def on_client_lost(self, identity: bytes, cause: ClientLoss, detail: str) -> None:
        """Remove a client and end its requests, because a send to it failed. `detail`: explanation for the log."""
        session = self._sessions.get(identity)
        if session is not None:
            self._requests.drop(session, cause, detail)

    # ── core ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def connect(self) -> None:
        """Put a Hello to each core into the outbox. Called at the start."""
        self._cores.connect()

    def on_core_message(self, message: CoreToFrontend, core: int = 0) -> None:
        """Handle a message of a core; `core`: its replica number. Raises the error of a Refused message."""
        if isinstance(message, EngineCoreOutputs):
            try:
                self._requests.on_outputs(core, message)
            except ProtocolError as error:
                count_malformed(self.counts, "core", error)
        elif isinstance(message, Welcome):
            self._cores.on_welcome(core)
            self._requests.resubmit_all(core)
            self._controls.on_core_up(core)
        elif isinstance(message, Unknown):
            if self._cores.all[core].is_up:
                self.counts["core_lost"] += 1
                self._cores.all[core].connect()
        elif isinstance(message, Load):
            self._cores.on_load(core, message)
        elif isinstance(message, Prefetched):
            self._controls.on_prefetched(message)
        elif isinstance(message, Refused):
            raise message.error.to_exception()

    # ── supervisor, threads, time ────────────────────────────────────────────────────────────────────────────────

    def on_control_message(self, message: SupervisorToChild) -> None:
        """Handle a message of the supervisor. Stop is handled by the process, not here."""
        if isinstance(message, Initialize):
            self.metrics.on_sizes(message)
            self.inputs.shorten(message.max_model_len)
        elif isinstance(message, Progress):
            self._queries.on_progress(message)
        elif isinstance(message, StartPhases):
            self.start_phases, self.metrics.kernels = message.phases, message.kernels
        elif isinstance(message, SetLogLevel):
            self.log_level = message.level
        elif isinstance(message, CoreUp):
            self._cores.on_core_up(message.replica)
        elif isinstance(message, ReplicaDown):
            goes_on_elsewhere = self._cores.on_down(message)
            if goes_on_elsewhere or not message.has_core:  # otherwise the core itself counts the losses
                self._requests.count_losses(message)
            if goes_on_elsewhere:
                self._requests.move_all(message)
                self._controls.on_down(message)
        elif isinstance(message, WorkersUp):
            self._cores.resume(message.replica)
            self._requests.resume_waiting()
        elif isinstance(message, DrainReplica):
            self._cores.drain(message.replica, message.limit_s)
        elif isinstance(message, Ordered):
            self._sessions.send_updates()  # outputs before this reply are sent before it
            self._controls.on_ordered(message)
        elif isinstance(message, Drain):
            self._queries.is_draining = self._requests.is_draining = True
            self._drains_at = self._monotonic() + message.clients_return_s

    def on_wakeup(self) -> None:
        """Call the callbacks of the jobs that threads have finished since the last call."""
        for complete in self.intake.take():
            complete()
        self.adapters.on_wakeup()
        self.media.on_wakeup()

    def stop(self, reason: str) -> None:
        """End every open request with an error that says `reason`, because the engine stops. End the threads, and
        send the last tracing spans."""
        for session in list(self._sessions):
            for request in list(session.request_by_id.values()):
                error = ErrorInfo("dead", f"request {request.request_id}: {reason}")
                self._requests.end(request, "error", error)
        self._sessions.send_updates()
        self.intake.close()
        self.adapters.close()
        self.media.close()
        if self._tracing is not None:
            self._tracing.close()

    def tick(self, now: float, *, check_leases: bool = True) -> None:
        """End a turn: check leases, ping the cores, refuse expired jobs, put Deltas into the outbox. `now`: monotonic
        seconds.

        `check_leases`: whether all messages of clients have been read, so that a client without a message is silent.
        If this loop itself was stopped (debugger, suspended machine), all leases restart.
        """
        self._awake_clock.look()
        if now - self._ticked_at > LEASE_S / 2:
            self._sessions.renew_leases(now)
        self._ticked_at = now
        if check_leases and now >= self._sessions.next_lease_end:
            for session in self._sessions.take_expired(now):
                self._requests.drop(session, "silent", f"no message within {LEASE_S:g} s")
        if self._outputs.answer_by_key and now >= self._cores.next_ping_at:
            self._cores.keep_alive(now)
        if now >= self._requests.next_resume_at:
            self._requests.resume_waiting()
        for replica in self._requests.take_drained(now):
            self.outbox.to_supervisor.append(ReplicaDrained(replica=replica))
        self.intake.expire(now)
        self.adapters.expire(now)
        self.shared.tick(now)
        if self._ledger is not None:
            self._ledger.tick()
        self._sessions.send_updates()

    def seconds_to_tick(self, now: float) -> float | None:
        """Return how long the loop may wait for messages before the next `tick`, in seconds; None: no limit. `now` is
        in monotonic seconds."""
        next_at = min(self._sessions.next_lease_end, self.intake.next_expiry, self.adapters.next_expiry)
        next_at = min(next_at, self._requests.next_resume_at, self._cores.next_drain_end, self.shared.next_at)
        if now < self._drains_at:
            next_at = min(next_at, self._drains_at)
        if self._outputs.answer_by_key and self._cores.is_up:
            next_at = min(next_at, self._cores.next_ping_at)
        return None if next_at == NEVER else min(max(0.0, next_at - now), PING_INTERVAL_S)
