"""A tiny Gemma 4 whose layers have different numbers of KV heads, in five KV groups, and its twin for transformers.

transformers refuses layers of one kind that differ. In the twin all have as many KV heads as query heads, each the copy
of the model's KV head that its query head reads, so both compute the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import load_file, save_file

from .checkpoints import tiny_checkpoint

SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = [SLIDING, FULL, SLIDING, SLIDING, FULL, FULL]
KV_HEADS = [2, 1, 1, 4, 2, 1]  # by layer
NUM_HEADS = 4
HEAD_DIMS = {SLIDING: 16, FULL: 32}
WINDOW = 8
GROUPS = [(None, 1), (None, 2), (WINDOW, 2), (WINDOW, 1), (WINDOW, 4)]  # windows and KV heads


class Uneven(NamedTuple):
    """The model, and the checkpoint that transformers reads in its place."""

    folder: Path
    twin: Path


def uneven_checkpoint(folder: Path, seed: int = 0) -> Uneven:
    """Write both into sub-folders."""
    even = {"num_key_value_heads": NUM_HEADS, "num_global_key_value_heads": NUM_HEADS, "sliding_window": WINDOW}
    layers = {"num_hidden_layers": len(KINDS), "layer_types": KINDS}
    made = Uneven(*(tiny_checkpoint(folder / name, "gemma4", seed=seed, **even, **layers) for name in Uneven._fields))
    own, copied = ({**load_file(each / "model.safetensors")} for each in made)
    for layer, (kind, num_kv_heads) in enumerate(zip(KINDS, KV_HEADS, strict=True)):
        for name in (f"model.layers.{layer}.self_attn.{part}_proj.weight" for part in "kv"):
            if name in own:  # full layers use keys as values
                heads = own[name].unflatten(0, (NUM_HEADS, HEAD_DIMS[kind]))[:num_kv_heads]
                own[name] = heads.flatten(0, 1).clone()
                copied[name] = heads.repeat_interleave(NUM_HEADS // num_kv_heads, 0).flatten(0, 1)
    for place, tensors in zip(made, (own, copied), strict=True):
        save_file(tensors, place / "model.safetensors", {"format": "pt"})
    _write_heads(made.folder / "config.json")
    return made


def _write_heads(file: Path) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    for name in ("num_global_key_value_heads", "global_head_dim"):
        del config[name]
    config["per_layer_config"] = {
        str(layer): {"head_dim": HEAD_DIMS[kind], "num_key_value_heads": num_kv_heads}
        for layer, (kind, num_kv_heads) in enumerate(zip(KINDS, KV_HEADS, strict=True))
    }
    file.write_text(json.dumps(config), encoding="utf-8")
