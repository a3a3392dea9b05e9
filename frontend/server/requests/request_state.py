"""RequestState and AnswerState: one open request of a client, and each of its n answers.

The detokenizer makes the text of an answer. The core, a stop string or a repetition ends the answer, whichever comes
first in the order of tokens. Updates stay in the answer until `take_delta`. Knows no socket.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TypeAlias

import msgspec

from ....ipc.codec import num_ids
from ....ipc.errors import ErrorInfo, ProtocolError
from ....ipc.messages.adapter import AdapterRef
from ....ipc.messages.base import BulkArray, CacheMisses, CacheReport, FinishReason, PromptDifference
from ....ipc.messages.client import Child, Delta, RequestMetrics, Submit
from ....ipc.messages.core import CoreChild, EngineCoreRequest, TenantRef
from ....ipc.messages.tier import PlaceName
from ....ipc.notes.deadly import NONE
from ....ipc.params.sampling_params import RepetitionDetectionParams
from ...forms.parsers.markers import MarkerFinder
from ...listening.keys.key_ledger import OpenUse
from ..helpers.task import Task
from ..prompts.prompt import ProcessedRequest
from ..reuse.seen_prompts import SeenPrompt
from ..text.detokenizer import Detokenizer
from ..text.token_texts import TokenTexts
from .client_session import ClientSession
from .logprob_buffer import LogprobBuffer, LogprobRun

LOSSES_TO_ISOLATE = 2  # CRASHES_TO_SUSPECT in the core's crash isolation

_asked_for = attrgetter(  # the fields of a Submit that say what the caller asked for
    "params",
    "pooling",
    "shown_token_ids",
    "prompt",
    "prompt_token_ids",
    "chat",
    "chat_form",
    "add_special_tokens",
    "adapter",
    "media",
    "text_pair",
)


class RequestState:
    """An open request, from its Submit until all its answers have finished."""

    __slots__ = (
        *(
            "adapter",
            "answers",
            "core",
            "expires_at",
            "is_accepted",
            "key",
            "media_digests",
            "processed",
            "prompt_logprobs",
            "session",
            "submit",
        ),
        *("difference", "opening", "seen_prompt", "sent_losses", "use"),
        "_releases",
    )

    def __init__(
        self, session: ClientSession[RequestState], submit: Submit, expires_at: float = math.inf, key: bytes = NONE
    ) -> None:
        """`expires_at`: unix seconds. `key`: the key of the request in the frontend's ReadingNote."""
        self.session, self.key = session, key
        self.expires_at = expires_at  # unix seconds; media and prompt must have been read by then
        self.submit = submit
        self.processed: ProcessedRequest | None = None  # None until the request has been read
        self.answers: list[AnswerState] = []
        self.is_accepted = False
        self.core = 0  # replica number of the core that computes it, or NOWHERE
        self.sent_losses = 0  # `num_losses` in the last message to a core
        self.opening: Task | None = None  # the task that reads the request; None if it never had to wait
        self.prompt_logprobs = LogprobBuffer(max(submit.num_prompt_logprobs, 1))
        self.adapter: AdapterRef | None = None
        self.use: OpenUse | None = None  # of its API key, if that has a name
        self.media_digests: list[bytes] = []  # of their bytes, once they are read
        self.seen_prompt: SeenPrompt | None = None  # its prompt as later ones are compared with it
        self.difference: PromptDifference | None = None  # of its prompt from the nearest earlier one
        self._releases: list[Callable[[], None]] = []

    @property
    def num_losses(self) -> int:
        """The number of losses of cores and workers while they computed this request, since its last new token."""
        return max((answer.num_losses for answer in self.answers if answer.finish_reason is None), default=0)

    @property
    def _tenant(self) -> TenantRef | None:
        if self.use is None:
            return None
        key = self.use.key
        return TenantRef(name=key.name, weight=key.weight, kv_share=key.kv_share)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)

    @property
    def was_alone(self) -> bool:
        """Whether the core isolated this request, because of earlier losses: it admitted no other until this one had a
        new token."""
        return self.sent_losses >= LOSSES_TO_ISOLATE

    def at_close(self, release: Callable[[], None]) -> None:
        """Register a function for `close` to call, which releases an adapter or media."""
        self._releases.append(release)

    @property
    def request_id(self) -> str:
        return self.submit.request_id

    @property
    def is_finished(self) -> bool:
        return bool(self.answers) and all(answer.finish_reason is not None for answer in self.answers)

    def cache_report(self, answer: AnswerState) -> CacheReport | None:
        """Return why tokens of the prompt were not found in the cache for one of its answers; None if all that were
        computed before were found."""
        assert self.processed is not None
        num_prompt, num_missed = num_ids(self.processed.prompt.token_ids), sum(answer.misses.num_tokens.values())
        num_left = num_prompt - answer.num_cached_tokens - num_missed
        found = None
        if answer.index == 0 and self.difference is not None and num_left:
            found = self.difference
            found = msgspec.structs.replace(found, num_tokens=min(found.num_tokens, num_left))
        if found is None and not num_missed:
            return None
        return CacheReport(misses=answer.misses if num_missed else None, difference=found)

    def close(self) -> None:
        """Stop reading the request, charge its tokens to its API key, and release adapter and media. Drop the
        references to the answers: they refer to this request, and without a cycle both are freed after the last delta,
        not by the garbage collector."""
        if self.use is not None:
            self.use.charge(self.num_output_tokens)
        self.answers = []
        if self.opening is not None:
            self.opening.close()
            self.opening = None
        releases, self._releases = self._releases, []
        for release in releases:
            release()

    def is_same(self, submit: Submit) -> bool:
        """Return whether `submit` asks for the same: prompt, parameters, adapter and media. Attempt and tokens so far
        may differ."""
        return bool(_asked_for(self.submit) == _asked_for(submit))

    def to_core(self, now: float) -> EngineCoreRequest:
        """Return the message that sends this request to a core at `now`, in unix seconds: its unfinished answers, each
        with all its tokens so far."""
        assert self.processed is not None
        children = [
            CoreChild(key=answer.key, seed=answer.seed, output_token_ids=answer.token_ids.tobytes())
            for answer in self.answers
            if answer.finish_reason is None
        ]
        self.sent_losses = self.num_losses
        return msgspec.structs.replace(
            self.processed.core,
            children=children,
            num_prompt_logprobs=self.prompt_logprobs.end,
            adapter=self.adapter,
            num_losses=self.sent_losses,
            waited_s=max(now - self.processed.core.arrival_time, 0.0),
            caller=self.session.caller_of(self.request_id),
            tenant=self._tenant,
        )


Session: TypeAlias = ClientSession[RequestState]


class AnswerState:
    """One of the n answers of a request: its tokens, detokenizer and finder of stop strings, and its unsent updates.

    A Delta contains tokens and exactly the text that they complete, so that a client's text depends only on its tokens.
    """

    __slots__ = (
        *("request", "key", "index", "seed", "token_ids", "finish_reason", "stop_reason", "error", "embedding"),
        *("finished_time", "first_scheduled_time", "num_cached_tokens", "num_loaded_tokens"),
        *("misses", "num_preemptions", "num_drafts", "num_accepted_drafts", "num_losses", "_num_tokens_at_loss"),
        *("_params", "_has_logprobs", "_named_token_ids", "_silent_token_ids", "_detokenizer"),
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
        eos_token_id: int | None,
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
        self.num_losses, self._num_tokens_at_loss = 0, -1
        self.num_loaded_tokens: dict[PlaceName, int] = {}
        self.misses = CacheMisses()
        self._has_logprobs = params.num_logprobs is not None or params.prompt_logprobs is not None
        own_end = () if params.ignore_eos or eos_token_id is None else (eos_token_id,)  # is not reported as stop_reason
        self._named_token_ids = frozenset(params.stop_token_ids or ()).difference(own_end)
        stops, is_included = params.stop_strings, params.include_stop_str_in_output
        self._silent_token_ids = frozenset(() if is_included else processed.core.stop_token_ids)  # add no text
        self._detokenizer, self._texts = detokenizer, texts
        self._stops = MarkerFinder(*stops, is_included=is_included) if stops else None
        self._logprobs = LogprobBuffer(0, are_named=bool(params.logprob_token_ids))
        self._text = ""
        self._has_sent_start = False

    def replay(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the client already has. They rebuild the state, may end the answer, and are not sent
        again."""
        self.append(0, token_ids, 0.0)
        self._text = ""
        self._num_taken = len(self.token_ids)
        self._logprobs.restart(self._num_taken)

    def echo(self, token_ids: Sequence[int]) -> list[Delta]:
        """Replay tokens and return each as a delta with the text that it completes: whoever reads these deltas is then
        in the state of one who read the answer as it was generated. None has a finish reason."""
        request_id, deltas = self.request.request_id, list[Delta]()
        for start, token_id in enumerate(token_ids):
            if self.finish_reason is not None:
                break
            self.append(start, [token_id], 0.0)
            one, text = self.token_ids[start:].tobytes(), self._text
            deltas.append(Delta(request_id=request_id, index=self.index, start=start, token_ids=one, text=text))
            self._text = ""
        self._num_taken = len(self.token_ids)
        self._logprobs.restart(self._num_taken)
        return deltas

    def count_loss(self) -> None:
        """Count the loss of a core or its workers while they computed this answer. If the answer has had a new token
        since the last loss, count from 1 again: it did not cause the earlier losses."""
        if len(self.token_ids) > self._num_tokens_at_loss:
            self.num_losses, self._num_tokens_at_loss = 0, len(self.token_ids)
        self.num_losses += 1

    def append_logprobs(self, run: LogprobRun) -> None:
        """Append the logprobs of tokens that have just been appended, except those after the end of the answer."""
        self._logprobs.append(run)
        self._logprobs.trim(len(self.token_ids))  # tokens after the end are not part of the answer

    def append(self, start: int, token_ids: Sequence[int], now: float) -> bool:
        """Append tokens until a stop string or a repetition ends the answer; return whether any was new. `start`:
        output index of the first one. Known tokens are skipped; ProtocolError if tokens before `start` are missing.
        With max_tokens 0 nothing is appended. `now`: unix seconds."""
        known = len(self.token_ids)
        if start != known:
            if start > known:
                raise ProtocolError(f"the core sent output tokens from {start} on, {known} are known")
            token_ids = token_ids[known - start :]
        if not token_ids or self._params.max_tokens == 0:  # with max_tokens 0 a request only scores its prompt
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
        """End the answer for `reason`, and append the text held back so far. If that completes a stop string, the stop
        string is the reason instead. `now`: unix seconds."""
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
        if reason == "stop" and last in self._named_token_ids:
            self.stop_reason = last

    def take_delta(self) -> Delta:
        """Return all unsent updates as one delta, with the unsent logprobs of the request's prompt; they then count as
        sent."""
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
            cache_report=None if self.finish_reason is None else self.request.cache_report(self),
        )


def repeats(token_ids: array[int], params: RepetitionDetectionParams) -> bool:
    """Return whether the tokens end with `min_count` copies of a pattern, of a size that `params` allow."""
    for size in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1):
        length = size * params.min_count
        if length > len(token_ids):
            return False
        if token_ids[-1] == token_ids[-1 - size] and token_ids[-length:-size] == token_ids[size - length :]:
            return True
    return False
