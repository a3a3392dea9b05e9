"""OutputProcessor: the core's columns → per answer, the tokens and text that its client has not got yet.

Owns the answers by key, from submit to finish. Text comes from the detokenizer, the end from the core or from a stop
string, whichever is first in the order of tokens. Knows no socket; news wait in the answers until they are taken.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import TypeAlias

import msgspec

from ...ipc.codec import decode_ids
from ...ipc.errors import ErrorInfo, ProtocolError
from ...ipc.messages.base import BulkArray, FinishReason
from ...ipc.messages.client import Child, Delta, RequestMetrics, Submit
from ...ipc.messages.core import CoreChild, EngineCoreOutputs, EngineCoreRequest, Finished
from ...ipc.sampling_params import RepetitionDetectionParams
from ..intake.background import BackgroundJob
from ..intake.input_processor import ProcessedRequest
from ..text.detokenizer import Detokenizer, DetokenizerFactory
from ..text.stop_strings import StopChecker
from ..text.token_texts import TokenTexts
from .client_session import ClientSession
from .logprob_buffer import LogprobBuffer, LogprobRun, runs_of
from .repetition import repeats


class RequestState:
    """A request that is open: from its submit until every answer has finished."""

    __slots__ = ("answers", "is_accepted", "processed", "prompt_logprobs", "session", "submit", "tokenizing")

    def __init__(self, session: ClientSession[RequestState], submit: Submit) -> None:
        self.session = session
        self.submit = submit
        self.processed: ProcessedRequest | None = None  # None while its prompt is tokenized
        self.answers: list[AnswerState] = []
        self.is_accepted = False
        self.tokenizing: BackgroundJob | None = None  # where it waits for its prompt's tokens
        self.prompt_logprobs = LogprobBuffer(max(submit.num_prompt_logprobs, 1))

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def is_finished(self) -> bool:
        return bool(self.answers) and all(answer.finish_reason is not None for answer in self.answers)

    def close(self) -> None:
        """The request is over. An answer knows its request; so that both are freed with the last delta, and do not
        wait for the garbage collector, the request forgets its answers."""
        self.answers = []
        self.tokenizing = None

    def is_same(self, submit: Submit) -> bool:
        """Whether `submit` asks for the same, at whatever attempt."""
        prompt = ("prompt", "prompt_token_ids", "chat", "chat_form", "add_special_tokens")
        key = attrgetter("params", "pooling", *prompt)
        return bool(key(self.submit) == key(submit))

    def to_core(self) -> EngineCoreRequest:
        """The request with all tokens that are known by now: the same for a submit, a resume and a lost core."""
        assert self.processed is not None
        children = [
            CoreChild(key=answer.key, seed=answer.seed, output_token_ids=answer.token_ids.tobytes())
            for answer in self.answers
            if answer.finish_reason is None
        ]
        known = self.prompt_logprobs.end
        return msgspec.structs.replace(self.processed.core, children=children, num_prompt_logprobs=known)


Session: TypeAlias = ClientSession[RequestState]


@dataclass(slots=True, eq=False)
class AnswerState:
    """One answer of a request: its tokens, the state that makes text of them, and what was not taken yet.

    A Delta holds tokens and their text in step, so that a client's text is always a function of its tokens.
    """

    request: RequestState
    key: int
    index: int
    seed: int
    _has_tokens: bool  # False: the request scores its prompt, and the token that comes after that is dropped
    _min_tokens: int
    _includes_stop: bool  # what ends the answer is shown
    _has_logprobs: bool
    _stop_token_ids: frozenset[int]
    _eos_token_ids: frozenset[int]
    _detokenizer: Detokenizer | None
    _stop_checker: StopChecker | None
    _texts: TokenTexts | None
    _logprobs: LogprobBuffer
    _repetition: RepetitionDetectionParams | None
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    finished_time: float = 0.0
    num_cached_tokens: int = 0
    error: ErrorInfo | None = None
    embedding: BulkArray | None = None
    _text: str = ""
    _num_taken: int = 0  # tokens
    _num_preemptions: int = 0
    first_scheduled_time: float = 0.0
    _first_token_time: float = 0.0
    _has_sent_start: bool = False

    @property
    def num_preemptions(self) -> int:
        """Known when the answer has ended."""
        return self._num_preemptions

    def replay(self, token_ids: Sequence[int]) -> None:
        """Take tokens that the client has: they rebuild the state, and only what comes after them is news."""
        self.append(0, token_ids, 0.0)
        self._text = ""
        self._num_taken = len(self.token_ids)
        self._logprobs.restart(self._num_taken)

    def append_logprobs(self, run: LogprobRun) -> None:
        """Take the logprobs of tokens that have just been appended."""
        self._logprobs.append(run)
        self._logprobs.trim(len(self.token_ids))  # what came after the end is not part of the answer

    def append(self, start: int, token_ids: Sequence[int], now: float) -> bool:
        """Take the output tokens from index `start` on; returns whether any was new. ProtocolError on a gap."""
        known = len(self.token_ids)
        if start != known:
            if start > known:
                raise ProtocolError(f"the core sent output tokens from {start} on, {known} are known")
            token_ids = token_ids[known - start :]
        if not token_ids or not self._has_tokens:
            return False
        if not self._first_token_time:
            self._first_token_time = now
        detokenizer = self._detokenizer
        if self._repetition is not None and len(token_ids) > 1:
            for token_id in token_ids:
                if self.finish_reason is None:
                    self.append(len(self.token_ids), [token_id], now)
            return True
        for token_id in token_ids:  # the path of every token
            self.token_ids.append(token_id)
            if detokenizer is None:
                continue
            if token_id in self._stop_token_ids and self._has_min_tokens and not self._includes_stop:
                continue  # it ends the answer and is not shown
            text = detokenizer.append(token_id)
            if self._stop_checker is None:
                self._text += text
            elif text:
                self._append_text(text)
                if self.finish_reason is not None:
                    self.finished_time = now
                    break
        if self._repetition is not None and self._has_min_tokens and repeats(self.token_ids, self._repetition):
            self.finish("repetition", now)
            self.stop_reason = self.stop_reason or "repetition_detected"
        return True

    @property
    def _has_min_tokens(self) -> bool:
        return len(self.token_ids) >= self._min_tokens

    def _append_text(self, text: str) -> None:
        if self._stop_checker is None:
            self._text += text
            return
        match = self._stop_checker.append(text, self._has_min_tokens)
        self._text += match.text
        if match.stop is not None:
            self.finish_reason, self.stop_reason = "stop", match.stop

    def finish(
        self, reason: FinishReason, now: float, error: ErrorInfo | None = None, num_preemptions: int = 0
    ) -> None:
        """The answer ends; the text that was kept back comes out, and a stop string that only this completes counts."""
        self.finished_time = now
        self._num_preemptions = num_preemptions
        if self._detokenizer is not None:
            self._append_text(self._detokenizer.finish())
        if self.finish_reason is not None:
            return
        if self._stop_checker is not None:
            self._text += self._stop_checker.finish()
        self.finish_reason = reason
        self.error = error
        last = self.token_ids[-1] if self.token_ids else -1
        if reason == "stop" and last in self._stop_token_ids - self._eos_token_ids:  # else its grammar is complete
            self.stop_reason = last

    def take_delta(self) -> Delta:
        """Everything that was not taken yet, as one delta."""
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
                num_preemptions=self._num_preemptions,
            ),
            error=self.error,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            prompt_start=0 if prompt_logprobs is None else prompt_start,
            embedding=self.embedding,
        )


@dataclass(slots=True)
class ProcessedOutputs:
    """What a message of the core brought."""

    accepted: list[RequestState] = field(default_factory=list)
    answers: list[AnswerState] = field(default_factory=list)  # with something to take; may repeat
    to_abort: list[int] = field(default_factory=list)  # keys that ended here while the core still runs them
    num_gaps: int = 0


class OutputProcessor:
    """The open answers by key. A key that is not here any more is ignored: its answer ended before the core knew."""

    def __init__(self, detokenizers: DetokenizerFactory | None, eos_token_ids: frozenset[int]) -> None:
        self._detokenizers = detokenizers
        self._texts = None if detokenizers is None else detokenizers.texts
        self._eos_token_ids = eos_token_ids
        self._next_key = 0
        self.answer_by_key: dict[int, AnswerState] = {}

    def add(self, request: RequestState, processed: ProcessedRequest, now: float) -> list[AnswerState]:
        """Make the answers of `request`; returns those that are at their end already."""
        request.processed = processed
        prompt_token_ids, ended = decode_ids(processed.prompt.token_ids), []
        for child in processed.children:
            answer = self._new_answer(request, processed, child, prompt_token_ids)
            request.answers.append(answer)
            answer.replay(decode_ids(child.output_token_ids))
            if answer.finish_reason is None:
                self.answer_by_key[answer.key] = answer
            else:
                answer.finished_time = now
                ended.append(answer)
        return ended

    def _new_answer(
        self, request: RequestState, processed: ProcessedRequest, child: Child, prompt_token_ids: Sequence[int]
    ) -> AnswerState:
        params, detokenizer = processed.core.params, None
        if self._detokenizers is not None and params.detokenize:
            detokenizer = self._detokenizers.new(
                prompt_token_ids, params.skip_special_tokens, params.spaces_between_special_tokens
            )
        stops = tuple(params.stop_strings)
        return AnswerState(
            request,
            self._new_key(),
            child.index,
            child.seed,
            _has_tokens=params.max_tokens != 0,
            _min_tokens=params.min_tokens,
            _includes_stop=params.include_stop_str_in_output,
            _has_logprobs=params.num_logprobs is not None or params.prompt_logprobs is not None,
            _stop_token_ids=frozenset(processed.core.stop_token_ids),
            _eos_token_ids=self._eos_token_ids,
            _detokenizer=detokenizer,
            _stop_checker=StopChecker(stops, params.include_stop_str_in_output) if stops else None,
            _texts=self._texts if params.detokenize else None,
            _logprobs=LogprobBuffer(0, are_named=bool(params.logprob_token_ids)),
            _repetition=params.repetition_detection,
        )

    def remove(self, request: RequestState) -> list[int]:
        """Forget the answers of `request`; returns the keys that the core still has."""
        return [key for key in (answer.key for answer in request.answers) if self.answer_by_key.pop(key, None)]

    def process(self, outputs: EngineCoreOutputs, now: float) -> ProcessedOutputs:
        """Take in one message; `now` in unix seconds. ProtocolError, and no change, when its columns disagree."""
        keys, starts = decode_ids(outputs.keys), decode_ids(outputs.starts)
        counts, token_ids = decode_ids(outputs.counts), decode_ids(outputs.token_ids)
        if not len(keys) == len(starts) == len(counts) or min(counts, default=0) < 0 or sum(counts) != len(token_ids):
            raise ProtocolError(
                f"columns of {len(keys)} keys, {len(starts)} starts, {len(counts)} counts and {len(token_ids)} tokens "
                f"(counted: {sum(counts)}) do not belong together"
            )
        runs = [] if outputs.logprobs is None else list(runs_of(outputs.logprobs))
        prompt_runs = [] if outputs.prompt_logprobs is None else list(runs_of(outputs.prompt_logprobs))
        news, answer_by_key = ProcessedOutputs(), self.answer_by_key
        if outputs.accepted or outputs.started:
            self._accept(outputs, now, news)
        for run in prompt_runs:
            answer = answer_by_key.get(run.key)
            if answer is not None and answer.request.prompt_logprobs.append(run):
                news.answers.append(answer)
        scored = [(answer_by_key.get(run.key), run) for run in runs]  # an answer may end in this very message
        is_one_each = counts.count(1) == len(counts) == len(token_ids)
        pieces: Iterable[Sequence[int]] = zip(token_ids, strict=True) if is_one_each else _cut(token_ids, counts)
        self._append_all(zip(keys, starts, pieces, strict=True), now, news)
        for answer, run in scored:
            if answer is not None:
                answer.append_logprobs(run)
        for pooled in outputs.pooled:
            answer = answer_by_key.get(pooled.owner)
            if answer is not None:
                answer.embedding = pooled.vector
        for finished in outputs.finished:
            self._finish(finished, now, news)
        return news

    def _accept(self, outputs: EngineCoreOutputs, now: float, news: ProcessedOutputs) -> None:
        for key in outputs.accepted:
            answer = self.answer_by_key.get(key)
            if answer is not None and not answer.request.is_accepted:
                answer.request.is_accepted = True
                news.accepted.append(answer.request)
        for started in outputs.started:
            answer = self.answer_by_key.get(started.key)
            if answer is not None:
                answer.num_cached_tokens = max(answer.num_cached_tokens, started.num_cached_tokens)
                answer.first_scheduled_time = answer.first_scheduled_time or now

    def _append_all(
        self, columns: Iterable[tuple[int, int, Sequence[int]]], now: float, news: ProcessedOutputs
    ) -> None:
        """columns: key, start and tokens."""
        for key, start, token_ids in columns:
            answer = self.answer_by_key.get(key)
            if answer is None:
                continue
            try:
                if answer.append(start, token_ids, now):
                    news.answers.append(answer)
            except ProtocolError as error:
                answer.finish("error", now, ErrorInfo("internal", f"{error}: the answer has a hole and is given up"))
                news.answers.append(answer)
                news.num_gaps += 1
            if answer.finish_reason is not None:
                del self.answer_by_key[key]
                news.to_abort.append(key)

    def _finish(self, finished: Finished, now: float, news: ProcessedOutputs) -> None:
        answer = self.answer_by_key.pop(finished.key, None)
        if answer is not None:
            error = finished.error
            if error is not None and error.kind == "internal":
                error = ErrorInfo(error.kind, f"request {answer.request.request_id}: {error.message}")
            answer.finish(finished.reason, now, error, finished.num_preemptions)
            news.answers.append(answer)

    def _new_key(self) -> int:
        """A number in [0, 2^31) that no open answer has."""
        while self._next_key in self.answer_by_key:
            self._next_key = (self._next_key + 1) & 0x7FFFFFFF
        key, self._next_key = self._next_key, (self._next_key + 1) & 0x7FFFFFFF
        return key


def _cut(token_ids: array[int], counts: array[int]) -> Iterator[array[int]]:
    """Pieces of these lengths."""
    ends = list(accumulate(counts))
    return (token_ids[end - count : end] for end, count in zip(ends, counts, strict=True))
