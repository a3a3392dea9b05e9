"""Pins of the host tier's blocks: each slot that the core pins is given back."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue

from tokenloom.core.tiers.pins import Pins
from tokenloom.ipc.codec import encode_ids
from tokenloom.ipc.messages.tier import PinBlocks, PinnedBlocks, UnpinSlots
from tokenloom.tests.core.tiers.slots import DEADLINE_S, key_of


def test_slots_of_the_core_reach_the_thread_that_asked() -> None:
    sent: SimpleQueue[PinBlocks | UnpinSlots] = SimpleQueue()
    pins = Pins(sent.put)
    found: dict[int, list[int]] = {}

    def ask(number: int) -> None:
        found[number] = pins.pin([key_of(number), key_of(100)], time.monotonic() + DEADLINE_S)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(5)]
    for thread in threads:
        thread.start()
    for _ in threads:
        message = sent.get(timeout=DEADLINE_S)
        assert isinstance(message, PinBlocks) and message.keys[32:] == key_of(100)
        (number,) = [number for number in range(5) if key_of(number) == message.keys[:32]]
        pins.take(PinnedBlocks(serial=message.serial, slots=encode_ids([number + 10, -1])))
    for thread in threads:
        thread.join(DEADLINE_S)
    assert found == {number: [number + 10, -1] for number in range(5)}
    pins.unpin([7, -1, 9])
    assert sent.get(timeout=DEADLINE_S) == UnpinSlots(slots=encode_ids([7, 9]))


def test_an_answer_after_the_deadline_is_given_back() -> None:
    sent: SimpleQueue[PinBlocks | UnpinSlots] = SimpleQueue()
    pins = Pins(sent.put)
    assert pins.pin([key_of(1), key_of(2)], time.monotonic()) == [-1, -1]
    message = sent.get(timeout=DEADLINE_S)
    assert isinstance(message, PinBlocks)
    pins.take(PinnedBlocks(serial=message.serial, slots=encode_ids([-1, 4])))
    assert sent.get(timeout=DEADLINE_S) == UnpinSlots(slots=encode_ids([4]))
    pins.unpin([-1])
    assert sent.empty()
