"""Run: the engine's work for one HTTP request: its submits, the news of its choices, its usage.

A choice is one answer of one prompt: choice = position of the prompt × n + index of the answer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from types import TracebackType

from ..ipc.codec import num_ids
from ..ipc.messages import Accepted, Delta, Submit
from .server_engine import LocalEngine, Stream
from .tokenizer import JsonObject

ChoiceNews = list[tuple[int, Delta]]


class Run:
    """An async context manager: leaving it, for whatever reason, aborts what is still open."""

    def __init__(self, engine: LocalEngine, submits: Sequence[Submit], num_answers: int) -> None:
        self._engine = engine
        self._submits = submits
        self._num_answers = num_answers
        self._stream: Stream | None = None
        self._num_cached = [0] * len(submits)
        self._num_completion_tokens = 0
        self.prompts: list[Accepted | None] = [None] * len(submits)

    @property
    def num_choices(self) -> int:
        return len(self._submits) * self._num_answers

    async def __aenter__(self) -> Run:
        self._stream = self._engine.open(self._submits, self._num_answers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._engine.close(self._submits)

    async def news(self) -> AsyncGenerator[ChoiceNews, None]:
        """What each turn brought, until every choice has ended; raises the first error. May be empty."""
        assert self._stream is not None, "entered"
        while not self._stream.is_over:
            found: ChoiceNews = []
            for position, update in await self._stream.take():
                if isinstance(update, Accepted):
                    self.prompts[position] = update
                else:
                    self._num_completion_tokens += num_ids(update.token_ids)
                    self._num_cached[position] = max(self._num_cached[position], update.num_cached_tokens)
                    found.append((position * self._num_answers + update.index, update))
            yield found

    def prompt_of(self, choice: int) -> Accepted | None:
        return self.prompts[choice // self._num_answers]

    def usage(self) -> JsonObject:
        """Tokens of the prompts, each counted once whatever n is, and of all answers so far."""
        num_prompt = sum(num_ids(each.prompt_token_ids) for each in self.prompts if each is not None)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": num_prompt + self._num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached)},
        }
