"""Random calls of two processes' stores on one folder give the results of a brute-force model."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tokenloom.ipc.blobs.store import BlobStore
from tokenloom.ipc.errors import Overloaded, RequestError

MAX_BYTES = 60  # below 64, so that a blob of unknown size reserves no more than it has
DATA = [bytes([65 + i]) * size for i, size in enumerate((1, 10, 20, 20, 30, 45, 60, 61))]
DIGESTS = [hashlib.sha256(data).digest() for data in DATA]
BLOBS = st.integers(0, len(DATA) - 1)
STORES = st.integers(0, 1)
USERS = st.sampled_from(["a", "b"])


@dataclass(eq=False)
class ModelBlob:
    """One file: a blob that was removed and put again is another one."""

    used: int
    is_damaged: bool = False
    holders: set[object] = field(default_factory=set)  # mappings, and numbers of stores that pin it


class Stores(RuleBasedStateMachine):
    @initialize()
    def create(self) -> None:
        self.folder = Path(tempfile.mkdtemp()) / "blobs"
        self.clock = itertools.count(time.time_ns(), 10**9)
        self.stores = [self.new_store() for _ in range(2)]
        self.blobs = dict[int, ModelBlob]()  # by index into DATA
        self.pins = dict[tuple[int, int], tuple[ModelBlob, set[str]]]()  # by store and index
        self.mappings = list[tuple[ModelBlob, memoryview, int]]()

    def new_store(self) -> BlobStore:
        return BlobStore(self.folder, MAX_BYTES, self.clock.__next__)

    def use(self, index: int) -> ModelBlob | None:
        if (blob := self.blobs.get(index)) is not None:
            blob.used = next(self.clock)
        return blob

    def use_checked(self, index: int) -> ModelBlob | None:
        if (blob := self.use(index)) is not None and blob.is_damaged:
            del self.blobs[index]
            return None
        return blob

    def make_room(self, size: int, reserved: int) -> bool:
        missing = sum(len(DATA[index]) for index in self.blobs) + reserved + size - MAX_BYTES
        chosen = []
        for index, blob in sorted(self.blobs.items(), key=lambda item: item[1].used):
            if missing > 0 and not blob.holders:
                missing -= len(DATA[index])
                chosen.append(index)
        if missing <= 0:
            for index in chosen:
                del self.blobs[index]
        return missing <= 0

    def note_pin(self, store: int, index: int, user: str, blob: ModelBlob) -> None:
        held, users = self.pins.get((store, index), (blob, set[str]()))
        if held is not blob and held in self.blobs.values():
            raise AssertionError("a pinned file was replaced")
        held.holders.discard(store)
        blob.holders.add(store)
        self.pins[store, index] = blob, users | {user}

    @rule(store=STORES, index=BLOBS, user=st.sampled_from(["", "", "a", "b"]), in_chunks=st.booleans())
    def put(self, store: int, index: int, user: str, in_chunks: bool) -> None:
        parts = [DATA[index][:3], DATA[index][3:]] if in_chunks else [DATA[index]]
        source = iter(parts) if in_chunks else DATA[index]
        expected: type[Exception] | None = None
        if in_chunks or self.use_checked(index) is None:
            reserved = 0
            for part in filter(None, parts):
                if reserved + len(part) > MAX_BYTES:
                    expected = RequestError
                elif not self.make_room(len(part), reserved):
                    expected = Overloaded
                if expected is not None:
                    break
                reserved += len(part)
        try:
            assert self.stores[store].put(source, user) == DIGESTS[index]
        except (RequestError, Overloaded) as error:
            assert type(error) is expected
            return
        assert expected is None
        blob = self.use_checked(index) or self.blobs.setdefault(index, ModelBlob(next(self.clock)))
        if user:
            self.note_pin(store, index, user, blob)

    @rule(store=STORES, index=BLOBS, keeps=st.booleans())
    def open(self, store: int, index: int, keeps: bool) -> None:
        expected = self.use_checked(index)
        found = self.stores[store].open(DIGESTS[index])
        assert (found is None) == (expected is None)
        if expected is not None and found is not None:
            assert found == DATA[index]
            if keeps:
                self.mappings.append((expected, found, index))
                expected.holders.add(id(found))

    @rule(which=st.integers(0, 100))
    def drop_mapping(self, which: int) -> None:
        if self.mappings:
            blob, found, _ = self.mappings.pop(which % len(self.mappings))
            blob.holders.discard(id(found))

    @rule(store=STORES, index=BLOBS, user=USERS)
    def pin(self, store: int, index: int, user: str) -> None:
        held, users = self.pins.get((store, index), (None, set[str]()))
        if held is not None and self.blobs.get(index) is held:
            users.add(user)  # without a use
            assert self.stores[store].pin(DIGESTS[index], user)
            return
        blob = self.use(index)
        assert self.stores[store].pin(DIGESTS[index], user) == (blob is not None)
        if blob is not None:
            self.note_pin(store, index, user, blob)

    @rule(store=STORES, index=BLOBS, user=USERS)
    def unpin(self, store: int, index: int, user: str) -> None:
        self.stores[store].unpin(DIGESTS[index], user)
        if (store, index) in self.pins:
            blob, users = self.pins[store, index]
            users.discard(user)
            if not users:
                del self.pins[store, index]
                blob.holders.discard(store)

    @rule(index=BLOBS)
    def damage(self, index: int) -> None:
        if (blob := self.blobs.get(index)) is not None:
            path = self.folder / DIGESTS[index].hex()
            status = path.stat()
            with path.open("r+b") as file:
                file.write(b"!")
            os.utime(path, ns=(status.st_atime_ns, next(self.clock)))  # another mtime on any file system
            blob.is_damaged = True
            self.mappings = [each for each in self.mappings if each[0] is not blob]  # they show the damage
            blob.holders &= {0, 1}

    @invariant()
    def files_are_those_of_the_model(self) -> None:
        if self.folder.exists():
            found = {path.name for path in self.folder.iterdir()} - {"lock"}
            assert found == {DIGESTS[index].hex() for index in self.blobs}
        assert self.stores[0].num_bytes() == sum(len(DATA[index]) for index in self.blobs) <= MAX_BYTES

    @invariant()
    def held_blobs_keep_their_content(self) -> None:
        for blob, found, index in self.mappings:
            assert found == DATA[index]
            assert self.blobs.get(index) is blob

    def teardown(self) -> None:
        with contextlib.suppress(AttributeError):
            for (store, index), (_, users) in self.pins.items():
                for user in users:
                    self.stores[store].unpin(DIGESTS[index], user)
            shutil.rmtree(self.folder.parent)


def test_random_calls_give_the_results_of_the_model() -> None:
    run_state_machine_as_test(
        Stores,
        settings=settings(max_examples=60, stateful_step_count=30, database=None, phases=[Phase.generate]),
    )
