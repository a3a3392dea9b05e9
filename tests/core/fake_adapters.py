"""The slots for adapters on all ranks of a FakeWorker: fills end when the test says so, and every use is checked."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from tokenloom.ipc.messages.adapter import AdapterRef, FillSlot, SlotContent
from tokenloom.ipc.messages.base import Rank
from tokenloom.ipc.messages.workers import SchedulerOutput, SlotFilled

RANK = 8


def adapter_of(number: int) -> AdapterRef | None:
    """Return the adapter with this number; 0 is the base model."""
    return AdapterRef(digest=digest_of(number), folder=f"/store/{number}", rank=RANK) if number else None


def digest_of(number: int) -> bytes:
    return bytes([number]) * 32 if number else b""


class FakeAdapters:
    """Content of the slots by rank. A rank fills one slot after the other, in the order of the steps."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self.ranks = ranks
        self.content: dict[Rank, dict[int, bytes]] = {rank: {} for rank in ranks}
        self._pending: dict[Rank, deque[tuple[SchedulerOutput, FillSlot]]] = defaultdict(deque)
        self._num_void = dict.fromkeys(ranks, 0)  # of the first pending fills of each rank: the memory is gone
        self.num_begun = 0

    def begin(self, output: SchedulerOutput, used_slots: Iterable[int]) -> None:
        """Begin the fills of a step at once, while rows of earlier steps may still use `used_slots`."""
        used = set(used_slots)
        for fill in output.fills:
            assert fill.slot not in used, "a slot is refilled under a step in flight"
            self.num_begun += 1
            for rank in self.ranks:
                self.content[rank].pop(fill.slot, None)
                self._pending[rank].append((output, fill))

    @property
    def busy_ranks(self) -> list[Rank]:
        return [rank for rank in self.ranks if self._pending[rank]]

    def loading(self, core_epoch: int) -> set[bytes]:
        """Return the adapters that some rank still loads for this core."""
        pending = (each for fills in self._pending.values() for each in fills)
        return {fill.digest for output, fill in pending if output.core_epoch == core_epoch}

    def next_digest(self, rank: Rank) -> bytes:
        return self._pending[rank][0][1].digest

    def finish(self, rank: Rank, error: str = "") -> SlotFilled:
        """End the oldest fill of a rank."""
        output, fill = self._pending[rank].popleft()
        if self._num_void[rank]:
            self._num_void[rank] -= 1
        elif not error and all(later.slot != fill.slot for _, later in self._pending[rank]):
            self.content[rank][fill.slot] = fill.digest
        return SlotFilled(
            step=output.step,
            core_epoch=output.core_epoch,
            generation=output.generation,
            rank=rank,
            slot=fill.slot,
            digest=fill.digest,
            error=error,
        )

    def drop(self) -> None:
        """Empty all slots, as workers do that load other weights; fills under way end without effect."""
        for rank in self.ranks:
            self.content[rank].clear()
            self._num_void[rank] = len(self._pending[rank])

    def digest_in(self, slot: int) -> bytes:
        """Return the adapter that a row with this slot computes with on every rank."""
        if not slot:
            return b""
        digests = {self.content[rank].get(slot, b"") for rank in self.ranks}
        assert len(digests) == 1 and b"" not in digests, f"slot {slot} holds {digests}"
        return digests.pop()

    def slots_of(self, rank: Rank) -> list[SlotContent]:
        return [SlotContent(slot=slot, digest=digest) for slot, digest in self.content[rank].items()]

    def common(self) -> list[SlotContent]:
        """Return the slots that a new core may adopt: those that are equal on all ranks."""
        first, *others = map(self.slots_of, self.ranks)
        return [content for content in first if all(content in slots for slots in others)]
