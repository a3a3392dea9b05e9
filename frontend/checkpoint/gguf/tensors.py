"""Mapping of a GGUF file's tensors to the names that the model of config.json has for them."""

from __future__ import annotations

import msgspec

from ....ipc.spec.config.gguf_index import GgufTensor
from ....ipc.spec.models.model_config import ModelConfig
from .architecture import Architecture

CONSUMED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")  # values in config.json
OTHERS = ("v.", "a.", "mm.")  # prefixes of media encoders and their projectors
WHOLE = {"embedding": "token_embd", "norm": "output_norm", "head": "output"}  # field of TensorNames → name in a file
IN_LAYER = {
    "input_norm": "attn_norm",
    "attention_output_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_output_norm": "post_ffw_norm",
    "query": "attn_q",
    "key": "attn_k",
    "value": "attn_v",
    "qkv": "attn_qkv",
    "output": "attn_output",
    "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "gate_up": "ffn_up",
    "down": "ffn_down",
}
PARTS = ("gate", "up", "down")  # an expert's matrices; stored for all in one: ffn_gate_exps [experts, out, in]


def index_of(tensors: dict[str, GgufTensor], config: ModelConfig, architecture: Architecture) -> dict[str, GgufTensor]:
    """Return the tensors by the names of config.json's model; a tensor unknown to the model keeps its own name."""
    names = config.names
    moved = {theirs: getattr(names, ours) for ours, theirs in WHOLE.items()}
    found: dict[str, GgufTensor] = {}
    renamed: dict[str, str] = {}  # whole names
    for layer in range(config.num_layers):
        here, there = f"{names.layers}.{layer}.", f"blk.{layer}."
        in_layer = {**IN_LAYER, **architecture.renamed}
        given = {ours: theirs for ours, theirs in in_layer.items() if getattr(names, ours)}
        moved |= {there + theirs: here + getattr(names, ours) for ours, theirs in given.items()}
        if config.experts is not None:
            block = f"{here}{names.experts}."
            moved |= {
                f"{there}ffn_gate_inp": block + names.router,
                f"{there}ffn_gate_inp_shexp": block + names.shared_gate,
            }
            for part, matrix in zip(PARTS, names.expert_matrices, strict=True):
                moved[f"{there}ffn_{part}_shexp"] = f"{block}{names.shared_expert}.{matrix}"
                renamed[f"{there}ffn_{part}_exps.bias"] = f"{block}experts.{matrix}_bias"
                whole = tensors.get(f"{there}ffn_{part}_exps.weight")
                if whole is not None:
                    found |= {f"{block}experts.{i}.{matrix}.weight": each for i, each in enumerate(_each(whole))}
        if names.sinks:
            renamed[f"{there}attn_sinks.weight"] = here + names.sinks
    for name, tensor in tensors.items():
        if name in CONSUMED or name.startswith(OTHERS) or name.endswith("_exps.weight"):
            continue
        module, _, kind = name.rpartition(".")
        tensor = _changed(tensor, name, config, architecture)
        found[renamed.get(name) or (f"{moved[module]}.{kind}" if module in moved else name)] = tensor
    return found


def _each(stacked: GgufTensor) -> list[GgufTensor]:
    """Return the n matrices of a tensor [n, out, in]."""
    count, *shape = stacked.shape
    size = stacked.num_bytes // count
    return [
        msgspec.structs.replace(stacked, shape=tuple(shape), offset=stacked.offset + i * size) for i in range(count)
    ]


def _changed(tensor: GgufTensor, name: str, config: ModelConfig, architecture: Architecture) -> GgufTensor:
    if architecture.is_rotated and name.rpartition(".")[0].endswith((".attn_q", ".attn_k")):
        return msgspec.structs.replace(tensor, rotated=config.head_dim)
    if name.endswith(".ffn_gate_inp_shexp.weight"):
        return msgspec.structs.replace(tensor, shape=(1, *tensor.shape))
    if architecture.added and name.endswith("norm.weight"):
        return msgspec.structs.replace(tensor, added=architecture.added)
    return tensor
