"""A frontend for tests: a ROUTER in a thread with the protocol of ipc/messages/client.py and predictable tokens.

The token at index i of an output is a function of prompt and seed (`answer_tokens`), as in the real engine, so that a
test can check that a resumed output continues where it stopped. The text of a token is "<id>". Tests control it
through `do`, which runs a function in the thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
from array import array
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import zmq

from tokenloom.ipc.codec import Decoder, decode_ids, encode, encode_ids, num_ids
from tokenloom.ipc.errors import ErrorInfo
from tokenloom.ipc.messages.adapter import AdapterInfo
from tokenloom.ipc.messages.base import PROTOCOL_VERSION, FinishReason, Hello, Ping, Pong, Refused, Unknown, Welcome
from tokenloom.ipc.messages.client import (
    CREDIT_WINDOW,
    Abort,
    Accepted,
    Adapters,
    AnswerFormIs,
    ClientMessage,
    Credit,
    Delta,
    Deltas,
    Detokenize,
    Done,
    FrontendMessage,
    GetAnswerForm,
    GetHealth,
    Health,
    Info,
    ListAdapters,
    LoadAdapter,
    Query,
    QueryFailed,
    RequestMetrics,
    Submit,
    Text,
    TokenIds,
    Tokenize,
    UnloadAdapter,
)
from tokenloom.ipc.params.sampling_params import SamplingParams
from tokenloom.ipc.sockets.zmq_sockets import new_socket

T = TypeVar("T")

DEADLINE_S = 20.0
FORBIDDEN = "forbidden"  # a prompt with this word is refused


def greedy(max_tokens: int = 40, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)  # type: ignore[arg-type]


def prompt_ids(submit: Submit) -> bytes:
    if submit.prompt_token_ids is not None:
        return submit.prompt_token_ids
    return encode_ids(list((submit.prompt or "".join(turn.content for turn in submit.chat or ())).encode()))


def answer_tokens(prompt: bytes, seed: int, num_tokens: int) -> list[int]:
    base = sum(decode_ids(prompt)) * 7 + seed
    return [(base + 31 * index) % 1000 for index in range(num_tokens)]


def text_of(tokens: list[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


def expected_text(prompt: str, num_tokens: int, seed: int = 5) -> str:
    return text_of(answer_tokens(encode_ids(list(prompt.encode())), seed, num_tokens))


@dataclass
class Running:
    submit: Submit
    tokens: list[int]
    num_sent: int
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(arrival_time=1.0))


@dataclass
class FakeSession:
    running: dict[str, Running] = field(default_factory=dict)
    num_in_flight: int = 0


class FakeService:
    """The frontend's protocol without a socket: `take` a message, `generate` a step, read `outbox`."""

    def __init__(self) -> None:
        self.run_id = "run-1"
        self.model_digest = ""  # not known
        self.defaults: dict[str, int | float] = {}  # default SamplingParams in Info
        self.version = PROTOCOL_VERSION
        self.is_mute = False  # sends no messages
        self.is_paused = False  # generates no tokens
        self.max_running = 1 << 30  # further requests get Overloaded
        self.tokens_per_delta = 4
        self.max_deltas: int | None = None  # it pauses after this many Deltas messages
        self.spoil: Callable[[Delta], list[Delta]] = lambda delta: [delta]
        self.seen: Counter[str] = Counter()
        self.submits: list[Submit] = []
        self.orders: list[LoadAdapter | UnloadAdapter] = []
        self.adapters: dict[str, AdapterInfo] = {}
        self.digest_by_adapter: dict[str, bytes] = {}  # for the Accepted of requests without one
        self.max_in_flight = 0
        self.sessions: dict[bytes, FakeSession] = {}
        self.outbox: list[tuple[bytes, FrontendMessage]] = []

    @property
    def has_work(self) -> bool:
        return not self.is_paused and any(
            session.running and session.num_in_flight < CREDIT_WINDOW for session in self.sessions.values()
        )

    def send(self, identity: bytes, message: FrontendMessage) -> None:
        self.outbox.append((identity, message))
        if isinstance(message, Deltas):
            session = self.sessions[identity]
            session.num_in_flight += 1
            self.max_in_flight = max(self.max_in_flight, session.num_in_flight)

    def take(self, identity: bytes, message: ClientMessage) -> None:
        self.seen[type(message).__name__] += 1
        if not self.is_mute:
            self._take(identity, message)

    def _take(self, identity: bytes, message: ClientMessage) -> None:
        session = self.sessions.get(identity)
        if isinstance(message, Hello):
            assert len(identity) == 16
            if message.protocol_version != self.version:
                text = f"the client speaks {message.protocol_version}, this engine {self.version}"
                self.send(identity, Refused(error=ErrorInfo("protocol", text)))
                return
            self.sessions.setdefault(identity, FakeSession()).num_in_flight = 0
            self.send(
                identity, Welcome(protocol_version=self.version, run_id=self.run_id, model_digest=self.model_digest)
            )
        elif session is None:
            self.send(identity, Unknown())
        elif isinstance(message, Submit):
            self._submit(identity, session, message)
        elif isinstance(message, Abort):
            running = session.running.pop(message.request_id, None)
            if running is not None:
                self.send(identity, Deltas(deltas=[_end(running, "abort")]))
        elif isinstance(message, Credit):
            session.num_in_flight -= message.count
            assert session.num_in_flight >= 0
        elif isinstance(message, Ping):
            self.send(identity, Pong())
        else:
            self._answer(identity, message)

    def _submit(self, identity: bytes, session: FakeSession, submit: Submit) -> None:
        self.submits.append(submit)
        known = session.running.get(submit.request_id)
        if known is not None and submit.attempt <= known.submit.attempt:
            return
        error = None
        if FORBIDDEN in (submit.prompt or ""):
            error = ErrorInfo("request", "the prompt is forbidden: choose another")
        elif len(session.running) >= self.max_running:
            error = ErrorInfo("overloaded", "busy", 0.01)
        if error is not None:
            delta = Delta(request_id=submit.request_id, finish_reason="error", error=error)
            self.send(identity, Deltas(deltas=[delta]))
            return
        ids = prompt_ids(submit)
        seed = submit.children[0].seed if submit.children else submit.params.seed
        seed = 5 if seed is None else seed
        digest = submit.adapter_digest or self.digest_by_adapter.get(submit.adapter, b"")
        tokens = answer_tokens(ids, seed + sum(digest), submit.params.max_tokens or 16)
        num_had = num_ids(submit.children[0].output_token_ids) if submit.children else 0
        if submit.children:
            assert decode_ids(submit.children[0].output_token_ids).tolist() == tokens[:num_had]
        session.running[submit.request_id] = Running(submit, tokens, num_had)
        text = submit.prompt if submit.chat is None else "".join(turn.content for turn in submit.chat)
        accepted = Accepted(
            request_id=submit.request_id,
            attempt=submit.attempt,
            prompt_token_ids=ids,
            prompt=text,
            seed=seed,
            adapter_digest=digest,
        )
        self.send(identity, accepted)

    def _carry_out(self, order: LoadAdapter | UnloadAdapter) -> FrontendMessage:
        self.orders.append(order)
        if isinstance(order, LoadAdapter):
            self.adapters[order.name] = AdapterInfo(name=order.name, path=order.path, digest="", rank=8, base="fake")
        elif self.adapters.pop(order.name, None) is None:
            return QueryFailed(query_id=order.query_id, error=ErrorInfo("request", "it cannot be found"))
        return Done(query_id=order.query_id)

    def _answer(self, identity: bytes, message: Query) -> None:
        query_id = message.query_id
        reply: FrontendMessage
        if isinstance(message, LoadAdapter | UnloadAdapter):
            reply = self._carry_out(message)
        elif isinstance(message, ListAdapters):
            reply = Adapters(query_id=query_id, adapters=[self.adapters[name] for name in sorted(self.adapters)])
        elif isinstance(message, Tokenize) and FORBIDDEN in (message.prompt or ""):
            reply = QueryFailed(query_id=query_id, error=ErrorInfo("request", "forbidden"))
        elif isinstance(message, Tokenize):
            text = message.prompt or "".join(turn.content for turn in message.chat or ())
            reply = TokenIds(query_id=query_id, token_ids=encode_ids(list(text.encode())))
        elif isinstance(message, Detokenize):
            reply = Text(query_id=query_id, text=bytes(decode_ids(message.token_ids).tolist()).decode())
        elif isinstance(message, GetHealth):
            reply = Health(
                query_id=query_id, is_ready=True, is_stalled=False, step=1, step_age_s=0.0, num_running=0, num_waiting=0
            )
        elif isinstance(message, GetAnswerForm):
            reply = AnswerFormIs(query_id=query_id, form={})
        else:
            reply = Info(
                query_id=query_id,
                default_sampling_params=self.defaults,
                version="0",
                run_id=self.run_id,
                model="fake",
                max_model_len=1000,
                vocab_size=1000,
                block_size=16,
                num_kv_blocks=10,
                tensor_parallel_size=1,
                eos_token_ids=[0],
            )
        self.send(identity, reply)

    def generate(self) -> None:
        """Run a step: tokens for every running request, one message to every client."""
        for identity, session in self.sessions.items():
            if self.is_paused or session.num_in_flight >= CREDIT_WINDOW or not session.running:
                continue
            deltas = [spoiled for running in list(session.running.values()) for spoiled in self._step(session, running)]
            if deltas:
                self.send(identity, Deltas(deltas=deltas))
            if self.max_deltas is not None:
                self.max_deltas -= 1
                self.is_paused = self.max_deltas <= 0

    def _step(self, session: FakeSession, running: Running) -> list[Delta]:
        start = running.num_sent
        new = running.tokens[start : start + self.tokens_per_delta]
        running.num_sent += len(new)
        is_last = running.num_sent == len(running.tokens)
        if is_last:
            del session.running[running.submit.request_id]
        return self.spoil(
            Delta(
                request_id=running.submit.request_id,
                start=start,
                token_ids=array("i", new).tobytes(),
                text=text_of(new),
                finish_reason="length" if is_last else None,
                metrics=running.metrics if start == 0 or is_last else None,
                num_cached_tokens=3 if start == 0 else 0,
            )
        )


class FakeFrontend:
    """A FakeService behind a ROUTER in a thread; tests read and change it with `do` and `set`."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.service = FakeService()
        self._decoder: Decoder[ClientMessage] = Decoder(ClientMessage)
        self._jobs: deque[Callable[[], None]] = deque()
        self._watchers: list[Callable[[], bool]] = []
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._context = zmq.Context()
        self._is_closed = False
        self._socket = self._bind()
        self._thread = threading.Thread(target=self._run, name="fake frontend", daemon=True)
        self._thread.start()

    # ── called by tests ──

    def do(self, function: Callable[[FakeService], T]) -> T:
        """Run `function(service)` in the thread between two turns."""
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(function(self.service))
            except Exception as error:
                future.set_exception(error)

        self._jobs.append(job)
        os.eventfd_write(self._wake_fd, 1)
        return future.result(DEADLINE_S)

    def set(self, **values: object) -> None:
        self.do(lambda service: service.__dict__.update(values))

    def until(self, condition: Callable[[FakeService], bool]) -> None:
        """Wait until `condition(service)` holds at the end of a turn."""
        is_true = threading.Event()

        def watch() -> bool:
            if condition(self.service):
                is_true.set()
            return is_true.is_set()

        self.do(lambda service: self._watchers.append(watch))
        assert is_true.wait(DEADLINE_S), f"not within {DEADLINE_S} s; seen {self.service.seen}"

    def forget(self) -> None:
        """Drop every session, as a frontend that restarts unnoticed."""
        self.do(lambda service: service.sessions.clear())

    def hang_up(self) -> None:
        """Close the socket and drop every session, as a process that ends."""

        def close(service: FakeService) -> None:
            service.sessions.clear()
            self._socket.close(linger=0)

        self.do(close)

    def come_back(self) -> None:
        def bind(service: FakeService) -> None:
            self._socket = self._bind()

        self.do(bind)

    def say(self, frame: bytes) -> None:
        """Send raw bytes to every client."""
        self.do(lambda service: [self._socket.send_multipart([identity, frame]) for identity in service.sessions])

    def close(self) -> None:
        self._is_closed = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        os.close(self._wake_fd)

    # ── the thread ──

    def _bind(self) -> zmq.Socket[bytes]:
        socket = new_socket(self._context, zmq.ROUTER)
        try:
            socket.bind(self.address)
        except zmq.ZMQError:
            socket.close()
            raise
        return socket

    def _run(self) -> None:
        while not self._is_closed:
            self._wait()
            while self._jobs:
                self._jobs.popleft()()
            if not self._socket.closed:
                self._receive()
                self.service.generate()
                self._send()
            self._watchers = [watch for watch in self._watchers if not watch()]
        self._socket.close(linger=0)
        self._context.term()

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        if not self._socket.closed:
            poller.register(self._socket, zmq.POLLIN)
        poller.poll(0 if self.service.has_work and not self._socket.closed else None)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _receive(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                identity, frame = self._socket.recv_multipart(zmq.DONTWAIT)
                self.service.take(identity, self._decoder.decode(frame))

    def _send(self) -> None:
        outbox, self.service.outbox = self.service.outbox, []
        for identity, message in outbox:
            with contextlib.suppress(zmq.ZMQError):  # the client is disconnected; its lease expires
                self._socket.send_multipart([identity, encode(message)])


def _end(running: Running, reason: FinishReason) -> Delta:
    return Delta(request_id=running.submit.request_id, start=running.num_sent, finish_reason=reason)
