"""A source whose blocks are lost, late or damaged, as a seed decides."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenloom.core.tiers.source import Item, Namespace, Source
from tokenloom.ipc.messages.tier import SourceName, SourceState

DAMAGES = ("corrupt", "truncate", "swap")
LOAD_FAULTS = ("drop", "delay", *DAMAGES)
STORE_FAULTS = ("delay", "no space")


class FaultySource:
    """Wraps a source. With probability `rate` a block meets one of `faults`; `counts` says how many met each.

    drop: not read · delay: after `delay_s` · corrupt, truncate, swap: `damage` is called with the fault, the key and a
    random generator, and damages the stored object before it is read · no space: not written.
    """

    def __init__(
        self,
        source: Source,
        rate: float,
        seed: int,
        faults: Sequence[str],
        damage: Callable[[str, bytes, random.Random], None] | None = None,
        delay_s: float = 0.001,
    ) -> None:
        self.name: SourceName = source.name
        self.num_loaders, self.load_batch, self.store_batch = source.num_loaders, source.load_batch, source.store_batch
        self.counts: Counter[str] = Counter()
        self._source, self._rate, self._faults = source, rate, faults
        self._damage, self._delay_s = damage, delay_s
        self._rng, self._lock = random.Random(seed), threading.Lock()
        self._never = threading.Event()

    def _meets(self, possible: Sequence[str]) -> str | None:
        """Draw the fault that a block meets, and carry it out if it is none of the caller's."""
        faults = [fault for fault in self._faults if fault in possible]
        with self._lock:
            if not faults or self._rng.random() >= self._rate:
                return None
            fault = self._rng.choice(faults)
            self.counts[fault] += 1
        if fault == "delay":
            self._never.wait(self._delay_s)
        return fault

    def open(self, namespace: Namespace) -> None:
        self._source.open(namespace)

    def find(self, keys: Sequence[bytes], deadline: float) -> int:
        self._meets(["delay"])
        return self._source.find(keys, deadline)

    def load(self, items: Sequence[Item], deadline: float, on_loaded: Callable[[int, bool], None]) -> None:
        for index, item in enumerate(items):
            fault = self._meets(LOAD_FAULTS)
            if fault == "drop":
                on_loaded(index, False)
                continue
            if fault in DAMAGES and self._damage is not None:
                with self._lock:
                    self._damage(fault, item.key, self._rng)
            results: list[bool] = []
            self._source.load([item], deadline, _recorder(results))
            on_loaded(index, results[0])

    def store(self, items: Sequence[Item]) -> list[bool]:
        return [self._meets(STORE_FAULTS) != "no space" and self._source.store([item])[0] for item in items]

    def clear(self) -> None:
        self._source.clear()

    def state(self) -> SourceState:
        return self._source.state()

    def close(self) -> None:
        self._source.close()


def _recorder(results: list[bool]) -> Callable[[int, bool], None]:
    return lambda _, is_good: results.append(is_good)


def damage_file(path: Path, fault: str, other: Path, rng: random.Random) -> None:
    """Damage a file of an object as `fault` says; `other` is the file of another object. Without a file do nothing."""
    try:
        content = bytearray(path.read_bytes())
        if fault == "corrupt":
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        elif fault == "truncate":
            content = content[: rng.randrange(len(content))]
        else:
            content = bytearray(other.read_bytes())
        path.write_bytes(content)
    except FileNotFoundError:
        pass
