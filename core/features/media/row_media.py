"""RowMedia: the media of running requests whose tokens are still to be computed.

A row computes the tokens of a span only when the medium's entry is ready; the row is bound to the entry from the first
step with such a token until the step with the last one is sent. If the placeholders of a medium attend to one another
in both directions, all tokens of a span are computed in one step. Spans in the prefix cache need no entry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ....ipc.errors import RequestError, error_info
from ....ipc.messages.media import A_MEDIUM, EncoderProgress, MediaSpan
from ....ipc.messages.workers import ModelRunnerOutput
from ....ipc.spec.config.engine_spec import EngineSpec
from ...media_spans import end_of, first_after
from ...request import Ids, Request
from ...scheduling.result_processor import NewTokens
from ...scheduling.scheduler import Scheduler
from ...scheduling.step.ledger import LedgerEntry
from ...scheduling.step_feature import Engine, StepFeature, StepPlan
from .encode_queue import EncodeQueue
from .encode_throttle import EncodeThrottle
from .encoder_cache import Entry


@dataclass(eq=False)
class SpansLeft:
    """The spans of a request, from index `first` on, whose tokens have not all been sent with steps. `bound`: entries
    of the first of these spans. The first `num_cached` tokens of the request were in the prefix cache."""

    num_cached: int
    first: int
    spans: deque[MediaSpan]
    bound: deque[Entry] = field(default_factory=deque)


class RowMedia(StepFeature):
    """Feature that binds rows to entries of the encoder cache, and lets steps encode media. `left`: running requests
    that have spans left, or prompt tokens after them."""

    def __init__(self, spec: EngineSpec, scheduler: Scheduler, engine: Engine) -> None:
        encoder = spec.model.encoder
        self.left: dict[Request, SpansLeft] = {}
        self.encodes = EncodeQueue.of(spec)
        self.throttle = EncodeThrottle(scheduler.prefill_throttle)
        self._rows, self._waiting, self._engine = scheduler.rows, scheduler.waiting, engine
        self._is_bidirectional = encoder is not None and encoder.is_bidirectional

    def admit(self, request: Request, num_computed: int) -> None:
        first = first_after(request.media, num_computed)
        self.encodes.totals.num_cached += first
        if first < len(request.media):
            self.left[request] = SpansLeft(num_computed, first, deque(request.media[first:]))

    def leave(self, request: Request, last_step: int) -> None:
        if (left := self.left.pop(request, None)) is not None:
            for entry in left.bound:
                self.encodes.cache.release(entry)

    # ── a step is made ───────────────────────────────────────────────────────────────────────────────────────────

    def is_due(self) -> bool:
        """Return whether a medium is partly encoded: it is completed even if no row needs it any more."""
        return self.encodes.partial is not None

    def limit(self, ahead: Ids) -> None:
        """Lower the number of tokens that each row could compute to those before its first medium that is not ready."""
        for request in self.left:
            row = request.row
            ahead[row] = min(int(ahead[row]), self._num_ready(request))

    def cut(self, request: Request, count: int, most: int) -> int:
        """Return how many of the next `count` tokens to compute: those before a medium that is not ready. No
        bidirectional span is cut: one that does not fit is left to a later step, and as the first of a step it is
        computed whole, even if that takes more than `count`; 0 if it takes more than `most`."""
        if request not in self.left:
            return count
        count = min(count, self._num_ready(request))
        if not self._is_bidirectional or not count:
            return count
        start = int(self._rows.num_scheduled[request.row])
        for span in self.left[request].spans:
            if span.start >= start + count:
                break
            if end_of(span) > start + count:
                whole = end_of(span) - start
                return span.start - start if span.start > start else whole if whole <= most else 0
        return count

    def num_later(self) -> int:
        """Return how many requests with media, running or waiting, cannot be prefilled in the next step: all but one,
        since media become ready one by one; in a burst, those whose next token is of a medium that is not ready."""
        num_requests = len(self.left) + self._waiting.num_with_media
        if num_requests and self.throttle.is_burst:
            return sum(self._num_ready(request) == 0 for request in self.left)
        return max(num_requests - 1, 0)

    def _num_ready(self, request: Request) -> int:
        """Return how many of the request's next tokens come before its first medium that is not ready; its token limit
        if all are ready."""
        left, cache = self.left[request], self.encodes.cache
        for index, span in enumerate(left.spans):
            if index >= len(left.bound) and cache.ready(span.digest) is None:
                return max(span.start - int(self._rows.num_scheduled[request.row]), 0)
        return int(self._rows.token_limit[request.row])

    def plan(self, step: StepPlan) -> None:
        """Add to a step its encodes, the entries freed before them, and the bindings of rows to entries."""
        if not self.left and self.encodes.partial is None:
            return
        counts = step.counts
        bound = self._bind(counts)
        num_tokens, num_decodes = int(counts.sum()), int((counts == 1).sum())
        plan = self.encodes.plan(self._wanted(), step.number, self.throttle, num_decodes, num_tokens - num_decodes)
        self._release_sent(counts)
        step.delta.encodes = plan.encodes
        step.delta.freed_entries = plan.freed_entries
        step.delta.span_entries = bound

    def _wanted(self) -> Iterator[MediaSpan]:
        """Yield the spans that are not bound to an entry yet, in the policy's order of their requests."""
        for request in sorted(self.left, key=lambda request: request.sort_key):
            left = self.left[request]
            yield from (span for index, span in enumerate(left.spans) if index >= len(left.bound))

    def _bind(self, counts: Ids) -> list[int]:
        """Bind the spans with tokens in this step to their entries; return flat triples: row, index of the span, and
        entry."""
        triples: list[int] = []
        for request, left in self.left.items():
            row, cache = request.row, self.encodes.cache
            end = int(self._rows.num_scheduled[row] + counts[row]) if counts[row] else 0
            while len(left.bound) < len(left.spans) and (span := left.spans[len(left.bound)]).start < end:
                entry = cache.ready(span.digest)
                assert entry is not None, "a token is scheduled before its medium is ready"
                self.encodes.totals.num_hits += entry.was_used
                cache.bind(entry)
                triples += (row, left.first + len(left.bound), entry.number)
                left.bound.append(entry)
        return triples

    def _release_sent(self, counts: Ids) -> None:
        """Release the entries of spans whose last token is sent with this step. A row may compute its last known token
        again, so a span that ends with that token keeps its entry."""
        for request, left in list(self.left.items()):
            row = request.row
            end = min(int(self._rows.num_scheduled[row] + counts[row]), int(self._rows.num_tokens[row]) - 1)
            while left.spans and end_of(left.spans[0]) <= end:
                left.spans.popleft()
                left.first += 1
                self.encodes.cache.release(left.bound.popleft())
            if not left.spans and end >= request.num_prompt_tokens - 1:
                del self.left[request]

    # ── results of steps ─────────────────────────────────────────────────────────────────────────────────────────

    def in_work(self, oldest: LedgerEntry | None) -> list[Request]:
        """Return the running requests that still need one of the media that the step `oldest` encodes."""
        digests = set() if oldest is None else {encode.digest for encode in oldest.encodes}
        return [
            request
            for request, left in self.left.items()
            if any(span.digest in digests for span in list(left.spans)[len(left.bound) :])
        ]

    def on_result(self, entry: LedgerEntry, output: ModelRunnerOutput, new_tokens: NewTokens) -> None:
        """Let rows use the media that a finished step has encoded; end requests with a medium that could not be
        read."""
        if not entry.encodes:
            return
        errors = self.encodes.on_encoded(entry.step, entry.encodes, output.failed_entries)
        needs = [(request, span) for request, left in self.left.items() for span in left.spans]
        reasons = {request: errors[span.digest] for request, span in needs if span.digest in errors}
        for request, reason in reasons.items():
            error = RequestError(f"{A_MEDIUM[request.media[0].kind]} of the prompt could not be read: {reason}")
            self._engine.end(request, "error", error_info(error))

    def reset(self, lost: Sequence[LedgerEntry]) -> None:
        self.encodes.reset()

    def report(self) -> dict[str, EncoderProgress]:
        return {"encoder": self.encodes.progress()}

    # ── for tests ────────────────────────────────────────────────────────────────────────────────────────────────

    def check_invariants(self, requests: Sequence[Request]) -> None:
        """Raise AssertionError unless the references of entries are those of rows, and no token of a span without an
        entry was sent."""
        cache, rows = self.encodes.cache, self._rows
        cache.check_invariants()
        bound = [entry for left in self.left.values() for entry in left.bound]
        assert all(entry.num_refs == bound.count(entry) for entry in cache.entries())
        assert set(bound) <= set(cache.entries()), "a row is bound to an entry that was freed"
        running = rows.requests()
        for request in running:
            end = int(rows.num_scheduled[request.row])
            num_sent = first_after(request.media, min(end, int(rows.num_tokens[request.row]) - 1))
            left = self.left.get(request)
            num_left = 0 if left is None else len(left.spans)
            ends_prompt = bool(request.media) and end_of(request.media[-1]) == request.num_prompt_tokens
            num_released = len(request.media) - num_left
            assert num_released in (num_sent, num_sent - ends_prompt), "a span is released early or late"
            if left is not None:
                assert list(left.spans) == request.media[left.first :]
                end += end == request.num_prompt_tokens - 1 and len(left.bound) > 0  # its last token again
                begun = [span for span in left.spans if span.start < end and left.num_cached < end]
                digests = [entry.span.digest for entry in left.bound]
                assert digests == [span.digest for span in begun], "a span was sent without its entry"
                is_cut = self._is_bidirectional and begun and end_of(begun[-1]) > end
                assert not is_cut, "a bidirectional span was cut"
        assert self.left.keys() <= set(running)
