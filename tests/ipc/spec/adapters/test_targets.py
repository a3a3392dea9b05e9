"""Targets are all matrices of a model, with the shapes of transformers' modules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from tokenloom.ipc.spec.adapters.targets import AdapterTarget, ModulePaths, is_chosen, targets_of
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.tests.support import families
from tokenloom.tests.support.checkpoints import FAMILIES, tiny_model
from tokenloom.tests.support.recurrent_families import config_of

FAST = ["llama", "mixtral", "qwen3_moe", "phi3", "gpt2", "gpt_neox", "gemma3", "gemma4_moe", "gpt_oss", "minimax_m2"]
OTHERS = sorted({*FAMILIES, *families.CONFIGS} - {*FAST, "apertus"})  # transformers' layers run apertus
OTHER_PARTS = (
    "audio_tower",
    "vision_tower",
    "multi_modal_projector",
    "embed_vision",
    "_norm",
    "_bias",
    "wpe",
)  # and names of tensors without matrix


def matrices_of(folder: Path, architecture: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the text model's matrices by path, of experts by parameter."""
    with torch.device("meta"):
        model = getattr(transformers, architecture)(transformers.AutoConfig.from_pretrained(folder))
    shapes = {name.removesuffix(".weight"): tuple(each.shape) for name, each in model.named_parameters()}
    shapes |= {"lm_head": tuple(model.lm_head.weight.shape)}  # which is no parameter of its own if it is tied
    return {
        name: shape
        for name, shape in shapes.items()
        if len(shape) > 1 and not any(part in name for part in OTHER_PARTS)
    }


def shape_of(target: AdapterTarget) -> tuple[int, ...]:
    shape = (target.num_outputs, target.num_inputs)
    if target.is_transposed or target.kind == "embedding":
        shape = shape[::-1]
    return (target.num_experts, *shape) if target.num_experts else shape


MIXERS = (".linear_attn.", ".mamba.", ".conv.", ".mixer.in_proj", ".mixer.out_proj", ".mixer.conv1d")


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_next", "qwen3_5", "lfm2", "granite4_dense", "bamba", "falcon_h1"),
        *("nemotron_h", "nemotron_h_moe", "olmo_hybrid"),
    ],
)
def test_targets_of_hybrids_are_all_matrices_but_those_of_mixers_with_a_state(family: str, tmp_path: Path) -> None:
    config = {**config_of(family), "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = load_model_config(tmp_path)
    shapes = matrices_of(tmp_path, model.architecture)
    expected = {name: shape for name, shape in shapes.items() if not any(part in name for part in MIXERS)}
    targets = {path: target for path, target in targets_of(model).items() if target.expert is None}
    assert {path: shape_of(target) for path, target in targets.items()} == expected


@pytest.mark.parametrize("family", [*FAST, *(pytest.param(each, marks=pytest.mark.nightly) for each in OTHERS)])
def test_targets_are_the_matrices_of_transformers_modules(tmp_path: Path, family: str) -> None:
    model = tiny_model(tmp_path, family)
    targets, paths = targets_of(model), ModulePaths(model)
    found = set()
    for module, shape in matrices_of(tmp_path, model.architecture).items():
        spelled = [each for each in paths.spellings(module) if each in targets]
        assert spelled, module
        assert shape_of(targets[spelled[0]]) == shape, module
        found.add(spelled[0])
    rest = [target for path, target in targets.items() if path not in found]
    assert all(target.expert is not None for target in rest), rest  # transformers has all experts in one parameter


def test_layers_that_share_keys_have_queries_alone(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    model = tiny_model(tmp_path, "gemma4", num_hidden_layers=4, layer_types=kinds, num_kv_shared_layers=2)
    targets, matrices = targets_of(model), matrices_of(tmp_path, model.architecture)
    own = [[name for name in ("q_proj", "k_proj", "v_proj") if f"model.layers.{layer}.self_attn.{name}" in targets]
           for layer in range(4)]  # fmt: skip
    assert own == [["q_proj", "k_proj", "v_proj"], ["q_proj", "k_proj"], ["q_proj"], ["q_proj"]]  # full: keys as values
    assert targets.keys() == matrices.keys()


def test_experts_one_by_one_are_those_of_the_stacked_ones(tmp_path: Path) -> None:
    targets = targets_of(tiny_model(tmp_path, "mixtral")).values()
    block = "model.layers.1.block_sparse_moe.experts"
    own = {each.module: each for each in targets if each.module.startswith(block)}
    assert len(own) == 2 + 3 * 5
    up = own[f"{block}.gate_up_proj"]
    parts = [own[f"{block}.3.{name}"] for name in ("w1", "w3")]
    assert [(each.expert, each.kind, each.layer, each.num_experts) for each in parts] == [(3, "experts_up", 1, 0)] * 2
    assert [each.first_output for each in parts] == [0, parts[0].num_outputs]
    assert sum(each.num_outputs for each in parts) == up.num_outputs


@pytest.mark.parametrize(
    ("family", "module", "path"),
    [
        ("llama", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
        ("llama", "model.language_model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
        ("llama", "language_model.model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
        ("llama", "layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
        ("llama", "language_model.lm_head", "lm_head"),
        ("gpt2", "transformer.h.0.mlp.c_fc", "model.h.0.mlp.c_fc"),
        ("gpt2", "transformer.wte", "model.wte"),
        ("gpt_neox", "layers.0.mlp.dense_h_to_4h", "gpt_neox.layers.0.mlp.dense_h_to_4h"),
        ("gpt_neox", "lm_head", "embed_out"),
        ("mixtral", "model.layers.0.mlp.gate", "model.layers.0.block_sparse_moe.gate"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.1.w2", "model.layers.0.block_sparse_moe.experts.1.w2"),
        ("llava", "model.language_model.layers.0.mlp.up_proj", "model.layers.0.mlp.up_proj"),
        ("llava", "model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj", None),
        ("idefics3", "model.text_model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
        ("idefics3", "model.connector.modality_projection.proj", None),
        ("qwen2_5_vl", "model.language_model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj"),
        ("qwen2_5_vl", "model.visual.blocks.0.mlp.up_proj", None),
        ("llama", "model.layers.9.mlp.up_proj", None),
    ],
)
def test_paths_of_wrapped_and_renamed_modules(tmp_path: Path, family: str, module: str, path: str | None) -> None:
    model = tiny_model(tmp_path, family)
    targets = targets_of(model)
    assert next((each for each in ModulePaths(model).spellings(module) if each in targets), None) == path


def test_chosen_modules_are_those_whose_paths_end_with_a_name(tmp_path: Path) -> None:
    targets = targets_of(tiny_model(tmp_path, "qwen3_moe"))

    def chosen(*names: str) -> set[str]:
        return {path.rpartition(".")[2] for path, target in targets.items() if is_chosen(target, names)}

    assert chosen("q_proj", "self_attn.o_proj", "roj") == {"q_proj", "o_proj"}
    assert chosen("experts") == {"gate_up_proj", "down_proj"}
    assert chosen() == set()
    assert all(is_chosen(target, None) for target in targets.values())
