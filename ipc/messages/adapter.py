"""Parts of several channels' messages that name LoRA adapters and the workers' slots for them.

A client names an adapter; the frontend's registry turns the name into a digest of the content, which all other
processes use. The workers hold adapters in slots 1 … max_loras; slot 0 stands for none.
"""

from __future__ import annotations

import msgspec

NO_SLOT = 0


class AdapterRef(msgspec.Struct, frozen=True, kw_only=True):
    """The adapter of a request, checked by the frontend and kept in the engine's own store."""

    digest: bytes  # SHA-256 of the content
    folder: str  # in the store; empty: of a gateway, and a blob of the digest in this host's store of those
    rank: int  # the largest of its modules

    @property
    def place(self) -> str:
        """Where it is, in errors."""
        return f"in {self.folder}" if self.folder else f"{self.digest.hex():.16} of a gateway"


class SlotContent(msgspec.Struct, frozen=True, kw_only=True):
    """The adapter in a worker's slot."""

    slot: int
    digest: bytes


class FillSlot(msgspec.Struct, frozen=True, kw_only=True):
    """Order to load an adapter into a slot that no row of this step or of an earlier one uses. SlotFilled replies."""

    slot: int
    digest: bytes
    folder: str  # as in AdapterRef
    num_waiting: int = 1  # adapters that wait for a slot, with this one: the more, the more of the CPU may loads take


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An adapter that requests may name."""

    name: str
    path: str  # that it was loaded from
    digest: str  # in hex
    rank: int
    base: str  # served name of the model
    loaded_at: float = 0.0  # unix seconds


class AdaptersProgress(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The core's state of the slots, in Progress. Numbers and seconds are totals since this core's start; the core
    counts in a struct of its own, so it is not frozen."""

    num_slots: int
    num_ready: int = 0  # slots, now
    num_filling: int = 0  # slots, now
    num_waiting: int = 0  # answers that wait for a slot, now
    num_queued: int = 0  # answers with an adapter; again after each preemption
    num_hits: int = 0  # of them, those that found their adapter in a slot when they came
    num_fills: int = 0  # slots that all ranks have filled
    num_failed_fills: int = 0
    fill_s: float = 0.0  # from the orders of the fills that succeeded until all ranks had filled their slots
    wait_s: float = 0.0  # that answers waited for a slot, all together
    num_closed: int = 0  # slots that were closed for an adapter that had waited too long
    running: list[bytes] = []  # digests of adapters with a row, now
    waiting: list[bytes] = []  # digests of adapters that answers wait for, now: the first in the policy's order
