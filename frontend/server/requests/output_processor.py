"""OutputProcessor: turns the core's output columns into unsent tokens and text of each answer.

Owns the open answers, by key. Knows no socket: updates stay in the answers (request_state.py) until they are sent.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ....ipc.codec import decode_ids
from ....ipc.errors import ErrorInfo, ProtocolError
from ....ipc.messages.client import Delta
from ....ipc.messages.core import EngineCoreOutputs, Finished
from ....ipc.notes.deadly import KEY_BYTES, ReadingNote
from ..prompts.prompt import ProcessedRequest
from ..text.detokenizer import DetokenizerFactory
from .logprob_buffer import runs_of
from .request_state import AnswerState, RequestState

NUM_KEYS = 1 << 31  # keys are int32


@dataclass(slots=True)
class ProcessedOutputs:
    """The changes that `OutputProcessor.process` made for one message of the core."""

    accepted: list[RequestState] = field(default_factory=list)  # requests that the core has accepted just now
    answers: list[AnswerState] = field(default_factory=list)  # answers with new updates; may contain an answer twice
    to_abort: list[int] = field(default_factory=list)  # keys of answers that ended here, such as by a stop string
    num_gaps: int = 0  # answers that ended because tokens were missing


@dataclass(slots=True)
class AddedAnswers:
    """What the tokens that a client already has make of the answers of its request."""

    ended: list[AnswerState] = field(default_factory=list)  # by these tokens, or before
    echo: list[Delta] = field(default_factory=list)  # if the request asks for one


class OutputProcessor:
    """Owner of the open answers, by key. Outputs for unknown keys are ignored: these answers have ended here, and
    the core did not know it yet."""

    def __init__(
        self,
        detokenizers: DetokenizerFactory | None,
        eos_token_id: int | None,
        note: ReadingNote,
        first_key: int = 0,
        key_step: int = 1,
    ) -> None:
        """`detokenizers`: None without a tokenizer. `eos_token_id`: the tokenizer's end token, which does not appear as
        stop_reason. Keys of answers are `first_key`, `first_key + key_step` and so on, so that the frontends of an
        engine use different keys. `note` records the request whose tokens are being made into text."""
        self._detokenizers, self._note = detokenizers, note
        self._texts = None if detokenizers is None else detokenizers.texts
        self._eos_token_id = eos_token_id
        self._next_key, self._key_step = first_key, key_step
        self.answer_by_key: dict[int, AnswerState] = {}

    def add(self, request: RequestState, processed: ProcessedRequest, now: float) -> AddedAnswers:
        """Create the answers of `request`, with the tokens that the client already has. `now`: unix seconds."""
        request.processed, params = processed, processed.core.params
        prompt_token_ids, added = decode_ids(processed.prompt.token_ids), AddedAnswers()
        for child in processed.children:
            detokenizer = None
            if self._detokenizers is not None and params.detokenize:
                detokenizer = self._detokenizers.new(
                    prompt_token_ids,
                    params.skip_special_tokens,
                    params.spaces_between_special_tokens,
                    frozenset(decode_ids(request.submit.shown_token_ids)),
                )
            texts = self._texts if params.detokenize else None
            answer = AnswerState(request, processed, child, self._new_key(), detokenizer, texts, self._eos_token_id)
            request.answers.append(answer)
            if request.submit.has_echo:
                added.echo += answer.echo(decode_ids(child.output_token_ids))
            else:
                answer.replay(decode_ids(child.output_token_ids))
            if child.finish_reason is not None:
                answer.finish(child.finish_reason, now)
            if answer.finish_reason is None:
                self.answer_by_key[answer.key] = answer
            else:
                answer.finished_time = now
                added.ended.append(answer)
        return added

    def remove(self, request: RequestState) -> list[int]:
        """Remove the answers of `request` from `answer_by_key`. Return the keys of those still in the core."""
        return [key for key in (answer.key for answer in request.answers) if self.answer_by_key.pop(key, None)]

    def rekey(self, request: RequestState) -> dict[int, AnswerState]:
        """Give the unfinished answers of `request` new keys, since another core will compute them: late outputs of the
        old core then have unknown keys and are ignored. Return the answers by their old keys."""
        by_old_key = {answer.key: answer for answer in request.answers if answer.key in self.answer_by_key}
        for old, answer in by_old_key.items():
            del self.answer_by_key[old]
            answer.key = self._new_key()
            self.answer_by_key[answer.key] = answer
        return by_old_key

    def process(self, outputs: EngineCoreOutputs, now: float) -> ProcessedOutputs:
        """Apply a message of the core to the answers; return the changes. ProtocolError, before any change, if
        the columns do not match in length. `now`: unix seconds."""
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
        if outputs.accepted or outputs.started or outputs.missed:
            self._accept(outputs, now, result)
        for run in prompt_runs:
            answer = answer_by_key.get(run.key)
            if answer is not None:
                self._note.begin(answer.request.key)
                if answer.request.prompt_logprobs.append(run):
                    result.answers.append(answer)
        scored = [(answer_by_key.get(run.key), run) for run in runs]  # an answer may end in this message
        is_one_each = counts.count(1) == len(counts) == len(token_ids)
        pieces: Iterable[Sequence[int]] = zip(token_ids, strict=True) if is_one_each else _split(token_ids, counts)
        self._append_all(zip(keys, starts, pieces, strict=True), now, result)
        for answer, run in scored:
            if answer is not None:
                self._note.begin(answer.request.key)
                answer.append_logprobs(run)
        for finished in outputs.finished:
            self._finish(finished, now, result)
        self._note.end()
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
        for missed in outputs.missed:
            answer = self.answer_by_key.get(missed.key)
            if answer is not None:
                answer.misses = missed.misses

    def _append_all(
        self, columns: Iterable[tuple[int, int, Sequence[int]]], now: float, result: ProcessedOutputs
    ) -> None:
        """Append the tokens of each (key, start, tokens) to the answer with that key. Missing tokens before `start` end
        the answer with an error."""
        cells = self._note.cells
        for key, start, token_ids in columns:
            answer = self.answer_by_key.get(key)
            if answer is None:
                continue
            cells[:KEY_BYTES] = answer.request.key
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
            self._note.begin(answer.request.key)
            error = finished.error
            if error is not None and error.kind == "internal":
                error = ErrorInfo(error.kind, f"request {answer.request.request_id}: {error.message}")
            answer.embedding = finished.vector
            answer.num_drafts, answer.num_accepted_drafts = finished.num_drafts, finished.num_accepted_drafts
            answer.finish(finished.reason, now, error, finished.num_preemptions)
            result.answers.append(answer)

    def _new_key(self) -> int:
        """Return an unused key in [0, 2^31)."""
        num_keys = NUM_KEYS // self._key_step * self._key_step
        while self._next_key in self.answer_by_key:
            self._next_key = (self._next_key + self._key_step) % num_keys
        key, self._next_key = self._next_key, (self._next_key + self._key_step) % num_keys
        return key


def _split(token_ids: array[int], counts: array[int]) -> Iterator[array[int]]:
    """Yield consecutive pieces of `token_ids` with the lengths `counts`."""
    ends = list(accumulate(counts))
    return (token_ids[end - count : end] for end, count in zip(ends, counts, strict=True))
