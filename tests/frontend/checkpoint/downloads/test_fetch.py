"""Models are fetched from a hub into its cache, and found there without it."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import msgspec
import pytest

from tokenloom.frontend.checkpoint.downloads.fetch import Fetched, fetch
from tokenloom.frontend.checkpoint.downloads.hub_name import parse_hub_name
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.support.fake_hub import COMMIT, FakeHub, fake_hub
from tokenloom.tests.support.mounts import needs_mounts, read_only, without_home

WEIGHTS = random.Random(2).randbytes(300_000)
GGUF = {
    "README.md": b"# m",
    "config.json": b"{}",
    "m-Q4_K_M.gguf": WEIGHTS[:2000],
    "m-Q8_0-00001-of-00002.gguf": WEIGHTS[:4000],
    "m-Q8_0-00002-of-00002.gguf": WEIGHTS[:5000],
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub(monkeypatch) as hub:
        hub.files["owner/name"] = {"config.json": b"{}", "model.safetensors": WEIGHTS, "x.bin": b"x", "a.md": b"a"}
        hub.files["owner/gguf"] = GGUF
        yield hub


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig(download_dir=str(tmp_path), hf_token="hf_key")


def get(text: str, config: EngineConfig, **options: Any) -> Fetched:
    name = parse_hub_name(text)
    assert name is not None
    return fetch(name, None, f"--model {text}", config, **options)


def names_in(folder: Path) -> list[str]:
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())


def test_the_files_that_serving_needs_are_fetched_once_and_kept_as_the_hubs_client_does(
    hub: FakeHub, config: EngineConfig, tmp_path: Path
) -> None:
    fetched = get("hf.co/owner/name", config)
    assert fetched == Fetched(tmp_path / "models--owner--name" / "snapshots" / COMMIT)
    assert names_in(fetched.snapshot) == ["config.json", "model.safetensors"]
    assert (fetched.snapshot / "model.safetensors").read_bytes() == WEIGHTS
    assert len(hub.asked) == 2 and all(each.authorization == "Bearer hf_key" for each in hub.asked)
    assert get("owner/name", config) == fetched and len(hub.asked) == 2, "nothing is fetched again"
    found = huggingface_hub.scan_cache_dir(tmp_path)
    assert not found.warnings and [each.repo_id for each in found.repos] == ["owner/name"]


def test_a_broken_off_download_asks_for_the_rest_with_a_range(hub: FakeHub, config: EngineConfig) -> None:
    hub.cuts["model.safetensors"] = [100_000]
    assert (get("owner/name", config).snapshot / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.ranges("model.safetensors") == [None, "bytes=100000-"]


def test_no_weights_are_fetched_if_none_are_needed(hub: FakeHub, config: EngineConfig) -> None:
    assert names_in(get("owner/name", config, has_weights=False).snapshot) == ["config.json"]


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("owner/gguf", ["m-Q4_K_M.gguf"]),
        ("owner/gguf:q8_0", ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]),
    ],
)
def test_of_a_repository_of_gguf_files_one_is_fetched_and_found_without_the_hub(
    name: str, files: list[str], hub: FakeHub, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = get(name, config)
    assert fetched.first == files[0] and names_in(fetched.snapshot) == files
    hub.files.clear()
    assert get(name, config) == fetched, "the hub has lost it"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert get(name, config) == fetched


def test_a_repository_with_both_kinds_is_one_of_safetensors_unless_a_file_is_named(
    hub: FakeHub, config: EngineConfig
) -> None:
    hub.files["owner/gguf"] = GGUF | {"model.safetensors": b"x"}
    assert get("owner/gguf", config).first is None
    assert get("owner/gguf:Q4_K_M", config).first == "m-Q4_K_M.gguf"


def test_an_incomplete_model_is_not_served_without_the_hub(
    hub: FakeHub, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    get("owner/name", config, has_weights=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in ("owner/name", "owner/other", "owner/gguf:Q8_0"):
        with pytest.raises(
            ConfigError, match=rf"^--model {name}: .* not in {config.download_dir}; HF_HUB_OFFLINE forbids"
        ):
            get(name, config)


def test_offline_another_file_of_a_repository_names_those_that_are_here(
    hub: FakeHub, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    get("owner/gguf", config)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    reason = f"^--model owner/gguf:Q8_0: of its GGUF files m-Q4_K_M.gguf are in {config.download_dir}; HF_HUB_OFFLINE"
    with pytest.raises(ConfigError, match=reason):
        get("owner/gguf:Q8_0", config)


def test_a_mirror_that_tells_no_sizes_is_used_as_the_hubs_client_does(hub: FakeHub, config: EngineConfig) -> None:
    names = ("config.json", "model.safetensors")
    hub.cards["owner/name"] = {"siblings": [{"rfilename": name, "blobId": "0" * 40} for name in names]}
    assert (get("owner/name", config).snapshot / "model.safetensors").read_bytes() == WEIGHTS
    assert names_in(get("owner/name", config).snapshot) == [*names]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("owner/none", "neither a folder nor a repository of the hub; a private one needs HF_TOKEN"),
        ("owner/private", "neither a folder nor a repository of the hub; a private one needs HF_TOKEN"),
        ("owner/gated", "licence to be accepted"),
        ("hf.co/owner/name/tree/v9", "the hub has no revision v9"),
        ("owner/gguf:Q2_K", "0 GGUF files have 'Q2_K' in their names, one must: m-Q4_K_M.gguf, m-Q8_0"),
        ("owner/name:Q2_K", "0 GGUF files have 'Q2_K' in their names, one must: none"),
    ],
)
def test_a_refusal_is_one_line_with_the_remedy(name: str, reason: str, hub: FakeHub, config: EngineConfig) -> None:
    for repository in ("owner/private", "owner/gated"):
        hub.files[repository] = hub.files["owner/name"]
    hub.private.add("owner/private")
    hub.gated.add("owner/gated")
    with pytest.raises(ConfigError, match=reason) as caught:
        get(name, EngineConfig(download_dir=config.download_dir, hf_token="hf_wrong"))
    assert str(caught.value).startswith(f"--model {name}: ") and "\n" not in str(caught.value)


def test_a_model_that_is_larger_than_the_disk_is_refused_before_anything_is_fetched(
    hub: FakeHub, config: EngineConfig
) -> None:
    huge = {
        "rfilename": "model.safetensors",
        "size": 1 << 60,
        "lfs": {"sha256": "0" * 64, "size": 1 << 60, "pointerSize": 1},
    }
    hub.cards["owner/name"] = {"siblings": [huge]}
    with pytest.raises(ConfigError, match=r"--model owner/name needs 1073741824\.00 GiB more in .* are free: free"):
        get("owner/name", config)
    assert not hub.asked


@needs_mounts
@pytest.mark.timeout(120)
def test_a_folder_that_cannot_be_written_is_named_with_the_remedy(hub: FakeHub, tmp_path: Path) -> None:
    program = (
        "import sys; from tokenloom.frontend.checkpoint.hub import find_checkpoint\n"
        "try: find_checkpoint('owner/name', None)\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    for prefix, why in (
        (read_only(tmp_path), r"its files cannot be kept in /.*/hub \(.*Read-only file system.*\)"),
        (without_home(), r".* cannot be kept in ~/.*: no such home"),
    ):
        names = ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME")
        environment = {name: value for name, value in os.environ.items() if name not in names}
        environment |= {"HOME": str(tmp_path), "HF_ENDPOINT": hub.url}
        command = [*prefix, sys.executable, "-P", "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd="/", env=environment)
        assert re.search(rf"^ConfigError .*{why}: give --download-dir or HF_HOME, a folder", done.stdout), done.stdout


def test_the_encoder_of_a_gguf_model_is_fetched_with_it(hub: FakeHub, config: EngineConfig) -> None:
    encoders = {f"mmproj-{form}.gguf": WEIGHTS[:100] for form in ("F32", "F16", "Q8_0")}
    hub.files["owner/gguf"] = GGUF | encoders
    hub.cards["owner/gguf"] = {"gguf": {"architecture": "gemma3"}}
    fetched = get("owner/gguf", config)
    assert fetched.mmproj == fetched.snapshot / "mmproj-F16.gguf" and fetched.mmproj.exists()
    assert names_in(fetched.snapshot) == ["m-Q4_K_M.gguf", "mmproj-F16.gguf"]


@pytest.mark.parametrize("change", [{"mmproj": "none"}, {"mmproj": "/mine.gguf"}, {"architecture": "qwen3next"}])
def test_no_encoder_is_fetched_if_none_of_the_repository_is_served(
    hub: FakeHub, config: EngineConfig, change: dict[str, str]
) -> None:
    hub.files["owner/gguf"] = GGUF | {"mmproj-F16.gguf": WEIGHTS[:100]}
    hub.cards["owner/gguf"] = {"gguf": {"architecture": change.get("architecture", "gemma3")}}
    wanted = msgspec.structs.replace(config, mmproj=change.get("mmproj", "auto"))
    fetched = get("owner/gguf", wanted)
    assert fetched.mmproj is None and names_in(fetched.snapshot) == ["m-Q4_K_M.gguf"]


def test_without_the_hub_the_encoder_in_the_cache_is_found(
    hub: FakeHub, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files["owner/gguf"] = GGUF | {"mmproj-F16.gguf": WEIGHTS[:100]}
    fetched = get("owner/gguf", config)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert get("owner/gguf", config) == fetched and fetched.mmproj is not None
