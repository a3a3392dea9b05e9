"""LocalEngine: the engine as the HTTP handlers see it: submit, await what comes, ask, abort.

A client of the Frontend in the same loop and the same process. One turn of the frontend wakes each run that has
news once, with everything that the turn brought for it. Of hundreds of runs a few wake at a time: between two such
groups the loop looks at its sockets, so that a probe or a new request does not wait for all of them.

A choice is one answer of one prompt: choice = position of the prompt × n + index of the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from functools import partial

import msgspec

from ...ipc.codec import JsonObject, num_ids
from ...ipc.errors import ErrorInfo, RequestError
from ...ipc.messages.client import (
    Abort,
    Accepted,
    Control,
    Delta,
    Deltas,
    Done,
    FrontendMessage,
    QueryFailed,
    RequestMetrics,
    Submit,
)
from ...ipc.messages.intake import BodyInput
from ...ipc.sampling_params import CutSide
from ..intake.background import BackgroundJob, Then
from ..intake.body_parser import ParsedBody
from ..intake.input_processor import Prompt
from ..metrics.access_record import access_record
from ..metrics.tracing import TraceContext, incoming_trace
from ..requests.frontend import Frontend
from .body_reader import BodyReader, in_background
from .forms.messages import chat_input
from .forms.schema import ChatRequest, TokenizeRequest
from .forms.timings import timings
from .parsers.thoughts import ends_inside
from .slices import SLICE_S

RUNS_PER_GROUP = 32
ChoiceNews = list[tuple[int, Delta]]


class Run:
    """The engine's work for one HTTP request: the news of its choices and its usage. `put` and `wake` are the engine's,
    the rest belongs to one task; both are in one loop."""

    def __init__(self, num_prompts: int, num_answers: int) -> None:
        self.num_choices = num_prompts * num_answers
        self.num_answers = num_answers
        self._num_open = [num_answers] * num_prompts  # answers that have not ended
        self._num_prompts_open = num_prompts
        self._news: list[tuple[int, Accepted | Delta]] = []  # of which prompt, and what it got
        self._waiter: asyncio.Future[None] | None = None
        self._num_cached = [0] * num_prompts
        self._metrics = RequestMetrics()  # the newest
        self.num_completion_tokens = 0
        self.num_thought_tokens = 0  # of those; chats count them
        self._prompts: list[Accepted | None] = [None] * num_prompts

    def put(self, position: int, update: Accepted | Delta) -> bool:
        """Something came for a prompt, to be seen after `wake`; returns whether it was the last."""
        self._news.append((position, update))
        if isinstance(update, Accepted) or update.finish_reason is None:
            return False
        self._num_open[position] -= 1
        is_last = self._num_open[position] <= 0 or update.finish_reason == "error"
        self._num_prompts_open -= is_last
        return is_last

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def news(self) -> AsyncGenerator[ChoiceNews, None]:
        """What each turn brought, until every choice has ended; raises the first error. May be empty."""
        while self._num_prompts_open or self._news:
            if not self._news:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            updates, self._news = self._news, []
            found: ChoiceNews = []
            for position, update in updates:
                if isinstance(update, Accepted):
                    self._prompts[position] = update
                    continue
                if update.finish_reason == "error":
                    error = update.error or ErrorInfo("internal", "the request failed and the engine did not say why")
                    raise error.to_exception()
                self.num_completion_tokens += num_ids(update.token_ids)
                self._metrics = update.metrics or self._metrics
                self._num_cached[position] = max(self._num_cached[position], update.num_cached_tokens)
                found.append((position * self.num_answers + update.index, update))
            yield found

    def timings(self) -> JsonObject:
        """How long the only choice took; empty if there are several."""
        return timings(self._metrics, self.num_completion_tokens) if self.num_choices == 1 else {}

    def prompt_of(self, choice: int) -> Accepted | None:
        return self._prompts[choice // self.num_answers]

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counted once whatever n is."""
        return sum(num_ids(each.prompt_token_ids) for each in self._prompts if each is not None)

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompts, those found in the prefix cache."""
        return sum(self._num_cached)

    def usage(self, num_told: int | None = None) -> JsonObject:
        """Tokens of the prompts, and of all answers so far or, while they are told one by one, those told."""
        num_prompt = self.num_prompt_tokens
        num_completion = self.num_completion_tokens if num_told is None else num_told
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.num_thought_tokens},
        }


class LocalEngine:
    """Invariant: a request id is here from its submit until its last answer has ended or its `run` is left."""

    def __init__(
        self,
        frontend: Frontend,
        wake: Callable[[], None],
        *,
        has_strict_fields: bool = False,
        tells_timings: bool = False,
    ) -> None:
        """`wake` makes the frontend have a turn soon. `tells_timings`: answers have their metrics."""
        self.tells_timings = tells_timings
        self._frontend = frontend
        self.inputs = frontend.inputs
        self.bodies = BodyReader(frontend.background, frontend.inputs.limits, is_strict=has_strict_fields)
        self.wake = wake
        self._session = frontend.open_local(self._deliver)
        self._run_by_id: dict[str, tuple[Run, int]] = {}  # and the position of the submit in it
        self._orders: dict[int, asyncio.Future[None]] = {}  # by query id
        self._query_ids = itertools.count()
        self._to_wake: dict[Run, None] = {}  # in order; not empty: `_wake_group` is due
        self._to_do: deque[Callable[[], None]] = deque()  # submits and ends; not empty: `_do_some` is due

    async def chat_prompt(
        self, parsed: ParsedBody[ChatRequest] | ParsedBody[TokenizeRequest], cut_side: CutSide | None = None
    ) -> BodyInput:
        """The prompt of a chat: made here, in a thread if it is long, or by the intake process with a large body."""
        if parsed.inputs:
            return parsed.inputs[0]
        chat = chat_input(parsed.body)
        self.inputs.check_template(chat.form)

        def start(then: Then[Prompt]) -> BackgroundJob | None:
            return self._frontend.prompts.read(
                None, None, chat.turns, then, form=chat.form, cut_side=cut_side, owner=secrets.token_hex(8)
            )

        prompt = await in_background(self._frontend.background, start)
        ids, is_inside = prompt.token_ids, ends_inside(prompt.text or "")
        return BodyInput(text=chat.echoed, token_ids=ids, is_of_chat=True, is_inside_thought=is_inside)

    async def text_tokens(self, given: BodyInput, add_special_tokens: bool, cut_side: CutSide | None = None) -> bytes:
        """The tokens of a text, in whose place they may stand already; with `cut_side` those that may be kept."""
        if given.token_ids is not None:
            return given.token_ids

        def start(then: Then[Prompt]) -> BackgroundJob | None:
            return self._frontend.prompts.read(
                given.text,
                None,
                None,
                then,
                add_special_tokens=add_special_tokens,
                cut_side=cut_side,
                owner=secrets.token_hex(8),
            )

        return (await in_background(self._frontend.background, start)).token_ids

    async def text_of(self, token_ids: bytes) -> str:
        """The text of tokens."""

        def start(then: Then[str]) -> BackgroundJob | None:
            return self._frontend.prompts.detokenize(token_ids, then, owner=secrets.token_hex(8))

        return await in_background(self._frontend.background, start)

    @contextlib.contextmanager
    def run(self, submits: Sequence[Submit]) -> Iterator[Run]:
        """Submit all, which ask for the same number of answers each, in turns of SLICE_S. Leaving this, for whatever
        reason, aborts what is still open.

        RequestError for an id that is in use."""
        for submit in submits:
            if submit.request_id in self._run_by_id:
                raise RequestError(f"request_id {submit.request_id} is open already: choose another")
        run, trace = Run(len(submits), submits[0].params.n), incoming_trace.get()
        for position, submit in enumerate(submits):
            self._run_by_id[submit.request_id] = (run, position)
        self._session.num_readers += 1
        try:
            self._do_all(partial(self._submit, run, submit, trace) for submit in submits)
            yield run
        finally:
            self._session.num_readers -= 1
            if (record := access_record.get()) is not None:
                record.num_prompt_tokens += run.num_prompt_tokens
                record.num_completion_tokens += run.num_completion_tokens
            left = [each.request_id for each in submits if self._run_by_id.pop(each.request_id, None) is not None]
            self._do_all(partial(self._frontend.on_local_disconnect, self._session, each) for each in left)

    def _submit(self, run: Run, submit: Submit, trace: TraceContext) -> None:
        if self._run_by_id.get(submit.request_id, (None, 0))[0] is run:  # else it was left before its turn came
            traced = msgspec.structs.replace(submit, **trace._asdict()) if trace.traceparent else submit
            self._frontend.on_message(self._session, traced)

    def _do_all(self, work: Iterable[Callable[[], None]]) -> None:
        """Do what fits into SLICE_S now and the rest in later turns, after that of others."""
        pending, is_idle = iter(work), not self._to_do
        _do_slice(pending)
        self._to_do.extend(pending)
        if is_idle and self._to_do:
            asyncio.get_running_loop().call_soon(self._do_some)
        self.wake()

    def _do_some(self) -> None:
        _do_slice(self._to_do.popleft() for _ in range(len(self._to_do)))
        if self._to_do:
            asyncio.get_running_loop().call_soon(self._do_some)
        self.wake()

    def abort(self, request_id: str) -> int:
        """End a request, given by the id of its answer; its caller gets what there is. Returns how many submits."""
        found = [each for each in self._run_by_id if each == request_id or each.rpartition("/")[0] == request_id]
        for each in found:
            self._frontend.on_message(self._session, Abort(request_id=each))
        if found:
            self.wake()
        return len(found)

    async def control(self, control: Control) -> None:
        """Give an order, whose query id is filled in here; returns when it is so, and raises why it cannot be."""
        query_id = next(self._query_ids)
        done = self._orders[query_id] = asyncio.get_running_loop().create_future()
        try:
            self._frontend.on_message(self._session, msgspec.structs.replace(control, query_id=query_id))
            self.wake()
            await done
        finally:
            del self._orders[query_id]

    def _on_reply(self, reply: Done | QueryFailed) -> None:
        done = self._orders.get(reply.query_id)
        if done is None or done.done():
            return  # its caller is gone
        if isinstance(reply, QueryFailed):
            done.set_exception(reply.error.to_exception())
        else:
            done.set_result(None)

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


def _do_slice(work: Iterator[Callable[[], None]]) -> None:
    """At least one piece of `work`, and as many as SLICE_S has room for."""
    deadline = time.monotonic() + SLICE_S
    for each in work:
        each()
        if time.monotonic() > deadline:
            return
