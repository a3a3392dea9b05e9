"""HelperWatch: what the grammar helper has been asked and has not answered, and when it counts as hung.

A grammar may take START_TIMEOUT_S to be opened. Other messages are answered within ANSWER_TIMEOUT_S, so a helper that
compiles and owes no other answer is asked for a sign of life after each SIGN_S of silence.
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import NamedTuple

from ....ipc.process.awake_clock import AwakeClock
from .helper import ANSWER_TIMEOUT_S, SIGN_S, START_TIMEOUT_S


class Loss(NamedTuple):
    """What a lost helper was doing."""

    was_up: bool
    suspects: frozenset[int]  # grammars that it compiled
    blamed: frozenset[int]  # the suspects or, without any, the grammars whose masks it was making


class HelperWatch:
    """Record of unanswered messages and openings. Sends nothing."""

    def __init__(self, clock: AwakeClock) -> None:
        self._clock = clock
        self.is_up = False  # it has read its vocabulary
        self._asked: deque[list[int]] = deque()  # for each unanswered message, the grammars whose masks it orders
        self._answer_deadline = 0.0
        self._deadline_by_opening: dict[int, float] = {}  # all that the helper compiles, even for finished requests
        self._sign_at = 0.0  # when to ask a helper that compiles for a sign of life

    @property
    def is_awaited(self) -> bool:
        return bool(self._asked or self._deadline_by_opening)

    @property
    def openings(self) -> list[int]:
        """The grammars that the helper compiles."""
        return list(self._deadline_by_opening)

    def ask(self, mask_ids: list[int]) -> None:
        """Note a message that must be answered, and the grammars whose masks it orders."""
        self._asked.append(mask_ids)
        self._answer_deadline = self._clock.now + ANSWER_TIMEOUT_S

    def hear(self) -> None:
        """Note that the helper has sent a message."""
        self._sign_at = self._clock.now + SIGN_S

    def end_ask(self) -> None:
        self._asked.popleft()

    def begin_opening(self, grammar_id: int) -> None:
        self._sign_at = max(self._sign_at, self._clock.now + SIGN_S)
        self._deadline_by_opening[grammar_id] = self._clock.now + START_TIMEOUT_S

    def end_opening(self, grammar_id: int) -> None:
        self._deadline_by_opening.pop(grammar_id, None)

    @property
    def _is_silent(self) -> bool:
        """Whether the helper is up and compiles, but owes no other answer: only a sign of life shows that it lives."""
        return self.is_up and bool(self._deadline_by_opening) and not self._asked

    @property
    def needs_sign(self) -> bool:
        """Whether to ask the helper for a sign of life."""
        return self._is_silent and self._clock.now >= self._sign_at

    @property
    def is_hung(self) -> bool:
        """Whether an answer or an opening is overdue."""
        return any(self._clock.now >= deadline for deadline in self._answer_deadlines())

    def _answer_deadlines(self) -> list[float]:
        deadlines = list(self._deadline_by_opening.values())
        if self._asked:
            deadlines.append(self._answer_deadline)
        return deadlines

    def deadlines(self) -> list[float]:
        """Return the times at which to look again, in seconds of the clock."""
        deadlines = self._answer_deadlines()
        if self._is_silent:
            deadlines.append(self._sign_at)
        return deadlines

    def lose(self) -> Loss:
        """Forget all messages to a helper that has ended."""
        suspects = frozenset(self._deadline_by_opening if self.is_up else ())
        loss = Loss(self.is_up, suspects, suspects or frozenset(chain.from_iterable(self._asked)))
        self.is_up = False
        self._asked.clear()
        self._deadline_by_opening.clear()
        return loss
