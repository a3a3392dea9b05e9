"""Steps run once each, in order, for one core at a time, whatever arrives."""

from __future__ import annotations

import random

from tokenloom.ipc.messages.workers import Probe, SchedulerOutput, TokenMask
from tokenloom.workers.step_sequencer import StepFence, Verdict

GENERATION = 3


def step(number: int, epoch: int = 0, generation: int = GENERATION) -> SchedulerOutput:
    return SchedulerOutput(step=number, core_epoch=epoch, generation=generation, rows=b"", counts=b"")


def mask(number: int, epoch: int = 0) -> TokenMask:
    return TokenMask(step=number, core_epoch=epoch, generation=GENERATION, rows=b"", bits=b"")


def probe(epoch: int = 0, generation: int = GENERATION) -> Probe:
    return Probe(core_epoch=epoch, generation=generation)


def probed(epoch: int = 0) -> StepFence:
    fence = StepFence(GENERATION)
    assert fence.judge(probe(epoch)) is Verdict.RESET
    return fence


def test_no_step_runs_before_a_probe() -> None:
    assert StepFence(GENERATION).judge(step(1)) is Verdict.STALE


def test_steps_run_in_order_and_once() -> None:
    fence = probed()
    assert [fence.judge(step(n)) for n in (1, 2, 2, 1, 3)] == [
        Verdict.EXECUTE,
        Verdict.EXECUTE,
        Verdict.STALE,
        Verdict.STALE,
        Verdict.EXECUTE,
    ]


def test_a_gap_is_asked_for_once_and_then_filled() -> None:
    fence = probed()
    assert [fence.judge(step(n)) for n in (1, 3, 4)] == [Verdict.EXECUTE, Verdict.RESEND, Verdict.DROP]
    assert fence.next_step == 2
    assert [fence.judge(step(n)) for n in (2, 3, 4)] == [Verdict.EXECUTE] * 3
    assert fence.judge(step(6)) is Verdict.RESEND


def test_a_probe_of_the_same_core_changes_nothing() -> None:
    fence = probed()
    fence.judge(step(1))
    assert fence.judge(probe()) is Verdict.ACKNOWLEDGE
    assert fence.judge(step(2)) is Verdict.EXECUTE


def test_a_new_core_starts_again_from_one_and_the_old_one_is_stale() -> None:
    fence = probed(epoch=4)
    fence.judge(step(1, epoch=4))
    fence.judge(step(3, epoch=4))
    assert fence.judge(step(1, epoch=5)) is Verdict.STALE, "a new core must probe first"
    assert fence.judge(probe(5)) is Verdict.RESET
    assert fence.judge(step(2, epoch=4)) is Verdict.STALE
    assert fence.judge(probe(4)) is Verdict.STALE
    assert fence.judge(step(2, epoch=5)) is Verdict.RESEND
    assert fence.judge(step(1, epoch=5)) is Verdict.EXECUTE


def test_another_group_is_stale() -> None:
    fence = probed()
    assert fence.judge(step(1, generation=2)) is Verdict.STALE
    assert fence.judge(probe(9, generation=4)) is Verdict.STALE
    assert fence.judge(step(1)) is Verdict.EXECUTE


def test_every_step_runs_exactly_once_through_random_losses_and_repeats() -> None:
    rng = random.Random(0)
    for _ in range(200):
        fence, executed, last = probed(), list[int](), 20
        queue = [n for n in range(1, last + 1) if rng.random() > 0.3]
        queue += [last + 1]  # the core goes on: a later step shows a gap at the end
        while queue:
            number = queue.pop(0)
            verdict = fence.judge(step(number))
            if verdict is Verdict.EXECUTE:
                executed.append(number)
            elif verdict is Verdict.RESEND:
                queue += range(fence.next_step, last + 2)
        assert executed == list(range(1, last + 2))


def test_a_mask_is_for_one_step_of_one_core_and_shows_a_lost_step() -> None:
    fence = probed()
    assert fence.judge(step(1)) is Verdict.EXECUTE
    assert fence.is_mask_of(step(1), mask(1))
    assert not fence.is_mask_of(step(1), mask(2)) and not fence.is_mask_of(step(1), mask(1, epoch=1))
    assert fence.judge(mask(1)) is Verdict.STALE, "its step is over"
    assert fence.judge(mask(2)) is Verdict.RESEND, "its step never came"
    assert fence.judge(step(2)) is Verdict.EXECUTE
    assert fence.has_replaced(step(2), probe(epoch=1)) and not fence.has_replaced(step(2), probe())
