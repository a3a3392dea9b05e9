"""RequestBatch: runs the requests of one `generate` call and returns their outputs in the order of the prompts.

It keeps a bounded number of requests open. If the engine refuses one as overloaded, the batch keeps fewer open and
resubmits it as others finish, so that a long list is never rejected for its length. The first error of another kind
aborts the batch.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from time import monotonic

from ...ipc.errors import Draining, Overloaded, RequestError, TokenloomError
from ...ipc.messages.client import Submit
from .open_request import Update
from .outputs import OutputBuilder, RequestOutput, Tools
from .transport import Transport

MAX_OPEN = 16384
BAR_INTERVAL_S = 0.2


class RequestBatch:
    """The requests of one call; call `run` once. The transport's thread uses a request's builder until its index is in
    `_ended`, then the caller's thread does; only the progress bar reads the builders' numbers of tokens before that."""

    def __init__(
        self, transport: Transport, submits: Sequence[Submit], show_progress: bool, tools: Tools | None = None
    ) -> None:
        self._transport = transport
        self._submits = submits
        self._builders = [OutputBuilder(submit, tools) for submit in submits]
        self._outputs: list[RequestOutput | None] = [None] * len(submits)
        self._todo = deque(range(len(submits)))
        self._open: set[int] = set()
        self._ended: SimpleQueue[int] = SimpleQueue()
        self._limit = MAX_OPEN
        self._retry_at = 0.0
        has_screen = sys.stderr is not None  # it is None in a program without a console
        self._bar = ProgressBar(len(submits), self._num_tokens) if show_progress and has_screen else None

    def run(self) -> list[RequestOutput]:
        try:
            while self._todo or self._open:
                self._submit_some()
                self._wait_one()
        finally:
            for index in self._open:
                self._transport.cancel(self._submits[index].request_id)
            if self._bar is not None:
                self._bar.close()
        return [output for output in self._outputs if output is not None]

    def _submit_some(self) -> None:
        while self._todo and len(self._open) < self._limit and monotonic() >= self._retry_at:
            index = self._todo.popleft()
            self._open.add(index)
            self._transport.submit(self._submits[index], self._sink(index))

    def _sink(self, index: int) -> Callable[[Update], None]:
        builder, ended = self._builders[index], self._ended

        def add(update: Update) -> None:
            builder.add(update)
            if builder.is_finished:
                ended.put(index)

        return add

    def _wait_one(self) -> None:
        try:
            index = self._transport.wait(self._ended, self._timeout_s())
        except Empty:
            index = -1
        if index >= 0:
            self._open.discard(index)
            self._finish(index)
        if self._bar is not None:
            self._bar.refresh(len(self._submits) - len(self._todo) - len(self._open))

    def _timeout_s(self) -> float | None:
        """Return the seconds until the next retry or refresh of the bar; None if neither is due."""
        retry_s = max(0.0, self._retry_at - monotonic()) if self._todo and not self._open else None
        if self._bar is None:
            return retry_s
        return BAR_INTERVAL_S if retry_s is None else min(BAR_INTERVAL_S, retry_s)

    def _finish(self, index: int) -> None:
        builder = self._builders[index]
        if isinstance(builder.error, Overloaded) and not isinstance(builder.error, Draining):
            self._builders[index] = OutputBuilder(self._submits[index])
            self._todo.appendleft(index)
            self._limit = max(1, len(self._open))
            self._retry_at = monotonic() + (0.0 if self._open else builder.error.retry_after_s)
        elif builder.error is not None:
            raise self._with_index(index, builder.error)
        else:
            self._limit = min(MAX_OPEN, self._limit + 1)
            self._outputs[index] = builder.build()

    def _with_index(self, index: int, error: TokenloomError) -> TokenloomError:
        """Return a RequestError with the prompt's index added, if there are several prompts; other errors unchanged."""
        if isinstance(error, RequestError) and len(self._submits) > 1:
            return RequestError(f"prompt {index} of {len(self._submits)}: {error}")
        return error

    def _num_tokens(self) -> int:
        return sum(builder.num_tokens for builder in self._builders)


class ProgressBar:
    """A tqdm bar that shows finished requests and the rate of generated tokens."""

    def __init__(self, num_requests: int, num_tokens: Callable[[], int]) -> None:
        from tqdm.auto import tqdm  # takes 50 ms, needed only for a bar

        class Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
            monitor_interval = 0  # no monitor thread: `refresh` is called often enough

        self._bar = Bar(total=num_requests, desc="requests", unit="request", dynamic_ncols=True)
        self._num_tokens = num_tokens
        self._begin = self._refreshed_at = monotonic()

    def refresh(self, num_ended: int) -> None:
        now = monotonic()
        self._bar.n = num_ended
        if now - self._refreshed_at >= BAR_INTERVAL_S:
            self._show(now)

    def close(self) -> None:
        self._show(monotonic())
        self._bar.close()

    def _show(self, now: float) -> None:
        self._refreshed_at = now
        rate = self._num_tokens() / max(now - self._begin, 1e-9)
        self._bar.set_postfix_str(f"{rate:.1f} tokens/s")
