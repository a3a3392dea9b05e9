"""Write SmolLM2-135M as a checkpoint of AWQ or GPTQ, each weight rounded to the nearest of its group's codes.

    python -m tokenloom.scripts.checkpoints.round_layers awq FOLDER

For measurements of what products as integers cost (compare_quality FOLDER stored+integers): those of the same codes as
floats are their measure, so that it does not matter how well the codes fit the floats.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokenloom.scripts.checkpoints.scale_layers import write_tokenizer
from tokenloom.tests.support.quantized_checkpoints import MATRIX, Tensors, words_of
from tokenloom.tests.system.real_model import reference

GROUP = 64  # inputs; divides 576 and 1,536
CONFIGS: dict[str, dict[str, object]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False},
}
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # of the outputs in a word


def rounded(weight: Tensor, kind: str) -> Tensors:
    """Round weight [out, in] and return its tensors as a checkpoint of that kind has them."""
    num_out, num_in = weight.shape
    groups = weight.float().numpy().T.reshape(num_in // GROUP, GROUP, num_out)
    low, high = np.minimum(groups.min(1), 0), np.maximum(groups.max(1), 0)
    scales = np.maximum((high - low) / 15, 1e-6).astype(np.float16)
    wide = scales.astype(np.float32)
    zeros = np.clip(np.rint(-low / wide), 0, 15).astype(np.int64)
    if kind == "gptq":
        zeros = np.maximum(zeros, 1)  # it stores one less
    codes = np.clip(np.rint(groups / wide[:, None]) + zeros[:, None], 0, 15).astype(np.int64).reshape(num_in, num_out)
    found = {"scales": torch.from_numpy(scales)}
    if kind == "awq":
        in_words = [each.reshape(len(each), num_out // 8, 8)[:, :, AWQ_ORDER] for each in (codes, zeros)]
        return found | {"qweight": words_of(in_words[0]), "qzeros": words_of(in_words[1])}
    return found | {
        "qweight": words_of(codes.reshape(num_in // 8, 8, num_out).transpose(0, 2, 1)),
        "qzeros": words_of((zeros - 1).reshape(len(zeros), num_out // 8, 8)),
        "g_idx": torch.arange(num_in, dtype=torch.int32) // GROUP,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=CONFIGS)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    reference().save_pretrained(given.folder)
    weights, stored = given.folder / "model.safetensors", Tensors()
    for name, tensor in load_file(weights).items():
        matrix = MATRIX.fullmatch(name)
        if matrix is None:
            stored[name] = tensor
            continue
        stored |= {f"{matrix[1]}.{part}": each.contiguous() for part, each in rounded(tensor, given.kind).items()}
    save_file(stored, weights, {"format": "pt"})
    config = given.folder / "config.json"
    fields = json.loads(config.read_text(encoding="utf-8")) | {"quantization_config": CONFIGS[given.kind]}
    config.write_text(json.dumps(fields, indent=2), encoding="utf-8")
    write_tokenizer(given.folder)


if __name__ == "__main__":
    main()
