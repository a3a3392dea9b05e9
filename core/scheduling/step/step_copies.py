"""StepCopies: the copies of one step between blocks of the pool and slots of the arena.

Workers run them before anything else of the step, stores first, and steps in order. So a block may be overwritten by
the step that stores it, and a slot may be loaded from in the step that fills it or any later one.
"""

from __future__ import annotations

from typing import NamedTuple


class Write(NamedTuple):
    """Order to write a slot to the disk or the remote. It holds a reference to the slot."""

    key: bytes
    name: bytes  # that of the block's object
    slot: int
    targets: int  # bits as in StoreBlocks
    owner: int


class StepCopies(NamedTuple):
    """The copies of one step."""

    stores: bytes  # as in SchedulerOutput
    loads: bytes
    slots: list[int]  # referenced until the step is done
    filled: list[tuple[int, bytes]]  # slots, and the names of what they hold when the step is done
    writes: list[Write]  # to order when the step is done: of slots that it fills, or that are filled already
