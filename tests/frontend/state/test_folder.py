"""A state folder has one engine at a time, and a fault of it ends the start with one line and no change."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tokenloom.frontend.state import folder as module
from tokenloom.frontend.state.folder import FILES, LOCK, StateFolder
from tokenloom.frontend.state.schema import FILE, TABLES, VERSION
from tokenloom.ipc.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StateFolder]:
    opened = StateFolder()
    opened.open(str(tmp_path / "deep" / "state"))
    yield opened
    opened.close()


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as found:
        StateFolder().open(str(path))
    return str(found.value)


def test_all_that_it_makes_is_its_users_alone(tmp_path: Path, folder: StateFolder) -> None:
    path = tmp_path / "deep" / "state"
    modes = {each.name: each.stat().st_mode & 0o777 for each in (path, *path.iterdir())}
    assert modes == {"state": 0o700, LOCK: 0o600, FILE: 0o600, FILES: 0o700}


def test_a_second_engine_learns_who_uses_it_and_may_follow(
    tmp_path: Path, folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.0)
    path = tmp_path / "deep" / "state"
    assert f"is in use by the engine of process {os.getpid()} on " in refusal(path)
    folder.close()
    folder.open(str(path))


def test_it_stays_in_use_until_the_last_process_that_inherited_it_has_ended(
    tmp_path: Path, folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a frontend does whose supervisor was killed."""
    path = tmp_path / "deep" / "state"
    heir = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=folder.fds)
    folder.close()
    monkeypatch.setattr(module, "WAIT_S", 0.0)
    assert "is in use by" in refusal(path)
    heir.communicate(b"\n", timeout=30)
    monkeypatch.setattr(module, "WAIT_S", 5.0)
    folder.open(str(path))


def test_a_damaged_or_newer_database_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / FILE
    with closing(sqlite3.connect(path)) as database:
        database.executescript(f"{TABLES}; PRAGMA user_version = {VERSION + 1}")
    newer = path.read_bytes()
    assert f"was written by a newer version, with tables {VERSION + 1}; this one reads {VERSION}: start" in refusal(
        tmp_path
    )
    assert path.read_bytes() == newer
    with closing(sqlite3.connect(path)) as database:
        database.executescript(f"PRAGMA user_version = {VERSION}")
        database.executemany("INSERT INTO events VALUES (NULL, ?, ?)", [(n, bytes(999)) for n in range(99)])
        database.commit()
    good = path.read_bytes()
    for damaged in (b"no database" * 999, good[:8192] + os.urandom(8192) + good[16384:]):
        path.write_bytes(damaged)
        assert f"{path} is damaged (" in refusal(tmp_path) and path.read_bytes() == damaged
    path.write_bytes(good)
    again = StateFolder()
    again.open(str(tmp_path))
    again.close()


def test_a_folder_that_cannot_be_made_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file") == f"--state-dir {tmp_path / 'file'} cannot be used: Not a directory"
    assert refusal(Path("/proc/state")).endswith(" cannot be used: No such file or directory")


def test_without_a_path_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    StateFolder().open(None)
    assert not list(tmp_path.iterdir())
