"""Steps run once each, in order, for one core at a time, whatever arrives."""

from __future__ import annotations

import random

from tokenloom.ipc.messages.workers import Probe, SchedulerOutput, TokenMask
from tokenloom.workers.step_sequencer import StepSequencer, StreamAction

GENERATION = 3


def step(number: int, epoch: int = 0, generation: int = GENERATION) -> SchedulerOutput:
    return SchedulerOutput(step=number, core_epoch=epoch, generation=generation, rows=b"", counts=b"")


def mask(number: int, epoch: int = 0) -> TokenMask:
    return TokenMask(step=number, core_epoch=epoch, generation=GENERATION, rows=b"", bits=b"")


def probe(epoch: int = 0, generation: int = GENERATION) -> Probe:
    return Probe(core_epoch=epoch, generation=generation)


def probed(epoch: int = 0) -> StepSequencer:
    sequencer = StepSequencer(GENERATION)
    assert sequencer.classify(probe(epoch)) is StreamAction.RESET
    return sequencer


def test_a_gap_is_requested_once_and_then_filled() -> None:
    sequencer = probed()
    assert [sequencer.classify(step(n)) for n in (1, 3, 4)] == [
        StreamAction.EXECUTE,
        StreamAction.RESEND,
        StreamAction.DROP,
    ]
    assert sequencer.next_step == 2
    assert [sequencer.classify(step(n)) for n in (2, 3, 4)] == [StreamAction.EXECUTE] * 3
    assert sequencer.classify(step(6)) is StreamAction.RESEND


def test_a_new_core_restarts_at_step_one_and_the_old_core_is_stale() -> None:
    sequencer = probed(epoch=4)
    sequencer.classify(step(1, epoch=4))
    sequencer.classify(step(3, epoch=4))
    assert sequencer.classify(step(1, epoch=5)) is StreamAction.STALE, "a new core must probe first"
    assert sequencer.classify(probe(5)) is StreamAction.RESET
    assert sequencer.classify(step(2, epoch=4)) is StreamAction.STALE
    assert sequencer.classify(probe(4)) is StreamAction.STALE
    assert sequencer.classify(step(2, epoch=5)) is StreamAction.RESEND
    assert sequencer.classify(step(1, epoch=5)) is StreamAction.EXECUTE


def test_another_group_is_stale() -> None:
    sequencer = probed()
    assert sequencer.classify(step(1, generation=2)) is StreamAction.STALE
    assert sequencer.classify(probe(9, generation=4)) is StreamAction.STALE
    assert sequencer.classify(step(1)) is StreamAction.EXECUTE


def test_every_step_runs_exactly_once_through_random_losses_and_repeats() -> None:
    rng = random.Random(0)
    for _ in range(200):
        sequencer, executed, last = probed(), list[int](), 20
        queue = [n for n in range(1, last + 1) if rng.random() > 0.3]
        queue += [last + 1]  # the core goes on: a later step shows a gap at the end
        while queue:
            number = queue.pop(0)
            action = sequencer.classify(step(number))
            if action is StreamAction.EXECUTE:
                executed.append(number)
            elif action is StreamAction.RESEND:
                queue += range(sequencer.next_step, last + 2)
        assert executed == list(range(1, last + 2))


def test_a_mask_belongs_to_one_step_of_one_core_and_reveals_a_lost_step() -> None:
    sequencer = probed()
    assert sequencer.classify(step(1)) is StreamAction.EXECUTE
    assert sequencer.is_mask_of(step(1), mask(1))
    assert not sequencer.is_mask_of(step(1), mask(2)) and not sequencer.is_mask_of(step(1), mask(1, epoch=1))
    assert sequencer.classify(mask(1)) is StreamAction.STALE, "its step is over"
    assert sequencer.classify(mask(2)) is StreamAction.RESEND, "its step never came"
    assert sequencer.classify(step(2)) is StreamAction.EXECUTE
    assert sequencer.has_replaced(step(2), probe(epoch=1)) and not sequencer.has_replaced(step(2), probe())
