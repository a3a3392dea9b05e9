"""Changes of JSON files that no sane program writes: each field removed or replaced by another type, a number out of
every range, a nest or a long text.

    assert not faults(hostile_changes(config), lambda change: load(written(change.of(config))))
"""

from __future__ import annotations

import copy
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from tokenloom.ipc.errors import ConfigError, RequestError

CPU_S = 1.0
MAX_BYTES = 32 << 20  # beside the file, whose longest text is copied a few times
REMOVED = object()
NEST: Any = "x"
for _ in range(200):
    NEST = [{"a": NEST}]
VALUES: dict[str, Any] = {
    "removed": REMOVED,
    "null": None,
    "empty text": "",
    "text": "x",
    "-1": -1,
    "0": 0,
    "1": 1,
    "0.5": 0.5,
    "2^31": 1 << 31,
    "10^30": 10**30,
    "infinity": float("inf"),  # this and the next are in no JSON but Python's
    "nan": float("nan"),
    "list": [],
    "object": {},
    "true": True,
    "list of one": ["x"],
    "object of one": {"x": [1]},
    "list of negatives": [-1, -1],
    "nest": NEST,
    "long text": "x" * (1 << 20),
}


class Hostile(NamedTuple):
    """A field, by the keys and indices on the way to it, and the name of its new value."""

    path: tuple[str | int, ...]
    value: str

    def of(self, config: Any) -> Any:
        """Return a copy of the config with the change."""
        found = copy.deepcopy(config)
        place = found
        for step in self.path[:-1]:
            place = place[step]
        if VALUES[self.value] is REMOVED:
            del place[self.path[-1]]
        else:
            place[self.path[-1]] = VALUES[self.value]
        return found

    @property
    def names(self) -> list[str]:
        """The names on the way to the field."""
        return [step for step in self.path if isinstance(step, str)]


def hostile_changes(config: Any) -> Iterator[Hostile]:
    """Yield every change of every field, and of the first entry of each list."""
    yield from (Hostile(path, value) for path in _paths(config, ()) for value in VALUES)


def _paths(value: Any, at: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    if at:
        yield at
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _paths(inner, (*at, name))
    elif isinstance(value, list) and value:
        yield from _paths(value[0], (*at, 0))


def faults(changes: Iterable[Hostile], read: Callable[[Hostile], object]) -> str:
    """Return a line for each change that is neither read nor refused by the name of the field, in CPU_S and MAX_BYTES;
    empty if there is none. `read` writes the change and reads it."""
    results = ((change, _fault(change, read)) for change in changes)
    return "\n".join(
        f"{'.'.join(map(str, change.path))} = {change.value}: {fault}" for change, fault in results if fault
    )


def _fault(change: Hostile, read: Callable[[Hostile], object]) -> str:
    tracemalloc.start()
    begun, fault = time.process_time(), ""
    try:
        read(change)
    except (ConfigError, RequestError) as refusal:
        if not _names(str(refusal), change):
            fault = f"refused without its name: {refusal!s:.300}"
    except Exception as error:  # any is a fault
        fault = f"{type(error).__name__}: {error!s:.200}"
    spent = time.process_time() - begun
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return f"{fault} in {spent:.1f} s of CPU and {peak} bytes" if spent > CPU_S or peak > MAX_BYTES else fault


def _names(message: str, change: Hostile) -> bool:
    """Return whether a message names the field, the object or list that holds it, or the byte that is no JSON."""
    return "(byte " in message or any(_plain(name).rstrip("s") in _plain(message) for name in change.names[-2:])


def _plain(text: str) -> str:
    return text.replace("_", " ").lower()
