"""Writes tiny random-weight checkpoints of any family with transformers' own classes, and reads them as oracles.

    from tokenloom.tests.support.checkpoints import tiny_checkpoint
    folder = tiny_checkpoint(tmp_path, "gemma2", sliding_window=5)
    model = reference_model(folder)

All norms, biases, scales and sinks are random, so that a tensor that is not used changes the logits.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tokenloom.scripts.bench.inputs.make_checkpoint import BOS_ID, DTYPES, EOS_ID, write_tokenizer

from .families import Config

SPREAD = 0.3  # deviation of norms, scales and sinks
BIAS_SPREAD = 0.15


def write_family(folder: Path, config: Config, dtype: str, seed: int, shard_bytes: int) -> Path:
    """Write config, random weights under their published names, generation config and tokenizer; return `folder`."""
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    stored = {**config, "dtype": dtype, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": 0}
    text = json.dumps(stored, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # `randomize` keeps the means of vectors, some of which transformers draws
        model = getattr(transformers, config["architectures"][0])(transformers.AutoConfig.from_pretrained(folder))
    randomize(model, seed)
    model.to(DTYPES[dtype]).save_pretrained(folder, max_shard_size=shard_bytes)
    (folder / "config.json").write_text(text, encoding="utf-8")  # transformers has rewritten it in its own spelling
    ids = json.dumps({"bos_token_id": BOS_ID, "eos_token_id": EOS_ID})
    (folder / "generation_config.json").write_text(ids, encoding="utf-8")
    write_tokenizer(folder)
    return folder


def reference_model(folder: Path) -> torch.nn.Module:
    """Return transformers' model of a checkpoint in float32."""
    import transformers

    architecture = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"][0]
    model: torch.nn.Module = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()
    return model


@torch.no_grad()
def randomize(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter and stored buffer with noise. Matrices keep the scale of their inputs; a vector varies
    around the value that it was initialized with, as norms are around 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("act_fn.eps"):  # a constant of xIELU that files store
            continue
        if "bias" in name:
            tensor.copy_(BIAS_SPREAD * noise)
        elif tensor.ndim < 2 or name.endswith("norm.weight"):  # Command-R+ has a row of norm weights for each head
            tensor.copy_(tensor.mean() + SPREAD * noise)
        elif "embed" in name or "lm_head" in name or name.endswith(("wte.weight", "wpe.weight")):
            tensor.copy_(noise * 3.0 / tensor.shape[1] ** 0.5)
        else:
            tensor.copy_(noise / tensor.shape[-1] ** 0.5)
