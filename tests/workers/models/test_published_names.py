"""The tensors in `published/` are those of transformers' model of the same config.json, by name and shape.

transformers builds each model at full size on the meta device and says under which names it would save it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from tokenloom.tests.support.published_models import NAMES, expand, read_published

ROOTS = re.compile(r"^(model\.language_model\.|language_model\.model\.|language_model\.|transformer\.|model\.)")
VALUES_PER_BLOCK = 32  # of mxfp4: 16 bytes and a scale


def transformers_shapes(config: dict[str, Any], folder: Path) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of all tensors that transformers saves for a config.json, unquantized."""
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(plain), encoding="utf-8")
    parsed = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = getattr(transformers, config["architectures"][0])(parsed)
    tensors = model.state_dict()
    if getattr(parsed, "tie_word_embeddings", False):
        for name in model._tied_weights_keys:
            tensors.pop(name, None)
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, tensors).items()}


def unpacked(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes with mxfp4's pairs [experts, out, blocks, 16] and [experts, out, blocks] as one [experts, in,
    out], as transformers keeps these matrices."""
    result = {}
    for name, shape in shapes.items():
        if name.endswith("_blocks"):
            num_experts, num_outputs, num_blocks, num_bytes = shape
            assert num_bytes * 2 == VALUES_PER_BLOCK
            assert shapes[name.removesuffix("_blocks") + "_scales"] == shape[:3]
            result[name.removesuffix("_blocks")] = (num_experts, num_blocks * VALUES_PER_BLOCK, num_outputs)
        elif not name.endswith("_scales"):
            result[name] = shape
    return result


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_names_and_shapes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = read_published(name)
    ours = {ROOTS.sub("", tensor): shape for tensor, shape in unpacked(model.shapes).items()}
    assert len(ours) == len(unpacked(model.shapes))
    theirs = {ROOTS.sub("", tensor): shape for tensor, shape in transformers_shapes(model.config, tmp_path).items()}
    ignored = {ROOTS.sub("", tensor) for tensor in model.ignored}
    assert ours == {tensor: shape for tensor, shape in theirs.items() if tensor not in ignored}


def test_a_pattern_stands_for_each_of_its_numbers() -> None:
    assert list(expand("a.{0-2,5}.b")) == ["a.0.b", "a.1.b", "a.2.b", "a.5.b"]
    assert list(expand("{7}.x.{0-1}")) == ["7.x.0", "7.x.1"]
    assert list(expand("norm.weight")) == ["norm.weight"]
