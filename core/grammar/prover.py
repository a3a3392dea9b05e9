"""GrammarProver: finds out whether unknown grammars can be compiled, in a process that holds no answer's grammar.

    queued ──▶ compiling ──▶ proven, or refused with an error
                  └─ longer than the limit, or it ended the process twice: refused

A caller's grammar may keep a compiler busy for ever, fill its memory or end it. Here it is killed with its process, and
nobody else's answer notices; the other grammars that were being compiled are compiled again. Verdicts are kept by
text, so that a grammar that is sent again and again costs nothing. Of the waiting grammars the oldest and the newest
are taken in turn: one that comes after a crowd does not wait for all of it, and none starves.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from ...ipc.errors import ErrorInfo, RequestError, error_info
from ...ipc.messages.grammar import AdvanceGrammars, GrammarOpened, OpenGrammar
from ...ipc.process.awake_clock import AwakeClock
from ...ipc.structured_outputs import GrammarKind
from .host import (
    ANSWER_TIMEOUT_S,
    HOST_IS_UP,
    NUM_COMPILERS,
    REOPEN_S,
    START_TIMEOUT_S,
    GrammarHost,
    GrammarHostLost,
    GrammarHostUnavailable,
)

MAX_VERDICTS = 4096
REFUSED_S = 60.0  # for which a grammar that took too long, or ended its compiler, is not tried again
PATIENCE = 10  # times the limit, for the grammar of a resumed request, which was compiled before

Verdict: TypeAlias = ErrorInfo | None  # None: proven


@dataclass(eq=False)
class _Trial:
    """A text to compile. It counts while `grammar_ids` wait for it."""

    kind: GrammarKind
    text: str
    limit_s: float
    grammar_ids: set[int] = field(default_factory=set)
    is_suspect: bool = False  # was being compiled when a process was lost: compile it alone
    deadline: float = 0.0


class GrammarProver:
    """Owns the process, the texts that wait for a verdict, and the verdicts so far."""

    def __init__(self, host: GrammarHost, timeout_s: float, clock: AwakeClock) -> None:
        self._host, self._timeout_s, self._clock = host, timeout_s, clock
        self._verdicts: OrderedDict[bytes, tuple[Verdict, float]] = OrderedDict()  # with the time until which they hold
        self._trial_by_key: dict[bytes, _Trial] = {}
        self._key_by_id: dict[int, bytes] = {}
        self._queue: deque[bytes] = deque()
        self._takes_newest = False  # of the queue, next
        self._compiling: dict[int, bytes] = {}  # by the number of the trial
        self._num_trials = HOST_IS_UP
        self._done: list[tuple[int, Verdict]] = []
        self._open_at = 0.0  # not before: no process could be started
        self._is_up = False
        self._num_unanswered = 0  # orders for a sign of life
        self._answer_deadline = 0.0

    def add(self, grammar_id: int, kind: GrammarKind, text: str, *, is_resumed: bool) -> None:
        """Ask for the verdict on a grammar; a later `take` returns it. is_resumed: it was compiled before."""
        key = hashlib.blake2b(f"{kind} {text}".encode(errors="surrogatepass"), digest_size=16).digest()
        known = self._verdicts.get(key)
        if known is not None and self._clock.now < known[1]:
            self._verdicts.move_to_end(key)
            self._done.append((grammar_id, known[0]))
            return
        trial = self._trial_by_key.get(key)
        if trial is None:
            trial = self._trial_by_key[key] = _Trial(kind, text, self._timeout_s)
            self._queue.append(key)
        trial.limit_s = max(trial.limit_s, self._timeout_s * (PATIENCE if is_resumed else 1))
        trial.grammar_ids.add(grammar_id)
        self._key_by_id[grammar_id] = key
        self._open_queued()

    def drop(self, grammar_id: int) -> None:
        """Forget a request that waits for a verdict."""
        if (key := self._key_by_id.pop(grammar_id, None)) is not None:
            self._trial_by_key[key].grammar_ids.discard(grammar_id)

    @property
    def is_active(self) -> bool:
        return bool(self._done or self._trial_by_key or self._num_unanswered)

    @property
    def next_deadline(self) -> float | None:
        """When to call `take` next if the process sends nothing, by the clock; None: no deadline."""
        deadlines = [self._trial_by_key[key].deadline for key in self._compiling.values()]
        if self._done:
            deadlines.append(self._clock.now)
        if self._num_unanswered:
            deadlines = [self._answer_deadline]
        if self._queue and self._clock.now < self._open_at:
            deadlines.append(self._open_at)
        return min(deadlines, default=None)

    def take(self) -> list[tuple[int, Verdict]]:
        """Apply the process's answers and the deadlines; return new verdicts with the ids that asked for them."""
        if self.is_active or self._host.has_process:
            try:
                for message in self._host.receive():
                    if not isinstance(message, GrammarOpened):
                        self._num_unanswered -= 1
                        if not self._num_unanswered:
                            self._refuse_overdue()
                    elif message.grammar_id == HOST_IS_UP:
                        self._on_up()
                    elif (key := self._compiling.pop(message.grammar_id, None)) is not None:
                        self._decide(key, message.error)
            except GrammarHostLost as error:
                self._on_loss(str(error))
            self._expire()
            self._open_queued()
        done, self._done = self._done, []
        return done

    def _on_up(self) -> None:
        self._is_up = True
        for key in self._compiling.values():  # the limit counts from now
            trial = self._trial_by_key[key]
            trial.deadline = self._clock.now + trial.limit_s

    def _decide(self, key: bytes, verdict: Verdict, holds_s: float = float("inf")) -> None:
        trial = self._trial_by_key.pop(key)
        for grammar_id in trial.grammar_ids:
            del self._key_by_id[grammar_id]
            self._done.append((grammar_id, verdict))
        self._verdicts[key] = verdict, self._clock.now + holds_s
        self._verdicts.move_to_end(key)
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    def _refuse(self, key: bytes, reason: str) -> None:
        self._decide(key, error_info(RequestError(f"structured_outputs {reason}")), REFUSED_S)

    def _expire(self) -> None:
        """Ask for a sign of life if a grammar is overdue: it is to blame only if the process lives. Replace a process
        that hangs."""
        now = self._clock.now
        if self._num_unanswered and now >= self._answer_deadline:
            self._host.stop()
            self._on_loss("it did not answer in time")
        elif not self._num_unanswered and self._overdue():
            if not self._is_up:
                self._host.stop()
                self._on_loss("it did not start in time")
                return
            self._num_unanswered, self._answer_deadline = 1, now + ANSWER_TIMEOUT_S
            self._send(AdvanceGrammars(grammar_ids=b"", token_ids=b"", serial=0))

    def _overdue(self) -> list[int]:
        now = self._clock.now
        return [each for each, key in self._compiling.items() if now >= self._trial_by_key[key].deadline]

    def _refuse_overdue(self) -> None:
        """Refuse the grammars that are overdue although the process lives, and kill it: nothing else stops them."""
        if not (overdue := self._overdue()):
            return
        for number in overdue:
            key = self._compiling.pop(number)
            limit_s = self._trial_by_key[key].limit_s
            self._refuse(key, f"was not compiled within {limit_s:g} s: simplify it or raise --grammar-timeout-s")
        self._host.stop()
        self._requeue(self._compiling.values())

    def _on_loss(self, reason: str) -> None:
        """Compile again the grammars that were being compiled, each alone; refuse one that was alone already. If the
        process had not read its vocabulary yet, none of them is to blame."""
        keys = list(self._compiling.values())
        if not self._is_up:
            self._open_at = self._clock.now + REOPEN_S
        elif len(keys) == 1 and self._trial_by_key[keys[0]].is_suspect:
            self._refuse(keys.pop(), f"ended its compiler ({reason}): it is nested too deep or too large; simplify it")
        else:
            for key in keys:
                self._trial_by_key[key].is_suspect = True
        self._requeue(keys)

    def _requeue(self, keys: Iterable[bytes]) -> None:
        self._queue.extendleft(reversed(list(keys)))
        self._compiling.clear()
        self._is_up, self._num_unanswered = False, 0

    def _open_queued(self) -> None:
        """Compile queued grammars, at most NUM_COMPILERS at once; a suspect is compiled alone."""
        while self._queue and len(self._compiling) < NUM_COMPILERS and self._clock.now >= self._open_at:
            take = self._queue.pop if self._takes_newest else self._queue.popleft
            key = self._queue[-1 if self._takes_newest else 0]
            trial = self._trial_by_key[key]
            if not trial.grammar_ids:
                take()
                del self._trial_by_key[key]
                continue
            if self._compiling and any(
                self._trial_by_key[each].is_suspect for each in (key, *self._compiling.values())
            ):
                return
            self._num_trials += 1
            if not self._send(OpenGrammar(grammar_id=self._num_trials, kind=trial.kind, text=trial.text)):
                self._open_at = self._clock.now + REOPEN_S
                return
            take()
            self._takes_newest = not self._takes_newest
            self._compiling[self._num_trials] = key
            trial.deadline = self._clock.now + (trial.limit_s if self._is_up else START_TIMEOUT_S)

    def _send(self, message: OpenGrammar | AdvanceGrammars) -> bool:
        """Send a message; return False if no process can be started."""
        try:
            self._host.send(message)
        except GrammarHostUnavailable:
            return False
        return True
