"""What a caller gets back: RequestOutput, and the builder that makes one from the updates of its request.

Knows no socket and no thread. Names and meanings are vLLM's.
"""

from __future__ import annotations

from array import array

import msgspec

from ..ipc.codec import decode_ids
from ..ipc.errors import TokenloomError
from ..ipc.messages import Accepted, FinishReason, Metrics, Submit
from .channel import Update

_SHOWN_IDS = 8
_SHOWN_CHARACTERS = 120


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One answer. `finish_reason` is None while it grows; `stop_reason` is the stop string or stop token id, if any."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(index={self.index}, text={_short(self.text)}, token_ids={_short_ids(self.token_ids)}, "
            f"finish_reason={self.finish_reason!r}, stop_reason={self.stop_reason!r})"
        )


class RequestMetrics(msgspec.Struct, kw_only=True):
    """When things happened, by the frontend's clock in unix seconds; 0 = not yet."""

    arrival_time: float = 0.0
    first_token_time: float = 0.0
    finished_time: float = 0.0
    num_preemptions: int = 0


class RequestOutput(msgspec.Struct, kw_only=True):
    """A request and its answers so far; `finished` says that nothing will be added.

    `prompt` is the text that was tokenized (for a chat: after the template), None if token ids were given.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics = msgspec.field(default_factory=RequestMetrics)

    def __repr__(self) -> str:
        prompt = None if self.prompt is None else _short(self.prompt)
        return (
            f"RequestOutput(request_id={self.request_id!r}, prompt={prompt}, "
            f"prompt_token_ids={_short_ids(self.prompt_token_ids)}, outputs={self.outputs!r}, "
            f"finished={self.finished}, num_cached_tokens={self.num_cached_tokens})"
        )


class OutputBuilder:
    """Merges the updates of one request. Every RequestOutput it makes is a copy that later updates do not touch."""

    def __init__(self, submit: Submit) -> None:
        self._request_id = submit.request_id
        self._prompt = submit.prompt
        self._prompt_token_ids = submit.prompt_token_ids or b""
        self._answer = _Answer()
        self._metrics = Metrics()
        self._num_cached_tokens = 0
        self.error: TokenloomError | None = None

    @property
    def is_finished(self) -> bool:
        """Nothing more will come: the answer has a finish reason or the request failed."""
        return self.error is not None or self._answer.finish_reason is not None

    @property
    def num_tokens(self) -> int:
        return len(self._answer.token_ids)

    def add(self, update: Update) -> None:
        if isinstance(update, TokenloomError):
            self.error = update
        elif isinstance(update, Accepted):
            self._prompt = update.prompt if update.prompt is not None else self._prompt
            self._prompt_token_ids = update.prompt_token_ids
        else:
            self._answer.token_ids.frombytes(update.token_ids)
            self._answer.text += update.text
            self._answer.finish_reason = update.finish_reason
            self._answer.stop_reason = update.stop_reason
            self._metrics = update.metrics or self._metrics
            self._num_cached_tokens = update.num_cached_tokens or self._num_cached_tokens

    def build(self) -> RequestOutput:
        answer = self._answer
        metrics = self._metrics
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=decode_ids(self._prompt_token_ids).tolist(),
            outputs=[
                CompletionOutput(
                    index=0,
                    text=answer.text,
                    token_ids=answer.token_ids.tolist(),
                    finish_reason=answer.finish_reason,
                    stop_reason=answer.stop_reason,
                )
            ],
            finished=answer.finish_reason is not None,
            num_cached_tokens=self._num_cached_tokens,
            metrics=RequestMetrics(
                arrival_time=metrics.arrival_time,
                first_token_time=metrics.first_token_time,
                finished_time=metrics.finished_time,
                num_preemptions=metrics.num_preemptions,
            ),
        )

    def result(self) -> RequestOutput:
        """The finished output; raises the error of a request that failed."""
        if self.error is not None:
            raise self.error
        return self.build()


class _Answer:
    __slots__ = ("finish_reason", "stop_reason", "text", "token_ids")

    def __init__(self) -> None:
        self.text = ""
        self.token_ids = array("i")
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None


def _short(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]!r}… ({len(text)} characters)"


def _short_ids(ids: list[int]) -> str:
    if len(ids) <= _SHOWN_IDS:
        return repr(ids)
    return f"[{', '.join(map(str, ids[:_SHOWN_IDS]))}, … ({len(ids)} ids)]"
