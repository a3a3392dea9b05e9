"""Attached: what a command that generates needs of an engine, and ClientEngine, which gives it over a socket."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from ...ipc.messages.client import ChatMessage
from ...ipc.params.sampling_params import SamplingParams
from ..client.client import Client


class End(NamedTuple):
    """How a streamed answer ended: the finish reason and the number of its tokens."""

    reason: str | None
    num_tokens: int


class Attached(Protocol):
    """An engine to which a command is attached. Leaving its `with` block disconnects."""

    model: str  # the name in requests
    sampling_defaults: Mapping[str, float]  # of the engine, by the names of SamplingParams

    def stream(self, prompt: str | list[ChatMessage], params: SamplingParams) -> Generator[str, None, End]:
        """Yield the text of an answer as it is generated; return how it ended. Closing the generator aborts it."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class ClientEngine:
    """An engine that a command uses over a client's socket; owns the client and closes it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        try:
            info = client.info()
        except BaseException:
            client.close()
            raise
        self.model: str = info.model
        self.sampling_defaults: Mapping[str, float] = info.default_sampling_params

    def stream(self, prompt: str | list[ChatMessage], params: SamplingParams) -> Generator[str, None, End]:
        output = yield from self._client.stream(prompt, params)
        (answer,) = output.outputs
        return End(answer.finish_reason, len(answer.token_ids))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._client.close()
