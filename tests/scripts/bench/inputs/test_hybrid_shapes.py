"""Named shapes of hybrids have the tensors that transformers' models have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tokenloom.scripts.bench.inputs.hybrid_shapes import HYBRID_KINDS
from tokenloom.scripts.bench.inputs.make_checkpoint import CONFIGS, tensor_shapes

HYBRIDS = [name for name, config in CONFIGS.items() if config["model_type"] in HYBRID_KINDS]


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_named_hybrid_has_the_tensors_of_transformers(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert tensor_shapes(CONFIGS[name]) == expected


def test_every_family_of_hybrids_has_a_named_shape() -> None:
    assert {CONFIGS[name]["model_type"] for name in HYBRIDS} == HYBRID_KINDS.keys()
