"""A matrix that round_layers.py writes is read back within half a step of its groups."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.quantized import as_floats
from tokenloom.scripts.checkpoints.round_layers import CONFIGS, GROUP, rounded
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.workers.weights.checkpoint import Checkpoint, TensorSlice
from tokenloom.workers.weights.quantized_weights import load_matrix

NAME = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_rounded_matrix_is_read_back(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    weight = torch.randn(16, 3 * GROUP)
    folder = tiny_checkpoint(tmp_path, "llama")
    fields = json.loads((folder / "config.json").read_text()) | {"quantization_config": CONFIGS[kind]}
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(
        {f"{NAME}.{part}": each.contiguous() for part, each in rounded(weight, kind).items()},
        folder / "model.safetensors",
    )
    with Checkpoint(folder, torch.float32, torch.device("cpu"), load_model_config(folder).quantization) as checkpoint:
        found = as_floats(load_matrix(checkpoint, TensorSlice(f"{NAME}.weight", tuple(weight.shape))))
    groups = weight.view(16, 3, GROUP)
    steps = (groups.amax(2) - groups.amin(2)) / 15
    assert ((found - weight).view(16, 3, GROUP).abs() <= 0.51 * steps[..., None] + 1e-2).all()
    assert found.unique().numel() > 16
