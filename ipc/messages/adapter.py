"""Structs about LoRA adapters and the workers' slots for them, as parts of messages of several channels.

A client names an adapter; the frontend's registry turns the name into a digest of the content, which all other
processes use. The workers hold adapters in slots 1 … max_loras; slot 0 means no adapter.
"""

from __future__ import annotations

import msgspec

NO_SLOT = 0


class AdapterRef(msgspec.Struct, frozen=True, kw_only=True):
    """The adapter of a request, checked by the frontend and kept in the engine's own store."""

    digest: bytes  # SHA-256 of the content
    folder: str  # in the store; empty: the adapter is a gateway's, a blob in this host's store for these
    rank: int  # the largest rank of its modules

    @property
    def place(self) -> str:
        """Where the adapter is, as a phrase for error messages."""
        return f"in {self.folder}" if self.folder else f"{self.digest.hex():.16} of a gateway"


class SlotContent(msgspec.Struct, frozen=True, kw_only=True):
    """The adapter in a worker's slot."""

    slot: int
    digest: bytes


class FillSlot(msgspec.Struct, frozen=True, kw_only=True):
    """Order to load an adapter into a slot that no row of this step or of an earlier one uses. The reply is
    SlotFilled."""

    slot: int
    digest: bytes
    folder: str  # as in AdapterRef
    num_waiting: int = 1  # adapters that wait for a slot, this one included: with more, loads may take more of the CPU


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An adapter that requests may name."""

    name: str
    path: str  # folder that it was loaded from
    digest: str  # in hex
    rank: int
    base: str  # served name of the model
    loaded_at: float = 0.0  # unix seconds


class AdaptersProgress(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The core's state of the slots, in Progress. Numbers and seconds without "now" are totals since this core's start.
    Not frozen, since the core counts in its own instance."""

    num_slots: int
    num_ready: int = 0  # slots, now
    num_filling: int = 0  # slots, now
    num_waiting: int = 0  # answers that wait for a slot, now
    num_queued: int = 0  # answers with an adapter that were queued; counted again after each preemption
    num_hits: int = 0  # of num_queued: those with their adapter in a slot when they were queued
    num_fills: int = 0  # slots that all ranks have filled
    num_failed_fills: int = 0
    fill_s: float = 0.0  # from the orders of the fills that succeeded until all ranks had filled their slots
    wait_s: float = 0.0  # sum of the times that answers waited for a slot
    num_closed: int = 0  # slots closed to new rows for the sake of an adapter that had waited too long
    running: list[bytes] = []  # digests of adapters with a row, now
    waiting: list[bytes] = []  # digests of adapters for which answers wait, now: the first ones in the policy's order
