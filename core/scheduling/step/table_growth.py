"""TableGrowth: extends the block tables of running requests, and adds the changes to the next step's message."""

from __future__ import annotations

from ...kv.manager import KVCacheManager
from ...request import Request
from .rows import Rows
from .step_delta import StepDelta


class TableGrowth:
    """Extension of tables. Owns nothing."""

    def __init__(self, rows: Rows, kv_cache: KVCacheManager, delta: StepDelta) -> None:
        self._rows = rows
        self._kv_cache = kv_cache
        self._delta = delta
        self._block_size = kv_cache.block_size
        self._has_windows = kv_cache.sizes.has_windows
        self._appends_only = len(kv_cache.groups) == 1 and not kv_cache.sizes.has_windows
        self._allocate = kv_cache.memory.allocate_each

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Extend the tables of a running request to hold `num_tokens` tokens; False if too few blocks are free. Blocks
        behind all windows leave the tables first."""
        tables = request.tables
        num_new = -(-num_tokens // self._block_size) - len(tables[0].block_ids)
        if num_new <= 0:
            return True
        if self._has_windows:
            first = self._rows.first_token(request.row)
            for table in tables:
                table.leave(first)
        found = self._allocate(num_new)
        if found is None:
            return False
        if self._appends_only:
            tables[0].block_ids += found
            self._delta.append_blocks(request.row, found)
        else:
            for group, table in enumerate(tables):
                table.block_ids += found[group * num_new : (group + 1) * num_new]
            self._delta.extend_tables(request, num_new)
        return True

    def room(self, request: Request, num_tokens: int) -> int:
        """Return how many tokens, at most `num_tokens`, the tables of a request can hold while a block stays free for
        each row."""
        size = self._rows.block_size
        num_new = -(-num_tokens // size) - request.num_blocks
        if num_new > 0:
            num_new = self._kv_cache.num_spare(num_new, self._rows.num_active)
        return min(num_tokens, (request.num_blocks + num_new) * size)
