"""A checkpoint is known by its digest on every host."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.frontend.launcher.hosts.agent import find_model
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.checkpoint_digest import checkpoint_digest
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.support.engine_specs import new_spec


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(DEMO_FOLDER, tmp_path / "copy")
    return tmp_path / "copy"


def test_a_copy_has_the_same_digest_and_other_weights_or_configurations_another(copy: Path) -> None:
    digest = checkpoint_digest(DEMO_FOLDER)
    (copy / "README.txt").write_text("notes")
    assert checkpoint_digest(copy) == digest
    (file,) = copy.glob("*.safetensors")
    weights = file.read_bytes()
    part = slice(len(weights) // 2, len(weights) // 2 + len(weights) // 32)
    for other in (
        weights[: part.start] + bytes(each ^ 1 for each in weights[part]) + weights[part.stop :],
        weights + b"\0",
    ):
        file.write_bytes(other)
        assert checkpoint_digest(copy) != digest
    file.write_bytes(weights)
    with (copy / "config.json").open("a") as config:
        config.write("\n")
    assert checkpoint_digest(copy) != digest


def test_a_host_takes_the_heads_path_or_else_the_name(copy: Path) -> None:
    assert find_model(new_spec(model_folder=str(copy))) == copy
    assert find_model(new_spec(model_folder="/only/on/the/head")) == DEMO_FOLDER
    elsewhere = new_spec(model_folder="/only/on/the/head", config=EngineConfig(model="/only/on/the/head"))
    with pytest.raises(ConfigError, match="--model /only/on/the/head is neither a folder, a GGUF file, a hub id"):
        find_model(elsewhere)
