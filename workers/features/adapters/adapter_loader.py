"""AdapterLoader: fills slots in a thread, so that no step waits for an adapter, and records the content of each slot.

    FillSlot → queue → thread: check, read, fill → eventfd → `take`: the reply

An order to fill a slot makes its content unknown until the fill has ended well. All methods must be called by the
thread that runs the steps.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from ....ipc.errors import Overloaded, ProtocolError, TokenloomError
from ....ipc.messages.adapter import FillSlot, SlotContent
from ....ipc.messages.base import Rank
from ....ipc.messages.workers import SchedulerOutput, SlotFilled
from ....ipc.process.faults import maybe_fail
from ....ipc.process.pacer import Pacer
from ....ipc.shortages.threads import start_thread
from .slot_filler import SlotFiller

logger = logging.getLogger("tokenloom.worker")

LULL_S = 0.1  # after a step with rows the next one usually follows within this time


@dataclass(eq=False)
class _Job:
    """One order on its way through the thread."""

    order: FillSlot
    step: SchedulerOutput
    filler: SlotFiller
    is_orphan: bool = False  # its core is gone: nobody waits for the reply
    is_dropped: bool = False  # its weights are gone, and its reply was made
    duration_s: float = 0.0
    num_bytes: int = 0
    error: str = ""


class AdapterLoader:
    """Owner of the thread, the orders without a reply, and the contents of the slots. `fd` is readable when `take` may
    have a reply."""

    def __init__(
        self,
        rank: Rank,
        num_slots: int,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._rank = rank
        self._num_slots = num_slots
        self._filler: SlotFiller | None = None  # of the weights in memory
        self._queue: SimpleQueue[_Job | None] | None = None  # of the thread for this filler
        self._done: SimpleQueue[_Job] = SimpleQueue()
        self._open: list[_Job] = []  # in the order of their steps
        self._replies: list[SlotFilled] = []  # of orders that the thread does not end
        self._digest_by_slot: dict[int, bytes] = {}
        self._monotonic = monotonic
        self._is_stepping, self._stepped_at = False, -LULL_S
        self._num_waiting = 1  # as the last order has it
        self._pacer = Pacer(lambda: self.is_beside_steps, lambda: self._num_waiting, sleep=sleep)

    @property
    def contents(self) -> list[SlotContent]:
        """The slots that rows may use."""
        return [SlotContent(slot=slot, digest=digest) for slot, digest in sorted(self._digest_by_slot.items())]

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots if each has an adapter of the highest rank in all layers."""
        return 0 if self._filler is None else self._filler.adapted.space.nbytes

    def use(self, filler: SlotFiller | None) -> None:
        """Use the slots of other weights from now on, all of them empty; None: no weights are in memory. Open orders
        fail."""
        for job in self._open:
            job.is_dropped, job.error = True, "its weights were replaced while it was loaded: send the request again"
            if not job.is_orphan:
                self._replies.append(self._reply_to(job))
        self._open.clear()
        self._digest_by_slot.clear()
        if self._queue is not None:
            self._queue.put(None)  # ends its thread after the fill under way
        self._queue, self._filler = None, filler
        os.eventfd_write(self.fd, 1)

    def start(self, order: FillSlot, step: SchedulerOutput) -> None:
        """Start to fill a slot by an order of `step`. No row may use the slot. ProtocolError if there is no such slot,
        or no weights are in memory."""
        if not 1 <= order.slot <= self._num_slots or self._filler is None:
            raise ProtocolError(
                f"step {step.step} fills adapter slot {order.slot}, slots are [1, {self._num_slots}] while weights are "
                "in memory"
            )
        self._digest_by_slot.pop(order.slot, None)
        self._num_waiting = order.num_waiting
        job = _Job(order, step, self._filler)
        self._open.append(job)
        try:
            if self._queue is None:
                self._queue = self._start_thread()
        except Overloaded as error:
            job.error = str(error)
            self._done.put(job)
            os.eventfd_write(self.fd, 1)
        else:
            self._queue.put(job)

    def check_filled(self, slot: int) -> None:
        """Raise ProtocolError if a slot has no known content: its rows would get the tokens of the base model."""
        if slot and slot not in self._digest_by_slot:
            filled = sorted(self._digest_by_slot)
            raise ProtocolError(f"a row is admitted with adapter slot {slot}, filled are {filled}")

    def forget_orders(self) -> None:
        """Send no replies to the open orders, because a new core does not expect them. The fill under way goes on, and
        if it ends well, its slot is in `contents`, which a later core gets; the others are not carried out."""
        for job in self._open:
            job.is_orphan = True

    def take(self) -> list[SlotFilled]:
        """Return the replies to orders that have ended since the last call."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        replies, self._replies = self._replies, []
        while not self._done.empty():
            job = self._done.get()
            if job.is_dropped:
                continue
            self._open.remove(job)
            slot = job.order.slot
            if not job.error and all(other.order.slot != slot for other in self._open):
                self._digest_by_slot[slot] = job.order.digest
            if not job.is_orphan:
                replies.append(self._reply_to(job))
        return replies

    @contextmanager
    def beside_step(self) -> Iterator[None]:
        """Slow the fills in this context, in which a step computes rows on the CPU, and for LULL_S after it."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping, self._stepped_at = False, self._monotonic()

    @property
    def is_beside_steps(self) -> bool:
        """Whether the CPU computes rows now, or did so within the last LULL_S."""
        return self._is_stepping or self._monotonic() - self._stepped_at < LULL_S

    def wait(self, timeout_s: float) -> None:
        """Wait until `take` may have a reply, but at most `timeout_s`."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        poll.poll(timeout_s * 1000)

    def _start_thread(self) -> SimpleQueue[_Job | None]:
        """Start a thread and return its queue."""
        queue: SimpleQueue[_Job | None] = SimpleQueue()
        begun = threading.Event()
        start_thread("adapter-loader", _run, queue, self._done, self.fd, self._rank.tp, self._pacer, begun)
        begun.wait()
        torch.set_num_threads(torch.get_num_threads())  # for later threads again as many as for this one
        return queue

    def _reply_to(self, job: _Job) -> SlotFilled:
        return SlotFilled(
            step=job.step.step,
            core_epoch=job.step.core_epoch,
            generation=job.step.generation,
            rank=self._rank,
            slot=job.order.slot,
            digest=job.order.digest,
            duration_s=job.duration_s,
            num_bytes=job.num_bytes,
            error=job.error,
        )


def _run(
    queue: SimpleQueue[_Job | None],
    done: SimpleQueue[_Job],
    fd: int,
    rank: int,
    pacer: Pacer,
    begun: threading.Event,
) -> None:
    """Fill slots in the order of the queue, until a None. The error of a fill is recorded in its job."""
    torch.set_num_threads(1)  # of this thread, and of all that begin later
    torch.get_num_threads()  # a thread takes the number of the process at its first use of it, and then keeps its own
    begun.set()
    while (job := queue.get()) is not None:
        start_time = time.monotonic()
        if job.is_orphan:
            job.error = "the core that ordered it is gone"
        else:
            try:
                maybe_fail("worker.fill", rank)
                job.num_bytes = job.filler.fill(job.order, pacer.start())
            except Exception as error:
                job.error = str(error) if isinstance(error, TokenloomError) else f"{type(error).__name__}: {error}"
                logger.warning("adapter %.12s is not loaded: %s", job.order.digest.hex(), job.error)
                with suppress(Exception):
                    job.filler.empty(job.order.slot)
        job.duration_s = time.monotonic() - start_time
        done.put(job)
        os.eventfd_write(fd, 1)
