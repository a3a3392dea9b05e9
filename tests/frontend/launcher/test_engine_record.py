"""Records of engines: those that live are found, the first started first; no other file confuses the list."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tokenloom.frontend.launcher.engine_record import FILE, EngineRecord, running_engines
from tokenloom.ipc.sockets import addresses
from tokenloom.ipc.sockets.addresses import RunDirectory


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def record(model: str, started_at: float = 0.0) -> EngineRecord:
    return EngineRecord(pid=1, model=model, addresses=["ipc:///a"], started_at=started_at)


def test_live_engines_are_found_in_the_order_of_their_starts() -> None:
    directories = [RunDirectory.create() for _ in range(3)]
    for directory, model, started_at in zip(directories, "abc", (2.0, 3.0, 1.0), strict=True):
        record(model, started_at).write(directory.path)
    assert [engine.model for engine in running_engines()] == ["c", "a", "b"]
    directories[1].remove()
    assert [engine.model for engine in running_engines()] == ["c", "a"]
    for directory in directories:
        directory.remove()
    assert running_engines() == []


def test_a_starting_engine_a_dead_one_and_a_damaged_file_are_not_listed(runtime: Path) -> None:
    starting, damaged = RunDirectory.create(), RunDirectory.create()
    record("damaged").write(damaged.path)
    (damaged.path / FILE).write_bytes(b'{"pid": 1, "mod')
    dead = runtime / "tokenloom" / "0123abcd"
    dead.mkdir()
    (dead / "lock").touch()
    record("dead").write(dead)
    other = runtime / "tokenloom" / "notes"
    other.mkdir()
    record("other").write(other)
    assert running_engines() == []
    assert dead.exists(), "a list removes nothing"
    for directory in (starting, damaged):
        directory.remove()


def test_an_engine_that_removes_its_directory_meanwhile_is_not_listed(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ending = RunDirectory.create()
    try_lock = addresses._try_lock

    def remove_first(path: Path) -> int | None:
        ending.remove()
        return try_lock(path)

    monkeypatch.setattr(addresses, "_try_lock", remove_first)
    assert running_engines() == []


def test_an_engine_that_cannot_write_its_record_serves_all_the_same(
    runtime: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tokenloom"):
        record("a").write(runtime / "gone")
    assert "without its address" in caplog.text
