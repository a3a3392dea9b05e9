"""find_checkpoint downloads a hub id to the operator's folder with the operator's token; errors name the mend."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from tokenloom.frontend.checkpoint.hub import find_checkpoint, is_model_name
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.gguf_index import read_gguf_index
from tokenloom.scripts.bench.inputs.write_gguf import convert
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.fake_hub import COMMIT, FakeHub, fake_hub


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


def test_only_the_demo_folders_gguf_files_and_hub_ids_are_model_names(tmp_path: Path) -> None:
    assert is_model_name("demo") and is_model_name("owner/name-1.5") and is_model_name(str(tmp_path))
    assert not is_model_name("statsu") and not is_model_name("./nowhere") and not is_model_name("a/b/c")
    (tmp_path / "sha256-0").touch()  # files need no suffix
    assert is_model_name(str(tmp_path / "sha256-0")) and is_model_name("owner/name:Q4_K_M")
    assert not is_model_name(str(tmp_path / "b.gguf")) and not is_model_name("owner/name:")


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with fake_hub(monkeypatch) as hub:
        yield hub


@pytest.mark.parametrize(
    "name", ["owner/gguf", "hf.co/owner/gguf:f32", "https://huggingface.co/owner/gguf/blob/main/m-F32.gguf"]
)
def test_a_gguf_file_of_the_hub_is_served_from_its_folder(name: str, fakes: FakeHub, tmp_path: Path) -> None:
    convert(tiny_checkpoint(tmp_path / "model", "llama"), tmp_path / "m.gguf", "F32")
    fakes.files["owner/gguf"] = {"m-F32.gguf": (tmp_path / "m.gguf").read_bytes()}
    folder = find_checkpoint(name, None, config=EngineConfig(download_dir=str(tmp_path / "hub")))
    assert (folder / "config.json").is_file() and read_gguf_index(folder)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("models/x.gguf", "models/x.gguf: there is no such file"),
        ("llama3.2:3b", "llama3.2:3b is a name of Ollama's library, .*hf.co/OWNER/NAME:Q4_K_M"),
        ("nothing", "nothing is neither a folder, a GGUF file, a hub id"),
    ],
)
def test_a_name_that_is_none_of_the_hubs_is_refused_without_asking_it(name: str, reason: str, fakes: FakeHub) -> None:
    with pytest.raises(ConfigError, match=f"^--model {reason}"):
        find_checkpoint(name, None)


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with fake_hub(monkeypatch) as hub:
        url = hub.url
    for name in ("owner/name", "owner/name:Q4_K_M"):
        with pytest.raises(
            ConfigError, match=rf"cannot be fetched from {url} \(.*refused\): check the network"
        ) as caught:
            find_checkpoint(name, None, config=EngineConfig(download_dir=str(tmp_path)))
        assert "\n" not in str(caught.value)


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
