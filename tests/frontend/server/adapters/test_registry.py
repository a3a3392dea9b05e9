"""Two frontends' registries agree with a dict under any orders, and the next frontend reads all from the files."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tokenloom.frontend.server.adapters.names_file import FILE_NAME
from tokenloom.frontend.server.adapters.registry import LEFT_S, AdapterRegistry, digests_of
from tokenloom.frontend.server.adapters.uses_file import LINGER_S
from tokenloom.ipc.errors import Overloaded, RequestError
from tokenloom.ipc.messages.adapter import AdapterInfo, AdapterRef

NAMES = st.sampled_from(["a", "b", "c"])
FRONTENDS = st.sampled_from([0, 1])
DIGESTS = st.sampled_from([bytes([number]) * 32 for number in range(4)])


def new_ref(digest: bytes, rank: int) -> AdapterRef:
    return AdapterRef(digest=digest, folder=f"/store/{digest.hex()}", rank=rank)


def info_of(name: str, digest: bytes) -> AdapterInfo:
    return AdapterInfo(name=name, path=f"/{name}", digest=digest.hex(), rank=8, base="model")


class Machine(RuleBasedStateMachine):
    """The registries of two frontends of an engine, and the dicts that they must agree with."""

    path: Path

    def __init__(self) -> None:
        super().__init__()
        for path in self.path.parent.glob("adapters*"):
            path.unlink()
        self.now = 0.0
        self.registries = [self.new(0), self.new(1)]
        self.digest_by_name: dict[str, bytes] = {}
        self.found: set[str] = set()
        self.users: list[Counter[bytes]] = [Counter(), Counter()]
        self.left: list[set[bytes]] = [set(), set()]
        self.idle: list[set[bytes]] = [set(), set()]  # their last request has just ended

    def new(self, at: int) -> AdapterRegistry:
        return AdapterRegistry(self.path, new_ref, lambda: self.now, at)

    @rule(at=FRONTENDS, name=NAMES, digest=DIGESTS, is_found=st.booleans())
    def put(self, at: int, name: str, digest: bytes, is_found: bool) -> None:
        self.registries[at].put(info_of(name, digest), is_found=is_found)
        self.digest_by_name[name] = digest
        self.found = self.found - {name} | ({name} if is_found else set())

    @rule(at=FRONTENDS, name=NAMES)
    def remove(self, at: int, name: str) -> None:
        assert self.registries[at].remove(name) == (name in self.digest_by_name)
        self.digest_by_name.pop(name, None)
        self.found.discard(name)

    @rule(at=FRONTENDS, name=NAMES)
    def hold_name(self, at: int, name: str) -> None:
        ref = self.registries[at].hold_name(name)
        assert (ref is None) == (name not in self.digest_by_name)
        if ref is not None:
            assert ref == new_ref(self.digest_by_name[name], 8)
            self.hold_one(at, ref.digest)

    @rule(at=FRONTENDS, digest=DIGESTS)
    def hold(self, at: int, digest: bytes) -> None:
        ref = self.registries[at].hold(digest)
        is_known = digest in {*self.digest_by_name.values(), *(+self.users[at]), *self.left[at]}
        assert (ref is not None) == is_known
        if ref is not None:
            self.hold_one(at, digest)

    def hold_one(self, at: int, digest: bytes) -> None:
        self.users[at][digest] += 1
        self.idle[at].discard(digest)

    @rule(at=FRONTENDS, digest=DIGESTS)
    def release(self, at: int, digest: bytes) -> None:
        if self.users[at][digest]:
            self.registries[at].release(digest)
            self.users[at][digest] -= 1
            if not self.users[at][digest]:
                self.left[at].discard(digest)
                self.idle[at].add(digest)

    @rule(at=FRONTENDS, digest=DIGESTS)
    def drop(self, at: int, digest: bytes) -> None:
        names = {name for name, each in self.digest_by_name.items() if each == digest}
        may = not self.users[at][digest] and digest not in self.left[at] | self.held(1 - at) and names <= self.found
        assert self.registries[at].may_drop(digest) == may
        if may:
            self.idle[at].discard(digest)
            self.found -= names
            self.digest_by_name = {name: each for name, each in self.digest_by_name.items() if name not in names}

    @rule(at=FRONTENDS)
    def replace_frontend(self, at: int) -> None:
        """The requests are resumed by the next frontend, or never."""
        self.left[at] = self.held(at)
        self.users[at].clear()
        self.idle[at].clear()
        self.registries[at].close()
        self.registries[at] = self.new(at)

    @rule()
    def wait(self) -> None:
        self.now += LEFT_S
        for at, registry in enumerate(self.registries):
            registry.expire(self.now)
            self.left[at].clear()
            self.idle[at].clear()

    def held(self, at: int) -> set[bytes]:
        return {*(+self.users[at]), *self.left[at], *self.idle[at]}

    @invariant()
    def check(self) -> None:
        for registry in self.registries:
            assert {info.name: bytes.fromhex(info.digest) for info in registry.infos} == self.digest_by_name
        assert digests_of(self.path) >= {*self.digest_by_name.values(), *self.held(0), *self.held(1)}

    def teardown(self) -> None:
        for registry in self.registries:
            registry.close()


def test_the_registry_agrees_with_a_dict(tmp_path: Path) -> None:
    Machine.path = tmp_path / FILE_NAME
    run_state_machine_as_test(Machine, settings=settings(max_examples=60, stateful_step_count=25, deadline=None))


NewRegistry = Callable[..., AdapterRegistry]


@pytest.fixture
def new(tmp_path: Path) -> Iterator[NewRegistry]:
    """Make the registry of a frontend, which is closed after the test."""
    registries: list[AdapterRegistry] = []

    def new(*arguments: Any, **options: Any) -> AdapterRegistry:
        registries.append(AdapterRegistry(tmp_path / FILE_NAME, new_ref, *arguments, **options))
        return registries[-1]

    yield new
    for registry in registries:
        registry.close()


def test_the_next_frontend_knows_orders_and_names_also_after_a_broken_write(new: NewRegistry, tmp_path: Path) -> None:
    new().put(info_of("a", bytes(32)), order_id="one")
    (tmp_path / FILE_NAME).with_suffix(".new").write_bytes(b"{")  # a frontend was killed here
    second = new()
    assert second.has_done("one") and not second.has_done("two") and not second.has_done("")
    assert [info.name for info in second.infos] == ["a"]
    second.put(info_of("b", bytes(32)))
    assert [info.name for info in new().infos] == ["a", "b"]


def test_names_are_limited(new: NewRegistry) -> None:
    registry = new()
    registry.max_names = 1
    registry.put(info_of("a", bytes(32)))
    registry.put(info_of("a", bytes([1]) * 32))
    with pytest.raises(RequestError, match="1 adapters have names, at most 1 may: unload some"):
        registry.put(info_of("b", bytes(32)))


def test_one_frontend_loads_the_modules_while_the_others_wait(new: NewRegistry) -> None:
    begun, loaded = threading.Event(), list[int]()

    def start(index: int) -> None:
        with new(index=index).loading_modules() as is_first:
            if is_first:
                begun.wait(10)
                loaded.append(index)

    threads = [threading.Thread(target=start, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    threads[0].join(0.1)
    assert all(thread.is_alive() for thread in threads), "all wait for the one that loads"
    begun.set()
    for thread in threads:
        thread.join(10)
    assert len(loaded) == 1
    start(3)
    assert len(loaded) == 1, "nor does one that is started later"


def test_a_start_that_fails_leaves_the_modules_to_the_next_frontend(new: NewRegistry) -> None:
    with suppress(KeyError), new().loading_modules():
        raise KeyError
    with new().loading_modules() as is_first:
        assert is_first


def test_a_name_that_another_frontend_gives_meanwhile_is_seen_by_the_last_look(new: NewRegistry) -> None:
    one, other = (new(index=index) for index in (0, 1))
    first = one.put(info_of("a", bytes(32)))
    assert first == info_of("a", bytes(32))
    assert other.put(info_of("a", bytes([1]) * 32), known=lambda: other.get("a")) == first
    assert one.get("a") == first


def test_on_a_full_disk_a_change_is_refused_and_uses_are_removed_later(new: NewRegistry, tmp_path: Path) -> None:
    now = 0.0
    registry = new(lambda: now, 0)
    registry.put(info_of("a", bytes(32)))
    assert registry.hold(bytes(32)) is not None
    registry.release(bytes(32))
    files = [tmp_path / FILE_NAME, *tmp_path.glob("adapters-*.json")]
    assert len(files) == 2
    for file in files:
        file.with_suffix(".new").unlink(missing_ok=True)
        file.with_suffix(".new").symlink_to("/dev/full")
    with pytest.raises(Overloaded, match="No space left"):
        registry.put(info_of("b", bytes([1]) * 32))
    assert [info.name for info in registry.infos] == ["a"]
    now = LEFT_S + LINGER_S
    registry.expire(now)  # in each turn of the frontend, which must go on
    for file in files:
        file.with_suffix(".new").unlink()
    registry.put(info_of("b", bytes([1]) * 32))
    assert [info.name for info in registry.infos] == ["a", "b"]
