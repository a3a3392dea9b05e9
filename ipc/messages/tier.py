"""Messages between the core and tier processes, over DEALER/DEALER: KV blocks are found, loaded into slots and stored
from slots.

A slot is a place in the arena (process/arena.py) for one block: on each host the parts of its ranks, one after another.
Messages give it by its number, which names its KV group, too.
The core allocates the slots and alone decides which content goes where; the tier process of a host reads and writes
disks and networks. Each order goes to the tier processes of all hosts, and their answers are merged into one
(core/links/tier_answers.py).
The slots of LoadBlocks and StoreBlocks belong to the tier process. Each one belongs to the core again when a
BlocksLoaded or BlocksStored names it, or with the last reply to the job. The `keys` of an order are the names of blocks
(object_name in core/kv/block_hash.py), 32 bytes each. A source is given by its index in SOURCES.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from .base import Message
from .media import MediaSpan

SourceName: TypeAlias = Literal["disk", "remote", "peer"]
SOURCES: tuple[SourceName, ...] = ("disk", "remote", "peer")
PlaceName: TypeAlias = Literal["pool", "host", "disk", "remote", "peer"]
PLACES: tuple[PlaceName, ...] = ("pool", "host", *SOURCES)  # where a request may find blocks
STORE_ON_DISK, STORE_REMOTELY = 1, 2  # bits of `targets`
HERE = 255  # in BlocksFound, in place of a source: the question said that the core has the block


class OpenTier(Message, frozen=True, kw_only=True, tag="open_tier"):
    """Order to read the digest of the weights and to open all sources under the namespace made from it, which replaces
    the one that was open before. The reply is TierOpened; none comes if the weights cannot be read."""

    serial: int
    model_folder: str  # empty: the folder of the start, which has another path on each host
    facts: bytes  # JSON: everything that determines the bytes of a block, except the weights


class FindGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a KV group needs to continue at a boundary, for FindBlocks."""

    needed: int = 0  # blocks before a boundary without which no row continues there; 0: all of them
    here: bytes = b""  # uint8 for each block of the question: 1 = the core has it, in the pool or a slot; empty: none


class FindBlocks(Message, frozen=True, kw_only=True, tag="find_blocks"):
    """Request to find the largest boundary of a prompt at which every group has the blocks that it needs, here or in
    some source. The rule is that of core/kv/hit_rule.py; blocks before the first of the question count as here.

    The reply is BlocksFound, within about 0.25 s, with what was found until then; a reply that waits for another host
    may come after the replies to later requests."""

    serial: int
    parent: bytes  # key of the block before the first, or the root
    token_ids: bytes  # int32, of whole blocks
    block_size: int  # tokens
    groups: list[FindGroup]  # of the engine, in order
    least: int = 0  # boundary in blocks of the prompt: only larger ones are of use
    skips_remote: bool = False  # do not look the blocks up outside this machine
    start: int = 0  # index in the prompt of the first of these tokens, a multiple of block_size
    media: list[MediaSpan] = []  # all media of the prompt


class LoadBlocks(Message, frozen=True, kw_only=True, tag="load_blocks"):
    """Order to read blocks into slots and to check them. The replies are BlocksLoaded, one or more for a job."""

    job: int
    keys: bytes
    slots: bytes  # int32
    sources: bytes  # uint8


class CancelLoad(Message, frozen=True, kw_only=True, tag="cancel_load"):
    """Order to start no further reads of a job; its last BlocksLoaded still follows."""

    job: int


class StoreBlocks(Message, frozen=True, kw_only=True, tag="store_blocks"):
    """Order to write the content of slots. The replies are BlocksStored, one or more for a job. The reply for slots
    that do not fit into the write queue comes at once."""

    job: int
    keys: bytes
    slots: bytes  # int32
    targets: bytes  # uint8: STORE_ON_DISK, STORE_REMOTELY or both
    owners: bytes  # uint64: number of each block's tenant, for quotas; 0: requests without a salt


class PinnedBlocks(Message, frozen=True, kw_only=True, tag="pinned_blocks"):
    """Reply to PinBlocks: the slot of each key, which keeps its content until UnpinSlots."""

    serial: int
    slots: bytes  # int32; -1: the host tier has no such block


class ClearTier(Message, frozen=True, kw_only=True, tag="clear_tier"):
    """Order to remove every object of the open namespace from the disk and the remote store. The reply is TierCleared,
    even if some objects could not be removed."""

    serial: int


class FlushTier(Message, frozen=True, kw_only=True, tag="flush_tier"):
    """Order to report when everything sent before is written. The reply is TierFlushed."""

    serial: int


CoreToTier: TypeAlias = (
    OpenTier | FindBlocks | LoadBlocks | CancelLoad | StoreBlocks | PinnedBlocks | ClearTier | FlushTier
)


class TierOpened(Message, frozen=True, kw_only=True, tag="tier_opened"):
    serial: int
    namespace: bytes  # 32 bytes: the root of all keys


class BlocksFound(Message, frozen=True, kw_only=True, tag="blocks_found"):
    """Reply to FindBlocks: the boundary `end`, in blocks of the prompt, and the source of each block that a group needs
    there and that is not before the first of the question: for a group that needs all blocks those up to `end`, for
    another one the last `needed` of them. If no boundary is of use, `end` is at most the question's `least`, and there
    are no sources."""

    serial: int
    sources: list[bytes]  # by group: uint8 for each block, in order; a source or HERE
    end: int
    deepest: int = 0  # the boundary at which the first group alone could continue, if it is larger


class BlocksLoaded(Message, frozen=True, kw_only=True, tag="blocks_loaded"):
    """Reply to LoadBlocks: slots of a job that belong to the core again."""

    job: int
    slots: bytes = b""  # int32: slots that hold the content of their keys
    bad_slots: bytes = b""  # int32: slots with blocks that were missing, late or damaged, or with a cancelled load
    is_last: bool = False


class BlocksStored(Message, frozen=True, kw_only=True, tag="blocks_stored"):
    """Reply to StoreBlocks: slots of a job that belong to the core again."""

    job: int
    slots: bytes  # int32
    targets: bytes  # uint8: where the block now is; 0: it was dropped
    is_last: bool = False


class PinBlocks(Message, frozen=True, kw_only=True, tag="pin_blocks"):
    """Request, for another engine, to pin blocks in the host tier. The reply is PinnedBlocks."""

    serial: int
    keys: bytes


class UnpinSlots(Message, frozen=True, kw_only=True, tag="unpin_slots"):
    slots: bytes  # int32


class TierCleared(Message, frozen=True, kw_only=True, tag="tier_cleared"):
    serial: int


class TierFlushed(Message, frozen=True, kw_only=True, tag="tier_flushed"):
    serial: int


class SourceState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A source's state and its totals since the start of the tier process."""

    name: PlaceName
    is_open: bool = False
    is_broken: bool = False  # its circuit breaker is open: it is not used until a probe succeeds
    error: str = ""  # the last error, with its remedy
    num_objects: int = 0
    held_bytes: int = 0
    max_bytes: int = 0  # 0: unknown
    queued_bytes: int = 0  # in the write queue
    num_read: int = 0  # blocks
    read_bytes: int = 0
    read_s: float = 0.0
    num_written: int = 0
    written_bytes: int = 0
    write_s: float = 0.0
    num_dropped: int = 0  # blocks not written: the queue was full, or the write failed
    num_failed: int = 0  # reads and lookups that failed
    rejected: dict[str, int] = {}  # rejected objects by reason: checksum, key, version, mac, length


class TiersProgress(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of all tiers, and totals since the core's start."""

    num_tokens_by_place: list[int]  # tokens of found blocks, in the order of PLACES
    num_slots: int  # the most that there can be at a time
    num_filled_slots: int  # slots with a block that lookups find
    num_used_slots: int  # slots that a step, the tier process or a peer refers to
    used_slot_bytes: int = 0  # of these; slots may have several sizes
    num_waiting: int = 0  # requests that wait for blocks
    is_open: bool = False  # the namespace of the weights is known, so that sources are in use
    sources: list[SourceState]  # first the host (the slots), without seconds, since workers copy its blocks in steps


class TierState(Message, frozen=True, kw_only=True, tag="tier_state"):
    """The state of all configured sources, sent after a change, at most once a second."""

    sources: list[SourceState]


TierToCore: TypeAlias = (
    TierOpened
    | BlocksFound
    | BlocksLoaded
    | BlocksStored
    | PinBlocks
    | UnpinSlots
    | TierCleared
    | TierFlushed
    | TierState
)
