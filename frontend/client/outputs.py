"""Outputs of requests (RequestOutput, TranscriptionOutput), and the builder of RequestOutputs
from the updates of a request.

Knows no socket and no thread. Names and meanings are vLLM's, except those of transcripts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar

import msgspec

from ...ipc.codec import decode_ids
from ...ipc.errors import TokenloomError
from ...ipc.messages.base import BulkArray, CacheReport, FinishReason
from ...ipc.messages.client import Accepted, Delta, RequestMetrics, Submit
from ...ipc.messages.tier import PlaceName
from ...ipc.params.lora_request import LoRARequest
from ..forms.logprobs import FlatLogprobs, TokenLogprobs, unpack_logprobs
from .open_request import Update

Token = TypeVar("Token", bound=TokenLogprobs | None)
_SHOWN_IDS = 8
_SHOWN_CHARACTERS = 120


class Tools(Protocol):
    """Interface of the tools of a chat (chat_tools.py)."""

    def message(self, text: str, *, is_whole: bool, begins_in_thought: bool) -> dict[str, Any]:
        """Return the text of an answer as a message."""


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One of the n completions. `finish_reason` is None until it ends; `stop_reason` is the stop string or the id of
    stop_token_ids that ended it, or repetition_detected; None for any other end."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None  # sum for token_ids; None unless logprobs were requested
    logprobs: list[TokenLogprobs] | FlatLogprobs | None = None  # one entry for each of token_ids
    message: dict[str, Any] | None = None  # of a chat with tools, once it ends: role, content, tool_calls, reasoning
    lora_request: None = None  # fields of vLLM, not supported
    routed_experts: None = None

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        """The calls in `message`, in OpenAI's form: {"id", "type", "function": {"name", "arguments"}}."""
        return list((self.message or {}).get("tool_calls", ()))

    def finished(self) -> bool:
        """Return whether this completion has ended."""
        return self.finish_reason is not None

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(index={self.index}, text={_short(self.text)}, token_ids={_short_ids(self.token_ids)}, "
            f"finish_reason={self.finish_reason!r}, stop_reason={self.stop_reason!r})"
        )


class RequestOutput(msgspec.Struct, kw_only=True):
    """A request with its completions so far; `finished` if all of them have ended.

    `prompt` is the text that was tokenized (for a chat, the rendered template); None if the prompt was token ids, or a
    chat that is too long to be sent back.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | FlatLogprobs | None = None  # per prompt token; None for the first
    embedding: BulkArray | None = None  # the result of a request to pool
    metrics: RequestMetrics = RequestMetrics()
    cache_report: CacheReport | None = None  # why tokens computed before were not in the prefix cache; None: none were
    lora_request: LoRARequest | None = None
    encoder_prompt: None = None  # fields of vLLM, not supported, like those below
    encoder_prompt_token_ids: None = None
    kv_transfer_params: None = None

    def __repr__(self) -> str:
        prompt = None if self.prompt is None else _short(self.prompt)
        return (
            f"RequestOutput(request_id={self.request_id!r}, prompt={prompt}, "
            f"prompt_token_ids={_short_ids(self.prompt_token_ids)}, outputs={self.outputs!r}, "
            f"finished={self.finished}, num_cached_tokens={self.num_cached_tokens})"
        )


class OutputBuilder:
    """Builder of RequestOutputs from the updates of one request. Later updates do not change an output that was
    built."""

    def __init__(self, submit: Submit, tools: Tools | None = None) -> None:
        """`tools`: those of a chat, by which ended answers are read."""
        self._request_id = submit.request_id
        self._prompt = submit.prompt
        self._prompt_token_ids = submit.prompt_token_ids or b""
        adapter = LoRARequest(submit.adapter, lora_path=submit.adapter_path)
        self._lora_request = adapter if submit.adapter else None
        self._is_flat = submit.params.flat_logprobs
        has_logprobs = submit.params.num_logprobs is not None
        self._answers = [
            _CompletionBuilder(index, has_logprobs, self._is_flat, tools) for index in range(submit.params.n)
        ]
        wants_prompt = submit.params.prompt_logprobs is not None
        self._prompt_logprobs: list[TokenLogprobs | None] | None = [None] if wants_prompt else None
        self.output_kind = submit.params.output_kind
        self._num_cached_tokens = 0
        self._embedding: BulkArray | None = None
        self._cache_report: CacheReport | None = None
        self.error: TokenloomError | None = None

    @property
    def is_finished(self) -> bool:
        """Whether all completions have ended or the request has failed."""
        return self.error is not None or all(answer.finish_reason is not None for answer in self._answers)

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self._answers)

    @property
    def has_delta(self) -> bool:
        """Whether `build_delta` would return new tokens, text or a finish reason."""
        return any(answer.has_delta for answer in self._answers)

    def add(self, update: Update) -> None:
        if isinstance(update, TokenloomError):
            self.error = update
        elif isinstance(update, Accepted):
            self._prompt = update.prompt if update.prompt is not None else self._prompt
            self._prompt_token_ids = update.prompt_token_ids
            for answer in self._answers:
                answer.begins_in_thought = update.begins_in_thought
        else:
            self._answers[update.index].add(update)
            if update.prompt_logprobs is not None and self._prompt_logprobs is not None:
                del self._prompt_logprobs[update.prompt_start :]
                self._prompt_logprobs += unpack_logprobs(update.prompt_logprobs)
            self._embedding = update.embedding or self._embedding
            self._cache_report = self._cache_report or update.cache_report
            self._num_cached_tokens = max(self._num_cached_tokens, update.num_cached_tokens)

    def build(self) -> RequestOutput:
        """Return the output with all updates so far."""
        return self._build([answer.build() for answer in self._answers])

    def build_delta(self) -> RequestOutput:
        """Return an output with the tokens, text and logprobs since the last call; unchanged completions are left
        out."""
        return self._build([answer.build_delta() for answer in self._answers if answer.has_delta])

    def _build(self, outputs: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=decode_ids(self._prompt_token_ids).tolist(),
            outputs=outputs,
            finished=self.is_finished,
            num_cached_tokens=self._num_cached_tokens,
            prompt_logprobs=_copy_logprobs(self._prompt_logprobs, self._is_flat),
            embedding=self._embedding,
            metrics=self._merge_metrics(),
            cache_report=self._cache_report,
            lora_request=self._lora_request,
        )

    def _merge_metrics(self) -> RequestMetrics:
        """Return metrics of the whole request: times from its first step to its last token, and counts summed over its
        answers. num_loaded_tokens is that of one answer: the others find the loaded prompt in the pool."""
        answers = [answer.metrics for answer in self._answers if answer.metrics is not None]
        if len(answers) < 2:
            return answers[0] if answers else RequestMetrics()
        return RequestMetrics(
            arrival_time=answers[0].arrival_time,
            first_scheduled_time=_earliest(each.first_scheduled_time for each in answers),
            first_token_time=_earliest(each.first_token_time for each in answers),
            finished_time=max(each.finished_time for each in answers) if self.is_finished else 0.0,
            num_preemptions=sum(each.num_preemptions for each in answers),
            num_drafts=sum(each.num_drafts for each in answers),
            num_accepted_drafts=sum(each.num_accepted_drafts for each in answers),
            num_loaded_tokens=max((each.num_loaded_tokens for each in answers), key=_num_in_all),
        )


def _earliest(times: Iterable[float]) -> float:
    """Return the earliest of the times that are not 0; 0 if all are."""
    return min(filter(None, times), default=0.0)


def _num_in_all(num_by_place: Mapping[PlaceName, int]) -> int:
    return sum(num_by_place.values())


class _CompletionBuilder:
    """Builder of one of the n completions. It records how many tokens and characters `build_delta` has returned."""

    def __init__(self, index: int, has_logprobs: bool, is_flat: bool, tools: Tools | None) -> None:
        self.index = index
        self._tools = tools
        self.begins_in_thought = False
        self._is_flat = is_flat
        self.text = ""
        self.token_ids = array("i")
        self.logprobs: list[TokenLogprobs] | None = [] if has_logprobs else None
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.metrics: RequestMetrics | None = None
        self._num_tokens_shown = self._num_characters_shown = 0
        self._has_shown_finish = False

    def add(self, delta: Delta) -> None:
        self.token_ids.frombytes(delta.token_ids)
        self.text += delta.text
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.metrics = delta.metrics or self.metrics
        if delta.logprobs is not None and self.logprobs is not None:
            new = unpack_logprobs(delta.logprobs)
            self.logprobs += new
            self.cumulative_logprob += sum(next(iter(token.values())).logprob for token in new)

    @property
    def has_delta(self) -> bool:
        return (
            len(self.token_ids) > self._num_tokens_shown
            or len(self.text) > self._num_characters_shown
            or (self.finish_reason is not None and not self._has_shown_finish)
        )

    def build(self, first_token: int = 0, first_character: int = 0) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text=self.text[first_character:],
            token_ids=self.token_ids[first_token:].tolist(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=_copy_logprobs(self.logprobs, self._is_flat, first_token),
            message=self._message(),
        )

    def _message(self) -> dict[str, Any] | None:
        """Return the answer as a message; None without tools, or before its end."""
        if self._tools is None or self.finish_reason is None:
            return None
        is_whole = self.finish_reason == "stop"
        return self._tools.message(self.text, is_whole=is_whole, begins_in_thought=self.begins_in_thought)

    def build_delta(self) -> CompletionOutput:
        new = self.build(self._num_tokens_shown, self._num_characters_shown)
        self._num_tokens_shown, self._num_characters_shown = len(self.token_ids), len(self.text)
        self._has_shown_finish = self.finish_reason is not None
        return new


def _copy_logprobs(tokens: list[Token] | None, is_flat: bool, start: int = 0) -> list[Token] | FlatLogprobs | None:
    """Return a copy of the logprobs from token `start` on, as FlatLogprobs if `is_flat`; None if `tokens` is None."""
    if tokens is None:
        return None
    return FlatLogprobs(tokens[start:]) if is_flat else tokens[start:]


def _short(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]!r}… ({len(text)} characters)"


def _short_ids(ids: list[int]) -> str:
    if len(ids) <= _SHOWN_IDS:
        return repr(ids)
    return f"[{', '.join(map(str, ids[:_SHOWN_IDS]))}, … ({len(ids)} ids)]"


class SpokenSegment(msgspec.Struct, kw_only=True):
    """A part of a transcript, with its start and end in the clip in seconds."""

    start_s: float
    end_s: float
    text: str


class TranscriptionOutput(msgspec.Struct, kw_only=True):
    """The transcript of a clip, or its translation."""

    text: str
    language: str | None  # code of the spoken language, given by the caller or detected; None: unknown
    duration_s: float  # length of the clip
    segments: list[SpokenSegment]  # parts with text
