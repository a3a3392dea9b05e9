"""OutputProcessor: turns the core's output columns into unsent tokens and text of each answer.

Owns the answers by key, from submit to finish. The detokenizer makes the text; the core or a stop string ends an
answer, whichever comes first in the order of tokens. Knows no socket: updates wait in the answers until `take_delta`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import TypeAlias

import msgspec

from ...ipc.codec import decode_ids
from ...ipc.errors import ErrorInfo, ProtocolError
from ...ipc.messages.adapter import AdapterRef
from ...ipc.messages.base import BulkArray, FinishReason
from ...ipc.messages.client import Child, Delta, RequestMetrics, Submit
from ...ipc.messages.core import CoreChild, EngineCoreOutputs, EngineCoreRequest, Finished
from ...ipc.messages.tier import PlaceName
from ..intake.prompt import ProcessedRequest
from ..intake.thread_pool import PoolJob
from ..text.detokenizer import Detokenizer, DetokenizerFactory
from ..text.markers import MarkerFinder
from ..text.token_texts import TokenTexts
from .client_session import ClientSession
from .logprob_buffer import LogprobBuffer, LogprobRun, runs_of
from .repetition import repeats


class RequestState:
    """One open request, from its Submit until all its answers have finished."""

    __slots__ = (
        *("adapter", "answers", "expires_at", "is_accepted", "processed", "prompt_logprobs", "session", "submit"),
        "tokenizing",
        "_releases",
    )

    def __init__(self, session: ClientSession[RequestState], submit: Submit, expires_at: float = math.inf) -> None:
        self.session = session
        self.expires_at = expires_at  # unix seconds: its media and prompt must have been read by then
        self.submit = submit
        self.processed: ProcessedRequest | None = None  # None while its prompt is tokenized
        self.answers: list[AnswerState] = []
        self.is_accepted = False
        self.tokenizing: PoolJob | None = None  # the job that tokenizes its prompt
        self.prompt_logprobs = LogprobBuffer(max(submit.num_prompt_logprobs, 1))
        self.adapter: AdapterRef | None = None
        self._releases: list[Callable[[], None]] = []

    def at_close(self, release: Callable[[], None]) -> None:
        """Call `release` in `close`: the request uses an adapter, or media."""
        self._releases.append(release)

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def is_finished(self) -> bool:
        return bool(self.answers) and all(answer.finish_reason is not None for answer in self.answers)

    def close(self) -> None:
        """Release adapter and media. Drop the references to the answers, which refer to this request: without a cycle
        both are freed with the last delta, not by the garbage collector."""
        self.answers = []
        self.tokenizing = None
        releases, self._releases = self._releases, []
        for release in releases:
            release()

    def is_same(self, submit: Submit) -> bool:
        """Whether `submit` has the same prompt and parameters; attempt and tokens so far may differ."""
        prompt = ("prompt", "prompt_token_ids", "chat", "chat_form", "add_special_tokens", "adapter", "media")
        key = attrgetter("params", "pooling", *prompt)
        return bool(key(self.submit) == key(submit))

    def to_core(self) -> EngineCoreRequest:
        """Make the core's request: the unfinished answers, each with all tokens known so far."""
        assert self.processed is not None
        children = [
            CoreChild(key=answer.key, seed=answer.seed, output_token_ids=answer.token_ids.tobytes())
            for answer in self.answers
            if answer.finish_reason is None
        ]
        known = self.prompt_logprobs.end
        return msgspec.structs.replace(
            self.processed.core, children=children, num_prompt_logprobs=known, adapter=self.adapter
        )


Session: TypeAlias = ClientSession[RequestState]


class AnswerState:
    """One of the n answers of a request: tokens, detokenizer, finder of stop strings, and the updates not yet taken.

    Each Delta has tokens and exactly the text that they complete: a client's text is a function of its tokens.
    """

    __slots__ = (
        *("request", "key", "index", "seed", "token_ids", "finish_reason", "stop_reason", "error", "embedding"),
        *("finished_time", "first_scheduled_time", "num_cached_tokens", "num_loaded_tokens"),
        *("num_preemptions", "num_drafts", "num_accepted_drafts"),
        *("_params", "_has_logprobs", "_stop_token_ids", "_eos_token_ids", "_silent_token_ids", "_detokenizer"),
        *("_stops", "_texts", "_logprobs", "_text", "_num_taken", "_first_token_time", "_has_sent_start"),
    )

    def __init__(
        self,
        request: RequestState,
        processed: ProcessedRequest,
        child: Child,
        key: int,
        detokenizer: Detokenizer | None,
        texts: TokenTexts | None,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._params = params = processed.core.params
        self.request, self.key, self.index, self.seed = request, key, child.index, child.seed
        self.token_ids = array("i")
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.error: ErrorInfo | None = None
        self.embedding: BulkArray | None = None
        self.finished_time = self.first_scheduled_time = self._first_token_time = 0.0
        self.num_cached_tokens = self.num_preemptions = self._num_taken = 0
        self.num_drafts = self.num_accepted_drafts = 0
        self.num_loaded_tokens: dict[PlaceName, int] = {}
        self._has_logprobs = params.num_logprobs is not None or params.prompt_logprobs is not None
        self._stop_token_ids, self._eos_token_ids = frozenset(processed.core.stop_token_ids), eos_token_ids
        stops, is_included = params.stop_strings, params.include_stop_str_in_output
        self._silent_token_ids = frozenset() if is_included else self._stop_token_ids  # these add no text
        self._detokenizer, self._texts = detokenizer, texts
        self._stops = MarkerFinder(*stops, is_included=is_included) if stops else None
        self._logprobs = LogprobBuffer(0, are_named=bool(params.logprob_token_ids))
        self._text = ""
        self._has_sent_start = False

    def replay(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the client already has: they rebuild the state, may end the answer, and stay unsent."""
        self.append(0, token_ids, 0.0)
        self._text = ""
        self._num_taken = len(self.token_ids)
        self._logprobs.restart(self._num_taken)

    def append_logprobs(self, run: LogprobRun) -> None:
        """Append the logprobs of tokens that have just been appended; drop those of tokens after the answer's end."""
        self._logprobs.append(run)
        self._logprobs.trim(len(self.token_ids))  # tokens after the end are not part of the answer

    def append(self, start: int, token_ids: Sequence[int], now: float) -> bool:
        """Append tokens until a stop string or repetition ends the answer; return whether any is new. `start`: position
        of the first; known tokens are skipped, and a gap is a ProtocolError. `now`: unix seconds."""
        known = len(self.token_ids)
        if start != known:
            if start > known:
                raise ProtocolError(f"the core sent output tokens from {start} on, {known} are known")
            token_ids = token_ids[known - start :]
        if not token_ids or self._params.max_tokens == 0:  # such a request only scores its prompt
            return False
        if not self._first_token_time:
            self._first_token_time = now
        detokenizer, repetition = self._detokenizer, self._params.repetition_detection
        if repetition is not None and len(token_ids) > 1:
            for token_id in token_ids:
                if self.finish_reason is None:
                    self.append(len(self.token_ids), [token_id], now)
            return True
        for token_id in token_ids:  # hot path: once per token
            self.token_ids.append(token_id)
            if detokenizer is None:
                continue
            if token_id in self._silent_token_ids and self._has_min_tokens:
                continue
            text = detokenizer.append(token_id)
            if self._stops is None:
                self._text += text
            elif text:
                self._append_text(text)
                if self.finish_reason is not None:
                    self.finished_time = now
                    break
        if repetition is not None and self._has_min_tokens and repeats(self.token_ids, repetition):
            self.finish("repetition", now)
            self.stop_reason = self.stop_reason or "repetition_detected"
        return True

    @property
    def _has_min_tokens(self) -> bool:
        return len(self.token_ids) >= self._params.min_tokens

    def _append_text(self, text: str) -> None:
        if self._stops is None:
            self._text += text
            return
        shown, stop, _ = self._stops.feed(text, self._has_min_tokens)
        self._text += shown
        if stop:
            self.finish_reason, self.stop_reason = "stop", stop

    def finish(
        self, reason: FinishReason, now: float, error: ErrorInfo | None = None, num_preemptions: int = 0
    ) -> None:
        """End the answer. Held-back text is released; if it completes a stop string, that is the reason instead."""
        self.finished_time = now
        self.num_preemptions = num_preemptions
        if self._detokenizer is not None:
            self._append_text(self._detokenizer.finish())
        if self.finish_reason is not None:
            return
        if self._stops is not None:
            self._text += self._stops.finish()
        self.finish_reason = reason
        self.error = error
        last = self.token_ids[-1] if self.token_ids else -1
        if reason == "stop" and last in self._stop_token_ids - self._eos_token_ids:  # otherwise its grammar is complete
            self.stop_reason = last

    def take_delta(self) -> Delta:
        """Remove and return all updates as one delta, with the unsent logprobs of the request's prompt."""
        start, text = self._num_taken, self._text
        self._num_taken, self._text = len(self.token_ids), ""
        token_ids = self.token_ids[start:].tobytes()
        if self._has_sent_start and self.finish_reason is None and not self._has_logprobs:
            request_id = self.request.submit.request_id
            return Delta(request_id=request_id, index=self.index, start=start, token_ids=token_ids, text=text)
        logprobs, prompt_start = self._logprobs.take(self._texts), self.request.prompt_logprobs.start
        prompt_logprobs = self.request.prompt_logprobs.take(self._texts)
        self._has_sent_start = bool(self.token_ids)
        processed = self.request.processed
        return Delta(
            request_id=self.request.submit.request_id,
            index=self.index,
            start=start,
            token_ids=token_ids,
            text=text,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            num_cached_tokens=self.num_cached_tokens,
            metrics=RequestMetrics(
                arrival_time=0.0 if processed is None else processed.core.arrival_time,
                first_scheduled_time=self.first_scheduled_time,
                first_token_time=self._first_token_time,
                finished_time=self.finished_time,
                num_preemptions=self.num_preemptions,
                num_drafts=self.num_drafts,
                num_accepted_drafts=self.num_accepted_drafts,
                num_loaded_tokens=self.num_loaded_tokens,
            ),
            error=self.error,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            prompt_start=0 if prompt_logprobs is None else prompt_start,
            embedding=self.embedding,
        )


@dataclass(slots=True)
class ProcessedOutputs:
    """Changes that `OutputProcessor.process` has made for one message of the core."""

    accepted: list[RequestState] = field(default_factory=list)
    answers: list[AnswerState] = field(default_factory=list)  # with new updates; may repeat
    to_abort: list[int] = field(default_factory=list)  # keys that ended here while the core still runs them
    num_gaps: int = 0


class OutputProcessor:
    """Open answers by key. Outputs of unknown keys are ignored: their answers ended here before the core could know."""

    def __init__(self, detokenizers: DetokenizerFactory | None, eos_token_ids: frozenset[int]) -> None:
        self._detokenizers = detokenizers
        self._texts = None if detokenizers is None else detokenizers.texts
        self._eos_token_ids = eos_token_ids
        self._next_key = 0
        self.answer_by_key: dict[int, AnswerState] = {}

    def add(self, request: RequestState, processed: ProcessedRequest, now: float) -> list[AnswerState]:
        """Create the answers of `request` with their tokens so far; return those that these tokens already end."""
        request.processed, params = processed, processed.core.params
        prompt_token_ids, ended = decode_ids(processed.prompt.token_ids), []
        for child in processed.children:
            detokenizer = None
            if self._detokenizers is not None and params.detokenize:
                detokenizer = self._detokenizers.new(
                    prompt_token_ids, params.skip_special_tokens, params.spaces_between_special_tokens
                )
            texts = self._texts if params.detokenize else None
            answer = AnswerState(request, processed, child, self._new_key(), detokenizer, texts, self._eos_token_ids)
            request.answers.append(answer)
            answer.replay(decode_ids(child.output_token_ids))
            if answer.finish_reason is None:
                self.answer_by_key[answer.key] = answer
            else:
                answer.finished_time = now
                ended.append(answer)
        return ended

    def remove(self, request: RequestState) -> list[int]:
        """Remove the answers of `request` from `answer_by_key`; return the keys that the core still runs."""
        return [key for key in (answer.key for answer in request.answers) if self.answer_by_key.pop(key, None)]

    def process(self, outputs: EngineCoreOutputs, now: float) -> ProcessedOutputs:
        """Apply a message to its answers at unix time `now`; ProtocolError, before any change, if columns disagree."""
        keys, starts = decode_ids(outputs.keys), decode_ids(outputs.starts)
        counts, token_ids = decode_ids(outputs.counts), decode_ids(outputs.token_ids)
        if not len(keys) == len(starts) == len(counts) or min(counts, default=0) < 0 or sum(counts) != len(token_ids):
            raise ProtocolError(
                f"columns of {len(keys)} keys, {len(starts)} starts, {len(counts)} counts and {len(token_ids)} tokens "
                f"(counted: {sum(counts)}) disagree"
            )
        runs = [] if outputs.logprobs is None else list(runs_of(outputs.logprobs))
        prompt_runs = [] if outputs.prompt_logprobs is None else list(runs_of(outputs.prompt_logprobs))
        result, answer_by_key = ProcessedOutputs(), self.answer_by_key
        if outputs.accepted or outputs.started:
            self._accept(outputs, now, result)
        for run in prompt_runs:
            answer = answer_by_key.get(run.key)
            if answer is not None and answer.request.prompt_logprobs.append(run):
                result.answers.append(answer)
        scored = [(answer_by_key.get(run.key), run) for run in runs]  # an answer may end in this very message
        is_one_each = counts.count(1) == len(counts) == len(token_ids)
        pieces: Iterable[Sequence[int]] = zip(token_ids, strict=True) if is_one_each else _split(token_ids, counts)
        self._append_all(zip(keys, starts, pieces, strict=True), now, result)
        for answer, run in scored:
            if answer is not None:
                answer.append_logprobs(run)
        for finished in outputs.finished:
            self._finish(finished, now, result)
        return result

    def _accept(self, outputs: EngineCoreOutputs, now: float, result: ProcessedOutputs) -> None:
        for key in outputs.accepted:
            answer = self.answer_by_key.get(key)
            if answer is not None and not answer.request.is_accepted:
                answer.request.is_accepted = True
                result.accepted.append(answer.request)
        for started in outputs.started:
            answer = self.answer_by_key.get(started.key)
            if answer is not None:
                if started.num_cached_tokens > answer.num_cached_tokens:
                    answer.num_cached_tokens = started.num_cached_tokens
                    answer.num_loaded_tokens = started.num_loaded_tokens
                answer.first_scheduled_time = answer.first_scheduled_time or now

    def _append_all(
        self, columns: Iterable[tuple[int, int, Sequence[int]]], now: float, result: ProcessedOutputs
    ) -> None:
        """Append the tokens of each (key, start, tokens) to its answer; a gap ends the answer with an error."""
        for key, start, token_ids in columns:
            answer = self.answer_by_key.get(key)
            if answer is None:
                continue
            try:
                if answer.append(start, token_ids, now):
                    result.answers.append(answer)
            except ProtocolError as error:
                answer.finish("error", now, ErrorInfo("internal", f"{error}: tokens are missing, the answer ends"))
                result.answers.append(answer)
                result.num_gaps += 1
            if answer.finish_reason is not None:
                del self.answer_by_key[key]
                result.to_abort.append(key)

    def _finish(self, finished: Finished, now: float, result: ProcessedOutputs) -> None:
        answer = self.answer_by_key.pop(finished.key, None)
        if answer is not None:
            error = finished.error
            if error is not None and error.kind == "internal":
                error = ErrorInfo(error.kind, f"request {answer.request.request_id}: {error.message}")
            answer.embedding = finished.vector
            answer.num_drafts, answer.num_accepted_drafts = finished.num_drafts, finished.num_accepted_drafts
            answer.finish(finished.reason, now, error, finished.num_preemptions)
            result.answers.append(answer)

    def _new_key(self) -> int:
        """Return an unused key in [0, 2^31)."""
        while self._next_key in self.answer_by_key:
            self._next_key = (self._next_key + 1) & 0x7FFFFFFF
        key, self._next_key = self._next_key, (self._next_key + 1) & 0x7FFFFFFF
        return key


def _split(token_ids: array[int], counts: array[int]) -> Iterator[array[int]]:
    """Split tokens into pieces of the given lengths."""
    ends = list(accumulate(counts))
    return (token_ids[end - count : end] for end, count in zip(ends, counts, strict=True))
