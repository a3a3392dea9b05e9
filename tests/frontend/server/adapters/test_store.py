"""AdapterStore keeps whole copies by content, within its size, and none that anyone uses is dropped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenloom.frontend.server.adapters.names_file import FILE_NAME
from tokenloom.frontend.server.adapters.store import AdapterStore
from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.process.pacer import Pacer
from tokenloom.ipc.spec.adapters.digest import adapter_digest
from tokenloom.tests.frontend.server.adapters.samples import adapter_spec, write_adapter
from tokenloom.tests.support.waiting import wait_until

DEADLINE_S = 20.0
YEAR_NS = 366 * 86400 * 10**9
CRASH = """
import sys
from pathlib import Path
from tokenloom.frontend.server.adapters.store import AdapterStore
from tokenloom.tests.frontend.server.adapters.samples import adapter_spec
run, source = map(Path, sys.argv[1:])
AdapterStore(adapter_spec(run), run / "adapters.json", lambda digest: True).copy(source)
"""


def new_store(
    tmp_path: Path,
    used: set[bytes] = frozenset(),  # type: ignore[assignment]
    run: str = "run",
    unix_time_ns: Callable[[], int] = time.time_ns,
    **options: object,
) -> AdapterStore:
    spec, path = adapter_spec(tmp_path / run, **options), tmp_path / run / FILE_NAME
    return AdapterStore(spec, path, lambda digest: digest not in used, unix_time_ns=unix_time_ns)


def add(store: AdapterStore, source: Path) -> bytes:
    copy = store.copy(source)
    try:
        return store.place(copy).digest
    finally:
        store.discard(copy)


def entries(store: AdapterStore) -> set[str]:
    return {path.name for path in store.root.iterdir() if not path.name.startswith(".")}


def test_equal_content_is_kept_once_and_a_damaged_entry_replaced(tmp_path: Path) -> None:
    store, source = new_store(tmp_path), write_adapter(tmp_path / "a", seed=1)
    first = add(store, source)
    assert add(store, write_adapter(tmp_path / "b", seed=1, base_model_name_or_path="elsewhere")) == first
    assert entries(store) == {first.hex()}
    file = store.root / first.hex() / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert add(store, source) == first and adapter_digest(file.parent) == first
    assert add(store, write_adapter(tmp_path / "b", seed=2)) != first


def test_the_least_recently_used_is_dropped_and_those_in_use_stay(tmp_path: Path) -> None:
    size = sum(file.stat().st_size for file in write_adapter(tmp_path / "a0").iterdir())
    used: set[bytes] = set()
    store = new_store(tmp_path, used, adapter_store_bytes=3 * size)
    digests = [add(store, write_adapter(tmp_path / f"a{i}", seed=i)) for i in range(3)]
    for age, digest in enumerate(digests):  # the first is the oldest
        os.utime(store.root / digest.hex(), (1000 + age, 1000 + age))
    used.add(digests[0])
    store.touch(digests[1])
    new = add(store, write_adapter(tmp_path / "a3", seed=3))
    assert entries(store) == {digests[0].hex(), digests[1].hex(), new.hex()}
    used |= {digests[1], new}
    with pytest.raises(
        RequestError, match=rf"holds at most {3 * size}, .* unload an adapter, or raise --adapter-store"
    ):
        add(store, write_adapter(tmp_path / "a4", seed=4))
    assert entries(store) == {digests[0].hex(), digests[1].hex(), new.hex()}
    assert not list(store.root.glob(".new-*"))


def test_an_adapter_that_another_engine_names_stays_until_that_engine_has_ended(tmp_path: Path) -> None:
    size = sum(file.stat().st_size for file in write_adapter(tmp_path / "a").iterdir())
    other = new_store(tmp_path, run="other")
    digest = add(other, tmp_path / "a")
    os.utime(other.root / digest.hex(), (1000, 1000))
    info = f'{{"name":"a","path":"/a","digest":"{digest.hex()}","rank":2,"base":"m"}}'
    (tmp_path / "other" / FILE_NAME).write_text(f'{{"adapters":[{info}]}}', encoding="utf-8")
    engines = other.root / ".engines"
    (engines / "0123456789abcdef").rename(engines / "another")  # its own run_id
    store = new_store(tmp_path, adapter_store_bytes=size)
    with pytest.raises(RequestError, match="holds at most"):
        add(store, write_adapter(tmp_path / "b", seed=1))
    shutil.rmtree(tmp_path / "other")
    add(store, tmp_path / "b")
    assert digest.hex() not in entries(store)
    assert [path.name for path in engines.iterdir()] == ["0123456789abcdef"]
    store.close()
    assert list(engines.iterdir()) == []


def test_a_new_entry_of_another_engine_stays_until_its_registry_can_name_it(tmp_path: Path) -> None:
    size = sum(file.stat().st_size for file in write_adapter(tmp_path / "a").iterdir())
    digest = add(new_store(tmp_path), tmp_path / "a")
    store = new_store(tmp_path, adapter_store_bytes=size)
    with pytest.raises(RequestError, match="holds at most"):
        add(store, write_adapter(tmp_path / "b", seed=1))
    assert digest.hex() in entries(store)


def test_a_disk_that_takes_no_changes_does_not_keep_a_store_from_its_end(tmp_path: Path) -> None:
    """The frontend closes it before it tells its clients that the engine stops."""
    store = new_store(tmp_path)
    shutil.rmtree(store.root / ".engines")
    (store.root / ".engines").write_text("no folder, so that a removal fails")
    store.close()


def test_names_that_are_not_ours_are_left_alone(tmp_path: Path) -> None:
    size = sum(file.stat().st_size for file in write_adapter(tmp_path / "a").iterdir())
    store = new_store(tmp_path, adapter_store_bytes=size)
    theirs = [store.root / name for name in ("x" * 64, ".new-thesis", "ab" * 31 + "A" * 2)]
    for path in theirs:
        write_adapter(path)
    linked = store.root / ("0" * 64)
    linked.symlink_to(tmp_path / "a")
    for path in (store.root / ".engines" / "file", store.root / ".new-12345678"):
        path.write_text("precious")
    first = add(store, tmp_path / "a")
    second = add(store, write_adapter(tmp_path / "b", seed=1))
    assert entries(store) & {first.hex(), second.hex()} == {second.hex()}
    assert all((path / "adapter_config.json").exists() for path in (*theirs, linked, tmp_path / "a"))
    assert (store.root / ".new-12345678").exists() and (store.root / ".engines" / "file").exists()


@pytest.mark.parametrize("jump_ns", [YEAR_NS, -YEAR_NS])
def test_a_clock_that_jumps_neither_fills_the_store_for_ever_nor_drops_the_newest(tmp_path: Path, jump_ns: int) -> None:
    size = sum(file.stat().st_size for file in write_adapter(tmp_path / "a").iterdir())
    other, then = add(new_store(tmp_path, run="other"), tmp_path / "a"), time.time_ns()
    store = new_store(tmp_path, unix_time_ns=lambda: then + jump_ns, adapter_store_bytes=2 * size)
    mine = add(store, write_adapter(tmp_path / "b", seed=1))
    os.utime(store.root / mine.hex(), ns=(then + jump_ns,) * 2)
    new = add(store, write_adapter(tmp_path / "c", seed=2))
    assert entries(store) == {mine.hex(), new.hex()} and other != mine


def test_a_crash_between_copy_and_rename_leaves_no_entry_and_its_rest_is_removed(tmp_path: Path) -> None:
    source, store = write_adapter(tmp_path / "a"), new_store(tmp_path)
    faults = tmp_path / "faults"
    faults.mkdir()
    (faults / "adapter.store").write_text("hang", encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-c", CRASH, str(tmp_path / "run"), str(source)],
        env={**os.environ, "TOKENLOOM_FAULTS": str(faults)},
    )
    try:
        wait_until(lambda: process.poll() is not None or not (faults / "adapter.store").exists())
        (left,) = store.root.glob(".new-*")
        store.discard(store.copy(write_adapter(tmp_path / "b", seed=1)))
        assert left.exists(), "its process lives"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(DEADLINE_S)
    assert entries(store) == set()
    digest = add(store, source)
    assert entries(store) == {digest.hex()} and not list(store.root.glob(".new-*"))


def test_links_out_of_the_folder_pipes_and_adapters_above_the_whole_store_are_refused(tmp_path: Path) -> None:
    store, folder = new_store(tmp_path), (tmp_path / "adapters").resolve()
    good, outside = write_adapter(folder / "good"), write_adapter(tmp_path / "outside")
    store.discard(store.copy(good, folder))
    with pytest.raises(RequestError, match="holds at most 10,"):
        new_store(tmp_path, adapter_store_bytes=10).copy(good)
    (folder / "link").symlink_to(outside)
    file = write_adapter(folder / "file") / "adapter_model.safetensors"
    file.unlink()
    file.symlink_to(outside / "adapter_model.safetensors")
    for name in ("link", "file", "../outside"):
        with pytest.raises(RequestError, match="is not beneath --adapter-folder"):
            store.copy(folder / name, folder)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(RequestError, match="is not a file"):
        store.copy(folder / "file")


def paced_store(tmp_path: Path, is_busy: Callable[[], bool]) -> AdapterStore:
    """Return a store that calls `is_busy` between all pieces of its work."""
    run, pacer = tmp_path / "run", Pacer(is_busy)
    pacer.slice_s = 0.0
    return AdapterStore(adapter_spec(run), run / FILE_NAME, lambda digest: True, pacer=pacer)


def test_a_source_that_changes_while_it_is_copied_is_refused(tmp_path: Path) -> None:
    source, ranks = write_adapter(tmp_path / "a", rank=2), [3]

    def is_busy() -> bool:
        if ranks:
            write_adapter(source, rank=ranks.pop())
        return False

    store = paced_store(tmp_path, is_busy)
    with pytest.raises(RequestError, match="a was changed while it was copied: load the adapter again"):
        store.copy(source)
    assert entries(store) == set() and not list(store.root.glob(".new-*"))
    assert store.find(add(store, source)).rank == 3


def test_copies_rest_while_requests_run(tmp_path: Path) -> None:
    looks = []

    def is_busy() -> bool:
        looks.append(1)
        return False

    store = paced_store(tmp_path, is_busy)
    add(store, write_adapter(tmp_path / "a"))
    assert looks
    looks.clear()
    add(store, tmp_path / "a")  # also while the content that is there is hashed
    assert len(looks) > 1


def test_a_cache_that_cannot_be_written_gives_way_to_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    store = new_store(tmp_path)
    assert store.root == tmp_path / "run" / "adapters"
    add(store, write_adapter(tmp_path / "a"))
