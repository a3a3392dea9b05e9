"""LineRun: one line of a batch as a request to the app, without a socket.

So a line has the defaults, errors, adapters and media of any other request. The tokens of the answer are reported while
it is made (api/continuation.py), so that a successor of this frontend goes on with them. Knows no database.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeAlias

import msgspec
from starlette.types import ASGIApp, Message, Scope

from ....forms.openai.batches.batch import BatchUsage, CachedTokens, ReasoningTokens
from ....forms.openai.batches.line import OutputId, answered_line, unanswered_line
from ....forms.openai.errors import HttpError, encode_json, to_http_error
from ....listening.journal.record import MAX_LOSSES
from ....listening.journal.tokens import TokenWriter, decode
from ....state.batches.lines import LineEnd, LineTokens, OpenLine
from ....state.batches.store import LineOutcome, StoredBatch
from ...api.continuation import SHOWN, TOKENS, Continuation, Shown, answers_of, working_on
from ..middleware import OF_ENGINE, OWNER

LONGEST_WAIT_S = 30.0  # before a request is sent again that the engine had no room for
Sleep: TypeAlias = Callable[[float], Awaitable[None]]


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int | None = 0
    reasoning_tokens: int | None = 0


class _Usage(msgspec.Struct, frozen=True):
    """Usage of an answer, in the names of any endpoint."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None

    @property
    def of_batch(self) -> BatchUsage:
        num_input = self.input_tokens or self.prompt_tokens
        num_output = self.output_tokens or self.completion_tokens or 0
        details = (self.prompt_tokens_details, self.input_tokens_details)
        thoughts = (self.completion_tokens_details, self.output_tokens_details)
        return BatchUsage(
            num_input,
            CachedTokens(sum(each.cached_tokens or 0 for each in details if each is not None)),
            num_output,
            ReasoningTokens(sum(each.reasoning_tokens or 0 for each in thoughts if each is not None)),
            self.total_tokens or num_input + num_output,
        )


class _Facts(msgspec.Struct, frozen=True):
    """The part of an answer that a batch counts."""

    model: str | None = None
    usage: _Usage | None = None


class _Named(msgspec.Struct, frozen=True):
    """The part of a body that chooses the model."""

    model: str | None = None


class HttpAnswer(NamedTuple):
    """A whole answer of the app."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class LineRun:
    """The request of an open line. `run` may be called once."""

    def __init__(self, app: ASGIApp, batch: StoredBatch, line: OpenLine, body: bytes | None, served_model: str) -> None:
        """`body`: that of the request; None: the input file is gone. `served_model`: the name of the model that the
        engine serves now."""
        self.batch, self.line = batch, line
        self._app, self._served_model = app, served_model
        self._body, self._has_body = body or b"", body is not None
        self._words = bytearray(line.tokens)  # the tokens of the answer, as the HTTP journal encodes them
        self._num_saved = len(self._words)
        self._writer = TokenWriter()
        self._seed, self._num_cached = line.seed, line.num_cached

    @property
    def num_bytes(self) -> int:
        return len(self._body)

    def take_tokens(self) -> LineTokens | None:
        """Return the tokens that came since the last call; None if there are none."""
        if self._num_saved == len(self._words):
            return None
        tokens = bytes(self._words[self._num_saved :])
        self._num_saved = len(self._words)
        return LineTokens(self.line.batch, self.line.number, self._seed, self._num_cached, tokens)

    async def run(self, sleep: Sleep = asyncio.sleep) -> LineOutcome:
        """Run the request until it has an answer; wait as long as the engine has no room for it."""
        if (fault := self._fault()) is not None:
            return self.failed(fault)
        wait_s = 0.5
        while True:
            answer = await self._ask()
            if answer.status not in (429, 503):
                return self._outcome(answer)
            given = answer.headers.get(b"retry-after", b"")
            await sleep(min(float(given) if given.isdigit() else wait_s, LONGEST_WAIT_S))
            wait_s *= 2

    def failed(self, error: Exception) -> LineOutcome:
        """Return the outcome of a request that ended with an error."""
        shown = to_http_error(error)
        return self._outcome(HttpAnswer(shown.status, {b"content-type": b"application/json"}, encode_json(shown.body)))

    def _fault(self) -> HttpError | None:
        """Return the error of a line that must not be sent, if it is one."""
        if not self._has_body:
            return HttpError(500, "the input file of the batch is gone: upload it again", "server_error")
        if self.line.losses > MAX_LOSSES:
            message = f"the engine was lost {self.line.losses} times before this request had a token: it is not run"
            return HttpError(500, f"{message} again", "server_error")
        begun = self.batch.record.served_model
        if begun == self._served_model or self._names_model():
            return None
        message = f"the batch was created for the model {begun!r:.200}, now {self._served_model!r:.200} is served"
        return HttpError(404, f"{message}: send it again", param="model", code="model_not_found")

    def _names_model(self) -> bool:
        try:
            return bool(msgspec.json.decode(self._body, type=_Named).model)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return True  # the app refuses it

    async def _ask(self) -> HttpAnswer:
        """Send the request to the app, with the tokens that its answer has, and return the answer."""
        path = self.batch.record.batch.endpoint
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self._body))]
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": head,
            "client": None,
            "server": None,
            OF_ENGINE: True,
            OWNER: self.batch.owner,
        }
        bodies = [self._body]
        status, headers, pieces = 500, dict[bytes, bytes](), list[bytes]()

        async def receive() -> Message:
            if bodies:
                return {"type": "http.request", "body": bodies.pop(), "more_body": False}
            never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
            return await never  # nobody disconnects

        async def send(message: Message) -> None:
            nonlocal status, headers
            if message["type"] == TOKENS:
                self._add(message[SHOWN])
            elif message["type"] == "http.response.start":
                status, headers = message["status"], dict(message.get("headers", ()))
            else:
                pieces.append(message.get("body", b""))

        with working_on(self._continuation()):
            await self._app(scope, receive, send)
        return HttpAnswer(status, headers, b"".join(pieces))

    def _continuation(self) -> Continuation:
        line = self.line
        shown, self._writer = decode(bytes(self._words))
        return Continuation(
            nonce=self.batch.record.nonce_of(line.number),
            created=line.opened,
            answers=answers_of(shown),
            sources=shown.sources,
            num_cached=self._num_cached,
            seed=self._seed or self.batch.record.seed_of(line.number),
            num_losses=line.losses,
            is_kept=True,
            is_flex=True,
        )

    def _add(self, shown: Shown) -> None:
        """Add tokens to the answer."""
        self._seed, self._num_cached = shown.seed, shown.num_cached
        self._words += self._writer.encode(shown.tokens, shown.ended, shown.logprobs, shown.sources)

    def _outcome(self, answer: HttpAnswer) -> LineOutcome:
        record, line = self.batch.record, self.line
        ids = OutputId(record.line_id(line.number), line.custom_id)
        kind = answer.headers.get(b"content-type", b"").decode("latin-1")
        if not kind.startswith("application/json"):
            message = (
                f"the answer is {kind or 'without a type':.80}, and a line holds JSON: ask for a form that is JSON"
            )
            end = LineEnd(line.batch, line.number, 0, unanswered_line(ids, "invalid_response", message))
            return LineOutcome(end, BatchUsage(), None)
        request_id = answer.headers.get(b"x-request-id", b"").decode("latin-1")
        shown = answered_line(ids, answer.status, request_id, b" ".join(answer.body.splitlines()))
        facts = msgspec.json.decode(answer.body, type=_Facts) if answer.status == 200 else _Facts()
        usage = BatchUsage() if facts.usage is None else facts.usage.of_batch
        return LineOutcome(LineEnd(line.batch, line.number, answer.status, shown), usage, facts.model)
