"""A config.json with a hostile value in one field is read or refused by the field's name, in little time and memory."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenloom.ipc.spec.models.model_config import ModelConfig
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.tests.support.checkpoints import NATIVES, tiny_config
from tokenloom.tests.support.hostile_fields import Hostile, faults, hostile_changes
from tokenloom.tests.support.today import some

DRAWN = 24  # changes of each family in the short form
GENERATION: dict[str, Any] = json.loads("""{
  "eos_token_id": [2, 3], "suppress_tokens": [1, 2], "begin_suppress_tokens": [5],
  "no_timestamps_token_id": 90, "max_initial_timestamp_index": 50, "is_multilingual": true,
  "lang_to_id": {"<|en|>": 80, "<|de|>": 81}
}""")
QUANTIZATIONS: dict[str, dict[str, Any]] = json.loads("""{
  "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true, "version": "gemm"},
  "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "gptq", "dynamic": {}},
  "fp8": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "expert_dtype": "fp8"},
  "compressed-tensors": {
    "quant_method": "compressed-tensors", "format": "int-quantized", "sparsity_config": {"format": "dense"},
    "config_groups": {
      "group_0": {
        "weights": {"type": "int", "num_bits": 8, "strategy": "group", "symmetric": true, "group_size": 64}
      }
    }
  }
}""")


def reader(path: Path, content: Any) -> Callable[[Hostile], None]:
    """Return the function that writes a change of the content into the file, and reads the model in its folder."""

    def read(change: Hostile) -> None:
        path.write_text(json.dumps(change.of(content)))
        model = load_model_config(path.parent)
        msgspec.msgpack.decode(msgspec.msgpack.encode(model), type=ModelConfig)  # other processes get it so

    return read


def changes_of(config: Any) -> list[Hostile]:
    """Return the changes of all fields; but for text_config as a whole: without it the fields are expected at the top,
    and another one is missing first."""
    return [each for each in hostile_changes(config) if each.path != ("text_config",)]


@pytest.mark.parametrize("family", some(NATIVES, 10))
def test_some_hostile_values_are_refused_by_their_fields(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    changes = random.Random(family).sample(changes_of(config), DRAWN)
    assert not faults(changes, reader(tmp_path / "config.json", config))


@pytest.mark.nightly
@pytest.mark.parametrize("family", NATIVES)
def test_every_hostile_value_is_refused_by_its_field(family: str, tmp_path: Path) -> None:
    config = tiny_config(family)
    assert not faults(changes_of(config), reader(tmp_path / "config.json", config))


@pytest.mark.parametrize("method", some([*QUANTIZATIONS], 1))
def test_hostile_quantization_is_refused_by_its_field(method: str, tmp_path: Path) -> None:
    config = {**tiny_config("llama"), "quantization_config": QUANTIZATIONS[method]}
    changes = [each for each in hostile_changes(config) if each.path[0] == "quantization_config"]
    assert not faults(changes, reader(tmp_path / "config.json", config))


def test_hostile_generation_config_is_refused_by_its_field(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama")))
    assert not faults(hostile_changes(GENERATION), reader(tmp_path / "generation_config.json", GENERATION))
