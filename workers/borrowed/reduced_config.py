"""Reduced configurations for the self-check: the same architecture with few small layers.

All fields that choose how a layer computes are kept; only numbers of layers, sizes and windows shrink.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedConfig

WINDOW = 6  # tokens of every attention window and attention chunk
VOCAB_SIZE = 96

_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks")
_WINDOWS = frozenset(
    "sliding_window attention_chunk_size sliding_window_size attention_window_size window_size swa_window_size "  # noqa: SIM905
    "local_attention".split()
)
_PERIOD = re.compile(r"period|interval|pattern|every_n|group_size$")

# Names of sizes, by their value in a reduced configuration: 4 query heads of 16 elements, hidden size 64.
_SIZES = {
    64: "hidden_size d_model n_embd embedding_size word_embed_proj_dim lru_width attention_hidden_size embedding_dim "
    "emb_dim ple_embed_dim",
    48: "intermediate_size ffn_dim ffn_hidden_size decoder_ffn_dim n_inner intermediate_size_mlp d_inner "
    "dense_intermediate_size dim_ff",
    32: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size "
    "moe_shared_expert_intermediate_size shared_experts_intermediate_size q_lora_rank o_lora_rank",
    24: "qk_head_dim kv_lora_rank",
    16: "head_dim v_head_dim qk_nope_head_dim global_head_dim swa_head_dim swa_v_head_dim hidden_size_per_layer_input "
    "linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_head mamba_head_dim d_head "
    "kv_channels attention_head_dim index_head_dim router_hidden_size d_rel mamba_headdim",
    8: "qk_rope_head_dim mamba_d_state ssm_state_size state_size laurel_rank mamba_dt_rank",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads attention_heads swa_num_attention_heads "
    "num_experts n_routed_experts num_local_experts moe_num_experts linear_num_value_heads linear_num_heads "
    "num_query_groups index_n_heads",
    2: "linear_num_key_heads num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts hc_mult",
    512: "max_position_embeddings n_positions n_ctx max_seq_len model_max_length",
    5: "chunk_size mamba_chunk_size block_size",
}
_SIZE_OF = {name: size for size, names in _SIZES.items() for name in names.split()}
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads", "num_global_key_value_heads")
# Fields that some classes leave out of their defaults, though their models need them.
_DEFAULTS = {
    "head_dim": 16,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
}
_VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size")


def reduced_config(config: PreTrainedConfig, *, has_small_sizes: bool) -> PreTrainedConfig:
    """Return the configuration with few layers of each kind, short windows and a small vocabulary.

    has_small_sizes: reduce the widths as well. Raises any exception of the configuration's class if the result is
    invalid.
    """
    fields = config.to_dict()
    fields.pop("transformers_version", None)
    _reduce_layers(fields)
    _reduce(fields, has_small_sizes)
    return type(config).from_dict(fields)


def _reduce_layers(fields: dict[str, Any]) -> None:
    count_name = next((name for name in _LAYER_COUNTS if isinstance(fields.get(name), int)), None)
    if count_name is None:
        return
    count = fields[count_name]
    lists = {name: each for name, each in fields.items() if isinstance(each, (list, tuple)) and len(each) == count}
    periods = [each for name, each in fields.items() if _PERIOD.search(name) and type(each) is int and each < count]
    kept = list(range(min(count, max([4, *periods]))))
    if lists and not periods:
        kept = _kept_layers(list(zip(*lists.values(), strict=True)))
    for name, values in lists.items():
        fields[name] = [values[i] for i in kept]
    fields[count_name] = len(kept)
    if fields.get("per_layer_config"):
        given = {int(layer): each for layer, each in fields["per_layer_config"].items()}
        fields["per_layer_config"] = {str(i): given[layer] for i, layer in enumerate(kept) if layer in given}
    for name in ("first_k_dense_replace", "num_dense_layers", "num_kv_shared_layers", "moe_layer_start_index"):
        if fields.get(name):
            fields[name] = 1
    for name in ("moe_layer_end_index",):
        if fields.get(name) is not None:
            fields[name] = len(kept) - 1
    for name in ("full_attn_idxs", "mlp_only_layers", "moe_layers", "hybrid_layer_ids"):
        if isinstance(fields.get(name), list) and name not in lists:
            fields[name] = [i for i in fields[name] if i < len(kept)]


def _kept_layers(kinds: list[tuple[Any, ...]]) -> list[int]:
    """Return the indices of the first two layers of each kind."""
    seen: dict[str, int] = {}
    kept = []
    for i, kind in enumerate(kinds):
        seen[repr(kind)] = seen.get(repr(kind), 0) + 1
        if seen[repr(kind)] <= 2:
            kept.append(i)
    return kept


def _reduce(fields: dict[str, Any], has_small_sizes: bool) -> None:
    is_rope_alone = fields.get("head_dim") == fields.get("qk_rope_head_dim")  # head_dim means the rotated part
    old_heads = next((fields[n] for n in ("num_attention_heads", "n_head", "num_heads") if fields.get(n)), None)
    longest = fields.get("max_position_embeddings")
    for name, value in list(fields.items()):
        if name == "per_layer_config" and value and has_small_sizes:
            fields[name] = {layer: _small_layer(each) for layer, each in value.items()}
        if has_small_sizes and name in _SIZE_OF and isinstance(value, list):
            fields[name] = [min(each, _SIZE_OF[name]) for each in value]
        if has_small_sizes and value is None and name in _DEFAULTS:
            fields[name] = _DEFAULTS[name]
        if type(value) is not int:
            continue
        if name in _WINDOWS and longest is not None and value >= longest:
            continue  # a window that no row fills
        if name in _WINDOWS:
            fields[name] = min(value, WINDOW)
        elif name in _VOCABULARIES:
            fields[name] = min(value, VOCAB_SIZE)
        elif name.endswith("_token_id") and value >= VOCAB_SIZE:
            fields[name] = 1
        elif not has_small_sizes or value <= 0:
            continue
        elif name in _KV_HEADS:
            fields[name] = 4 if value == old_heads else min(value, 2)
        elif name in _SIZE_OF:
            fields[name] = min(value, _SIZE_OF[name])
    if isinstance(fields.get("eos_token_id"), list):
        fields["eos_token_id"] = None
    if has_small_sizes:
        _match_sizes(fields, is_rope_alone)


def _small_layer(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a layer's entry of per_layer_config without its sizes, but, if it has a head size, with twice the reduced
    one."""
    kept = {name: each for name, each in fields.items() if name not in _SIZE_OF and name not in _KV_HEADS}
    return {**kept, "head_dim": 2 * _SIZE_OF["head_dim"]} if "head_dim" in fields else kept


def _match_sizes(fields: dict[str, Any], is_rope_alone: bool) -> None:
    """Set the sizes that follow from other sizes."""
    hidden = fields.get("hidden_size") or 64
    for name, most in (
        ("n_group", 2),
        ("n_groups", 2),
        ("num_expert_group", 2),
        ("topk_group", 1),
        ("mamba_n_groups", 2),
    ):
        if fields.get(name):
            fields[name] = min(fields[name], most)
    if fields.get("qk_rope_head_dim") and fields.get("qk_nope_head_dim"):
        for name in ("qk_head_dim", "swa_head_dim"):
            if name in fields:
                fields[name] = fields["qk_rope_head_dim"] + fields["qk_nope_head_dim"]
        if is_rope_alone:
            fields["head_dim"] = fields["qk_rope_head_dim"]
    inner = (fields.get("mamba_expand") or fields.get("expand") or 2) * hidden
    for heads, dim in (
        ("mamba_n_heads", "mamba_d_head"),
        ("mamba_num_heads", "mamba_head_dim"),
        ("num_heads", "head_dim"),
    ):
        if fields.get(heads) and fields.get(dim) and (heads != "num_heads" or "state_size" in fields):
            fields[heads] = inner // fields[dim]
    if fields.get("mamba_d_ssm"):
        fields["mamba_d_ssm"] = inner
    if fields.get("query_pre_attn_scalar"):
        fields["query_pre_attn_scalar"] = 24
    _match_rotary(fields)


def _match_rotary(fields: dict[str, Any]) -> None:
    head_dim = fields.get("head_dim") or 16
    given = fields.get("rope_parameters") or {}
    for rope in [given, *(each for each in given.values() if isinstance(each, dict))]:
        if not isinstance(rope, dict):
            continue
        partial = rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
        pairs = int(head_dim * partial) // 2
        for name in ("short_factor", "long_factor"):
            if rope.get(name):
                rope[name] = list(rope[name][:pairs])
        if rope.get("mrope_section"):
            rope["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
        if rope.get("original_max_position_embeddings"):
            rope["original_max_position_embeddings"] = min(rope["original_max_position_embeddings"], 64)
    if fields.get("rotary_dim"):
        fields["rotary_dim"] = 8
