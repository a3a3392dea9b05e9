"""BlockNotes: what is known of the blocks of a pool, besides their keys, to copy and write them.

A block is sent once a step that was sent, or is sent next, gives it its content: later steps may copy it. It is
written once that step is done. It is wanted if other requests are likely to need it: all in a group that sees all
tokens, and in one with a window those before a kept boundary or the end of an answer.
"""

from __future__ import annotations

from ...kv.block_pool import BlockPool


class BlockNotes:
    """Notes of the blocks of one KV group; all are forgotten when the block leaves the index."""

    def __init__(self, pool: BlockPool) -> None:
        """Blocks with keys were written for the core before this one."""
        self._pool = pool
        self._no_notes = bytes(pool.num_blocks)
        self.is_sent = bytearray(self._no_notes)
        self.is_written = bytearray(self._no_notes)
        self.is_wanted = bytearray(self._no_notes)
        for block in map(pool.block_of, pool.keys):
            self.is_sent[block] = self.is_written[block] = True
        self.arriving: set[int] = set()  # blocks that get their content from a slot
        self._owner_by_block: dict[int, int] = {}  # tenant, for blocks of requests with a salt

    def owner(self, block: int) -> int:
        """Return the tenant whose request filled the block; 0: one without a salt."""
        return self._owner_by_block.get(block, 0)

    def sent(self, block: int, key: bytes, owner: int) -> bool:
        """Record that a step writes a block; return whether it is the one that lookups find by its key."""
        is_found = self._pool.holds(block, key)
        self.is_sent[block] = is_found
        if owner:
            self._owner_by_block[block] = owner
        return is_found

    def sent_pending(self) -> None:
        """Record that the next step writes all blocks that were cached since the last one."""
        for block, key in self._pool.pending:
            self.is_sent[block] = self._pool.holds(block, key)

    def forget(self, block: int) -> None:
        self.is_sent[block] = self.is_written[block] = self.is_wanted[block] = False
        self.arriving.discard(block)
        self._owner_by_block.pop(block, None)

    def clear(self) -> None:
        for each in (self.is_sent, self.is_written, self.is_wanted):
            each[:] = self._no_notes
        self.arriving.clear()
        self._owner_by_block.clear()
