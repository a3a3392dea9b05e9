"""Replay a trace of prompts through pool and tiers: how many of their tokens would have been found, and where.

    python scripts/fleet/replay_kv_trace.py TRACE.jsonl --pool 300000 --host 3000000 --disk 30000000

TRACE has a JSON object a line with `input_length`, `output_length` and `hash_ids`, one for each 512 tokens of the
prompt that follow the same tokens (the form of Mooncake's traces). Sizes are in tokens; 0: none. The pool and the host
tier are the engine's own; requests run one after the other, so that the order of the trace alone decides. Printed: the
share of prompt tokens found by the pool alone, by a pool that knows only the time of last use, with each further tier,
and by a cache that forgets nothing. TRACE may be `sessions`: conversations with pauses among single long prompts
(session_trace.py); the shares are then those of the tokens of conversations.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenloom.core.features.tiers.slots import Slots
from tokenloom.core.kv.block_pool import BlockPool
from tokenloom.core.kv.session_pool import SessionPool
from tokenloom.ipc.process.arena import ArenaShape
from tokenloom.scripts.bench.report import Report
from tokenloom.scripts.bench.runner import REQUIRED, read_options
from tokenloom.scripts.fleet.session_trace import TracedRequest, keys_of, session_trace

BLOCK = 512  # tokens


class Tier:
    """A tier that gets the blocks that the pool evicts; the engine's host tier, for all sizes."""

    def __init__(self, num_blocks: int) -> None:
        self.slots = Slots(ArenaShape(num_blocks, (1,), (1,)))

    def keep(self, key: bytes) -> None:
        if self.slots.lookup(key) is None and (slot := self.slots.allocate_for(0)) is not None:
            self.slots.cache_written(slot, key)
            self.slots.free([slot])

    def use(self, key: bytes) -> bool:
        """Return whether the block is here, and mark it as the one used last."""
        slot = self.slots.lookup(key)
        if slot is not None:
            self.slots.touch([slot])
            self.slots.free([slot])
        return slot is not None


class Replay:
    """The pool of an engine and its tiers. It observes the pool."""

    def __init__(self, pool: type[BlockPool], pool_tokens: int, tiers: Sequence[Tier] = ()) -> None:
        self.pool = pool(max(pool_tokens // BLOCK, 1) + 1, [self])
        self.tiers = tiers
        self.num_found = [0] * (1 + len(tiers))  # of blocks that count

    def written(self, group: int, block: int, key: bytes) -> None: ...

    def forgotten(self, group: int, block: int, key: bytes) -> None: ...

    def cleared(self, group: int) -> None: ...

    def evicted(self, group: int, block: int, key: bytes, *, is_demoted: bool = False) -> None:
        for tier in self.tiers:
            tier.keep(key)

    def request(self, request: TracedRequest) -> None:
        """Run a request: find the longest prefix, compute the rest and `num_new` blocks that nobody asks for."""
        table: list[int] = []
        places = [self._find(key) for key in request.keys]
        num_hits = next((i for i, place in enumerate(places) if place is None), len(places))
        for place in places[:num_hits]:
            assert place is not None
            self.num_found[place] += request.counts
        for i, key in enumerate(request.keys):
            block = self.pool.lookup(key)
            if i < num_hits and block is not None:
                self.pool.note_needed([block])
                self.pool.touch([block])
            else:
                taken = self.pool.allocate(1)
                if taken is None:
                    break  # longer than the pool
                (block,) = taken
                self.pool.cache_block(block, key)
            table.append(block)
        self.pool.note_end(table, num_hits)
        table += self.pool.allocate(min(request.num_new, self.pool.num_free)) or []
        self.pool.free(reversed(table))

    def _find(self, key: bytes) -> int | None:
        if self.pool.lookup(key) is not None:
            return 0
        return next((1 + i for i, tier in enumerate(self.tiers) if tier.use(key)), None)


def requests_of(trace: Path) -> Iterator[TracedRequest]:
    """Yield the requests of a file, or of the generated trace."""
    if trace.name == "sessions":
        yield from session_trace()
        return
    with trace.open(encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            yield TracedRequest(keys_of(request["hash_ids"]), -(-int(request["output_length"]) // BLOCK))


def num_ideal(requests: Sequence[TracedRequest]) -> int:
    """Return how many blocks a cache that forgets nothing would find."""
    seen: set[bytes] = set()
    found = 0
    for request in requests:
        num_hits = next((i for i, key in enumerate(request.keys) if key not in seen), len(request.keys))
        found += num_hits * request.counts
        seen.update(request.keys)
    return found


OPTIONS = {
    "trace": (REQUIRED, "", Path),
    "--pool": (300_000, "tokens in it"),
    "--host": (3_000_000, "tokens in it"),
    "--disk": (30_000_000, "tokens in it"),
}


def main() -> int:
    arguments = read_options(__doc__, OPTIONS)
    sizes = {name: getattr(arguments, name) for name in ("pool", "host", "disk")}
    report = Report("replay of a trace", {"trace": arguments.trace.name, **sizes})
    requests = list(requests_of(arguments.trace))
    num_blocks = sum(len(each.keys) for each in requests if each.counts)
    outer = [name for name in ("host", "disk") if sizes[name]]
    replays = {"pool, by time alone": Replay(BlockPool, arguments.pool)}
    for count in range(len(outer) + 1):
        tiers = [Tier(sizes[name] // BLOCK) for name in outer[:count]]
        replays[" + ".join(["pool", *outer[:count]])] = Replay(SessionPool, arguments.pool, tiers)
    for name, replay in replays.items():
        for request in requests:
            replay.request(request)
        share = {place: found / num_blocks for place, found in zip(["pool", *outer], replay.num_found, strict=False)}
        report.add(cache=name, found=sum(replay.num_found) / num_blocks, **share)
    report.add(cache="all that ever was", found=num_ideal(requests) / num_blocks)
    report.note("requests, blocks", [len(requests), num_blocks])
    report.publish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
