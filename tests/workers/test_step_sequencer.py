"""Steps run once each, in order, for one core at a time, whatever arrives."""

from __future__ import annotations

import random

import pytest

from tokenloom.ipc.messages.workers import CoreToWorker, Probe, SchedulerOutput, TokenMask
from tokenloom.workers.step_sequencer import StepSequencer, StreamAction

GENERATION = 3


def step(number: int, epoch: int = 0, generation: int = GENERATION) -> SchedulerOutput:
    return SchedulerOutput(step=number, core_epoch=epoch, generation=generation, rows=b"", counts=b"")


def mask(number: int, epoch: int = 0) -> TokenMask:
    return TokenMask(step=number, core_epoch=epoch, generation=GENERATION, rows=b"", bits=b"")


def probe(epoch: int = 0, generation: int = GENERATION) -> Probe:
    return Probe(core_epoch=epoch, generation=generation)


def probed() -> StepSequencer:
    sequencer = StepSequencer(GENERATION)
    assert sequencer.classify(probe()) is StreamAction.RESET
    return sequencer


STREAMS: dict[str, list[tuple[CoreToWorker, str]]] = {
    "steps run in order and once": [
        *((probe(), "RESET"), (step(1), "EXECUTE"), (step(2), "EXECUTE"), (step(2), "STALE"), (step(1), "STALE")),
        (step(3), "EXECUTE"),
    ],
    "a gap is requested once and then filled": [
        *((probe(), "RESET"), (step(1), "EXECUTE"), (step(3), "RESEND"), (step(4), "DROP"), (step(2), "EXECUTE")),
        *((step(3), "EXECUTE"), (step(4), "EXECUTE"), (step(6), "RESEND")),
    ],
    "a new core probes first and restarts at step one, and the old core is stale": [
        *((probe(4), "RESET"), (step(1, 4), "EXECUTE"), (step(3, 4), "RESEND"), (step(1, 5), "STALE")),
        *((probe(5), "RESET"), (step(2, 4), "STALE"), (probe(4), "STALE"), (step(2, 5), "RESEND")),
        (step(1, 5), "EXECUTE"),
    ],
    "another group is stale": [
        *((probe(), "RESET"), (step(1, generation=2), "STALE"), (probe(9, generation=4), "STALE")),
        (step(1), "EXECUTE"),
    ],
    "no step runs before a probe, and another probe of the same core changes nothing": [
        *((step(1), "STALE"), (probe(), "RESET"), (step(1), "EXECUTE"), (probe(), "ACKNOWLEDGE"), (step(2), "EXECUTE")),
    ],
}


@pytest.mark.parametrize("name", STREAMS)
def test_each_message_of_a_stream_has_its_action(name: str) -> None:
    sequencer = StepSequencer(GENERATION)
    for message, action in STREAMS[name]:
        assert sequencer.classify(message).name == action


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
