"""OpeningQueue: the grammars that the helper is to open, in order, as many at once as it compiles.

A grammar is opened with the tokens of its answer's open constrained part, so that it continues there; in free text with
none, so that it is ready for the next begin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from ....ipc.helper_process import HelperUnavailable
from ....ipc.messages.grammar import OpenGrammar
from ....ipc.process.awake_clock import AwakeClock
from ...scheduling.step.rows import Rows
from .entry import Entry, GrammarState
from .helper import NUM_COMPILERS, REOPEN_S, GrammarHelper
from .helper_watch import HelperWatch


class OpeningQueue:
    """Owner of the queue. It moves the entries of the GrammarManager to QUEUED and OPENING."""

    def __init__(
        self,
        helper: GrammarHelper,
        watch: HelperWatch,
        clock: AwakeClock,
        rows: Rows,
        entry_by_id: Mapping[int, Entry],
    ) -> None:
        self._helper = helper
        self._watch = watch
        self._clock = clock
        self._rows = rows
        self._entry_by_id = entry_by_id
        self._queue: deque[int] = deque()
        self._open_at = 0.0  # not before: no helper could be started

    def add(self, grammar_id: int) -> None:
        self._entry_by_id[grammar_id].state = GrammarState.QUEUED
        self._queue.append(grammar_id)

    def clear(self) -> None:
        self._queue.clear()

    def pause(self) -> None:
        """Open no grammar for REOPEN_S."""
        self._open_at = self._clock.now + REOPEN_S

    @property
    def deadline(self) -> float | None:
        """Time by the clock at which to call `open_queued`, if nothing else happens before."""
        return self._open_at if self._queue and self._clock.now < self._open_at else None

    def open_queued(self) -> None:
        """Open queued grammars while fewer than NUM_COMPILERS are being compiled; one that may have ended a helper is
        compiled alone."""
        while self._queue and len(self._watch.openings) < NUM_COMPILERS and self._clock.now >= self._open_at:
            entry = self._entry_by_id.get(self._queue[0])
            opening = [self._entry_by_id.get(grammar_id) for grammar_id in self._watch.openings]
            if any(each is not None and each.is_suspect for each in opening):
                return
            if entry is not None and entry.is_suspect and opening:
                return
            grammar_id = self._queue.popleft()
            if entry is not None:
                self._open(grammar_id, entry)

    def _open(self, grammar_id: int, entry: Entry) -> None:
        params = entry.request.params.structured_outputs
        assert params is not None, "only requests with a grammar come here"
        frame = b""
        num_known = 0
        if entry.gate.start is not None:
            tokens = self._rows.output_tokens(entry.request)
            frame = tokens[entry.gate.start :].tobytes()
            num_known = len(tokens)
        try:
            self._helper.send(
                OpenGrammar(
                    grammar_id=grammar_id,
                    kind=params.kind,
                    text=params.text,
                    token_ids=frame,
                    repeats=entry.request.constraint_repeats,
                )
            )
        except HelperUnavailable:
            self._queue.appendleft(grammar_id)
            self.pause()
            return
        entry.num_opened = num_known
        entry.state = GrammarState.OPENING
        self._watch.begin_opening(grammar_id)
