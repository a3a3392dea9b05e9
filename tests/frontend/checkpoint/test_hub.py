"""find_checkpoint downloads a hub id to the operator's folder with the operator's token; errors name the mend."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from tokenloom.frontend.checkpoint import hub
from tokenloom.frontend.checkpoint.hub import find_checkpoint, is_model_name
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.engine_config import EngineConfig

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a --download-dir that holds owner/name, and switch the hub's client offline."""
    folder = tmp_path / "models--owner--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    (folder / "snapshots" / COMMIT / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_hub_id_is_found_in_the_download_dir_or_the_error_names_that_and_hf_hub_offline(cache: Path) -> None:
    config = EngineConfig(download_dir=str(cache))
    assert find_checkpoint("owner/name", None, config=config) == cache / "models--owner--name" / "snapshots" / COMMIT
    with pytest.raises(ConfigError, match=rf"--model owner/other: .* not in {cache}; HF_HUB_OFFLINE forbids .*: unset"):
        find_checkpoint("owner/other", None, config=config)


class _Refusal:
    status_code, headers, request, text = 404, {}, None, ""  # type: ignore[var-annotated]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            ConnectionError("name or service not known"),
            r"from https://\S+ \(name or service .* HF_TOKEN .*HF_HUB_OFFLINE",
        ),
        (
            RepositoryNotFoundError("404", response=_Refusal()),
            "nor a repository of the hub; a private one needs HF_TOKEN",
        ),
        (GatedRepoError("403", response=_Refusal()), "licence to be accepted"),
    ],
)
def test_a_failed_download_is_one_line_with_the_mend(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options)
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ConfigError, match=words) as caught:
        find_checkpoint("owner/name", None, config=EngineConfig(hf_token="hf_x", load_format="dummy"))
    assert "\n" not in str(caught.value) and asked["token"] == "hf_x"
    assert not any("safetensors" in pattern for pattern in asked["allow_patterns"])


def test_only_the_demo_folders_gguf_files_and_hub_ids_are_model_names(tmp_path: Path) -> None:
    assert is_model_name("demo") and is_model_name("owner/name-1.5") and is_model_name(str(tmp_path))
    assert not is_model_name("statsu") and not is_model_name("./nowhere") and not is_model_name("a/b/c")
    (tmp_path / "sha256-0").touch()  # files need no suffix
    assert is_model_name(str(tmp_path / "sha256-0")) and is_model_name("owner/name:Q4_K_M")
    assert not is_model_name(str(tmp_path / "b.gguf")) and not is_model_name("owner/name:")


FILES = [
    "m-Q4_K_M.gguf",
    "m-Q6_K.gguf",
    "m-Q6_K_L.gguf",
    "m-BF16.gguf",
    "m-F16.gguf",
    "mmproj-m-F16.gguf",
    "UD/m-IQ4_XS-00001-of-00002.gguf",
    "UD/m-IQ4_XS-00002-of-00002.gguf",
]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Make a repository of GGUF files, and return the list of its requests."""
    asked: dict[str, Any] = {"opened": []}

    def list_repo_files(self: object, name: str, *, revision: str | None) -> list[str]:
        return ["README.md", *FILES]

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        for each in options["allow_patterns"] or FILES:
            (tmp_path / each).parent.mkdir(exist_ok=True)
            (tmp_path / each).touch()
        return str(tmp_path)

    def checkpoint_folder(path: Path) -> Path:
        asked["opened"].append(path.name)
        return tmp_path

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", list_repo_files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(hub, "checkpoint_folder", checkpoint_folder)
    return asked


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize(
    ("part", "fetched"),
    [
        ("Q4_K_M", ["m-Q4_K_M.gguf"]),
        ("q6_k", ["m-Q6_K.gguf"]),
        ("F16", ["m-F16.gguf"]),
        ("Q6_K_L.gguf", ["m-Q6_K_L.gguf"]),
        ("IQ4_XS", ["UD/m-IQ4_XS-00001-of-00002.gguf", "UD/m-IQ4_XS-00002-of-00002.gguf"]),
    ],
)
def test_of_a_repository_of_gguf_files_the_named_one_alone_is_fetched_or_found_in_the_cache(
    part: str, fetched: list[str], offline: bool, repository: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    for option, config in (("--model", EngineConfig()), ("--tokenizer", EngineConfig(load_format="dummy"))):
        find_checkpoint(f"owner/name:{part}", "main", option, config)
        assert repository["name"] == "owner/name" and repository["revision"] == "main"
        assert offline or repository["allow_patterns"] == fetched
    assert repository["opened"] == [Path(fetched[0]).name] * 2


def test_a_name_that_no_gguf_file_has_lists_those_that_are_there(repository: dict[str, Any]) -> None:
    for name, reason in (
        ("owner/name:Q4_K", r"owner/name: 0 GGUF files have 'Q4_K' in .*: UD/m-IQ4_XS-.*, m-BF16"),
        ("models/x.gguf", r"models/x.gguf: there is no such file"),
    ):
        with pytest.raises(ConfigError, match=f"--model {reason}"):
            find_checkpoint(name, None)
    assert "name" not in repository, "nothing was fetched"


def test_a_network_that_fails_while_files_are_listed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx2

    def list_repo_files(self: object, name: str, *, revision: str | None) -> list[str]:
        raise httpx2.ConnectError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", list_repo_files)
    with pytest.raises(
        ConfigError, match=r"cannot be fetched from https://\S+ \(no route to host\): check the network"
    ):
        find_checkpoint("owner/name:Q4_K_M", None)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"])
def test_a_pipe_or_folder_in_place_of_a_file_is_refused_before_it_is_opened(name: str, tmp_path: Path) -> None:
    for other in ("config.json", "README.md"):
        (tmp_path / other).write_text("{}")
    (tmp_path / "missing.json").symlink_to("nowhere")
    (tmp_path / "original").mkdir()
    assert find_checkpoint(str(tmp_path), None) == tmp_path
    for make in (os.mkfifo, os.mkdir):
        (tmp_path / name).unlink(missing_ok=True)
        make(tmp_path / name)
        with pytest.raises(ConfigError, match=f"{name} is no regular file"):
            find_checkpoint(str(tmp_path), None)


@pytest.mark.parametrize("content", ['{"weight_map": {"a": "../x.safetensors"}}', '{"weight_map": {"a": "pipe"}}', "{"])
def test_a_damaged_index_is_refused_before_workers_read_it(tmp_path: Path, content: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json (names the file|cannot be read)"):
        find_checkpoint(str(tmp_path), None)
