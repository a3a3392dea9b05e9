"""AdapterRegistry agrees with a dict under any orders, and a second frontend reads all of it from the file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tokenloom.frontend.adapters import registry as module
from tokenloom.frontend.adapters.registry import FILE_NAME, LEFT_S, AdapterRegistry, digests_of
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.adapter import AdapterInfo, AdapterRef

NAMES = st.sampled_from(["a", "b", "c"])
DIGESTS = st.sampled_from([bytes([number]) * 32 for number in range(4)])


def new_ref(digest: bytes, rank: int) -> AdapterRef:
    return AdapterRef(digest=digest, folder=f"/store/{digest.hex()}", rank=rank)


def info_of(name: str, digest: bytes) -> AdapterInfo:
    return AdapterInfo(name=name, path=f"/{name}", digest=digest.hex(), rank=8, base="model")


class Machine(RuleBasedStateMachine):
    """The registry, and the dicts that it must agree with."""

    path: Path

    def __init__(self) -> None:
        super().__init__()
        self.path.unlink(missing_ok=True)
        self.now = 0.0
        self.registry = AdapterRegistry(self.path, new_ref, lambda: self.now)
        self.digest_by_name: dict[str, bytes] = {}
        self.found: set[str] = set()
        self.users: Counter[bytes] = Counter()
        self.left: set[bytes] = set()

    @rule(name=NAMES, digest=DIGESTS, is_found=st.booleans())
    def put(self, name: str, digest: bytes, is_found: bool) -> None:
        self.registry.put(info_of(name, digest), is_found=is_found)
        self.digest_by_name[name] = digest
        self.found = self.found - {name} | ({name} if is_found else set())

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        if name in self.digest_by_name:
            self.registry.remove(name)
            del self.digest_by_name[name]
            self.found.discard(name)

    @rule(name=NAMES)
    def hold_name(self, name: str) -> None:
        ref = self.registry.hold_name(name)
        assert (ref is None) == (name not in self.digest_by_name)
        if ref is not None:
            assert ref == new_ref(self.digest_by_name[name], 8)
            self.users[ref.digest] += 1

    @rule(digest=DIGESTS)
    def hold(self, digest: bytes) -> None:
        ref = self.registry.hold(digest)
        assert (ref is not None) == (digest in self.used)
        self.users[digest] += ref is not None

    @rule(digest=DIGESTS)
    def release(self, digest: bytes) -> None:
        if self.users[digest]:
            self.registry.release(digest)
            self.users[digest] -= 1
            if not self.users[digest] and digest not in self.digest_by_name.values():
                self.left.discard(digest)

    @rule(digest=DIGESTS)
    def drop(self, digest: bytes) -> None:
        names = {name for name, each in self.digest_by_name.items() if each == digest}
        may = not self.users[digest] and digest not in self.left and names <= self.found
        assert self.registry.may_drop(digest) == may
        if may:
            self.found -= names
            self.digest_by_name = {name: each for name, each in self.digest_by_name.items() if name not in names}

    @rule()
    def replace_frontend(self) -> None:
        """The requests are resumed by the next frontend, or never."""
        self.left = {digest for digest in self.used if digest not in self.digest_by_name.values()}
        self.users.clear()
        self.registry = AdapterRegistry(self.path, new_ref, lambda: self.now)

    @rule()
    def wait(self) -> None:
        self.now += LEFT_S
        self.left.clear()

    @property
    def used(self) -> set[bytes]:
        return {*self.digest_by_name.values(), *(+self.users), *self.left}

    @invariant()
    def check(self) -> None:
        assert {info.name: bytes.fromhex(info.digest) for info in self.registry.infos} == self.digest_by_name
        if self.path.exists():
            assert digests_of(self.path) >= {*self.digest_by_name.values(), *(+self.users)}


def test_the_registry_agrees_with_a_dict(tmp_path: Path) -> None:
    Machine.path = tmp_path / FILE_NAME
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Machine, settings=settings(max_examples=60, stateful_step_count=25, deadline=None)
    )


def test_the_next_frontend_knows_names_orders_and_the_adapters_of_open_requests(tmp_path: Path) -> None:
    path, old, new = tmp_path / FILE_NAME, bytes(32), bytes([1]) * 32
    first = AdapterRegistry(path, new_ref)
    assert first.is_new
    first.put(info_of("a", old), order_id="one")
    assert first.hold_name("a") == new_ref(old, 8)
    first.put(info_of("a", new))
    second = AdapterRegistry(path, new_ref)
    assert not second.is_new and second.has_done("one") and not second.has_done("two") and not second.has_done("")
    assert second.get("a") == info_of("a", new)
    assert second.hold(old) == new_ref(old, 8), "of a request that began before the name was given away"
    assert not second.may_drop(old)
    second.release(old)
    assert second.may_drop(old) and second.hold(old) is None


def test_an_adapter_that_nobody_resumes_may_be_dropped_after_a_while(tmp_path: Path) -> None:
    path, now = tmp_path / FILE_NAME, 0.0
    first = AdapterRegistry(path, new_ref, lambda: now)
    first.put(info_of("a", bytes(32)))
    first.hold_name("a")
    first.remove("a")
    second = AdapterRegistry(path, new_ref, lambda: now)
    assert not second.may_drop(bytes(32))
    now += LEFT_S
    assert second.may_drop(bytes(32))


def test_a_broken_write_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    AdapterRegistry(path, new_ref).put(info_of("a", bytes(32)))
    path.with_suffix(".new").write_bytes(b"{")  # a frontend was killed here
    second = AdapterRegistry(path, new_ref)
    assert [info.name for info in second.infos] == ["a"]
    second.put(info_of("b", bytes(32)))
    assert [info.name for info in AdapterRegistry(path, new_ref).infos] == ["a", "b"]


def test_names_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NAMES", 1)
    registry = AdapterRegistry(tmp_path / FILE_NAME, new_ref)
    registry.put(info_of("a", bytes(32)))
    registry.put(info_of("a", bytes([1]) * 32))
    with pytest.raises(RequestError, match="1 adapters have names, at most 1 may: unload some"):
        registry.put(info_of("b", bytes(32)))
