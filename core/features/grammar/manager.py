"""GrammarManager: structured output in the core, from a request's arrival to its end.

    proving ──▶ queued ──open──▶ opening ──opened──▶ ready: masks and tokens until the request ends
       │          ▲                 └─ error: the request fails
       │          └── the helper was lost: all are opened again with their answers' tokens so far
       └─ refused: the request fails

The GrammarProver (prover.py) compiles what no helper has compiled yet, in a process of its own. A GrammarHelper
(helper.py) then compiles it once more and makes masks; nothing here waits for either. A request waits
(WaitReason.GRAMMAR) until its grammar is open. A helper that ends or hangs is replaced, and all grammars continue from
their tokens; a request fails at which MAX_LOSSES helpers have ended without a new token of it in between.

A step waits LATE_S for masks at most. Then it goes on without the rows whose masks are late: their requests return to
the queue, where they wait for their masks or for another helper. With prefix caching, only the last block of their
tokens is computed again. No token changes, since a token depends on those before it and on its draw alone.

A grammar may apply to parts of an answer alone (gate.py): behind a thought, or from the token that starts a call to the
call's end, as often as one comes. Beside these parts a step waits for no mask of the request. The step after the one
that samples a begin may be in flight then; what it samples for the request is void, and sampled again with a mask.

If a mask leaves one token, that token needs no sampling, and the tokens after it may need none either. The helper sends
them with the mask (jump-forward tokens). The core appends two or more at once, and the next step computes all of them
together. The helper gets them back as any other tokens, so the core may also ignore them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from ....ipc.codec import decode_ids
from ....ipc.errors import InternalError, error_info
from ....ipc.helper_process import HelperLost, HelperUnavailable
from ....ipc.messages.base import FinishReason
from ....ipc.messages.grammar import (
    RESTART,
    AdvanceGrammars,
    CloseGrammars,
    GrammarOpened,
    GrammarsAdvanced,
)
from ....ipc.messages.workers import ModelRunnerOutput
from ....ipc.process.awake_clock import AwakeClock
from ...request import Request, WaitReason
from ...scheduling.result_processor import NewTokens
from ...scheduling.scheduler import Scheduler
from ...scheduling.step.ledger import LedgerEntry
from ...scheduling.step_feature import Engine, StepFeature
from .entry import Entry, GrammarState
from .gate import ConstraintGate
from .helper import HELPER_IS_UP, GrammarHelper
from .helper_watch import HelperWatch
from .mask_fill import GrammarMasks, MaskFill, masks_in, order_of, token_mask
from .opening_queue import OpeningQueue
from .prover import GrammarProver

LATE_S = 0.25  # longest time that a step waits for masks; without other load the slowest take some 20 ms
MAX_LOSSES = 3  # losses of the helper without a new token before a request fails


class GrammarManager(StepFeature):
    """Feature for structured output. Owns an entry for each unfinished request with a grammar, and the state of the
    masks that the oldest step waits for."""

    def __init__(
        self,
        helper: GrammarHelper,
        prover: GrammarProver | None,
        clock: AwakeClock,
        scheduler: Scheduler,
        engine: Engine,
        *,
        can_void: bool = True,
    ) -> None:
        """prover: None if the helper shares its process with the core, so that nothing protects it. can_void: a token
        can be sampled again; else each step of a request with a grammar waits for masks, of which free text has
        none."""
        self._helper, self._prover, self._clock = helper, prover, clock
        self._scheduler, self._engine = scheduler, engine
        self._can_void = can_void
        self.is_active = False  # a request, a step in flight or an unanswered message has a grammar
        self._entry_by_id: dict[int, Entry] = {}
        self._next_id = HELPER_IS_UP + 1
        self._advances: list[tuple[int, int]] = []  # grammar id, token: not sent yet
        self._is_helper_waiting = False  # an unsent token was sampled; jump-forward tokens need not be sent at once
        self._masked_step = 0  # the last step with requested masks
        self._fill: MaskFill | None = None
        self._serial = 0  # number of the newest order for masks
        self._late_serial = 0  # number of the newest order that was given up
        self._answered_serial = 0  # number of the newest order that the helper has answered
        self._watch = HelperWatch(clock)
        self._openings = OpeningQueue(helper, self._watch, clock, scheduler.rows, self._entry_by_id)

    # ── requests come and go ─────────────────────────────────────────────────────────────────────────────────────

    def arrive(self, request: Request) -> None:
        """Let a request with a grammar wait until the grammar is open, and queue the grammar to be compiled."""
        params = request.params.structured_outputs
        if params is None:
            return
        self.is_active = True
        request.grammar_id, self._next_id = self._next_id, self._next_id + 1
        request.waits_for.add(WaitReason.GRAMMAR)
        gate = ConstraintGate(request.constraint_begins, request.constraint_triggers)
        self._entry_by_id[request.grammar_id] = Entry(request, gate)
        if gate.is_free:
            gate.enter(self._scheduler.rows.output_tokens(request), 0)
        request.is_masked = not gate.is_free or not self._can_void
        if self._prover is None:
            self._openings.add(request.grammar_id)
            self._openings.open_queued()
        else:
            is_resumed = request.num_output_tokens > 0
            self._prover.add(request.grammar_id, params.kind, params.text, caller=request.caller, is_resumed=is_resumed)

    def end(self, request: Request, reason: FinishReason | None) -> None:
        """Close the grammar of a request. If it is being compiled, the result is discarded."""
        entry = self._entry_by_id.pop(request.grammar_id, None)
        if entry is not None and entry.state is GrammarState.PROVING and self._prover is not None:
            self._prover.drop(request.grammar_id)
        if entry is not None and entry.state is GrammarState.READY:
            self._helper.send(CloseGrammars(grammar_ids=[request.grammar_id]))

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def on_result(self, entry: LedgerEntry, output: ModelRunnerOutput, new_tokens: NewTokens) -> None:
        if new_tokens.token_owners.has_grammar:
            self.advance(new_tokens)
        if self.is_active:
            self.want_masks()

    def advance(self, new: NewTokens, *, are_jump_tokens: bool = False) -> None:
        """Record new tokens, which the next `_flush` sends to the helper. Jump-forward tokens, which came from the
        helper, are sent only with other tokens or with an order for masks."""
        self._is_helper_waiting |= not are_jump_tokens
        for grammar_id, index, token_id in zip(
            new.token_owners.grammar_ids.tolist(), decode_ids(new.starts), decode_ids(new.token_ids), strict=True
        ):
            entry = self._entry_by_id.get(grammar_id)
            if entry is None:
                continue
            gate = entry.gate
            if gate.start is None:
                if token_id in gate.last_ids:
                    self._look_for_begin(grammar_id, entry, index)
                continue
            entry.late_masks = None
            entry.num_losses = 0
            if entry.state is GrammarState.READY:  # else it gets all its tokens when it is open
                self._advances.append((grammar_id, token_id))

    def _look_for_begin(self, grammar_id: int, entry: Entry, index: int) -> None:
        """Let masks begin if a begin ends with the output token at `index`, and record the tokens of it that are
        constrained."""
        outputs = self._scheduler.rows.output_tokens(entry.request)[: index + 1]
        if not entry.gate.enter(outputs, index):
            return
        if entry.state is GrammarState.READY:
            constrained = outputs[entry.gate.start :].tolist()
            if entry.request.constraint_repeats:
                constrained.insert(0, RESTART)
            self._advances += [(grammar_id, token_id) for token_id in constrained]
        if self._can_void:
            self._scheduler.begin_masks(entry.request)

    def want_masks(self) -> None:
        """Order the masks of the oldest step in flight, once: all tokens before its samples are known by now. If the
        helper has none to make, send the known masks at once. Also send recorded tokens to the helper."""
        step = self._scheduler.ledger.oldest
        if step is None or step.step <= self._masked_step or not step.batch.grammar_ids:
            self._flush()
            return
        self._masked_step = step.step
        wanted, there, missing = list[int](), list[GrammarMasks](), list[int]()
        for grammar_id in step.batch.grammar_ids:
            entry = self._entry_by_id.get(grammar_id)
            if entry is None or entry.gate.is_free:
                continue
            if entry.late_masks is not None:
                there.append(entry.late_masks)
            elif entry.state is GrammarState.READY and not self._is_behind:
                wanted.append(grammar_id)
            else:
                missing.append(grammar_id)
        self._hold_back(missing)
        if not wanted:
            self._send_masks(there)
            self._flush()
            return
        self._serial += 1
        self._fill = MaskFill(wanted, there, self._clock.now + LATE_S)
        row_of = {grammar_id: self._entry_by_id[grammar_id].request.row for grammar_id in wanted}
        drafts = step.batch.drafts
        self._flush(wanted, [drafts.get(row_of[grammar_id], []) for grammar_id in wanted] if drafts else [])

    def reset(self, lost: Sequence[LedgerEntry]) -> None:
        """Forget the order for masks: its step is lost with the workers. The steps of new workers count from 1."""
        self._fill, self._masked_step = None, 0

    @property
    def is_awaiting_masks(self) -> bool:
        return self._fill is not None

    def delays_step(self) -> bool:
        """Return whether the oldest step waits for masks. They may make more tokens known, so no step is scheduled
        before."""
        step = self._scheduler.ledger.oldest if self.is_active else None
        if step is None or not step.batch.grammar_ids:
            return False
        return step.step > self._masked_step or self._fill is not None

    @property
    def _is_behind(self) -> bool:
        """Whether a mask order that was given up is still unanswered. A new order would probably be late, too."""
        return self._answered_serial < self._late_serial

    def _flush(self, mask_ids: list[int] | None = None, drafts: Iterable[list[int]] = ()) -> None:
        """Send recorded tokens to the helper if one of them was sampled or masks are ordered. mask_ids: the grammars
        whose masks are ordered; drafts: the drafts of each."""
        if not (self._advances and self._is_helper_waiting) and not mask_ids:
            return
        advances, self._advances, self._is_helper_waiting = self._advances, [], False
        serial = self._serial if mask_ids else 0
        self._ask(order_of(advances, serial, mask_ids or [], list(drafts)), mask_ids or [])

    def _ask(self, message: AdvanceGrammars, mask_ids: list[int]) -> None:
        """Send a message that the helper must answer within ANSWER_TIMEOUT_S."""
        with contextlib.suppress(HelperUnavailable):  # asked again after the time limit
            self._helper.send(message)
        self._watch.ask(mask_ids)

    def _hold_back(self, grammar_ids: list[int]) -> None:
        """Return requests to the queue until their masks have come or their grammars are open."""
        for grammar_id in grammar_ids:
            entry = self._entry_by_id.get(grammar_id)
            if entry is not None and entry.request.row >= 0:
                entry.request.waits_for.add(WaitReason.GRAMMAR)
                self._scheduler.preempt(entry.request)

    def _give_up_masks(self) -> None:
        """Let the oldest step continue without the rows whose masks are late."""
        fill, self._fill = self._fill, None
        if fill is not None:
            self._late_serial = self._serial
            self._hold_back(fill.grammar_ids)
            self._send_masks(fill.there)

    # ── answers of the helper ──────────────────────────────────────────────────────────────────────────────────────

    def take(self) -> None:
        """Apply the helper's answers and the deadlines: admit, finish or fail requests, send the oldest step's
        masks."""
        if not (self.is_active or self._helper.has_process):
            return
        self._clock.look()
        self._take_verdicts()
        try:
            for message in self._helper.receive():
                self._watch.hear()
                if isinstance(message, GrammarOpened):
                    self._on_opened(message)
                else:
                    self._on_advanced(message)
        except HelperLost as loss:
            self._on_loss(f"the process {loss}")
        self._expire()
        self._openings.open_queued()
        self._flush()
        is_in_step = any(step.batch.grammar_ids for step in self._scheduler.ledger.entries)
        is_opening = bool(self._entry_by_id) or self._watch.is_awaited
        self.is_active = is_in_step or is_opening or (self._prover is not None and self._prover.is_active)

    def _take_verdicts(self) -> None:
        """Queue the grammars that are proven; end the requests with the others."""
        for grammar_id, error in self._prover.take() if self._prover is not None else ():
            entry = self._entry_by_id.get(grammar_id)
            if entry is not None and error is not None:
                self._engine.end(entry.request, "error", error)
            elif entry is not None:
                self._openings.add(grammar_id)

    def next_deadline(self) -> float | None:
        """Return when to call `take` next if the helper sends nothing."""
        deadlines = self._watch.deadlines()
        if self._prover is not None and (deadline := self._prover.next_deadline) is not None:
            deadlines.append(deadline)
        if self._fill is not None:
            deadlines.append(self._fill.deadline)
        if (deadline := self._openings.deadline) is not None:
            deadlines.append(deadline)
        return min(deadlines, default=None)

    def _on_opened(self, message: GrammarOpened) -> None:
        if message.grammar_id == HELPER_IS_UP:
            self._watch.is_up = True
            return
        self._watch.end_opening(message.grammar_id)
        entry = self._entry_by_id.get(message.grammar_id)
        if entry is None:
            if message.error is None and not message.is_complete:
                self._helper.send(CloseGrammars(grammar_ids=[message.grammar_id]))
            return
        entry.state, entry.is_suspect = GrammarState.READY, False
        if message.error is not None:
            self._engine.end(entry.request, "error", message.error)
        elif message.is_complete and entry.gate.start is None:  # its only text is empty
            self._engine.end(entry.request, "stop")
        elif message.is_complete and entry.gate.start is not None:
            self._openings.add(message.grammar_id)  # the helper has closed it
            self._end_constraint(entry, entry.gate.start + message.num_tokens)
        else:
            self._scheduler.waiting.release(entry.request, WaitReason.GRAMMAR)
            if entry.gate.start is not None:
                num_had = max(entry.num_opened, entry.gate.start)
                late_ids = self._scheduler.rows.output_tokens(entry.request)[num_had:].tolist()
                self._advances += [(message.grammar_id, token_id) for token_id in late_ids]
                self._is_helper_waiting = True

    def _on_advanced(self, message: GrammarsAdvanced) -> None:
        self._watch.end_ask()
        for failure in message.failures:
            if (entry := self._entry_by_id.get(failure.grammar_id)) is not None:
                self._engine.end(entry.request, "error", failure.error)
        for grammar_id in decode_ids(message.complete_ids):
            if (entry := self._entry_by_id.get(grammar_id)) is not None:  # no token is known that it has not got
                self._end_constraint(entry, len(self._scheduler.rows.output_tokens(entry.request)))
        if message.serial:
            self._on_masks(message)
            self._catch_up(message.serial)

    def _end_constraint(self, entry: Entry, end: int) -> None:
        """Apply the end of a constrained part, before the output token at index `end`: the answer ends or, if its
        constraint repeats, is free up to the next begin."""
        request = entry.request
        if not request.constraint_repeats:
            self._engine.end(request, "stop")
            return
        entry.late_masks = None
        entry.gate.leave(end)
        entry.gate.enter(self._scheduler.rows.output_tokens(request), end)  # tokens behind it are of a resumed answer
        if entry.gate.is_free and self._can_void:
            self._scheduler.end_masks(request)

    def _on_masks(self, message: GrammarsAdvanced) -> None:
        """Send the masks that the oldest step waits for, and append their jump-forward tokens, so that the next step
        computes these together. Keep masks that came too late for the next step of their requests."""
        found = [masks for masks in masks_in(message) if masks.grammar_id in self._entry_by_id]
        if self._fill is None or message.serial != self._serial:
            for masks in found:
                self._entry_by_id[masks.grammar_id].late_masks = masks
            return
        there, self._fill = self._fill.there, None
        self._send_masks([*there, *found])

    def _catch_up(self, serial: int) -> None:
        """Let the requests run that wait for masks, once the helper has answered all orders that were given up."""
        was_behind, self._answered_serial = self._is_behind, serial
        if was_behind and not self._is_behind:
            for entry in self._entry_by_id.values():
                if entry.state is GrammarState.READY:
                    self._scheduler.waiting.release(entry.request, WaitReason.GRAMMAR)

    def _send_masks(self, all_masks: list[GrammarMasks]) -> None:
        """Send the masks of requests with rows for the oldest step, and append their jump-forward tokens. If a row has
        another request since the step was sent, the workers ignore its masks."""
        running: list[tuple[Request, GrammarMasks]] = []
        for masks in all_masks:
            entry = self._entry_by_id.get(masks.grammar_id)
            if entry is not None and entry.request.row >= 0:
                running.append((entry.request, masks))
        scheduler = self._scheduler
        self._engine.send_masks(
            token_mask(running, self._masked_step, core_epoch=scheduler.core_epoch, generation=scheduler.generation)
        )
        jumps = [(request, masks.jump_ids) for request, masks in running if masks.may_jump(request.params)]
        if jumps:
            self.advance(self._engine.append_jump_tokens(jumps), are_jump_tokens=True)

    # ── trouble ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _expire(self) -> None:
        """Give up late masks; ask a helper that compiles for a sign of life; replace a helper that hangs."""
        if self._watch.needs_sign:
            self._ask(order_of([], 0, [], []), [])
        if self._fill is not None and self._clock.now >= self._fill.deadline:
            self._give_up_masks()
        if self._watch.is_hung:
            self._helper.stop()
            self._on_loss("it did not answer in time")

    def _on_loss(self, reason: str) -> None:
        """Queue all grammars to be opened by the next helper, and fail requests at whose grammars MAX_LOSSES helpers
        have ended. If a helper ends before it has read its vocabulary, no grammar is taken for the cause."""
        loss = self._watch.lose()
        if not loss.was_up:
            self._openings.pause()
        self._advances = []
        self._give_up_masks()
        self._answered_serial = self._serial
        self._openings.clear()
        for grammar_id, entry in list(self._entry_by_id.items()):
            if entry.state is GrammarState.PROVING:
                continue
            entry.state, entry.late_masks = GrammarState.QUEUED, None
            entry.is_suspect |= grammar_id in loss.suspects
            entry.num_losses += grammar_id in loss.blamed
            if entry.num_losses >= MAX_LOSSES:
                error = InternalError(
                    f"the grammar process has ended {MAX_LOSSES} times at this request; last: {reason}"
                )
                self._engine.end(entry.request, "error", error_info(error))
            else:
                self._openings.add(grammar_id)

    # ── for tests ────────────────────────────────────────────────────────────────────────────────────────────────

    def check_invariants(self, requests: Sequence[Request]) -> None:
        named = {request.grammar_id: request for request in requests if request.grammar_id}
        assert named == {grammar_id: entry.request for grammar_id, entry in self._entry_by_id.items()}
