"""Folders in the user's cache are for this user alone, also those that were open before."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tokenloom.ipc.spec.adapters.places import adapters_folder
from tokenloom.ipc.spec.config.cache_folder import cache_folder, private_cache


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenloom"


def modes(cache: Path) -> set[int]:
    return {stat.S_IMODE(each.stat().st_mode) for each in (cache, cache / "gguf")}


def test_new_folders_are_private_whatever_the_umask(cache: Path) -> None:
    before = os.umask(0)
    try:
        assert private_cache("gguf") == cache / "gguf" and private_cache() == cache == cache_folder()
    finally:
        os.umask(before)
    assert modes(cache) == {0o700}


def test_others_lose_the_right_to_write(cache: Path) -> None:
    for each in (cache, cache / "gguf"):
        each.mkdir(parents=True, exist_ok=True)
        each.chmod(0o777)
    private_cache("gguf")
    assert modes(cache) == {0o755}


@pytest.mark.skipif(os.getuid() != 0, reason="a folder can be given away by root alone")
def test_a_folder_of_another_user_is_not_used(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(private_cache("adapters"), 23456, 23456)
    private_cache("adapters")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match="belongs to the user with number 23456"):
        private_cache("adapters")
    (tmp_path / "run").mkdir()
    assert adapters_folder(str(tmp_path / "run")) == tmp_path / "run" / "adapters"
