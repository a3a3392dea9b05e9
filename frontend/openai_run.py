"""Run: the engine's work for one HTTP request: the news of its choices and its usage.

A choice is one answer of one prompt: choice = position of the prompt × n + index of the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from ..ipc.codec import num_ids
from ..ipc.errors import ErrorInfo
from ..ipc.messages import Accepted, Delta
from .tokenizer import JsonObject

ChoiceNews = list[tuple[int, Delta]]


class Run:
    """`put` and `wake` are the engine's, the rest belongs to one task; both are in one loop."""

    def __init__(self, num_prompts: int, num_answers: int) -> None:
        self.num_choices = num_prompts * num_answers
        self.num_answers = num_answers
        self._num_open = [num_answers] * num_prompts  # answers that have not ended
        self._num_prompts_open = num_prompts
        self._news: list[tuple[int, Accepted | Delta]] = []  # of which prompt, and what it got
        self._waiter: asyncio.Future[None] | None = None
        self._num_cached = [0] * num_prompts
        self._num_completion_tokens = 0
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
                self._num_completion_tokens += num_ids(update.token_ids)
                self._num_cached[position] = max(self._num_cached[position], update.num_cached_tokens)
                found.append((position * self.num_answers + update.index, update))
            yield found

    def prompt_of(self, choice: int) -> Accepted | None:
        return self._prompts[choice // self.num_answers]

    def usage(self) -> JsonObject:
        """Tokens of the prompts, each counted once whatever n is, and of all answers so far."""
        num_prompt = sum(num_ids(each.prompt_token_ids) for each in self._prompts if each is not None)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": num_prompt + self._num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached)},
        }
