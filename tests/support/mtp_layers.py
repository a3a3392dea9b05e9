"""Tiny checkpoints with a layer for multi-token prediction, and its oracle: transformers' own layer of the family.

transformers reads no such layers. So the model is written with one layer more, which then gets the names of the head's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .checkpoints import tiny_checkpoint, tiny_config
from .family_checkpoints import reference_model
from .recurrent_families import RECURRENT, recurrent_checkpoint


class Form(NamedTuple):
    """Names of a head's tensors."""

    layer: str
    projection: str
    embedding_norm: str
    state_norm: str
    norm: str
    is_state_first: bool = False
    continues_normed: bool = False


QWEN = Form("mtp.layers.0.", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", False, True)
GLM = Form(*(f"model.layers.3.{name}" for name in ("", "eh_proj", "enorm", "hnorm", "shared_head.norm")))
FORMS = {"qwen3_5": QWEN, "qwen3_next": QWEN, "qwen3_5_moe": QWEN, "glm4_moe": GLM}
OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")


def mtp_checkpoint(folder: Path, family: str, bigram_noise: float | None = None, **fields: Any) -> Path:
    """Write a model with an MTP layer into `folder`, and the same with one layer more into `folder`-longer.
    bigram_noise: no layer adds anything, so that a token follows from the one before it alone, and the head knows it
    but for noise; None: random weights."""
    form, config = FORMS[family], RECURRENT.get(family) or tiny_config(family)
    num_layers = config["num_hidden_layers"]
    assert isinstance(num_layers, int)
    more = {**fields, "num_hidden_layers": num_layers + 1}
    if "layer_types" in config:
        more["layer_types"] = [*config["layer_types"], "full_attention"]  # type: ignore[misc]
    write: Callable[..., Path] = recurrent_checkpoint if family in RECURRENT else tiny_checkpoint
    longer = write(folder.with_name(f"{folder.name}-longer"), family, **more)
    tensors = {name: each for path in longer.glob("*.safetensors") for name, each in load_file(path).items()}
    if bigram_noise is not None:
        tensors = {name: each * (not name.endswith(OUTPUTS)) for name, each in tensors.items()}
    for name, each in head_tensors(form, tensors, bigram_noise).items():
        tensors[f"{name}.weight"] = each
    last = f"model.layers.{num_layers}."
    tensors = {name.replace(last, form.layer): each for name, each in tensors.items()}
    folder.mkdir(parents=True)
    for path in longer.iterdir():
        if path.suffix != ".safetensors" and not path.name.endswith("index.json"):
            (folder / path.name).write_bytes(path.read_bytes())
    stored = json.loads((folder / "config.json").read_text())
    stored |= {"num_hidden_layers": num_layers, "num_nextn_predict_layers": 1}
    if "layer_types" in stored:
        stored["layer_types"] = config["layer_types"]
    (folder / "config.json").write_text(json.dumps(stored))
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    return folder


def head_tensors(form: Form, tensors: dict[str, Tensor], bigram_noise: float | None) -> dict[str, Tensor]:
    """Return the tensors that the head has beside its layer."""
    final = tensors["model.norm.weight"]
    generator, size = torch.Generator().manual_seed(7), len(final)
    projection = torch.randn(size, 2 * size, generator=generator) / (2 * size) ** 0.5
    if bigram_noise is not None:
        projection = torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1) + bigram_noise * projection
    drawn = [0.3 * torch.randn(size, generator=generator) + (form.norm != "mtp.norm") for _ in range(3)]
    if bigram_noise is not None:
        drawn = [*(torch.full((size,), float(form.norm != "mtp.norm")) for _ in range(2)), final.clone()]
    norms = dict(zip((form.embedding_norm, form.state_norm, form.norm), drawn, strict=True))
    return {form.projection: projection, **norms}


@torch.inference_mode()
def mtp_oracle(folder: Path, family: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a function that computes the head on states [T, hidden] of tokens and the tokens [T] behind them, and
    gives the states that follow and logits."""
    form, longer = FORMS[family], folder.with_name(f"{folder.name}-longer")
    model: Any = reference_model(longer)
    tensors = load_file(folder / "model.safetensors")
    norm_type = type(model.model.norm)

    def norm(name: str, x: Tensor) -> Tensor:
        made = norm_type(x.shape[1], model.config.rms_norm_eps)
        made.weight.data = tensors[f"{name}.weight"]
        found: Tensor = made(x)
        return found

    def run(states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        inputs = [norm(form.embedding_norm, model.model.embed_tokens(tokens)), norm(form.state_norm, states)]
        x = (torch.cat(inputs, dim=1) @ tensors[f"{form.projection}.weight"].T)[None]
        positions = torch.arange(len(tokens))[None]
        rotary = model.model.rotary_emb(x, positions)
        mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
        output = model.model.layers[-1](
            x, position_embeddings=rotary, attention_mask=mask, position_ids=positions, past_key_values=None
        )
        output = (output[0] if isinstance(output, tuple) else output)[0]
        normed = norm(form.norm, output)
        return (normed if form.continues_normed else output), model.lm_head(normed)

    return run
