"""Write a random LoRA adapter of a checkpoint, as a PEFT checkpoint made without peft.

    python scripts/bench/inputs/make_adapter.py CHECKPOINT OUT --rank 16 --seed 0

For benchmarks and tests: adapter_config.json and adapter_model.safetensors. Needs torch and safetensors. The matrices
are those of the checkpoint's own files, so that any family works that has one tensor for each module. Equal arguments
give equal bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tokenloom.ipc.spec.models.multimodal import ENCODER_PREFIXES
from tokenloom.scripts.bench.inputs.make_checkpoint import DTYPES

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ROOT = "base_model.model"


@dataclass(frozen=True)
class AdapterShape:
    """Form of an adapter. `strength`: size of the updates, as a multiple of the outputs of a random checkpoint."""

    rank: int = 16
    alpha: int = 32
    modules: Sequence[str] = LINEARS  # last parts of their names
    dtype: str = "float32"
    strength: float = 1.0
    use_rslora: bool = False
    use_dora: bool = False
    layers: Sequence[int] | None = None  # None: all

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def matrices(checkpoint: Path, shape: AdapterShape) -> Iterator[tuple[str, Path]]:
    """Yield the module and the file of each matrix that such an adapter updates, in the order of their names: of the
    language model alone, since the engine takes no adapters of encoders."""
    found = []
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found += [(name.removesuffix(".weight"), file) for name in tensors.keys()]  # noqa: SIM118
    for module, file in sorted(found):
        if module.startswith(tuple(ENCODER_PREFIXES)):
            continue
        layers = [int(part) for part in module.split(".") if part.isdigit()][:1]
        is_in_layer = shape.layers is None or not layers or layers[0] in shape.layers
        if module.rpartition(".")[2] in shape.modules and is_in_layer:
            yield module, file


def write_adapter(folder: Path, checkpoint: Path, shape: AdapterShape | None = None, seed: int = 0) -> Path:
    """Write an adapter of `checkpoint` into `folder`, which is created if missing; return it.

    The rows of A have length 1 on average. B is scaled so that the update of an output has a standard deviation of
    `strength` if the inputs have one of 1.
    """
    shape = shape or AdapterShape()
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for module, file in matrices(checkpoint, shape):
        with safe_open(file, framework="pt") as weights:
            num_outputs, num_inputs = weights.get_slice(f"{module}.weight").get_shape()
            weight = weights.get_tensor(f"{module}.weight").float() if shape.use_dora else None
        a = torch.randn(shape.rank, num_inputs, generator=generator) / math.sqrt(num_inputs)
        b = torch.randn(num_outputs, shape.rank, generator=generator)
        b *= shape.strength / (math.sqrt(shape.rank) * shape.scale)
        tensors[f"{ROOT}.{module}.lora_A.weight"], tensors[f"{ROOT}.{module}.lora_B.weight"] = a, b
        if weight is not None:
            lengths = (weight + shape.scale * b @ a).norm(dim=1)
            noise = torch.randn(num_outputs, generator=generator)
            tensors[f"{ROOT}.{module}.lora_magnitude_vector"] = lengths * (1 + 0.2 * noise)
    assert tensors, f"no matrix of {checkpoint} has one of the names {', '.join(shape.modules)}"
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.to(DTYPES[shape.dtype]).contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps(config_of(shape), indent=2) + "\n", encoding="utf-8")
    return folder


def config_of(shape: AdapterShape) -> Mapping[str, object]:
    """Return the fields of adapter_config.json that change the meaning of the tensors, and peft's task."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": shape.rank,
        "lora_alpha": shape.alpha,
        "target_modules": list(shape.modules),
        "layers_to_transform": None if shape.layers is None else list(shape.layers),
        "bias": "none",
        "use_rslora": shape.use_rslora,
        "use_dora": shape.use_dora,
        "inference_mode": True,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    shape = AdapterShape(rank=options.rank, alpha=2 * options.rank, dtype=options.dtype)
    folder = write_adapter(options.out, options.checkpoint, shape, options.seed)
    print(f"{folder}: {(folder / 'adapter_model.safetensors').stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
