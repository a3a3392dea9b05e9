"""TableGrowth: extends the block tables of running requests, and adds the changes to the next step's message."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...kv.block_pool import NULL_BLOCK
from ...kv.manager import KVCacheManager
from ...request import Request
from .rows import Rows
from .state_moves import StateMoves
from .step_delta import StepDelta


class TableGrowth:
    """Extension of tables. Owns the plans for states; `states` is None if no layer keeps one."""

    def __init__(self, rows: Rows, kv_cache: KVCacheManager, delta: StepDelta) -> None:
        self._rows = rows
        self._kv_cache = kv_cache
        self._delta = delta
        self._block_size = kv_cache.block_size
        self._has_windows = kv_cache.sizes.has_windows
        self._allocate = kv_cache.memory.allocate_each
        group = kv_cache.sizes.state_group
        self.states = None if group is None else StateMoves(rows, kv_cache, group)
        # Extends the tables of a running request to hold a number of tokens, up to which the step that is being made
        # computes it; False if too few blocks are free. Blocks behind all windows leave the tables first.
        self.grow: Callable[[Request, int], bool] = self._grow_tables
        if kv_cache.sizes.is_of_step:
            self.grow = lambda request, num_tokens: True
        elif self.states is not None:
            self.grow = partial(self._grow_with_state, self.states)
        elif len(kv_cache.groups) == 1 and kv_cache.sizes.are_full:
            self.grow = self._grow_table

    def _grow_table(self, request: Request, num_tokens: int) -> bool:
        block_ids = request.tables[0].block_ids
        num_new = -(-num_tokens // self._block_size) - len(block_ids)
        if num_new <= 0:
            return True
        self._kv_cache.filling = request
        found = self._allocate(num_new)
        if found is None:
            return False
        block_ids += found
        self._delta.append_blocks(request.row, found)
        return True

    def _grow_tables(self, request: Request, num_tokens: int) -> bool:
        tables = request.tables
        num_new = -(-num_tokens // self._block_size) - len(tables[0].block_ids)
        if num_new <= 0:
            return True
        if self._has_windows:
            first = self._rows.first_token(request.row)
            for table in tables:
                table.leave(first)
        self._kv_cache.filling = request
        found = self._allocate(num_new)
        if found is None:
            return False
        for group, table in enumerate(tables):
            table.block_ids += found[group * num_new : (group + 1) * num_new]
        self._delta.extend_tables(request, num_new)
        return True

    def grow_for_drafts(self, request: Request, num_tokens: int) -> bool:
        """Extend the tables of a running request to hold `num_tokens` tokens, the last of which are drafts; False if
        too few blocks are free. The step does not update the request's state."""
        if self.states is None:
            return self.grow(request, num_tokens)
        self.states.withhold(request)
        return self._extend(self.states, request, num_tokens, num_states=0) is not None

    def grow_ahead(self, request: Request, num_tokens: int) -> None:
        """Extend the tables of a running request to hold up to `num_tokens` tokens, while a block stays free for each
        row. The step does not compute them."""
        num_tokens = self.room(request, num_tokens)
        if self.states is None:
            self.grow(request, num_tokens)
        else:
            self._extend(self.states, request, num_tokens, num_states=0)

    def _grow_with_state(self, states: StateMoves, request: Request, num_tokens: int) -> bool:
        if num_tokens <= int(self._rows.num_scheduled[request.row]):
            return True
        positions = states.positions(request, num_tokens)
        found = self._extend(states, request, num_tokens, len(positions))
        if found is None:
            return False
        states.plan(request, num_tokens, positions, found)
        return True

    def _extend(self, states: StateMoves, request: Request, num_tokens: int, num_states: int) -> list[int] | None:
        """Extend tables as `grow` does, and allocate `num_states` blocks of states besides; return these, or None."""
        tables = request.tables
        num_new = max(-(-num_tokens // self._block_size) - request.num_blocks, 0)
        counts = [num_new] * len(tables)
        counts[states.group] = num_states
        if not num_new and not num_states:
            return []
        if num_new and self._has_windows:
            first = self._rows.first_token(request.row)
            for table in tables:
                table.leave(first)
        self._kv_cache.filling = request
        found = self._kv_cache.memory.allocate(counts)
        if found is None:
            return None
        if num_new:
            for group, table in enumerate(tables):
                table.block_ids += found[group] if table.has_appends else [NULL_BLOCK] * num_new
            self._delta.extend_tables(request, num_new)
        return found[states.group]

    def room(self, request: Request, num_tokens: int) -> int:
        """Return how many tokens, at most `num_tokens`, the tables of a request can hold while a block stays free for
        each row."""
        size = self._rows.block_size
        num_new = -(-num_tokens // size) - request.num_blocks
        if num_new > 0:
            num_new = self._kv_cache.num_spare(num_new, self._rows.num_active)
        return min(num_tokens, (request.num_blocks + num_new) * size)
