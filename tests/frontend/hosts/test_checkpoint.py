"""A checkpoint is known by its digest on every host."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tokenloom.frontend.hosts.checkpoint import find_model
from tokenloom.frontend.supervisor.resolve import DEMO_FOLDER
from tokenloom.ipc.config.checkpoint_digest import checkpoint_digest
from tokenloom.ipc.config.engine_config import EngineConfig
from tokenloom.ipc.errors import ConfigError
from tokenloom.tests.support.engine_specs import new_spec


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(DEMO_FOLDER, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_copy_has_the_same_digest(copy: Path) -> None:
    (copy / "README.txt").write_text("notes")
    assert checkpoint_digest(copy) == checkpoint_digest(DEMO_FOLDER)


def test_other_weights_of_the_same_shapes_have_another_digest(copy: Path) -> None:
    (file,) = copy.glob("*.safetensors")
    weights = bytearray(file.read_bytes())
    middle = len(weights) // 2
    for place in range(middle, middle + len(weights) // 32):
        weights[place] ^= 1
    file.write_bytes(weights)
    assert checkpoint_digest(copy) != checkpoint_digest(DEMO_FOLDER)


def test_another_configuration_or_a_longer_file_has_another_digest(copy: Path) -> None:
    config = (copy / "config.json").read_text()
    (copy / "config.json").write_text(config + "\n")
    assert checkpoint_digest(copy) != checkpoint_digest(DEMO_FOLDER)
    (copy / "config.json").write_text(config)
    (file,) = copy.glob("*.safetensors")
    with file.open("ab") as end:
        end.write(b"\0")
    assert checkpoint_digest(copy) != checkpoint_digest(DEMO_FOLDER)


def test_a_host_takes_the_heads_path_or_else_the_name(copy: Path) -> None:
    assert find_model(new_spec(model_folder=str(copy))) == copy
    assert find_model(new_spec(model_folder="/only/on/the/head")) == DEMO_FOLDER
    elsewhere = new_spec(model_folder="/only/on/the/head", config=EngineConfig(model="/only/on/the/head"))
    with pytest.raises(ConfigError, match="--model /only/on/the/head is neither a folder, a GGUF file, a hub id"):
        find_model(elsewhere)
