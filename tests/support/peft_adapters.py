"""Random adapters that peft itself makes and saves, of any tiny family, and peft's logits with them.

    from tokenloom.tests.support.peft_adapters import KINDS, peft_logits, save_adapter
    adapter = save_adapter(tmp_path / "a", checkpoint, KINDS["dora"], seed=1)
    logits = peft_logits(checkpoint, adapter, {"prompt": [5, 17, 3]})

Updates are about as large as the base's weights, so that greedy tokens change. For adapters without peft see
`adapters.py`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .adapters import peft_model
from .family_checkpoints import reference_model

Config = dict[str, Any]  # arguments of peft.LoraConfig

STRENGTH = 0.7  # of an update's outputs, as a multiple of the base's
STACKED = ["experts.gate_up_proj", "experts.down_proj"]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj"]
LINEARS += ["c_attn", "c_proj", "c_fc"]
KINDS: dict[str, Config] = {
    "r8": {"target_modules": ["q_proj", "v_proj", "qkv_proj", "c_attn"], "r": 8, "lora_alpha": 8},
    "r16 all linears": {"target_modules": "all-linear", "r": 16, "lora_alpha": 32},
    "rslora": {"target_modules": "all-linear", "r": 8, "lora_alpha": 4, "use_rslora": True},
    "dora": {"target_modules": "all-linear", "r": 4, "lora_alpha": 8, "use_dora": True},
    "patterns": {
        "target_modules": "all-linear",
        "r": 4,
        "lora_alpha": 12,
        "rank_pattern": {r".*\.1\..*(q|k|qkv|gate_up)_proj": 9, "down_proj": 1, "c_fc": 7},
        "alpha_pattern": {r".*\.0\..*": 3, "o_proj": 30, "c_proj": 2},
    },
    "one layer": {"target_modules": LINEARS, "r": 5, "lora_alpha": 20, "layers_to_transform": [1]},
    "embedding and head": {"target_modules": ["embed_tokens", "wte", "lm_head", "o_proj"], "r": 6, "lora_alpha": 6},
    "experts": {"target_modules": ["o_proj"], "target_parameters": STACKED, "r": 4, "lora_alpha": 8},
    "experts and router": {
        "target_modules": ["q_proj"],
        "target_parameters": [*STACKED, "gate.weight"],
        "r": 3,
        "lora_alpha": 3,
        "rank_pattern": {"experts.down_proj": 5},
    },
}


@torch.no_grad()
def save_adapter(folder: Path, checkpoint: Path, config: Config, seed: int, strength: float = STRENGTH) -> Path:
    """Save a random adapter of a checkpoint and return its folder."""
    import peft

    with _quiet():
        model: Any = peft.get_peft_model(reference_model(checkpoint), peft.LoraConfig(**config))
        randomize(model, seed, strength)
        model.save_pretrained(folder)
    return folder


@torch.inference_mode()
def peft_logits(
    checkpoint: Path, adapter: Path | None, tokens: Mapping[str, Sequence[int]], *, is_merged: bool = False
) -> dict[str, Tensor]:
    """Return the logits [n, vocab] of each prompt with an adapter, merged into the weights or beside them."""
    with _quiet():
        model: Any = reference_model(checkpoint) if adapter is None else peft_model(checkpoint, {"default": adapter})
        if is_merged:
            model = model.merge_and_unload()
    return {name: model(torch.tensor([list(ids)])).logits[0] for name, ids in tokens.items()}


def randomize(model: Any, seed: int, strength: float) -> None:
    """Fill the matrices of a peft model's adapter, and change its magnitudes by about a third."""
    from peft.tuners.lora import LoraLayer

    generator = torch.Generator().manual_seed(seed)
    for layer in (each for each in model.modules() if isinstance(each, LoraLayer)):
        rank, scale = layer.r["default"], layer.scaling["default"]
        is_embedding = "default" in layer.lora_embedding_A
        pairs = (layer.lora_embedding_A, layer.lora_embedding_B) if is_embedding else (layer.lora_A, layer.lora_B)
        a, b = (each["default"] if is_embedding else each["default"].weight for each in pairs)
        width = layer.out_features if is_embedding else layer.in_features
        a.copy_(torch.randn(a.shape, generator=generator) * width**-0.5)
        b.copy_(torch.randn(b.shape, generator=generator) * (strength / scale * rank**-0.5))
        for magnitude in layer.lora_magnitude_vector.values():
            magnitude.weight.mul_(1 + 0.3 * torch.randn(magnitude.weight.shape, generator=generator))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ignore the warnings of peft: that tied weights are updated alone, and of names of its own that are deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
