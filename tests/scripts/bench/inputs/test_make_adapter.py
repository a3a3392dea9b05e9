"""Random adapters made by hand are those that peft reads: every tensor is used, and each changes the base's tokens."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenloom.scripts.bench.inputs.make_adapter import AdapterShape, matrices, write_adapter
from tokenloom.tests.support.adapters import KINDS, peft_model
from tokenloom.tests.support.checkpoints import tiny_checkpoint

pytest.importorskip("peft")


def test_peft_reads_every_tensor_and_each_kind_changes_the_tokens(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "m", "qwen3")
    folders = {
        f"kind-{name}".replace(" ", "-"): write_adapter(tmp_path / name, checkpoint, KINDS[name]) for name in KINDS
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft's use of transformers
        model = peft_model(checkpoint, folders)
    read = {name: tensor for name, tensor in model.named_parameters() if "lora_" in name}
    ids = torch.randint(0, 256, (4, 30), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        with model.disable_adapter():
            base = model(ids).logits.argmax(dim=-1)
        for name, folder in folders.items():
            written = load_file(folder / "adapter_model.safetensors")
            owned = {key: value for key, value in read.items() if f".{name}." in key or key.endswith(f".{name}")}
            assert len(owned) == len(written), name
            for key, value in owned.items():
                stored = key.replace(f".{name}", "", 1).replace("_vector.weight", "_vector")
                assert torch.equal(value, written[stored]), key
            model.set_adapter(name)
            changed = (model(ids).logits.argmax(dim=-1) != base).float().mean()
            assert changed > 0.5, f"{name} changes {changed:.0%} of the tokens"


def test_equal_arguments_give_equal_bytes_and_another_seed_gives_others(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "m", "llama")
    shape = AdapterShape(rank=3, alpha=6, modules=("q_proj",), dtype="bfloat16")
    one, same, other = (
        write_adapter(tmp_path / name, checkpoint, shape, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    files = [(folder / "adapter_model.safetensors").read_bytes() for folder in (one, same, other)]
    assert files[0] == files[1] != files[2]
    config = json.loads((one / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (3, 6, ["q_proj"])
    assert len(load_file(one / "adapter_model.safetensors")) == 2 * 2, "two tensors in each of two layers"


def test_encoders_get_no_tensors(tmp_path: Path) -> None:
    names = ("model.visual.blocks.0.mlp.gate_proj", "vision_tower.layers.0.q_proj", "model.layers.0.self_attn.q_proj")
    save_file({f"{name}.weight": torch.zeros(4, 4) for name in names}, tmp_path / "model.safetensors")
    assert [module for module, _ in matrices(tmp_path, AdapterShape())] == ["model.layers.0.self_attn.q_proj"]
