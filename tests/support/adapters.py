"""Random adapters of random checkpoints, strong enough that greedy tokens change, and their peft models.

    from tokenloom.tests.support.adapters import KINDS, write_adapters
    folders = write_adapters(tmp_path / "adapters", checkpoint, 5)

The files are written by hand, so that a misreading that peft shares with the engine could not hide in them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenloom.scripts.bench.inputs.make_adapter import AdapterShape, write_adapter

STRENGTH = 0.7
KINDS = {  # by the feature that only they have
    "all linears": AdapterShape(rank=8, alpha=16, strength=STRENGTH),
    "attention": AdapterShape(rank=4, alpha=4, modules=("q_proj", "v_proj", "o_proj"), strength=2 * STRENGTH),
    "rslora": AdapterShape(rank=16, alpha=16, use_rslora=True, strength=STRENGTH),
    "dora": AdapterShape(rank=8, alpha=8, use_dora=True, strength=STRENGTH),
    "one layer": AdapterShape(rank=5, alpha=20, layers=[1], strength=3 * STRENGTH),
    "mlp": AdapterShape(rank=1, alpha=2, modules=("gate_proj", "up_proj", "down_proj"), strength=2 * STRENGTH),
}


def write_adapters(folder: Path, checkpoint: Path, count: int, seed: int = 0) -> list[Path]:
    """Write `count` adapters, whose kinds go around KINDS, into sub-folders a0, a1, … and return these."""
    shapes = list(KINDS.values())
    return [write_adapter(folder / f"a{i}", checkpoint, shapes[i % len(shapes)], seed + i) for i in range(count)]


def peft_model(checkpoint: Path, adapters: dict[str, Path]) -> Any:
    """Return peft's model of a checkpoint in float32 with named adapters, none of which is merged."""
    import peft
    import torch
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    model: Any = None
    for name, folder in adapters.items():
        if model is None:
            model = peft.PeftModel.from_pretrained(base, folder, adapter_name=name)
        else:
            model.load_adapter(folder, adapter_name=name)
    return model.eval()
