"""Pins: blocks of the host tier that stay in their slots while another engine loads them. The core keeps the pins."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

from ...ipc.codec import decode_ids, encode_ids
from ...ipc.messages.tier import PinBlocks, PinnedBlocks, UnpinSlots


class Pins:
    """Owner of the questions that the core has not answered yet. Any thread may pin and unpin."""

    def __init__(self, send: Callable[[PinBlocks | UnpinSlots], None]) -> None:
        self._send = send
        self._lock = threading.Lock()
        self._serial = 0
        self._open: dict[int, Future[list[int]]] = {}

    def pin(self, keys: Sequence[bytes], deadline: float) -> list[int]:
        """Return the slot of each key; -1 where the host tier does not have it, and -1 for all keys if the deadline
        (monotonic seconds) passes first. The slots keep their content until `unpin`."""
        future: Future[list[int]] = Future()
        with self._lock:
            self._serial += 1
            serial = self._serial
            self._open[serial] = future
        self._send(PinBlocks(serial=serial, keys=b"".join(keys)))
        try:
            return future.result(max(deadline - time.monotonic(), 0.0))
        except FutureTimeout:
            with self._lock:
                is_late = self._open.pop(serial, None) is not None
            return [-1] * len(keys) if is_late else future.result()

    def unpin(self, slots: Sequence[int]) -> None:
        """Release pinned slots; -1 is skipped."""
        if held := [slot for slot in slots if slot >= 0]:
            self._send(UnpinSlots(slots=encode_ids(held)))

    def take(self, message: PinnedBlocks) -> None:
        """Apply the core's answer. If it comes too late, release its slots."""
        slots = list(decode_ids(message.slots))
        with self._lock:
            future = self._open.pop(message.serial, None)
            if future is not None:
                future.set_result(slots)
        if future is None:
            self.unpin(slots)
