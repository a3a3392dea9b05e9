"""Small adapters of the model of `new_spec`, and specifications of engines that serve them."""

from __future__ import annotations

import json
import struct
from array import array
from pathlib import Path
from typing import Any

from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.tests.support.engine_specs import new_spec

MODULES = ("self_attn.q_proj", "self_attn.v_proj")
SIZE = 8  # inputs and outputs of each module


def write_adapter(
    folder: Path, seed: int = 0, rank: int = 2, *, value: float | None = None, size: int = SIZE, **config: Any
) -> Path:
    """Write an adapter with content that depends on `seed`; `value` becomes one of its elements."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "v_proj"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")
    header: dict[str, Any] = {}
    data = b""
    for module in MODULES:
        for part, shape in (("lora_A", [rank, size]), ("lora_B", [size, rank])):
            content = array("f", (seed + index for index in range(rank * size)))
            if value is not None and not data:
                content[3] = value
            name = f"base_model.model.model.layers.0.{module}.{part}.weight"
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + 4 * len(content)]}
            data += content.tobytes()
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)
    return folder


def adapter_spec(run_directory: Path, **options: Any) -> EngineSpec:
    """Return the specification of an engine that serves adapters."""
    run_directory.mkdir(exist_ok=True)
    config = EngineConfig(enable_lora=True, **options)
    return new_spec(config=config, run_directory=str(run_directory))
