"""Folders in the user's cache are for this user alone, also those that were open before."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tokenloom.ipc.spec.adapters.places import adapters_folder
from tokenloom.ipc.spec.config.cache_folder import cache_folder, private_cache, triton_environment
from tokenloom.tests.support.engine_specs import new_spec
from tokenloom.tests.support.mounts import needs_mounts, read_only, without_home

DEADLINE_S = 60


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


def test_triton_keeps_its_folder_while_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    assert triton_environment("/run/x") == {} and (tmp_path / ".triton").is_dir()
    monkeypatch.setenv("TRITON_CACHE_DIR", "/nowhere")
    assert triton_environment("/run/x") == {}, "the operator's own choice"
    monkeypatch.delenv("TRITON_CACHE_DIR")
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "file"))
    spec = new_spec(run_directory="/run/x", device="cuda")
    assert spec.environment()["TRITON_CACHE_DIR"] == "/run/x/triton"
    assert "TRITON_CACHE_DIR" not in new_spec(run_directory="/run/x", device="cpu").environment()


@needs_mounts
@pytest.mark.parametrize("case", ["read only", "no home"])
def test_without_a_home_that_can_be_written_triton_gets_the_run_directory(case: str, tmp_path: Path) -> None:
    program = (
        "from tokenloom.ipc.spec.config.cache_folder import triton_environment; print(triton_environment('/run/x'))"
    )
    prefix = read_only(tmp_path) if case == "read only" else without_home()
    names = ("TRITON_CACHE_DIR", "TRITON_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in names} | {"HOME": str(tmp_path)}
    command = [*prefix, sys.executable, "-P", "-c", program]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, check=True, cwd="/", env=environment
    )
    assert done.stdout.strip() == "{'TRITON_CACHE_DIR': '/run/x/triton'}"
    assert done.stderr.count("set TRITON_CACHE_DIR to a folder") == 1 and done.stderr.count("\n") == 1
