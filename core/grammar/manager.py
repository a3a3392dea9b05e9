"""GrammarManager: structured output in the core, from a request's submit to its finish.

    queued ──open──▶ opening ──opened──▶ ready: masks and tokens until the request ends
      ▲                 └─ error, or longer than the deadline: the request fails
      └── the host was lost: all are opened again with the tokens they have

A GrammarHost (process_host.py) compiles grammars and makes masks; nothing here waits for it. A request waits
(WaitReason.GRAMMAR) until its grammar is open. A host that ends or hangs is replaced: the grammars it was compiling
are tried again one at a time, and fail if they end that host too; all others continue from their tokens.

If a mask leaves one token, that token needs no sampling, and the tokens after it may need none either. The host sends
them with the mask (jump-forward tokens). The core appends two or more at once, and the next step computes all of them
together. The host gets them back as any other tokens, so the core may also ignore them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, Protocol

from ...ipc.codec import decode_ids, encode_ids
from ...ipc.errors import ErrorInfo, InternalError, RequestError, error_info
from ...ipc.messages.grammar import (
    AdvanceGrammars,
    CloseGrammars,
    CoreToGrammar,
    GrammarOpened,
    GrammarsAdvanced,
    GrammarToCore,
    OpenGrammar,
)
from ...ipc.sampling_params import SamplingParams
from ..request import Ids, Request, WaitReason
from .thought import OpenThought, tokens_after

NUM_COMPILERS = 2  # grammars that are compiled at once
START_TIMEOUT_S = 60.0  # until a new host has read the vocabulary; compilation times count from then
ADVANCE_TIMEOUT_S = 5.0  # the library's fuel ends a mask after some 20 ms
HOST_IS_UP = 0  # the grammar id of a host's first answer
MAX_LOSSES = 3  # losses of the host without a new token before a request fails


class GrammarHostLost(Exception):
    """The host has ended; the next message starts a new one without any grammars."""


class GrammarHost(Protocol):
    """Compiles grammars and makes masks. `send` does not wait; `receive` returns the answers so far."""

    @property
    def has_process(self) -> bool:
        """Whether a process runs, whose end `receive` reports."""

    def send(self, message: CoreToGrammar) -> None: ...

    def receive(self) -> list[GrammarToCore]:
        """Return the answers so far; GrammarHostLost, once, if the host has ended."""

    def stop(self) -> None:
        """End the host at once; the next message starts a new one."""


def may_jump(params: SamplingParams) -> bool:
    """Whether jump-forward tokens may skip sampling: only if no logprobs are requested and no other rule could veto
    them."""
    is_told = params.num_logprobs is not None
    is_ruled = params.bad_words or params.allowed_token_ids or params.min_tokens or params.logits_processors
    return not (is_told or is_ruled or params.thinking_token_budget is not None)


class GrammarState(Enum):
    QUEUED = auto()
    OPENING = auto()
    READY = auto()


@dataclass(eq=False)
class _Entry:
    request: Request
    thought: OpenThought  # before its end the grammar is not in force
    state: GrammarState = GrammarState.QUEUED
    has_begun: bool = False  # was ready once: its request waits no longer
    is_proven: bool = False  # was compiled before, here or for an earlier core: it can be compiled
    is_suspect: bool = False  # was compiling when a host was lost: compile it alone
    num_losses: int = 0
    late_tokens: list[int] = field(default_factory=list)  # received while opening


@dataclass
class _Fill:
    """The masks that the oldest step in flight waits for."""

    serial: int
    grammar_ids: list[int]
    is_sent: bool = False


class RequestMask(NamedTuple):
    """The tokens allowed next in one answer."""

    request: Request
    bits: bytes
    jump_tokens: list[int]  # jump-forward tokens; the mask allows only the first; []: several tokens are allowed


@dataclass
class GrammarUpdates:
    """Answers and failures since the last `take`, in the order to apply them."""

    ready: list[Request] = field(default_factory=list)
    complete: list[Request] = field(default_factory=list)  # nothing can follow their tokens
    failed: list[tuple[Request, ErrorInfo]] = field(default_factory=list)
    masks: list[RequestMask] | None = None  # of requests that are unfinished


class GrammarManager:
    """Owns an entry for each unfinished request with a grammar. `now` is monotonic seconds everywhere."""

    def __init__(self, host: GrammarHost, timeout_s: float, output_tokens: Callable[[Request], Ids]) -> None:
        """output_tokens: returns a request's output tokens so far."""
        self._host = host
        self._timeout_s = timeout_s
        self._output_tokens = output_tokens
        self._entry_by_id: dict[int, _Entry] = {}
        self._queue: deque[int] = deque()
        self._deadline_by_opening: dict[int, float] = {}  # all that the host compiles, even for finished requests
        self._late: set[int] = set()  # of these: past their deadline; they fail if the host is alive
        self._num_until_sign = 0  # answers until the one that shows that the host is alive
        self._next_id = HOST_IS_UP + 1
        self._is_host_up = False
        self._advances: list[tuple[int, int]] = []  # grammar id, token: not sent yet
        self._is_host_waiting = False  # for one of them; jump-forward tokens need no hurry
        self._serial = 0
        self._fill: _Fill | None = None
        self._num_unanswered = 0
        self._answer_deadline = 0.0

    # ── requests come and go ─────────────────────────────────────────────────────────────────────────────────────

    def add(self, request: Request, now: float) -> None:
        """Add a request, which waits until its grammar is ready."""
        request.grammar_id, self._next_id = self._next_id, self._next_id + 1
        request.waits_for.add(WaitReason.GRAMMAR)
        thought = OpenThought(request.thought_end, self._output_tokens(request).tobytes())
        self._entry_by_id[request.grammar_id] = _Entry(request, thought, is_proven=request.num_output_tokens > 0)
        self._queue.append(request.grammar_id)
        self._open_queued(now)

    def drop(self, request: Request) -> None:
        """Drop a finished request. If its grammar is being compiled, the result is discarded."""
        entry = self._entry_by_id.pop(request.grammar_id, None)
        if entry is not None and entry.state is GrammarState.READY:
            self._host.send(CloseGrammars(grammar_ids=[request.grammar_id]))

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def advance(self, tokens: Iterable[tuple[int, int]], *, are_jump_tokens: bool = False) -> None:
        """Note new tokens of these grammar ids. The next `flush` sends them, unless it has nothing but jump-forward
        tokens, which came from the host."""
        self._is_host_waiting |= not are_jump_tokens
        for grammar_id, token_id in tokens:
            entry = self._entry_by_id.get(grammar_id)
            if entry is not None and not entry.thought.is_over:
                entry.thought.append(token_id)
                continue
            if entry is None or entry.state is GrammarState.QUEUED:  # it opens with all tokens
                continue
            entry.num_losses = 0
            if entry.state is GrammarState.READY:
                self._advances.append((grammar_id, token_id))
            else:
                entry.late_tokens.append(token_id)

    def want_masks(self, grammar_ids: Iterable[int]) -> bool:
        """Request the masks of these answers' next tokens with the next `flush`; `take` returns them once. False if
        none of the grammars is in force yet."""
        entries = ((grammar_id, self._entry_by_id.get(grammar_id)) for grammar_id in grammar_ids)
        held = [grammar_id for grammar_id, entry in entries if entry is None or entry.thought.is_over]
        if held:
            self._serial += 1
            self._fill = _Fill(self._serial, held)
        return bool(held)

    def forget_masks(self) -> None:
        """Drop the request for masks of a lost step."""
        self._fill = None

    @property
    def is_awaiting_masks(self) -> bool:
        return self._fill is not None

    @property
    def is_idle(self) -> bool:
        """Whether there is neither a request with a grammar nor anything that the host has not answered."""
        return not (self._entry_by_id or self._deadline_by_opening or self._num_unanswered or self._fill)

    def flush(self, now: float) -> None:
        """Send tokens and the request for masks. Masks are requested once all their grammars are open."""
        fill, serial, mask_ids = self._fill, 0, list[int]()
        if fill is not None and not fill.is_sent:
            wanted = [grammar_id for grammar_id in fill.grammar_ids if grammar_id in self._entry_by_id]
            if all(self._entry_by_id[grammar_id].state is GrammarState.READY for grammar_id in wanted):
                fill.is_sent, serial, mask_ids = True, fill.serial, wanted
        if not (self._advances and self._is_host_waiting) and not serial:
            return
        advances, self._advances, self._is_host_waiting = self._advances, [], False
        self._host.send(
            AdvanceGrammars(
                grammar_ids=encode_ids(grammar_id for grammar_id, _ in advances),
                token_ids=encode_ids(token_id for _, token_id in advances),
                serial=serial,
                mask_ids=encode_ids(mask_ids),
            )
        )
        self._num_unanswered += 1
        self._answer_deadline = now + ADVANCE_TIMEOUT_S

    # ── what the host has done ───────────────────────────────────────────────────────────────────────────────────

    def take(self, now: float) -> GrammarUpdates:
        """Apply the host's answers and the deadlines."""
        news = GrammarUpdates()
        try:
            for message in self._host.receive():
                if isinstance(message, GrammarOpened):
                    self._on_opened(message, now, news)
                else:
                    self._on_advanced(message, news)
        except GrammarHostLost as error:
            self._on_loss(str(error), news)
        self._expire(now, news)
        self._open_queued(now)
        self.flush(now)
        return news

    @property
    def next_deadline(self) -> float | None:
        """When to call `take` next if the host sends nothing."""
        deadlines = [
            deadline
            for each, deadline in self._deadline_by_opening.items()
            if each in self._entry_by_id and each not in self._late
        ]
        if self._num_unanswered:
            deadlines.append(self._answer_deadline)
        return min(deadlines, default=None)

    def _on_opened(self, message: GrammarOpened, now: float, news: GrammarUpdates) -> None:
        if message.grammar_id == HOST_IS_UP:
            self._is_host_up = True
            self._deadline_by_opening = dict.fromkeys(self._deadline_by_opening, now + self._timeout_s)
            return
        self._deadline_by_opening.pop(message.grammar_id, None)
        self._late.discard(message.grammar_id)
        entry = self._entry_by_id.get(message.grammar_id)
        if entry is None:
            if message.error is None:
                self._host.send(CloseGrammars(grammar_ids=[message.grammar_id]))
            return
        entry.state, entry.is_suspect = GrammarState.READY, False
        if message.error is not None:
            news.failed.append((entry.request, message.error))
        elif message.is_complete:
            news.complete.append(entry.request)
        elif not entry.has_begun:
            entry.has_begun = entry.is_proven = True
            news.ready.append(entry.request)
        self._advances += [(message.grammar_id, token_id) for token_id in entry.late_tokens]
        self._is_host_waiting = True
        entry.late_tokens = []

    def _on_advanced(self, message: GrammarsAdvanced, news: GrammarUpdates) -> None:
        self._num_unanswered -= 1
        self._num_until_sign = max(self._num_until_sign - 1, 0)
        for failure in message.failures:
            if failure.grammar_id in self._entry_by_id:
                news.failed.append((self._entry_by_id[failure.grammar_id].request, failure.error))
        for grammar_id in decode_ids(message.complete_ids):
            if grammar_id in self._entry_by_id:
                news.complete.append(self._entry_by_id[grammar_id].request)
        if self._fill is None or message.serial != self._fill.serial:
            return
        self._fill = None
        news.masks = self._masks_of(message)

    def _masks_of(self, message: GrammarsAdvanced) -> list[RequestMask]:
        """Decode the masks of unfinished requests."""
        ids, counts, forced = (decode_ids(frame) for frame in (message.mask_ids, message.jump_counts, message.jump_ids))
        width, start, masks = len(message.bits) // max(len(ids), 1), 0, list[RequestMask]()
        for i, (grammar_id, count) in enumerate(zip(ids, counts, strict=True)):
            entry = self._entry_by_id.get(grammar_id)
            if entry is not None:
                bits = message.bits[i * width : (i + 1) * width]
                masks.append(RequestMask(entry.request, bits, forced[start : start + count].tolist()))
            start += count
        return masks

    # ── trouble ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _expire(self, now: float, news: GrammarUpdates) -> None:
        """Fail grammars that compile for too long; replace a host that hangs."""
        if self._num_unanswered and now >= self._answer_deadline:
            self._replace_host([], news)
            return
        if self._late and not self._num_until_sign:
            self._fail_late(now, news)
        overdue = [each for each, deadline in self._deadline_by_opening.items() if now >= deadline]
        if not self._late.issuperset(overdue):
            self._late.update(overdue)
            self._ask_for_sign(now)

    def _ask_for_sign(self, now: float) -> None:
        """Send the host a message that it must answer, to tell a slow grammar from a hung host."""
        self._host.send(AdvanceGrammars(grammar_ids=b"", token_ids=b"", serial=0))
        self._num_unanswered += 1
        self._num_until_sign = self._num_unanswered
        self._answer_deadline = now + ADVANCE_TIMEOUT_S

    def _fail_late(self, now: float, news: GrammarUpdates) -> None:
        """Fail the late grammars of a host that still answers; a grammar that was compiled before is tried again."""
        failed = {request for request, _ in news.failed}
        for grammar_id in self._late:
            entry = self._entry_by_id.get(grammar_id)
            if entry is not None and entry.is_proven:
                self._deadline_by_opening[grammar_id] = now + self._timeout_s
            elif entry is not None and entry.request not in failed:
                limit = self._timeout_s if self._is_host_up else START_TIMEOUT_S
                error = RequestError(
                    f"structured_outputs was not compiled within {limit:g} s: simplify it or raise --grammar-timeout-s"
                )
                news.failed.append((entry.request, error_info(error)))
        stuck = [each for each in self._late if self._deadline_by_opening[each] <= now]
        self._late.intersection_update(stuck)
        if len(stuck) == NUM_COMPILERS:
            self._replace_host(stuck, news)

    def _replace_host(self, stuck: list[int], news: GrammarUpdates) -> None:
        """Replace the host; the openings in `stuck` have failed."""
        self._host.stop()
        for grammar_id in stuck:
            del self._deadline_by_opening[grammar_id]
        self._on_loss("it did not answer in time", news)

    def _on_loss(self, reason: str, news: GrammarUpdates) -> None:
        """Queue all grammars to be opened again; fail those that end every host."""
        suspects, self._deadline_by_opening = list(self._deadline_by_opening), {}
        masked = self._fill.grammar_ids if self._fill is not None and self._fill.is_sent else []
        blamed = frozenset(suspects or masked)
        self._is_host_up, self._num_unanswered, self._num_until_sign, self._advances = False, 0, 0, []
        self._late.clear()
        if self._fill is not None:
            self._fill.is_sent = False
        failed = {request for request, _ in news.failed}
        self._queue.clear()
        for grammar_id, entry in self._entry_by_id.items():
            was_suspect = entry.is_suspect
            entry.state, entry.late_tokens = GrammarState.QUEUED, []
            entry.is_suspect |= grammar_id in suspects
            entry.num_losses += grammar_id in blamed
            if entry.request in failed:
                continue
            if suspects == [grammar_id] and was_suspect and not entry.is_proven:
                error: Exception = RequestError(
                    f"structured_outputs ended its compiler ({reason}): it is nested too deep or too large; simplify it"
                )
                news.failed.append((entry.request, error_info(error)))
            elif entry.num_losses >= MAX_LOSSES:
                error = InternalError(
                    f"the grammar process has ended {MAX_LOSSES} times at this request; last: {reason}"
                )
                news.failed.append((entry.request, error_info(error)))
            elif entry.has_begun:
                self._queue.appendleft(grammar_id)  # a step may wait for it
            else:
                self._queue.append(grammar_id)

    def _open_queued(self, now: float) -> None:
        """Open queued grammars, NUM_COMPILERS at once; a suspect alone."""
        while self._queue and len(self._deadline_by_opening) < NUM_COMPILERS:
            entry = self._entry_by_id.get(self._queue[0])
            opening = (self._entry_by_id.get(grammar_id) for grammar_id in self._deadline_by_opening)
            if any(each is not None and each.is_suspect for each in opening):
                return
            if entry is not None and entry.is_suspect and self._deadline_by_opening:
                return
            grammar_id = self._queue.popleft()
            if entry is not None:
                self._open(grammar_id, entry, now)

    def _open(self, grammar_id: int, entry: _Entry, now: float) -> None:
        params = entry.request.params.structured_outputs
        assert params is not None, "only requests with a grammar come here"
        tokens = tokens_after(entry.request.thought_end, self._output_tokens(entry.request).tobytes())
        self._host.send(OpenGrammar(grammar_id=grammar_id, kind=params.kind, text=params.text, token_ids=tokens))
        entry.state = GrammarState.OPENING
        self._deadline_by_opening[grammar_id] = now + (self._timeout_s if self._is_host_up else START_TIMEOUT_S)
