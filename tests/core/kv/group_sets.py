"""Sets of KV groups for tests of the core: windows and sizes of blocks, from one group to three."""

from __future__ import annotations

from typing import NamedTuple

from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.ipc.spec.config.speculation import MAX_DRAFTS
from tokenloom.ipc.spec.kv.kv_groups import KVGroup, num_held
from tokenloom.tests.core.fake_cache import STATE


class Groups(NamedTuple):
    """Windows of the layers (STATE: they keep a state), and the bytes of a slab and of a block of each group."""

    windows: tuple[int | None, ...]
    slab_bytes: int
    block_bytes: tuple[int, ...]

    def held(self, num_tokens: int, block_size: int, max_step_tokens: int) -> list[int]:
        """Return by group the most blocks that a request of `num_tokens` holds."""
        step_tokens = max_step_tokens + 2 * (1 + MAX_DRAFTS)
        groups = [KVGroup(window or None, (), 1, 8, is_state=window == STATE) for window in self.windows]
        return num_held(groups, num_tokens, step_tokens, block_size)

    def pool(self, num_more: int, block_size: int, max_step_tokens: int) -> PoolShape:
        """Return the shape of a pool that has `num_more` slabs beyond those of a request of 80 tokens."""
        empty = PoolShape(0, self.slab_bytes, self.block_bytes)
        least = empty.num_slabs_for(self.held(80, block_size, max_step_tokens))
        return PoolShape(least + num_more, self.slab_bytes, self.block_bytes)


SETS = {
    "full": Groups((None,), 1, (1,)),
    "full and window": Groups((None, 6), 20, (3, 10)),
    "full and two windows": Groups((None, 20, 5), 24, (4, 12, 5)),
    "two full and two windows": Groups((None, None, 9, 9), 21, (4, 7, 3, 5)),
    "windows": Groups((21, 6), 15, (5, 4)),
    "window": Groups((9,), 1, (1,)),
    "Gemma 4": Groups((None, 12), 32, (7, 16)),
    "gpt-oss": Groups((None, 8), 4, (4, 4)),
    "Qwen3.5": Groups((None, STATE), 64, (2, 64)),
    "LFM2": Groups((None, STATE), 35, (5, 3)),
    "windows and states": Groups((None, 10, STATE), 60, (3, 7, 20)),
    "window and states": Groups((9, STATE), 14, (4, 7)),
    "states": Groups((STATE,), 1, (1,)),
}
