"""GrammarProver: tries whether unknown grammars can be compiled, in a process without the grammars of answers.

    queued ──▶ compiling ──▶ proven, or refused with an error
                  └─ longer than the limit, or it ended the process twice: refused

A caller's grammar may keep a compiler busy forever, fill its memory or make it crash. Here only the prover's process is
killed, and no other answer is affected; the other grammars that were being compiled are compiled again. The last
MAX_VERDICTS verdicts are kept by text, those of limits and crashes for REFUSED_S, so that a grammar that is sent
repeatedly is tried once.

Callers share the compilers by fair queueing over time: the caller that has used them least is next, and one that comes
back starts no lower than the virtual time, which runs as fast as an equal share. Of one caller's waiting
grammars the oldest and the newest are taken alternately: behind a proxy, where many clients are one caller, a newcomer
does not wait for all others, and none starves. A caller's grammars that would wait longer than MAX_WAIT_S are refused.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from ....ipc.errors import ErrorInfo, Overloaded, RequestError, error_info
from ....ipc.helper_process import HelperLost, HelperUnavailable
from ....ipc.messages.grammar import AdvanceGrammars, GrammarOpened, OpenGrammar
from ....ipc.params.structured_outputs import GrammarKind
from ....ipc.process.awake_clock import AwakeClock
from .helper import (
    ANSWER_TIMEOUT_S,
    HELPER_IS_UP,
    NUM_COMPILERS,
    REOPEN_S,
    START_TIMEOUT_S,
    GrammarHelper,
)

MAX_VERDICTS = 4096
REFUSED_S = 60.0  # time for which a grammar that took too long, or ended its compiler, is not tried again
PATIENCE = 10  # factor of the time limit for the grammar of a resumed request, which was compiled before
SLOW_S = 0.1  # a caller whose trials take longer leaves a compiler to other callers
MAX_WAIT_S = 600.0  # longest wait of a caller's grammars, by its last trials: 300 that are refused, 60,000 usual ones

Verdict: TypeAlias = ErrorInfo | None  # None: proven


@dataclass(eq=False)
class _Caller:
    """The waiting grammars of one caller, from old to new, and its use of the compilers."""

    keys: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    takes_newest: bool = False  # its newest grammar is next, not its oldest
    num_compiling: int = 0
    used_s: float = 0.0  # seconds of compilation, added to the virtual time at which it came
    trial_s: float = 0.0  # mean seconds of a trial, in which the last one counts a quarter

    @property
    def is_active(self) -> bool:
        return bool(self.keys or self.num_compiling)

    @property
    def has_its_share(self) -> bool:
        return self.num_compiling > 0 and self.trial_s > SLOW_S


@dataclass(eq=False)
class _Trial:
    """A text to compile. It exists while `grammar_ids` wait for its verdict or it is being compiled."""

    kind: GrammarKind
    text: str
    limit_s: float
    grammar_ids: set[int] = field(default_factory=set)
    callers: list[_Caller] = field(default_factory=list)  # of these grammars
    is_resumed: bool = False
    is_suspect: bool = False  # was being compiled when a process was lost: compile it alone
    compiled_for: _Caller | None = None  # whose turn it is being compiled in; None: it is not
    begun_at: float = 0.0
    deadline: float = 0.0


class GrammarProver:
    """Owner of the process, of the texts that wait for a verdict, and of the verdicts so far."""

    def __init__(self, helper: GrammarHelper, timeout_s: float, clock: AwakeClock) -> None:
        self._helper, self._timeout_s, self._clock = helper, timeout_s, clock
        self._verdicts: OrderedDict[bytes, tuple[Verdict, float]] = OrderedDict()  # with the time until which they hold
        self._trial_by_key: dict[bytes, _Trial] = {}
        self._key_by_id: dict[int, bytes] = {}
        self._caller_by_name: dict[str, _Caller] = {}
        self._virtual_s = 0.0  # of compilation, for a caller with an equal share
        self._compiling: dict[int, bytes] = {}  # by the number of the trial
        self._num_trials = HELPER_IS_UP
        self._done: list[tuple[int, Verdict]] = []
        self._open_at = 0.0  # not before: no process could be started
        self._is_up = False
        self._num_unanswered = 0  # orders for a sign of life
        self._answer_deadline = 0.0

    def add(self, grammar_id: int, kind: GrammarKind, text: str, caller: str, *, is_resumed: bool) -> None:
        """Ask for the verdict on a grammar; a later `take` returns it. caller: key of the client; callers share the
        compilers equally. is_resumed: the grammar was compiled before."""
        key = hashlib.blake2b(f"{kind} {text}".encode(errors="surrogatepass"), digest_size=16).digest()
        known = self._verdicts.get(key)
        if known is not None and self._clock.now < known[1]:
            self._verdicts.move_to_end(key)
            self._done.append((grammar_id, known[0]))
            return
        trial = self._trial_by_key.get(key)
        if trial is None:
            trial = self._trial_by_key[key] = _Trial(kind, text, self._timeout_s)
        trial.limit_s = max(trial.limit_s, self._timeout_s * (PATIENCE if is_resumed else 1))
        trial.is_resumed |= is_resumed
        trial.grammar_ids.add(grammar_id)
        self._key_by_id[grammar_id] = key
        asking = self._caller_of(caller)
        if asking not in trial.callers:
            trial.callers.append(asking)
            if trial.compiled_for is None:
                asking.keys[key] = None
                self._refuse_excess(asking)
        self._open_queued()

    def _caller_of(self, name: str) -> _Caller:
        """Return the caller with this name; one that comes back starts no lower than the virtual time. Forget callers
        that would be like new ones if they came back."""
        caller = self._caller_by_name.get(name)
        if caller is None:
            if len(self._caller_by_name) > 2 * len(self._trial_by_key) + 64:
                known = self._caller_by_name.items()
                self._caller_by_name = {k: one for k, one in known if one.is_active or one.used_s > self._virtual_s}
            caller = self._caller_by_name[name] = _Caller()
        if not caller.is_active:
            caller.used_s = max(caller.used_s, self._virtual_s)
        return caller

    def drop(self, grammar_id: int) -> None:
        """Forget a grammar id that waits for a verdict, if it does."""
        if (key := self._key_by_id.pop(grammar_id, None)) is not None:
            trial = self._trial_by_key[key]
            trial.grammar_ids.discard(grammar_id)
            if not trial.grammar_ids and trial.compiled_for is None:
                self._unqueue(key)
                del self._trial_by_key[key]

    def _unqueue(self, key: bytes) -> None:
        for caller in self._trial_by_key[key].callers:
            caller.keys.pop(key, None)

    def _refuse_excess(self, caller: _Caller) -> None:
        """Refuse the newest grammars of a caller that would wait for more than MAX_WAIT_S, except those of resumed
        requests and those that other callers wait for, too."""
        most = max(1, int(MAX_WAIT_S / max(caller.trial_s, 1e-6)))
        num_waiting = len(caller.keys)
        for key in list(islice(reversed(caller.keys), max(0, num_waiting - most))):
            trial = self._trial_by_key[key]
            if trial.callers == [caller] and not trial.is_resumed:
                error = Overloaded(
                    f"{num_waiting} structured_outputs of this caller that are new to the engine wait to be compiled, "
                    f"and its last ones took {caller.trial_s:.2g} s each: send simpler ones, or ask again later",
                    retry_after_s=self._timeout_s,
                )
                self._end(key, error_info(error))

    @property
    def is_active(self) -> bool:
        return bool(self._done or self._trial_by_key or self._num_unanswered)

    @property
    def next_deadline(self) -> float | None:
        """Time by the clock at which to call `take` next if the process sends nothing; None: there is no deadline."""
        deadlines = [self._trial_by_key[key].deadline for key in self._compiling.values()]
        if self._done:
            deadlines.append(self._clock.now)
        if self._num_unanswered:
            deadlines = [self._answer_deadline]
        if self._clock.now < self._open_at and any(caller.keys for caller in self._caller_by_name.values()):
            deadlines.append(self._open_at)
        return min(deadlines, default=None)

    def take(self) -> list[tuple[int, Verdict]]:
        """Apply the process's answers and the deadlines; return new verdicts, each with a grammar id that waited for
        it."""
        if self.is_active or self._helper.has_process:
            try:
                for message in self._helper.receive():
                    if not isinstance(message, GrammarOpened):
                        self._num_unanswered -= 1
                        if not self._num_unanswered:
                            self._refuse_overdue()
                    elif message.grammar_id == HELPER_IS_UP:
                        self._on_up()
                    elif (key := self._compiling.pop(message.grammar_id, None)) is not None:
                        self._decide(key, message.error)
            except HelperLost as loss:
                self._on_loss(f"the process {loss}")
            self._expire()
            self._open_queued()
        done, self._done = self._done, []
        return done

    def _on_up(self) -> None:
        self._is_up = True
        for key in self._compiling.values():  # the limit counts from now
            trial = self._trial_by_key[key]
            trial.begun_at = self._clock.now
            trial.deadline = self._clock.now + trial.limit_s

    def _end(self, key: bytes, verdict: Verdict) -> None:
        """Remove a trial and pass its verdict to all grammar ids that wait for it."""
        self._unqueue(key)
        trial = self._trial_by_key.pop(key)
        for grammar_id in trial.grammar_ids:
            del self._key_by_id[grammar_id]
            self._done.append((grammar_id, verdict))

    def _decide(self, key: bytes, verdict: Verdict, holds_s: float = float("inf")) -> None:
        """Keep the verdict of a trial for `holds_s`, pass it on, and charge the trial's time to its caller."""
        trial = self._trial_by_key[key]
        self._end(key, verdict)
        if (caller := trial.compiled_for) is not None:
            seconds = self._clock.now - trial.begun_at
            num_active = sum(each.is_active for each in self._caller_by_name.values())
            self._virtual_s += seconds / max(1, num_active)
            caller.num_compiling -= 1
            caller.used_s += seconds
            caller.trial_s += (seconds - caller.trial_s) / 4
            self._refuse_excess(caller)
        self._verdicts[key] = verdict, self._clock.now + holds_s
        self._verdicts.move_to_end(key)
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)

    def _refuse(self, key: bytes, reason: str) -> None:
        self._decide(key, error_info(RequestError(f"structured_outputs {reason}")), REFUSED_S)

    def _expire(self) -> None:
        """Send a probe to the process if a grammar is overdue: if the process answers, the grammar is refused,
        otherwise the process is replaced. A process that has not started in time is replaced without a probe."""
        now = self._clock.now
        if self._num_unanswered and now >= self._answer_deadline:
            self._helper.stop()
            self._on_loss("it did not answer in time")
        elif not self._num_unanswered and self._overdue():
            if not self._is_up:
                self._helper.stop()
                self._on_loss("it did not start in time")
                return
            self._num_unanswered, self._answer_deadline = 1, now + ANSWER_TIMEOUT_S
            self._send(AdvanceGrammars(grammar_ids=b"", token_ids=b"", serial=0))

    def _overdue(self) -> list[int]:
        now = self._clock.now
        return [each for each, key in self._compiling.items() if now >= self._trial_by_key[key].deadline]

    def _refuse_overdue(self) -> None:
        """Refuse the grammars that are overdue although the process answers, and kill it: nothing else stops them."""
        if not (overdue := self._overdue()):
            return
        for number in overdue:
            key = self._compiling.pop(number)
            limit_s = self._trial_by_key[key].limit_s
            self._refuse(key, f"was not compiled within {limit_s:g} s: simplify it or raise --grammar-timeout-s")
        self._helper.stop()
        self._requeue(self._compiling.values())

    def _on_loss(self, reason: str) -> None:
        """Queue the grammars that were being compiled again, each to be compiled alone; refuse one that was alone
        already. If the process had not read its vocabulary yet, none of them is taken for the cause."""
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
        """Let grammars that were being compiled wait again, before the others of their callers."""
        for key in reversed(list(keys)):
            trial = self._trial_by_key[key]
            if trial.compiled_for is not None:
                trial.compiled_for.num_compiling -= 1
                trial.compiled_for = None
            if not trial.grammar_ids:
                del self._trial_by_key[key]
                continue
            for caller in trial.callers:
                caller.keys[key] = None
                caller.keys.move_to_end(key, last=False)
        self._compiling.clear()
        self._is_up, self._num_unanswered = False, 0

    def _open_queued(self) -> None:
        """Compile queued grammars, at most NUM_COMPILERS at once; a suspect is compiled alone."""
        while len(self._compiling) < NUM_COMPILERS and self._clock.now >= self._open_at:
            callers = self._caller_by_name.values()
            waiting = [each for each in callers if each.keys and not (each.has_its_share and len(callers) > 1)]
            caller = min(waiting, key=lambda each: (each.num_compiling, each.used_s), default=None)
            if caller is None:
                return
            key = next(reversed(caller.keys) if caller.takes_newest else iter(caller.keys))
            trial = self._trial_by_key[key]
            if self._compiling and any(
                self._trial_by_key[each].is_suspect for each in (key, *self._compiling.values())
            ):
                return
            self._num_trials += 1
            if not self._send(OpenGrammar(grammar_id=self._num_trials, kind=trial.kind, text=trial.text)):
                self._open_at = self._clock.now + REOPEN_S
                return
            self._unqueue(key)
            caller.takes_newest = not caller.takes_newest
            caller.num_compiling += 1
            self._compiling[self._num_trials] = key
            trial.compiled_for, trial.begun_at = caller, self._clock.now
            trial.deadline = self._clock.now + (trial.limit_s if self._is_up else START_TIMEOUT_S)

    def _send(self, message: OpenGrammar | AdvanceGrammars) -> bool:
        """Send a message; return False if no process can be started."""
        try:
            self._helper.send(message)
        except HelperUnavailable:
            return False
        return True
