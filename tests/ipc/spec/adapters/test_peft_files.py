"""Adapters that PEFT has saved are read with the ranks, scales and matrices of PEFT's own modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from tokenloom.ipc.spec.adapters.adapter_file import AdapterModule, read_adapter
from tokenloom.ipc.spec.adapters.tensor_header import TENSORS_NAME, TensorPlace
from tokenloom.ipc.spec.models.model_config import ModelConfig
from tokenloom.tests.support.checkpoints import tiny_model
from tokenloom.tests.support.peft_adapters import KINDS, STACKED, randomize

pytestmark = pytest.mark.filterwarnings("ignore")  # peft uses names of transformers that are deprecated

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "patterns": (
        "llama",
        {
            "target_modules": "all-linear",
            "r": 8,
            "rank_pattern": {r"layers\.1\..*(q|k)_proj": 4, "down_proj": 2, "model.layers.0.mlp.up_proj": 3},
            "alpha_pattern": {"^model.layers.0.self_attn.q_proj": 3, ".*_proj": 5},
        },
    ),
    "dora of fused matrices": ("phi3", KINDS["dora"]),
    "transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc", "wte"], "use_rslora": True}),
    "transposed dora": ("gpt2", KINDS["dora"]),
    "embedding and head": ("llama", KINDS["embedding and head"]),
    "renamed head": ("gpt_neox", {"target_modules": ["query_key_value", "lm_head"], "r": 4}),
    "parameters of linears": (
        "llama",
        {
            "target_modules": ["v_proj"],
            "target_parameters": ["q_proj.weight"],
            "r": 4,
            "alpha_pattern": {"q_proj.weight": 3, r"(q|v)_proj": 6},
        },
    ),
    "wrapped": ("gemma3", {"target_modules": r".*language_model.*(q|o|down)_proj", "r": 4}),
    "renamed experts": ("mixtral", KINDS["experts and router"]),
    "experts of old targets": ("mixtral", {"target_modules": ["w1", "w2", "w3", "gate", "o_proj"], "r": 2}),
    "experts": (
        "qwen3_moe",
        {
            "target_modules": "all-linear",
            "r": 2,
            "rank_pattern": {"experts.down_proj": 3},
            "alpha_pattern": {"gate_up_proj": 9},
        },
    ),
    "interleaved experts": ("gpt_oss", KINDS["experts"]),
    "experts beside an mlp": (
        "gemma4_moe",
        {"target_modules": ["up_proj", "router.proj"], "target_parameters": STACKED, "r": 4},
    ),
}


def save_random(model: Any, folder: Path, **config: Any) -> None:
    """Save a random adapter of the model."""
    tuned = peft.get_peft_model(model, peft.LoraConfig(**{"lora_alpha": 11, **config}))
    randomize(tuned, seed=1, strength=1.0)
    tuned.save_pretrained(folder)


def tree(modules: dict[str, nn.Module]) -> nn.Module:
    """Return a module with these modules at their paths."""
    root = nn.Module()
    for path, module in modules.items():
        parent, (*parts, last) = root, path.split(".")
        for part in parts:
            if not hasattr(parent, part):
                parent.add_module(part, nn.Module())
            parent = getattr(parent, part)
        parent.add_module(last, module)
    return root


def layers_of(model: Any, folder: Path) -> dict[str, Any]:
    """Return the layers of PEFT that it makes of a saved adapter, by the names of their A in the file."""
    layers = {}
    for name, layer in peft.PeftModel.from_pretrained(model, folder).named_modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            is_embedding = "default" in layer.lora_embedding_A
            layers[f"{name}.lora_embedding_A" if is_embedding else f"{name}.lora_A.weight"] = layer
    return layers


def tensor_at(path: Path, place: TensorPlace) -> Tensor:
    with path.open("rb") as file:
        file.seek(place.offset)
        content = bytearray(file.read(place.num_bytes))
    return torch.frombuffer(content, dtype=DTYPES[place.dtype]).view(place.shape)


def updates_of(path: Path, module: AdapterModule) -> Tensor:
    """Return scale · b @ a as AdapterModule says it: [out, in], or of all experts [E, out, in]."""
    a, b, num = tensor_at(path, module.a), tensor_at(path, module.b), module.target.num_experts
    if not num:
        return module.scale * b @ a
    rows = [slice(expert * module.rank, (expert + 1) * module.rank) for expert in range(num)]
    deltas = torch.stack([module.scale * b[:, expert::num] @ a[rows[expert]] for expert in range(num)])
    return deltas.mT if module.are_swapped else deltas


def expected(module: AdapterModule, layer: Any) -> Tensor:
    delta: Tensor = layer.get_delta_weight("default")
    return delta.mT if module.target.is_transposed or module.target.kind == "embedding" else delta


def check(folder: Path, model: ModelConfig, layers: dict[str, Any]) -> Iterator[AdapterModule]:
    adapter, path = read_adapter(folder, model, max_rank=64), folder / TENSORS_NAME
    assert {each.a.name for each in adapter.modules} == layers.keys()
    for module in adapter.modules:
        layer, target = layers[module.a.name], module.target
        assert (module.rank, module.scale) == (layer.r["default"], layer.scaling["default"])
        torch.testing.assert_close(updates_of(path, module), expected(module, layer))
        if isinstance(layer, ParamWrapper):
            assert target.module.endswith(layer.parameter_name) or not target.num_experts
        own = module.a.name.removeprefix("base_model.model.").split(".")
        assert target.layer == next((int(each) for each in own if each.isdigit()), None)
        assert (module.magnitude is not None) == layer.use_dora.get("default", False)
        if module.magnitude is not None:
            magnitude = layer.lora_magnitude_vector["default"].weight
            assert torch.equal(tensor_at(path, module.magnitude), magnitude)
        yield module


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_files_of_peft_hold_its_modules_updates(tmp_path: Path, case: str) -> None:
    family, config = CASES[case]
    model = tiny_model(tmp_path, family)
    make, file = getattr(transformers, model.architecture), transformers.AutoConfig.from_pretrained(tmp_path)
    save_random(make(file), tmp_path / "adapter", **config)
    assert list(check(tmp_path / "adapter", model, layers_of(make(file), tmp_path / "adapter")))


@pytest.mark.parametrize(
    ("family", "path"),
    [("mixtral", "block_sparse_moe.experts.{}.w{}"), ("qwen3_moe", "mlp.experts.{}.{}_proj")],
)
@torch.no_grad()
def test_files_of_models_with_experts_one_by_one(tmp_path: Path, family: str, path: str) -> None:
    model = tiny_model(tmp_path, family)
    assert model.experts is not None
    hidden, size = model.hidden_size, model.experts.intermediate_size
    gate, up, down = ("1", "3", "2") if family == "mixtral" else ("gate", "up", "down")
    shapes = {gate: (hidden, size), up: (hidden, size), down: (size, hidden)}

    def make() -> nn.Module:
        return tree(
            {
                f"model.layers.0.{path.format(expert, name)}": nn.Linear(*shape, bias=False)
                for expert in range(model.experts.num_experts if model.experts else 0)
                for name, shape in shapes.items()
            }
        )

    leaves = [path.format(0, name).rpartition(".")[2] for name in shapes]
    config: dict[str, Any] = {"rank_pattern": {r".*\.3\.[^.]+": 2}, "alpha_pattern": {r"experts\.(1|3)\..*": 5}}
    save_random(make(), tmp_path / "adapter", target_modules=leaves, r=4, use_dora=True, **config)
    modules = list(check(tmp_path / "adapter", model, layers_of(make(), tmp_path / "adapter")))
    experts = [each.expert for each in modules if each.target.kind == "experts_down"]
    assert sorted(map(str, experts)) == sorted(map(str, range(len(modules) // 3)))
    assert all(f".{each.expert}." in each.a.name for each in modules)


@torch.no_grad()
def test_files_of_interleaved_experts_that_peft_takes_for_transposed_ones(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, "gpt_oss")
    assert model.experts is not None
    num, hidden, size = model.experts.num_experts, model.hidden_size, model.experts.intermediate_size

    class Experts(nn.Module):  # as in transformers 4, which does not say is_transposed
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(num, hidden, 2 * size))
            self.down_proj = nn.Parameter(torch.zeros(num, size, hidden))

    def make() -> nn.Module:
        return tree({"model.layers.0.mlp.experts": Experts()})

    save_random(make(), tmp_path / "adapter", target_modules=[], target_parameters=STACKED, r=4)
    up, down = check(tmp_path / "adapter", model, layers_of(make(), tmp_path / "adapter"))
    assert (up.are_swapped, up.target.kind) == (True, "experts_up")
    assert (down.are_swapped, down.target.kind) == (True, "experts_down")
