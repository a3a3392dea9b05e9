"""Traces of requests for simulate_fleet.py: arrivals, lengths and shared prefixes, for a fleet of any size.

A trace has a JSON object a line: `timestamp` in milliseconds, `input_length`, `output_length` in tokens and `hash_ids`,
one for each BLOCK tokens of the prompt that follow the same tokens (the form of Mooncake's traces). A fleet's load is
the trace of several tenants: each has prompts of its own and begins somewhere else in the trace.
"""

from __future__ import annotations

import heapq
import json
import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

BLOCK = 512  # tokens


class Entry(NamedTuple):
    """One line of a trace."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    keys: tuple[int, ...]  # of the whole blocks of the prompt


@dataclass(eq=False, slots=True)
class Job:
    """A request of the simulation and its fate. Times in seconds of the simulation."""

    number: int
    arrived_at: float
    num_prompt_tokens: int
    num_output_tokens: int
    keys: Sequence[int]
    num_done: int = 0  # output tokens that were delivered
    is_poison: bool = False  # it ends the replica that computes it
    num_losses: int = 0  # replicas lost while they computed it, without a token in between
    num_resumes: int = 0
    num_cached_tokens: int = -1  # at its first start
    num_recomputed_tokens: int = 0
    first_token_at: float = -1.0
    finished_at: float = -1.0
    lost_at: float = -1.0  # of its last replica, until the next token
    gap_s: float = 0.0  # longest wait for a token after a loss
    core: int = field(default=-1)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.num_prompt_tokens + self.num_done

    @property
    def is_convicted(self) -> bool:
        return self.finished_at >= 0 and self.num_done < self.num_output_tokens


def read_trace(path: Path) -> list[Entry]:
    """Return the lines of a trace file, by time."""
    entries = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                request = json.loads(line)
                num_prompt, num_output = max(int(request["input_length"]), 1), max(int(request["output_length"]), 1)
                keys = tuple(int(key) for key in request["hash_ids"][: num_prompt // BLOCK])
                entries.append(Entry(float(request["timestamp"]) / 1000, num_prompt, num_output, keys))
            except (ValueError, KeyError, TypeError) as error:
                raise SystemExit(f"{path}, line {number}: no request ({error!r}); see the head of {__file__}") from None
    if not entries:
        raise SystemExit(f"{path} has no requests")
    return sorted(entries, key=lambda entry: entry.at_s)


def jobs_of(trace: Sequence[Entry], *, num_tenants: int, speed: float, duration_s: float, seed: int) -> Iterator[Job]:
    """Yield the requests of a fleet by their arrival. speed: how many times as fast as in the trace they come."""
    random_ = random.Random(seed)
    starts = [random_.randrange(len(trace)) for _ in range(num_tenants)]
    streams = (_of_tenant(trace, tenant, start, speed) for tenant, start in enumerate(starts))
    for number, (at, tenant, entry) in enumerate(heapq.merge(*streams, key=lambda each: each[:2])):
        if at > duration_s:
            return
        keys = [tenant << 40 | key for key in entry.keys]
        yield Job(number, at, entry.num_prompt_tokens, entry.num_output_tokens, keys)


def _of_tenant(trace: Sequence[Entry], tenant: int, start: int, speed: float) -> Iterator[tuple[float, int, Entry]]:
    """Yield the trace from an entry on, round and round; each round has prompts of its own."""
    length_s = trace[-1].at_s - trace[0].at_s + 1.0
    begin = trace[start].at_s
    for number in range(start, 1 << 40):
        turn, place = divmod(number, len(trace))
        entry = trace[place]
        if turn:
            entry = entry._replace(keys=tuple(turn << 32 | key for key in entry.keys))
        yield (entry.at_s + turn * length_s - begin) / speed, tenant, entry


def share_cached_by_one(jobs: Iterable[Job], num_blocks: int) -> float:
    """Return the share of prompt tokens that one cache of `num_blocks` blocks has, requests taken one by one. It is the
    bound for a fleet with as many blocks in all."""
    cache: OrderedDict[int, None] = OrderedDict()
    num_tokens = num_cached = 0
    for job in jobs:
        depth = next((i for i, key in enumerate(job.keys) if key not in cache), len(job.keys))
        num_tokens += job.num_prompt_tokens
        num_cached += min(depth * BLOCK, job.num_prompt_tokens - 1)
        for key in reversed(job.keys):
            cache[key] = None
            cache.move_to_end(key)
        for i in range(-(-(job.num_output_tokens + job.num_prompt_tokens % BLOCK) // BLOCK)):
            cache[-(job.number << 10 | i) - 1] = None  # blocks of the answer, which no prompt has
        while len(cache) > num_blocks:
            cache.popitem(last=False)
    return num_cached / max(num_tokens, 1)
