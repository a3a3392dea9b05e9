"""A GPU samples steps itself if it has kernels for the model, whose layers keep no state."""

from __future__ import annotations

import msgspec
import pytest
import torch

from tokenloom.ipc.spec.models.model_config import LayerConfig
from tokenloom.tests.core.harness import A_STATE
from tokenloom.tests.support.engine_specs import new_spec
from tokenloom.workers.model_loader import ModelLoader


@pytest.mark.parametrize(("device", "fits"), [("cpu", True), ("cuda", True), ("cuda", False)])
@pytest.mark.parametrize("has_state", [False, True])
def test_a_gpu_samples_the_steps_of_models_with_kernels_and_without_states(
    device: str, *, fits: bool, has_state: bool
) -> None:
    spec = new_spec()
    if has_state:
        layers = [LayerConfig(mixer="state"), LayerConfig()]
        model = msgspec.structs.replace(spec.model, layers=layers, num_layers=2, state=A_STATE)
        spec = msgspec.structs.replace(spec, model=model)
    loader = ModelLoader(spec, torch.device(device), None)
    loader.__dict__["_fits_gpu_kernels"] = fits  # else it looks for a GPU
    has_kernels = device == "cuda" and fits
    assert loader.has_device_kernels == has_kernels
    assert loader.samples_on_device == loader.has_graphs == (has_kernels and not has_state)
