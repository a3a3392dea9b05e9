"""Router: chooses the core that is expected to answer a request soonest.

    cost of a core = (prompt tokens that wait there + new ones, which it does not have cached) / its measured rate
                   + its open answers × the seconds that each adds to an answer
                   + WASTE × new tokens / the mean rate: they delay others, and evict blocks that others would find

Candidates are the cores that hold the longest prefixes of the prompt and a few random ones, so the work of a choice
does not grow with the number of cores. Among those within 2 % of the least cost a random one is taken, so that several
frontends do not all choose the same core. A prompt is routed to its prefix, by content: a conversation stays on one
core as long as that is the cheapest. Priorities and quotas are left to the core.

Pure: knows no sockets and no clock. The same class runs in the frontend and in scripts/fleet/simulate_fleet.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from .core_load import CoreLoad, OthersLoad, Rate
from .prefix_index import MAX_ENTRIES, PrefixIndex
from .prefix_keys import KEY_TOKENS

MAX_HOLDERS = 8  # candidates chosen for their prefixes
NUM_CANDIDATES = 12  # number of candidates, including the random ones
WASTE = 6.0  # fitted on one trace and checked on another: docs/operate/replicas.md
TIE = 1.02  # a cost up to this multiple of the least counts as equal to it
FAVOR = 3.0  # a cost of the favorite core up to this multiple of the least is accepted
FIRST_RATE = 5000.0  # prompt tokens per second, before any is measured
FORGET = 0.995  # weight of all earlier answers when one more has finished
MIN_SHARE = 0.01  # least slowdown by each other answer, as a share of the decode time


@dataclass(slots=True)
class _Sent:
    """An open answer, with the number of cached tokens that its core was expected to have."""

    core: int
    num_tokens: int
    num_expected: int
    age: int  # tokens sent to the core since that prefix was last used; 0: too few to learn from
    age_beyond: int  # the same for the next key, which was expected to be evicted
    first_token_at: float = 0.0


class Router:
    """Owner of a CoreLoad for each core, the prefix index and the open answers. A lost or draining core is never
    picked."""

    def __init__(self, *, key_tokens: int = KEY_TOKENS, max_entries: int = MAX_ENTRIES, seed: int = 0) -> None:
        self.index = PrefixIndex(max_entries)
        self.loads: dict[int, CoreLoad] = {}
        self.open: dict[int, _Sent] = {}
        self._key_tokens = key_tokens
        self._random = random.Random(seed)
        self._pickable: list[int] = []
        self._oldest: dict[int, int] = {}  # least stamp that counts, for each pickable core
        self._fleet = Rate(FIRST_RATE)
        self._decode = DecodeCost()

    # ── cores come and go ────────────────────────────────────────────────────────────────────────────────────────

    def add(self, core: int, capacity_tokens: int | None = None) -> None:
        """Start to use a new or restarted core, whose prefix cache is empty. capacity_tokens: the size of that cache in
        tokens; None: unknown."""
        before = self.loads.get(core)
        self.loads[core] = CoreLoad(0 if before is None else before.num_inserted + 1, capacity_tokens)
        self.resume(core)

    def lose(self, core: int) -> list[int]:
        """Stop using a core that is gone, and return its open answers in the order in which they were sent."""
        self.drain(core)
        lost = [request_id for request_id, sent in self.open.items() if sent.core == core]
        for request_id in lost:
            self.on_finished(request_id, 0, 0.0)
        return lost

    def drain(self, core: int) -> None:
        """Send nothing new to a core; its open answers continue."""
        if core in self._oldest:
            self._pickable.remove(core)
            del self._oldest[core]

    def resume(self, core: int) -> None:
        """Allow sending to a drained core again."""
        if core not in self._oldest:
            self._pickable.append(core)
            self._oldest[core] = self.loads[core].oldest

    def clear_cache(self, core: int) -> None:
        """Record that a core has lost its prefix cache, but not its requests: its workers were replaced."""
        self.loads[core].clear_cache()
        self._on_aged(core)

    @property
    def cores(self) -> Sequence[int]:
        """The cores that may be picked."""
        return self._pickable

    def tokens_per_s(self, core: int, now: float) -> float:
        """Return the rate of a core in prompt tokens per second: as measured, or the mean of all cores if that is too
        long ago."""
        return self.loads[core].tokens_per_s(now, self._fleet.value)

    # ── a request ────────────────────────────────────────────────────────────────────────────────────────────────

    def favorite(self, name: str) -> int | None:
        """Return the core for requests that name the same conversation: the same in each frontend, by a hash of name
        and core, so that few change theirs when a core comes or goes. None if there is no core."""
        return max(self._pickable, key=lambda core: blake2b(f"{core} {name}".encode()).digest(), default=None)

    def pick(
        self, keys: Sequence[int], num_tokens: int, now: float, without: int = -1, favorite: int | None = None
    ) -> int | None:
        """Return the best core for a prompt of `num_tokens` with these prefix keys; None if there is no core. without:
        a core to avoid if there is another one; -1: none. favorite: a core that is taken unless it costs more than
        FAVOR times as much as the best."""
        candidates = self.index.longest(keys, self._oldest, MAX_HOLDERS)
        if favorite is not None:
            candidates.setdefault(favorite, self.index.depth(favorite, keys, self._oldest[favorite]))
        candidates.pop(without, None)
        for core in self._random_cores(candidates, without):
            candidates[core] = self.index.depth(core, keys, self._oldest[core])
        costs, fleet = {}, self._fleet.value
        for core, depth in candidates.items():
            load = self.loads[core]
            rest = max(num_tokens - depth * self._key_tokens, 1)
            num_open = load.num_open + load.others.num_open
            seconds = load.seconds(rest, now, fleet) + num_open * self._decode.row_s
            costs[core] = seconds + WASTE * rest / fleet
        if not costs:
            return without if without in self._oldest else None
        if favorite in costs and costs[favorite] <= FAVOR * min(costs.values()):
            return favorite
        most = TIE * min(costs.values())
        best = [core for core, cost in costs.items() if cost <= most]
        return best[int(self._random.random() * len(best))] if len(best) > 1 else best[0]

    def _random_cores(self, known: Iterable[int], without: int) -> Iterable[int]:
        """Return random cores other than `known` and `without`; in a small fleet, all of these."""
        cores, known = self._pickable, set(known) | {without}
        if len(cores) <= NUM_CANDIDATES:
            return [core for core in cores if core not in known]
        found = {cores[int(self._random.random() * len(cores))] for _ in range(NUM_CANDIDATES - len(known) + 1)}
        return found - known

    def on_sent(self, request_id: int, core: int, keys: Sequence[int], num_tokens: int, now: float) -> None:
        """Record that an answer was sent to a core. request_id: chosen by the caller, unique for each answer."""
        load, index, size = self.loads[core], self.index, self._key_tokens
        oldest = load.oldest
        depth = index.depth(core, keys, oldest)
        num_expected = min(depth * size, num_tokens - 1)
        sent = _Sent(core, num_tokens, num_expected, 0, 0)
        if depth and (age := load.num_inserted - index.stamp_of(core, keys[depth - 1])) > load.num_waiting_tokens:
            sent.age = age
        if depth < len(keys) and 0 <= (stamp := index.stamp_of(core, keys[depth])) < oldest:
            sent.age_beyond = load.num_inserted - stamp
        self.open[request_id] = sent
        load.on_sent(request_id, num_tokens - num_expected, now)
        self._on_aged(core)
        index.add(core, keys, load.num_inserted)

    def on_prefetched(self, core: int, keys: Sequence[int]) -> None:
        """Record that a core has loaded the KV blocks of a prompt without a request."""
        self.index.add(core, keys, self.loads[core].num_inserted)

    def on_started(self, request_id: int, num_cached_tokens: int) -> None:
        """Correct the load and the size of the prefix cache by the number of cached tokens that the core found when an
        answer left its waiting queue."""
        sent = self.open[request_id]
        load = self.loads[sent.core]
        load.correct(request_id, sent.num_tokens - min(num_cached_tokens, sent.num_tokens - 1))
        off_by = num_cached_tokens - sent.num_expected
        if off_by <= -self._key_tokens and sent.age:
            load.on_wrong_depth(sent.age, is_missing=True)
        elif off_by >= self._key_tokens and sent.age_beyond:
            load.on_wrong_depth(sent.age_beyond, is_missing=False)
        self._on_aged(sent.core)

    def on_first_token(self, request_id: int, now: float) -> None:
        sent = self.open[request_id]
        sent.first_token_at = now
        self.loads[sent.core].on_first_token(request_id, now, self._fleet)

    def on_finished(self, request_id: int, num_output_tokens: int, now: float) -> None:
        """Forget an answer that has ended or was moved to another core."""
        sent = self.open.pop(request_id)
        load = self.loads[sent.core]
        if sent.first_token_at:
            self._decode.on_finished(load.num_open, num_output_tokens, now - sent.first_token_at)
        load.on_finished(request_id, num_output_tokens)
        self._on_aged(sent.core)

    def on_load(self, core: int, others: OthersLoad) -> None:
        """Set a core's report of the work that other frontends have sent to it."""
        self.loads[core].others = others.checked()

    def _on_aged(self, core: int) -> None:
        if core in self._oldest:
            self._oldest[core] = self.loads[core].oldest


class DecodeCost:
    """Estimate of the seconds by which each other answer on a core prolongs an answer, learned from finished answers.

    Owns the running sums of a linear regression: seconds between tokens over the number of open answers on the core."""

    def __init__(self) -> None:
        self._sums = [0.0] * 6  # sums of: 1, rows, rows², seconds between tokens, rows × these, output tokens
        self.row_s = 0.0

    def on_finished(self, num_open: int, num_tokens: int, seconds: float) -> None:
        """Add an answer of `num_tokens` that took `seconds` after its first token, on a core with `num_open`
        answers."""
        if num_tokens < 2:
            return
        between_s = seconds / (num_tokens - 1)
        new = (1.0, num_open, num_open**2, between_s, num_open * between_s, num_tokens)
        self._sums = [FORGET * old + each for old, each in zip(self._sums, new, strict=True)]
        count, *sums = self._sums
        rows, squares, between_s, products, num_tokens_ = (each / count for each in sums)
        variance = squares - rows * rows
        slope = (products - rows * between_s) / variance if variance > 0.25 else 0.0
        self.row_s = num_tokens_ * max(slope, MIN_SHARE * between_s)
