"""Faults of a cluster become one line, made from the errors that Ray raises."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray._private.utils import check_version_info, compute_version_info
from ray.exceptions import AuthenticationError

from tokenloom.frontend.checkpoint.resolve import resolve
from tokenloom.frontend.launcher.ray.cluster import refusal
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.sockets.addresses import RunDirectory
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.host_places import ray_address, ray_listen_address

ON_RAY = EngineConfig(tensor_parallel_size=2, hosts=2, distributed_executor_backend="ray")


def test_another_version_is_named_with_the_mend() -> None:
    ours, python = compute_version_info()
    with pytest.raises(RuntimeError) as raised:
        check_version_info({"ray_version": "2.9.3", "python_version": "3.10.2"}, "10.0.0.1")
    text = refusal("10.0.0.1:6379", raised.value)
    assert f"runs Ray 2.9.3 on Python 3.10.2, this host Ray {ours} on Python {python}: " in text
    assert text.endswith("pip install ray==2.9.3") and "\n" not in text


def test_a_missing_token_is_named_with_the_mend() -> None:
    text = refusal("10.0.0.1:6379", AuthenticationError("no token\nwas found"))
    assert "RAY_AUTH_MODE=token" in text and "\n" not in text


@pytest.fixture
def run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunDirectory]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    directory = RunDirectory.create()
    yield directory
    directory.remove()


def test_without_ray_the_start_ends_with_one_line(run_directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"Ray is not installed for this Python: pip install 'tokenloom\[ray\]'"):
        resolve(ON_RAY, run_directory)


def test_agents_connect_to_the_interface_towards_the_cluster_with_keys_of_the_engine(
    run_directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    spec = resolve(ON_RAY, run_directory)
    assert spec.endpoints.agents == "tcp://127.0.0.1:0" and spec.host_address == "127.0.0.1"
    assert spec.hosts_key_file.stat().st_mode & 0o777 == 0o600
    given = EngineConfig(
        tensor_parallel_size=2, hosts=2, distributed_executor_backend="ray", listen_hosts="tcp://127.0.0.2:7100"
    )
    other = RunDirectory.create()
    assert resolve(given, other).host_address == "127.0.0.2"
    other.remove()


def test_the_cluster_is_that_of_ray_start_or_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="no node of a Ray cluster: run `ray start --head`"):
        ray_address()
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.9:6379\n", encoding="utf-8")
    assert ray_address() == "10.0.0.9:6379"
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    with pytest.raises(ConfigError, match="set RAY_ADDRESS to the HOST:PORT"):
        ray_listen_address()


def test_uni_is_for_one_rank() -> None:
    EngineConfig(distributed_executor_backend="uni")
    with pytest.raises(ConfigError, match="uni is for one rank, --tensor-parallel-size is 2"):
        EngineConfig(distributed_executor_backend="uni", tensor_parallel_size=2)
