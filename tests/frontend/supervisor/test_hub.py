"""find_checkpoint downloads a hub id to the operator's folder with the operator's token; errors name the mend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.constants
import pytest
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from tokenloom.frontend.supervisor import hub
from tokenloom.frontend.supervisor.hub import find_checkpoint, is_model_name
from tokenloom.ipc.config.engine_config import EngineConfig
from tokenloom.ipc.errors import ConfigError

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


def test_a_hub_id_is_found_in_the_download_dir(cache: Path) -> None:
    found = find_checkpoint("owner/name", None, config=EngineConfig(download_dir=str(cache)))
    assert found == cache / "models--owner--name" / "snapshots" / COMMIT


def test_a_model_missing_from_the_offline_cache_names_the_cache_and_hf_hub_offline(cache: Path) -> None:
    with pytest.raises(ConfigError, match=rf"--model owner/other: .* not in {cache}; HF_HUB_OFFLINE forbids .*: unset"):
        find_checkpoint("owner/other", None, config=EngineConfig(download_dir=str(cache)))


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


def test_of_a_repository_of_gguf_files_the_named_one_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, asked = tmp_path / "snapshot", dict[str, Any]()
    for name in (
        "m-Q4_K_M.gguf",
        "m-Q4_K_S.gguf",
        "UD/m-IQ4_XS-00001-of-00002.gguf",
        "UD/m-IQ4_XS-00002-of-00002.gguf",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(folder)

    found: list[Path] = []

    def checkpoint_folder(path: Path) -> Path:
        found.append(path)
        return tmp_path

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(hub, "checkpoint_folder", checkpoint_folder)
    assert find_checkpoint("owner/name:Q4_K_M", "main") == tmp_path
    assert asked["name"] == "owner/name" and asked["revision"] == "main" and "*Q4_K_M*.gguf" in asked["allow_patterns"]
    assert not any("safetensors" in pattern for pattern in asked["allow_patterns"])
    find_checkpoint("owner/name:IQ4_XS", None)
    assert [path.name for path in found] == ["m-Q4_K_M.gguf", "m-IQ4_XS-00001-of-00002.gguf"]
    with pytest.raises(
        ConfigError, match=r"Q4_K in its name is needed, the repository has m-Q4_K_M.gguf, m-Q4_K_S.gguf"
    ):
        find_checkpoint("owner/name:Q4_K", None)
    with pytest.raises(ConfigError, match="Q8_0 in its name is needed, the repository has none"):
        find_checkpoint("owner/name:Q8_0", None)
