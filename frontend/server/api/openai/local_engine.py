"""LocalEngine: the HTTP handlers' access to the engine, to submit requests, await deltas, control and abort.

A LocalEngine is a client of the Frontend in the same process and event loop. Each turn (loop iteration) of the frontend
wakes every run that has new deltas once. At most RUNS_PER_GROUP runs are woken together: between two groups the event
loop serves its sockets, so that a probe or a new request does not wait for hundreds of runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial

import msgspec

from .....ipc.messages.client import (
    Abort,
    Accepted,
    ChatMessage,
    Control,
    Delta,
    Deltas,
    Done,
    FrontendMessage,
    LoadAdapter,
    Medium,
    PutMedium,
    QueryFailed,
    Submit,
)
from .....ipc.messages.intake import BodyInput, ReadPrompt
from .....ipc.params.sampling_params import CutSide
from ....forms.answer_forms.form import AnswerForm
from ....forms.media.media_sender import held_media
from ....forms.openai.errors import HttpError, unknown_model
from ....forms.openai.messages import chat_input
from ....forms.openai.prompts import submitted_id
from ....forms.openai.schema import ChatRequest, TokenizeRequest
from ....forms.prompts import id_is_open
from ...adapters.manager import NotFound
from ...bodies.body_parser import ParsedBody
from ...helpers.task import in_event_loop
from ...metrics.access_record import access_record
from ...metrics.tracing import TraceContext, incoming_trace
from ...prompts.prompt import Prompt
from ...requests.client_session import Caller
from ...requests.frontend import Frontend
from ...requests.media.media_input import ReadPiece
from ..continuation import Continuation, current
from .body_reader import BodyReader
from .run import NOBODY, Run
from .slices import SLICE_S

RUNS_PER_GROUP = 32


def _of_flex_class(submit: Submit) -> Submit:
    return msgspec.structs.replace(submit, params=submit.params.replace(service_tier="flex"))


class LocalEngine:
    """Client of the Frontend in the same process. A request id is in use from `run` until the last answer ends or the
    caller leaves the context of `run`."""

    def __init__(
        self,
        frontend: Frontend,
        wake: Callable[[], None],
        *,
        has_strict_fields: bool = False,
        has_timings: bool = False,
        block_size: int = 0,
    ) -> None:
        """`wake` schedules a turn of the frontend. `has_timings`: whether responses include their durations.
        `block_size`: tokens per block of the prefix cache, or 0 if there is none."""
        self.has_timings = has_timings
        self._block_size = block_size
        self._frontend = frontend
        self.inputs = frontend.inputs
        self.on_unparsed = frontend.metrics.answers.on_unparsed
        self.bodies = BodyReader(
            frontend.intake, frontend.inputs.limits, is_strict=has_strict_fields, hold=frontend.media.hold
        )
        self.wake = wake
        self.slice_s = SLICE_S
        self._session = frontend.open_local(self._deliver, self._caller_of)
        self._run_by_id: dict[str, tuple[Run, int]] = {}  # with the prompt's position in the run
        self._controls: dict[int, asyncio.Future[Done]] = {}  # by query id
        self._query_ids = itertools.count()
        self._to_wake: dict[Run, None] = {}  # an ordered set; unless it is empty, `_wake_group` is scheduled
        self._to_do: deque[Callable[[], None]] = deque()  # submits and aborts; unless empty, `_do_some` is scheduled

    async def model_of(self, body: object) -> str:
        """Return the name to report for the model that a body asks for: the served model's first or an adapter's. Load
        the adapter if needed. HttpError 404 if the name is unknown, and 403 if the caller's key may not use it;
        RequestError or Overloaded if the adapter cannot be loaded."""
        name: str = getattr(body, "model", None) or ""
        if current().adapter_digest:  # the request goes on with it, even if its name was given up
            return name
        try:
            info = await in_event_loop(self._frontend.adapters.find(name))
            key = current().api_key
            if info is not None and key is not None and not key.may_use(info.name):
                message = f"key {key.name} may not use the adapter {info.name}: ask for one of /v1/models"
                raise HttpError(403, message, "permission_error", param="model")
            return self._frontend.model_names[0] if info is None else info.name
        except NotFound as error:
            raise unknown_model(error) from None

    async def answer_form(self, template: str | None = None) -> AnswerForm:
        """Return the form of the model's answers, or of those to a request's chat template. Waits until it is
        learned."""
        return (await self._frontend.forms.choice(template)).form

    @property
    def adapter_names(self) -> list[str]:
        return [info.name for info in self._frontend.adapters.infos]

    def adapter_digest(self, model: str) -> bytes:
        """Return the digest of the adapter that `model` names; empty for the model itself."""
        info = self._frontend.adapters.get(model)
        return b"" if info is None else bytes.fromhex(info.digest)

    async def chat_prompt(
        self, parsed: ParsedBody[ChatRequest] | ParsedBody[TokenizeRequest], cut_side: CutSide | None = None
    ) -> BodyInput:
        """Return the prompt of a chat. If an intake process has read the body, the prompt is in `parsed`; otherwise it
        is rendered and tokenized now. `cut_side`: the side on which the caller will truncate the prompt."""
        if parsed.inputs:
            return parsed.inputs[0]
        chat = chat_input(parsed.body, self.inputs.media_limits)
        self.inputs.check_template(chat.form)
        self.put(chat.media)
        now = current().created
        prompt = await self._prompt(ReadPrompt(chat=chat.turns, chat_form=chat.form, cut_side=cut_side, now=now))
        return chat.prompt(prompt.token_ids, prompt.text)

    def put(self, media: Iterable[Medium]) -> None:
        """Store the media whose bytes are in this process, for a request that is about to be submitted."""
        for medium in held_media(media):
            self._frontend.media.put(PutMedium(digest=medium.digest, data=memoryview(medium.data)))

    @contextlib.asynccontextmanager
    async def pieces(self, clip: Medium, piece_s: float, wait_s: float) -> AsyncIterator[Sequence[ReadPiece]]:
        """Cut a clip into pieces of at most `piece_s` seconds, within `wait_s` seconds; the context's value is the
        pieces. Inside the context requests may refer to a piece, as a medium, by the digest of its media file."""
        job = self._frontend.media.read_pieces(clip, piece_s, owner=secrets.token_hex(8), wait_s=wait_s)
        try:
            yield await in_event_loop(job.reply)
        finally:
            self._frontend.media.release(job)

    async def rendered(self, turns: list[ChatMessage]) -> str:
        """Return the text of a chat in the model's chat template, up to the start of the answer."""
        return (await self._prompt(ReadPrompt(chat=turns, now=current().created))).text or ""

    async def chat_tokens(self, parsed: ParsedBody[ChatRequest] | ParsedBody[TokenizeRequest]) -> bytes:
        """Return the token ids of a chat's prompt, including those of its media."""
        prompt = await self.chat_prompt(parsed)
        token_ids = prompt.token_ids or b""
        if not prompt.media:
            return token_ids
        return (await in_event_loop(self._frontend.reader.expand(token_ids, prompt.media))).token_ids

    async def text_tokens(self, given: BodyInput, add_special_tokens: bool, cut_side: CutSide | None = None) -> bytes:
        """Return the token ids of a text, or those that `given` already holds. `cut_side`: the side on which the caller
        will truncate the text."""
        if given.token_ids is not None:
            return given.token_ids
        question = ReadPrompt(prompt=given.text, add_special_tokens=add_special_tokens, cut_side=cut_side)
        return (await self._prompt(question)).token_ids

    async def _prompt(self, question: ReadPrompt) -> Prompt:
        return await in_event_loop(self._frontend.prompts.read(question, owner=secrets.token_hex(8)))

    async def text_of(self, token_ids: bytes) -> str:
        """Return the text of token ids."""
        return await in_event_loop(self._frontend.prompts.detokenize(token_ids, owner=secrets.token_hex(8)))

    @contextlib.contextmanager
    def run(
        self,
        submits: Sequence[Submit],
        model: str = "",
        max_open: int | None = None,
        continuation: Continuation | None = None,
    ) -> Iterator[Run]:
        """Submit requests to `model`, a result of `model_of`, in slices of `slice_s`; the context's value is their Run.
        Leaving the context aborts the requests that are still open. If `max_open` is given, at most that many run at a
        time, in order. `continuation`: as in Run.

        All submits must have the same `n`. RequestError if a request id is in use."""
        for submit in submits:
            self.check_id(submit.request_id)
        submits = current().since_first_byte(submits)
        if continuation is not None:
            submits = continuation.submits(submits, self.inputs.new_seed)
        if current().is_flex:
            submits = [_of_flex_class(submit) for submit in submits]
        record, trace = access_record.get(), incoming_trace.get()
        caller = Caller("" if record is None else record.peer, current().api_key)
        run = Run(len(submits), submits[0].params.n, self._block_size, caller, continuation)
        adapter = "" if model in self._frontend.model_names else model
        for position, submit in enumerate(submits):
            self._run_by_id[submit.request_id] = (run, position)
        self._session.num_readers += 1
        send = self._frontend.note.bound(partial(self._submit, run, trace, adapter))
        work = (partial(send, submit) for submit in submits)
        try:
            run.waiting = None if max_open is None else work
            self._do_all(itertools.islice(work, max_open))
            yield run
        finally:
            self._session.num_readers -= 1
            if record is not None:
                record.num_prompt_tokens += run.num_prompt_tokens
                record.num_completion_tokens += run.num_completion_tokens
                record.adapter = adapter
            left = [each.request_id for each in submits if self._run_by_id.pop(each.request_id, None) is not None]
            self._do_all(partial(self._frontend.on_local_disconnect, self._session, each) for each in left)

    def _caller_of(self, request_id: str) -> Caller:
        run, _ = self._run_by_id.get(request_id, (None, 0))
        return NOBODY if run is None else run.caller

    def check_id(self, request_id: str) -> None:
        """Raise RequestError if a submit with this id is open."""
        if request_id in self._run_by_id:
            raise id_is_open(request_id)

    def _submit(self, run: Run, trace: TraceContext, adapter: str, submit: Submit) -> None:
        if self._run_by_id.get(submit.request_id, (None, 0))[0] is run:  # otherwise the caller has already left `run`
            if adapter or trace.traceparent:
                submit = msgspec.structs.replace(submit, adapter=adapter, **trace._asdict())
            self._frontend.on_message(self._session, submit)

    def _do_all(self, work: Iterable[Callable[[], None]]) -> None:
        """Run as much of `work` as `slice_s` allows; queue the rest for later turns of the event loop."""
        pending, is_idle = iter(work), not self._to_do
        self._do_slice(pending)
        self._to_do.extend(pending)
        if is_idle and self._to_do:
            asyncio.get_running_loop().call_soon(self._do_some)
        self.wake()

    def _do_some(self) -> None:
        self._do_slice(self._to_do.popleft() for _ in range(len(self._to_do)))
        if self._to_do:
            asyncio.get_running_loop().call_soon(self._do_some)
        self.wake()

    def _do_slice(self, work: Iterator[Callable[[], None]]) -> None:
        """Run at least one item of `work`, and more until `slice_s` has passed."""
        deadline = time.monotonic() + self.slice_s
        for each in work:
            each()
            if time.monotonic() > deadline:
                return

    def abort(self, request_id: str) -> int:
        """Abort the submits ID and ID/N of a response, and return their number. Their `run` gets the partial
        answers."""
        request_id = submitted_id(request_id)
        found = [each for each in self._run_by_id if each == request_id or each.rpartition("/")[0] == request_id]
        for each in found:
            self._frontend.on_message(self._session, Abort(request_id=each))
        if found:
            self.wake()
        return len(found)

    async def control(self, control: Control) -> Done:
        """Send a control message with a fresh query id, and return its reply. Raise the error of a QueryFailed."""
        query_id = next(self._query_ids)
        done: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._controls[query_id] = done
        try:
            self._frontend.on_message(self._session, msgspec.structs.replace(control, query_id=query_id))
            self.wake()
            return await done
        finally:
            del self._controls[query_id], done  # the future's error holds this frame

    async def load_adapter(self, query: LoadAdapter) -> None:
        """Load an adapter from a folder in --adapter-folder. NotFound if it does not exist, RequestError if it cannot
        be loaded, Overloaded if a resource is short."""
        await in_event_loop(self._frontend.adapters.load(query, is_confined=True))

    def _on_reply(self, reply: Done | QueryFailed) -> None:
        done = self._controls.get(reply.query_id)
        if done is None or done.done():
            return  # the caller has left
        if isinstance(reply, QueryFailed):
            done.set_exception(reply.error.to_exception())
        else:
            done.set_result(reply)

    def _deliver(self, message: FrontendMessage) -> None:
        if isinstance(message, Deltas):
            for delta in message.deltas:
                self._put(delta.request_id, delta)
        elif isinstance(message, Accepted):
            self._put(message.request_id, message)
        elif isinstance(message, (Done, QueryFailed)):
            self._on_reply(message)

    def _put(self, request_id: str, update: Accepted | Delta) -> None:
        run, position = self._run_by_id.get(request_id, (None, 0))
        if run is None:
            return  # the caller has left
        if not self._to_wake:
            asyncio.get_running_loop().call_soon(self._wake_group)
        self._to_wake[run] = None
        if run.put(position, update):
            del self._run_by_id[request_id]
            if run.waiting is not None:
                asyncio.get_running_loop().call_soon(self._do_all, itertools.islice(run.waiting, 1))

    def _wake_group(self) -> None:
        group = list(itertools.islice(self._to_wake, RUNS_PER_GROUP))
        for run in group:
            del self._to_wake[run]
            run.wake()
        if self._to_wake:
            asyncio.get_running_loop().call_soon(self._wake_group)
