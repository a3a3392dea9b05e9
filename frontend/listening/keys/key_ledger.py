"""KeyLedger: the open requests and the used tokens of each named API key, exact through any kill of a process.

Each frontend has a file in the run directory, which only it writes and all read (shared_words.py): for each key its
totals and the tokens of each of the last seconds, and for each open request the tokens that it was charged. So the
numbers are those of the engine as a whole, whatever becomes of its cores. A frontend that replaces a killed one takes
its file over. It finds the open requests that go on by their ids, which are the same; the tokens that these had been
charged are not charged again. Requests that have not come back after INHERIT_S are closed.

A request that is new is checked against the limits under a lock that all frontends share. One that goes on is never
refused, so the sum of open requests does not exceed a limit that it kept before.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ....ipc.errors import Overloaded, RateLimited, RequestError
from ....ipc.spec.config.engine_spec import EngineSpec
from .api_keys import MAX_KEYS, MAX_NAME, ApiKey
from .shared_words import FIRST, SharedWords

WINDOW_S = 60  # of tokens_per_minute
INHERIT_S = 10.0  # for which requests of the frontend before may come back
LOCK_S = 0.1  # longest wait for another frontend that checks a request
MAX_OPEN = 16384  # open requests of named keys in a frontend
_RING = 64  # seconds with a count of their own
_NAME_WORDS = MAX_NAME // 8
NUM_OPEN, NUM_REQUESTS, NUM_REFUSED, PROMPT, OUTPUT = range(5)  # places of a key's numbers
_KEY_WORDS = 5 + _NAME_WORDS + 2 * _RING  # then its name, and for each second its number and tokens
_OPEN_WORDS = (
    4  # of an open request: digest of its id, 0 if free; place of its key; charged tokens of prompt, of answers
)
_FIRST_OPEN = FIRST + MAX_KEYS * _KEY_WORDS
_NUM_WORDS = MAX_KEYS * _KEY_WORDS + MAX_OPEN * _OPEN_WORDS


class KeyUsage(NamedTuple):
    """Numbers of a key: since the engine's start, and now."""

    open_requests: int = 0
    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    tokens_last_minute: int = 0


class OpenUse:
    """An open request in the ledger, until `close`."""

    def __init__(self, ledger: KeyLedger, key: ApiKey, slot: int) -> None:
        self.key, self._ledger, self._slot = key, ledger, slot

    def begin(self, num_prompt_tokens: int, *, goes_on: bool) -> None:
        """Charge the prompt, unless it was. If it was not, and the request does not go on, RateLimited if its key has
        used up its tokens per minute, and RequestError if the prompt alone has more."""
        self._ledger.begin(self._slot, self.key, num_prompt_tokens, goes_on=goes_on)

    def charge(self, num_output_tokens: int) -> None:
        """Charge the tokens of all answers so far, unless that many were charged before."""
        self._ledger.charge(self._slot, 3, num_output_tokens, OUTPUT)

    def close(self) -> None:
        self._ledger.close(self._slot)


class KeyLedger:
    """Owner of this frontend's file, and reader of the others'."""

    def __init__(
        self, folder: Path, index: int, num_frontends: int, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`index`: of this frontend. Nothing is opened before the first call, since the frontend before may still
        write. `monotonic`: a clock that all processes share."""
        self._folder, self._index, self._num_frontends, self._monotonic = folder, index, num_frontends, monotonic
        self._files: list[SharedWords] = []
        self._places: list[dict[str, int]] = []  # of each file: the first index of each key, by name
        self._free: list[int] = []  # indices of slots
        self._inherited: dict[int, int] = {}  # slots of requests that may come back, by digest
        self._inherited_until = 0.0
        self._lock_fd = -1

    def tick(self) -> None:
        """Open the files, and close the requests that have not come back in time."""
        self._prepare()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────

    def open(self, key: ApiKey, request_id: str, *, goes_on: bool) -> OpenUse:
        """Count a request as open. Unless it goes on, RateLimited if its key has as many as it may have."""
        self._prepare()
        digest = int.from_bytes(hashlib.blake2b(request_id.encode(), digest_size=8).digest(), "little") >> 1 or 1
        if (slot := self._inherited.pop(digest, None)) is not None:
            return OpenUse(self, key, slot)
        with self._locked():
            place = self._place(key.name)
            num_open = sum(self._numbers(key.name, NUM_OPEN))
            if not goes_on and key.open_requests and num_open >= key.open_requests:
                self._add(place + NUM_REFUSED)
                raise RateLimited(
                    f"key {key.name} has {num_open} open requests, at most {key.open_requests} may be: ask again later"
                )
            if not self._free:
                raise Overloaded(f"this frontend has {MAX_OPEN} open requests of named keys: ask again later")
            slot = self._free.pop()
            words = self._own.words
            changes = [(slot + 1, place), (slot + 2, 0), (slot + 3, 0), (slot, digest)]
            changes += [(place + each, words[place + each] + 1) for each in (NUM_OPEN, NUM_REQUESTS)]
            self._own.change(changes)
        return OpenUse(self, key, slot)

    def begin(self, slot: int, key: ApiKey, num_tokens: int, *, goes_on: bool) -> None:
        """Charge a prompt, as in OpenUse."""
        most = key.tokens_per_minute
        if not most or goes_on or self._own.words[slot + 2]:
            self.charge(slot, 2, num_tokens, PROMPT)
            return
        if num_tokens > most:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, key {key.name} may use {most} in a minute: shorten it or raise "
                "tokens_per_minute of the key"
            )
        with self._locked():
            used = self._lately(key.name)
            if sum(used.values()) + num_tokens > most:
                self._add(self._own.words[slot + 1] + NUM_REFUSED)
                raise RateLimited(
                    f"key {key.name} has used {sum(used.values())} tokens in the last minute, at most {most} may be, "
                    f"and the prompt has {num_tokens}: ask again later",
                    self._seconds_until(used, most - num_tokens),
                )
            self.charge(slot, 2, num_tokens, PROMPT)

    def charge(self, slot: int, part: int, num_tokens: int, total: int) -> None:
        """Raise the charged tokens of a request to `num_tokens`. part: 2 of its prompt, 3 of its answers. total: the
        place of the key's total of them."""
        words = self._own.words
        more = num_tokens - words[slot + part]
        if more <= 0:
            return
        place, second = words[slot + 1], int(self._monotonic())
        ring = place + 5 + _NAME_WORDS + 2 * (second % _RING)
        in_second = words[ring + 1] if words[ring] == second else 0
        changes = [(slot + part, num_tokens), (place + total, words[place + total] + more)]
        self._own.change([*changes, (ring, second), (ring + 1, in_second + more)])

    def close(self, slot: int) -> None:
        place = self._own.words[slot + 1]
        self._own.change([(slot, 0), (place + NUM_OPEN, self._own.words[place + NUM_OPEN] - 1)])
        self._free.append(slot)

    # ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────

    def usage(self, name: str) -> KeyUsage:
        """Return the numbers of a key, of all frontends."""
        self._prepare()
        totals = [sum(self._numbers(name, place)) for place in (NUM_OPEN, NUM_REQUESTS, NUM_REFUSED, PROMPT, OUTPUT)]
        return KeyUsage._make([*totals, sum(self._lately(name).values())])

    def _numbers(self, name: str, number: int) -> Iterator[int]:
        """Yield a number of a key in each file that knows it."""
        for which in range(self._num_frontends):
            if (place := self._find(which, name)) is not None:
                yield self._files[which].words[place + number]

    def _lately(self, name: str) -> dict[int, int]:
        """Return the tokens of a key by second, of the last WINDOW_S seconds."""
        found: dict[int, int] = {}
        since = int(self._monotonic()) - WINDOW_S
        for which in range(self._num_frontends):
            if (place := self._find(which, name)) is not None:
                begin = place + 5 + _NAME_WORDS
                ring = self._files[which].words[begin : begin + 2 * _RING].tolist()
                for second, num_tokens in zip(ring[0::2], ring[1::2], strict=True):
                    if second > since:
                        found[second] = found.get(second, 0) + num_tokens
        return found

    def _seconds_until(self, used: dict[int, int], most: int) -> float:
        """Return the seconds until at most `most` of the tokens in `used` are in the window."""
        left = sum(used.values())
        for second in sorted(used):
            left -= used[second]
            if left <= most:
                return second + WINDOW_S - self._monotonic()
        return WINDOW_S

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _own(self) -> SharedWords:
        return self._files[self._index]

    def _prepare(self) -> None:
        """Open the files at the first call. Later, close requests that have not come back in time."""
        if not self._files:
            paths = [self._folder / f"frontend-{which}.keys" for which in range(self._num_frontends)]
            self._files = [SharedWords(path, _NUM_WORDS) for path in paths]
            self._places = [{} for _ in paths]
            self._own.repair()
            slots = range(_FIRST_OPEN, _FIRST_OPEN + MAX_OPEN * _OPEN_WORDS, _OPEN_WORDS)
            words = self._own.words
            self._inherited = {words[slot]: slot for slot in slots if words[slot]}
            self._free = [slot for slot in reversed(slots) if not words[slot]]
            self._inherited_until = self._monotonic() + INHERIT_S
        elif self._inherited and self._monotonic() >= self._inherited_until:
            inherited, self._inherited = self._inherited, {}
            for slot in inherited.values():
                self.close(slot)

    def _find(self, which: int, name: str) -> int | None:
        """Return the first index of a key in a file; None if it has none."""
        places, words = self._places[which], self._files[which].words
        if name not in places:
            wanted = _name_words(name)
            for place in range(FIRST, _FIRST_OPEN, _KEY_WORDS):
                found = words[place + 5 : place + 5 + _NAME_WORDS].tolist()
                if found == wanted:
                    places[name] = place
                    break
                if not found[0]:
                    return None
        return places.get(name)

    def _place(self, name: str) -> int:
        """Return the first index of a key in this frontend's file; take a free one for a new key. Overloaded if there
        is none: keys that are not valid any more keep theirs."""
        if (place := self._find(self._index, name)) is not None:
            return place
        words = self._own.words
        for place in range(FIRST, _FIRST_OPEN, _KEY_WORDS):
            if not words[place + 5]:
                self._own.change([(place + 5 + each, word) for each, word in enumerate(_name_words(name))])
                return place
        raise Overloaded(f"{MAX_KEYS} names of keys were used since the start: start the engine again for more")

    def _add(self, index: int) -> None:
        self._own.change([(index, self._own.words[index] + 1)])

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Let no other frontend check a request meanwhile. Overloaded if one does so for longer than LOCK_S: it
        hangs."""
        if self._num_frontends == 1:
            yield
            return
        if self._lock_fd < 0:
            self._lock_fd = os.open(self._folder / "keys.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Overloaded("another frontend does not respond: ask again later") from None
                time.sleep(0.0005)
        try:
            yield
        finally:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)


def ledger_of(spec: EngineSpec, index: int, monotonic: Callable[[], float]) -> KeyLedger | None:
    """Return the ledger of frontend `index`; None if no key can have a name."""
    if spec.config.api_key_file is None:
        return None
    return KeyLedger(Path(spec.run_directory), index, spec.config.api_server_count, monotonic)


def _name_words(name: str) -> list[int]:
    encoded = name.encode().ljust(MAX_NAME, b"\0")
    return [int.from_bytes(encoded[start : start + 8], "little") for start in range(0, MAX_NAME, 8)]
