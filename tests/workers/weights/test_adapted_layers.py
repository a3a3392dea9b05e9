"""Layers of every family note the modules that adapters may update, each output and input once over the ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.adapters.targets import targets_of
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.models.audio_families import AUDIO_FAMILIES
from tokenloom.ipc.spec.models.families import FAMILIES
from tokenloom.ipc.spec.models.model_config import ModelConfig
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.ipc.spec.models.vision_families import VISION_FAMILIES
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.support import families
from tokenloom.tests.support.checkpoints import FAMILIES as LLAMA_LIKE
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.paged_run import CPU
from tokenloom.workers.features.adapters.slot_filler import adaptable
from tokenloom.workers.machine.parallel import NullGroup
from tokenloom.workers.models.load import load_model
from tokenloom.workers.weights.adapted_layers import AdaptedLayers, AdaptedPart

NATIVE = sorted(
    name
    for name, config in families.CONFIGS.items()
    if config["architectures"][0] in FAMILIES | VISION_FAMILIES | AUDIO_FAMILIES
)
EVERY = sorted({*NATIVE, *LLAMA_LIKE})
CONFIG = EngineConfig(enable_lora=True, max_loras=2, max_lora_rank=4)


def layers_of(
    folder: Path, config: ModelConfig, rank: int = 0, size: int = 1, options: EngineConfig = CONFIG
) -> AdaptedLayers:
    ops = ReferenceOps()
    adapters = adaptable(ops, config, options)
    model = load_model(folder, config, 64, torch.float32, CPU, ops, NullGroup(rank, size), adapters=adapters)
    assert model.adapted is not None
    return model.adapted


def parts_of(layers: AdaptedLayers) -> list[AdaptedPart]:
    parts = [part for layer in layers.linears for part in layer.parts]
    return parts + [part for each in layers.experts for group in (*each.ups, *each.downs) for part in group]


@pytest.mark.parametrize("family", some(EVERY, 8))
def test_the_noted_modules_are_all_that_adapters_may_update(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, family)
    config = load_model_config(folder)
    targets, parts = targets_of(config), parts_of(layers_of(folder, config))
    assert {part.module for part in parts} == targets.keys()
    for part in parts:
        target = targets[part.module]
        assert (part.expert is not None) == bool(target.num_experts)
        outputs = torch.as_tensor(part.outputs)
        assert sorted(set(outputs.tolist())) == list(range(target.num_outputs)), "each output at least once"
        assert part.inputs == range(target.num_inputs)


@pytest.mark.parametrize(
    ("family", "size", "fields"),
    some(
        [
            ("llama", 3, {"intermediate_size": 90}),
            ("phi4", 2, {}),
            ("gpt2", 2, {}),
            ("falcon_40b", 2, {}),
            ("gpt_oss", 2, {}),
        ],
        2,
    ),
)
def test_ranks_share_every_module(family: str, size: int, fields: dict[str, int], tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, family, **fields)
    config = load_model_config(folder)
    targets = targets_of(config)
    seen: dict[str, set[tuple[int, int]]] = {module: set() for module in targets}
    for rank in range(size):
        for part in parts_of(layers_of(folder, config, rank, size)):
            target = targets[part.module]
            corners = [(int(o), i) for o in part.outputs for i in (part.inputs[0], part.inputs[-1])]
            seen[part.module] |= {(o, min(i, target.num_inputs - 1)) for o, i in corners}
    for module, target in targets.items():
        outputs, inputs = ({corner[axis] for corner in seen[module]} for axis in (0, 1))
        assert outputs == set(range(target.num_outputs))
        assert {0, target.num_inputs - 1} <= inputs


def test_the_parts_of_a_layer_lie_behind_each_other(tmp_path: Path) -> None:
    for family in ("llama", "glm", "gemma4", "phi4"):
        folder = tiny_checkpoint(tmp_path / family, family)
        for layer in layers_of(folder, load_model_config(folder)).linears:
            end = 0
            for part in layer.parts:
                assert part.first_output == end
                end += len(part.outputs)
            assert end == layer.num_outputs


def test_a_mixture_of_files_names_the_block_of_experts_as_the_config(tmp_path: Path) -> None:
    """Files that transformers has saved say "mlp" for "block_sparse_moe"."""
    from safetensors.torch import load_file, save_file

    folder = tiny_checkpoint(tmp_path, "mixtral")
    tensors = load_file(folder / "model.safetensors")
    assert any(".block_sparse_moe." in name for name in tensors)
    renamed = {name.replace(".block_sparse_moe.", ".mlp."): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors")
    config = load_model_config(folder)
    assert {part.module for part in parts_of(layers_of(folder, config))} == targets_of(config).keys()


def test_only_chosen_modules_get_slots(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    config, every = load_model_config(folder), layers_of(folder, load_model_config(folder))
    options = EngineConfig(enable_lora=True, max_loras=2, max_lora_rank=4, lora_target_modules=["v_proj", "down_proj"])
    chosen = layers_of(folder, config, options=options)
    assert {part.module.rpartition(".")[2] for part in parts_of(chosen)} == {"v_proj", "down_proj"}
    assert len(chosen.linears) == 2 * config.num_layers
    assert 0 < chosen.space.nbytes < every.space.nbytes / 2
    nowhere = EngineConfig(enable_lora=True, lora_target_modules=["w1"])
    with pytest.raises(ConfigError, match="w1 names no module of LlamaForCausalLM"):
        adaptable(ReferenceOps(), config, nowhere)
