"""Mapping of a GGUF file's tensors to the names that the model of config.json has for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec

from ....ipc.spec.config.gguf_index import GgufTensor
from ....ipc.spec.models.model_config import ModelConfig
from .architecture import Architecture
from .encoders.pooling_files import DENSE

CONSUMED = (  # their values are in config.json, or they are modules of sentence-transformers
    *("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"),
    *DENSE,
)
OTHERS = ("v.", "a.", "mm.")  # prefixes of media encoders and their projectors
WHOLE = {  # field of TensorNames → name in a file
    "embedding": "token_embd",
    "positions": "position_embd",
    "token_types": "token_types",
    "embedding_norm": "token_embd_norm",
    "norm": "output_norm",
    "head": "output",
}
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
PROJECTIONS = {  # parts that a projection of StateConfig gives → name in a file
    "qkv": "attn_qkv",
    "z": "attn_gate",
    "b": "ssm_beta",
    "a": "ssm_alpha",
    "ba": "ssm_ba",
    "qkvz": "ssm_in",
    "zvkqa": "ssm_in",
    "uzv": "shortconv.in_proj",
}
BESIDE_MLP_NORMS = ("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")  # as TensorNames.beside_mlp_norms
PARTS = ("gate", "up", "down")  # an expert's matrices; stored for all in one: ffn_gate_exps [experts, out, in]


def index_of(
    tensors: dict[str, GgufTensor], config: ModelConfig, architecture: Architecture, further: range
) -> dict[str, GgufTensor]:
    """Return the tensors by the names of config.json's model; a tensor unknown to the model keeps its own name.
    `further`: layers that are not run, of which nothing is returned."""
    names = config.names
    whole = {architecture.renamed.get(ours, theirs): getattr(names, ours) for ours, theirs in WHOLE.items()}
    whole |= architecture.of_head
    in_layer = _names_in_layer(config, architecture)
    of_state = _names_of_state(config)
    parameters = _parameters(config)
    found: dict[str, GgufTensor] = {}
    for name, tensor in tensors.items():
        if name in CONSUMED or name.startswith(OTHERS):
            continue
        tensor = _changed(tensor, name, config, architecture)
        module, _, kind = name.rpartition(".")
        place, _, inner = module.partition(".")
        layer, _, inner = inner.partition(".")
        here = f"{names.layers}.{layer}."
        number = int(layer) if layer.isdecimal() else -1
        if number in further:
            continue
        has_state = 0 <= number < config.num_layers and config.layers[number].has_state
        if place != "blk":
            found[f"{whole[module]}.{kind}" if module in whole else name] = tensor
        elif parameter := parameters.get(f"{inner}.{kind}".removeprefix(".")):
            found[here + parameter] = tensor
        elif has_state and inner in of_state:
            found[f"{here}{of_state[inner]}.{kind}"] = tensor
        elif parts := _parts(inner, tensor, config):
            found |= {f"{here}{part}.{kind}": each for part, each in parts.items()}
        elif inner in in_layer:
            found[f"{here}{in_layer[inner]}.{kind}"] = tensor
        else:
            found[name] = tensor
    return found


def _names_in_layer(config: ModelConfig, architecture: Architecture) -> dict[str, str]:
    """Return the model's names of a layer's modules by those of a file."""
    names = config.names
    theirs = {**IN_LAYER, **architecture.renamed}
    found = {theirs[ours]: getattr(names, ours) for ours in theirs if theirs[ours] and getattr(names, ours)}
    if config.experts is not None:
        block = _block(config)
        found |= {"ffn_gate_inp": block + names.router, "ffn_gate_inp_shexp": block + names.shared_gate}
        shared = [names.gate, names.up, names.down]
        if names.shared_expert:
            shared = [f"{block}{names.shared_expert}.{matrix}" for matrix in names.expert_matrices]
        found |= {f"ffn_{part}_shexp": each for part, each in zip(PARTS, shared, strict=True)}
        found |= dict(zip(BESIDE_MLP_NORMS, names.beside_mlp_norms, strict=True))
    return found


def _names_of_state(config: ModelConfig) -> dict[str, str]:
    """Return the model's names of the modules of a layer's mixer with a state by those of a file."""
    state = config.state
    if state is None:
        return {}
    block = f"{state.names.block}."
    found = {PROJECTIONS[parts]: block + name for name, parts in state.projections.items() if parts in PROJECTIONS}
    if state.kind == "conv":
        return found | {"shortconv.conv": block + state.names.conv, "shortconv.out_proj": block + state.names.output}
    modules = {"ssm_conv1d": state.names.conv, "ssm_norm": state.names.norm, "ssm_out": state.names.output}
    return found | {theirs: block + ours for theirs, ours in modules.items()}


def _parameters(config: ModelConfig) -> dict[str, str]:
    """Return the model's names, with their endings, of those parameters of a layer that have others in a file."""
    names = config.names
    block = _block(config)
    found = {
        "attn_sinks.weight": names.sinks,
        "layer_output_scale.weight": names.layer_scale,
        "ffn_norm": f"{names.mlp_norm}.weight",  # Falcon-H1's have no ending in a file
        "exp_probs_b.bias": block + names.choice_bias,
        "ffn_gate_inp.scale": block + names.router_scale,
        "ffn_down_exps.scale": block + names.expert_scales,
    }
    if config.state is not None:
        mixer, of_state = f"{config.state.names.block}.", config.state.names
        found |= {
            "ssm_a": mixer + of_state.decay,
            "ssm_d": mixer + of_state.skip,
            "ssm_dt.bias": mixer + of_state.dt_bias,
        }
    biases = zip(PARTS, names.expert_matrices, strict=True)
    return found | {f"ffn_{part}_exps.bias": f"{block}experts.{matrix}_bias" for part, matrix in biases}


def _parts(module: str, tensor: GgufTensor, config: ModelConfig) -> dict[str, GgufTensor]:
    """Return, by the model's names, the modules that a layer's tensor holds together; {} if it is a single one."""
    names = config.names
    for part, matrix in zip(PARTS, names.expert_matrices, strict=True):
        if module == f"ffn_{part}_exps":
            return {f"{_experts(config)}{i}.{matrix}": each for i, each in enumerate(_each(tensor))}
    if module == "ffn_gate_up_exps":
        return dict(_gates_and_ups(tensor, config))
    for norm, name in (("attn_q_norm", names.query_norm), ("attn_k_norm", names.key_norm)):
        if module == norm and "{head}" in name:
            return {name.format(head=head): each for head, each in enumerate(_each(tensor))}
    if module == "attn_qkv" and not names.qkv:
        keys = config.num_kv_heads * config.head_dim
        rows = _rows(tensor, (config.num_heads * config.head_dim * (1 + config.has_output_gate), keys, keys))
        return dict(zip((names.query, names.key, names.value), rows, strict=True))
    return {}


def _gates_and_ups(tensor: GgufTensor, config: ModelConfig) -> Iterator[tuple[str, GgufTensor]]:
    """Yield the names and places of the matrices in a tensor [experts, gates | ups, in]."""
    sizes = [tensor.shape[1] // 2] * 2
    for i, expert in enumerate(_each(tensor)):
        for matrix, part in zip(config.names.expert_matrices, _rows(expert, sizes), strict=False):
            yield f"{_experts(config)}{i}.{matrix}", part


def _block(config: ModelConfig) -> str:
    """Return the prefix of a layer's modules beside its experts."""
    return f"{config.names.experts}." if config.names.experts else ""


def _experts(config: ModelConfig) -> str:
    """Return the prefix of an expert's number."""
    expert_list = config.names.expert_list
    return _block(config) + (f"{expert_list}." if expert_list else "")


def _each(stacked: GgufTensor) -> list[GgufTensor]:
    """Return the n tensors of a tensor [n, …]."""
    count, *shape = stacked.shape
    return [msgspec.structs.replace(each, shape=tuple(shape)) for each in _rows(stacked, (1,) * count)]


def _rows(stacked: GgufTensor, sizes: Sequence[int]) -> list[GgufTensor]:
    """Return the tensors, of `sizes` rows, that lie one behind the other in a tensor [rows, …]."""
    count, *shape = stacked.shape
    row_bytes = stacked.num_bytes // count
    starts = accumulate(sizes, initial=0)
    return [
        msgspec.structs.replace(stacked, shape=(size, *shape), offset=stacked.offset + start * row_bytes)
        for start, size in zip(starts, sizes, strict=False)
    ]


def _changed(tensor: GgufTensor, name: str, config: ModelConfig, architecture: Architecture) -> GgufTensor:
    if architecture.is_rotated and name.rpartition(".")[0].endswith((".attn_q", ".attn_k")):
        return msgspec.structs.replace(tensor, rotated=config.head_dim)
    if config.names.qkv_layout == "by_kv_head" and ".attn_qkv." in name:
        return msgspec.structs.replace(tensor, grouped=(config.num_heads, config.num_kv_heads))
    if name.endswith(".ffn_gate_inp_shexp.weight"):
        return msgspec.structs.replace(tensor, shape=(1, *tensor.shape))
    if name.endswith(".exp_probs_b.bias"):  # converters have kept or dropped an axis of 1
        shape = (1, tensor.num_elements) if config.names.is_choice_bias_row else (tensor.num_elements,)
        return msgspec.structs.replace(tensor, shape=shape)
    if name == "token_types.weight":  # an axis of 1 may be left out
        return tensor.reshaped((config.num_token_types, config.hidden_size))
    if name == "cls.output.weight":
        return tensor.reshaped((tensor.num_elements // config.hidden_size, config.hidden_size))
    if name.endswith(".ssm_a"):
        return msgspec.structs.replace(tensor, is_decay=True)
    if name.endswith(".ssm_norm.weight"):  # [groups, n] in Mamba2
        return tensor.reshaped((tensor.num_elements,))
    if architecture.added and name.endswith("norm.weight"):
        return msgspec.structs.replace(tensor, added=architecture.added)
    return tensor
