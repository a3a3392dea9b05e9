"""Run: the deltas and the usage of one HTTP request.

A choice is one answer to one prompt: choice = position of the prompt × n + index of the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping

from .....ipc.codec import JsonObject, num_ids
from .....ipc.errors import ErrorInfo, InternalError
from .....ipc.messages.base import CacheReport
from .....ipc.messages.client import Accepted, Delta, RequestMetrics
from ....forms.cache_report import report_json
from ...requests.client_session import Caller
from ..continuation import Answer, Continuation

NOBODY = Caller()
ChoiceDeltas = list[tuple[int, Delta]]


class Echo:
    """Deltas of the tokens that a client already has, as they come again, and all that arrives before the last of
    them."""

    def __init__(self, answers: Mapping[int, Answer]) -> None:
        self._answers = {choice: each for choice, each in answers.items() if each.token_ids or each.finish_reason}
        self._missing = {choice: len(answer.token_ids) for choice, answer in self._answers.items()}
        self._open = set(self._answers)  # choices whose echo is not complete
        self.deltas: ChoiceDeltas = []
        self.rest: ChoiceDeltas = []

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    def add(self, deltas: ChoiceDeltas) -> None:
        """Add deltas in the order of their arrival. InternalError if an answer ends before all its tokens have come
        again."""
        for choice, delta in deltas:
            answer = self._answers.get(choice)
            if answer is None or choice not in self._open:
                self.rest.append((choice, delta))
                continue
            found = self.deltas if answer.has_shown(delta) else self.rest
            found.append((choice, answer.completed(delta)))
            self._missing[choice] -= num_ids(delta.token_ids)
            has_end = delta.finish_reason is not None
            if self._missing[choice] > 0 and has_end:
                raise InternalError("the answer could not go on where it stopped: send the request again")
            if self._missing[choice] <= 0 and has_end == (answer.finish_reason is not None):
                self._open.discard(choice)


class Run:
    """Deltas and usage of the choices of one HTTP request. LocalEngine calls `put` and `wake`; one task of the same
    event loop calls the other methods."""

    def __init__(
        self,
        num_prompts: int,
        num_answers: int,
        block_size: int = 0,
        caller: Caller = NOBODY,
        continuation: Continuation | None = None,
    ) -> None:
        """`block_size`: tokens per block of the prefix cache, or 0 if there is none. `caller`: of the HTTP request.
        `continuation`: that of the HTTP request, if the answers go on in another frontend."""
        self._block_size, self.caller = block_size, caller
        self._continuation = continuation or Continuation(nonce=b"", created=0.0)
        self._echo = Echo(self._continuation.answers)
        self.num_choices = num_prompts * num_answers
        self.num_answers = num_answers
        self._num_open = [num_answers] * num_prompts  # unfinished answers of each prompt
        self._num_prompts_open = num_prompts
        self._updates: list[tuple[int, Accepted | Delta]] = []  # (position of the prompt, update)
        self._waiter: asyncio.Future[None] | None = None
        self._num_cached = [0] * num_prompts
        self.num_cached_tokens = self._continuation.num_cached  # prompt tokens that were found in the prefix cache
        self.includes_cache_report = False
        self._cache_reports: dict[int, CacheReport] = {}  # by the position of the prompt
        self.metrics = RequestMetrics()  # the newest
        self.num_completion_tokens = 0
        self._num_drafts = self._num_accepted_drafts = 0  # counted for ended answers
        self.num_thought_tokens = 0  # those of the completion tokens that are reasoning; set by chats
        self._prompts = [b""] * num_prompts  # token ids, as soon as they are known
        self.media_digests: list[bytes] = []  # of the bytes of the last accepted prompt's media
        self.waiting: Iterator[Callable[[], None]] | None = None  # submits still to do, one whenever a prompt ends

    def put(self, position: int, update: Accepted | Delta) -> bool:
        """Queue an update of the prompt at `position` for `deltas`, and return whether it is the prompt's last
        update."""
        self._updates.append((position, update))
        if isinstance(update, Accepted) or update.finish_reason is None:
            return False
        self._num_open[position] -= 1
        is_last = self._num_open[position] <= 0 or update.finish_reason == "error"
        self._num_prompts_open -= is_last
        return is_last

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def deltas(self) -> AsyncGenerator[ChoiceDeltas, None]:
        """Yield lists of (choice, delta) pairs until all choices have ended: the deltas that have arrived since the
        list before, usually those of one turn of the frontend; a list may be empty. Raise the first error of a
        choice.

        Deltas of tokens that the client has come first, in a list of their own, while the continuation is muted."""
        continuation = self._continuation
        while self._echo.is_open:
            await self._arrival()
            self._echo.add(self._take())
        if self._echo.deltas or self._echo.rest:
            continuation.is_muted = True
            yield self._echo.deltas
            continuation.is_muted = False
            yield self._rendered(self._echo.rest)
        while self._num_prompts_open or self._updates:
            await self._arrival()
            yield self._rendered(self._take())
            if continuation.report is not None and continuation.rendered:
                await continuation.report(continuation.take_shown())

    async def _arrival(self) -> None:
        """Wait until there are updates."""
        if not self._updates:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def _rendered(self, deltas: ChoiceDeltas) -> ChoiceDeltas:
        """Return deltas that are about to be rendered; note them if the answer may have to go on elsewhere."""
        if self._continuation.is_kept:
            self._continuation.rendered += deltas
            self._continuation.rendered_cached = self.num_cached_tokens
        return deltas

    def _take(self) -> ChoiceDeltas:
        """Return the deltas that have arrived, and count them. Raise the first error of a choice."""
        updates, self._updates = self._updates, []
        found: ChoiceDeltas = []
        for position, update in updates:
            if isinstance(update, Accepted):
                self._prompts[position] = update.prompt_token_ids
                self.media_digests = update.media_digests
                self._continuation.note_sources(position, update)
                continue
            if update.finish_reason == "error":
                error = update.error or ErrorInfo("internal", "the request failed and the engine did not say why")
                raise error.to_exception()
            self.num_completion_tokens += num_ids(update.token_ids)
            self.metrics = update.metrics or self.metrics
            if update.finish_reason is not None and update.metrics is not None:
                self._num_drafts += update.metrics.num_drafts
                self._num_accepted_drafts += update.metrics.num_accepted_drafts
            if update.cache_report is not None:
                self._cache_reports.setdefault(position, update.cache_report)
            choice = position * self.num_answers + update.index
            if update.num_cached_tokens > self._num_cached[position]:
                self._count_cached(position, update.num_cached_tokens)
            found.append((choice, update))
        return found

    def _count_cached(self, position: int, num_cached: int) -> None:
        """Count prompt tokens found in the prefix cache. Those of a prompt that the client has answers to are counted
        already, as they were found at first."""
        first = position * self.num_answers
        if not any(choice in self._continuation.answers for choice in range(first, first + self.num_answers)):
            self.num_cached_tokens += num_cached - self._num_cached[position]
        self._num_cached[position] = num_cached

    def prompt_ids(self, choice: int) -> bytes:
        """Return the token ids of a choice's prompt; empty until the frontend has accepted it."""
        return self._prompts[choice // self.num_answers]

    @property
    def num_prompt_tokens(self) -> int:
        """The number of prompt tokens; each prompt counts once, whatever `n` is."""
        return sum(map(num_ids, self._prompts))

    @property
    def num_cache_writes(self) -> int:
        """The number of prompt tokens that were not in the prefix cache and that an equal prompt would find there, as
        long as their blocks stay."""
        if not self._block_size:
            return 0
        size = self._block_size
        kept = [(num_ids(each) - 1) // size * size for each in self._prompts]  # the last token is computed again
        return max(0, sum(kept) - self.num_cached_tokens)

    def usage(self, num_sent: int | None = None) -> JsonObject:
        """Return OpenAI's usage. `num_sent`: the completion tokens to report; None: all that have arrived.

        The engine's own drafts have field names of their own, because OpenAI's prediction tokens are those of the
        request's field `prediction`, and are billed."""
        num_prompt = self.num_prompt_tokens
        num_completion = self.num_completion_tokens if num_sent is None else num_sent
        prompt = {"cached_tokens": self.num_cached_tokens, "cache_write_tokens": self.num_cache_writes}
        completion = {"reasoning_tokens": self.num_thought_tokens}
        if self._num_drafts:
            completion |= {"draft_tokens": self._num_drafts, "accepted_draft_tokens": self._num_accepted_drafts}
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion,
            "total_tokens": num_prompt + num_completion,
            "prompt_tokens_details": prompt,
            "completion_tokens_details": completion,
            **self.cache_report(),
        }

    def cache_report(self) -> JsonObject:
        """Return the field of the usage with the cache report; {} if it was not asked for."""
        if not self.includes_cache_report:
            return {}
        reports = self._cache_reports.values()
        return {"cache_report": report_json(reports, self.num_prompt_tokens, self.num_cached_tokens)}
