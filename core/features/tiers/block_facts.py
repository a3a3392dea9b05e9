"""Facts on which the bytes of a block depend, except the weights. The root of all keys is made from both.

Facts must stay the same for models that engines serve already: otherwise no engine would find the blocks that an
earlier version has stored. So a field that models get later counts only if its value is not the default.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ....ipc.spec.config.engine_spec import EngineSpec
from ....ipc.version import numerics_digest

# Version of a block's layout: [layers, 2, kv heads of the rank, tokens, head_dim], rank after rank; with several KV
# groups, the layers of the block's group.
FORMAT, GROUPED_FORMAT = 1, 2
# The fields of a model's configs when blocks were first stored with these facts. The list is closed.
FIRST_FIELDS = {
    "ActivationConfig": """
        kind is_gated limit
    """,
    "AudioConfig": """
        family audio_token_id hidden_size num_layers num_mel_bins window_frames window_rows num_halvings
        convolution_products rows_per_embed windows_together max_windows min_samples
    """,
    "CrossConfig": """
        num_rows num_tokens
    """,
    "ExpertsConfig": """
        num_experts top_k intermediate_size is_normalized score has_choice_bias num_groups top_groups group_score scale
        has_bias activation shared_size has_shared_gate is_beside_mlp
    """,
    "HeadNormsConfig": """
        norm has_weight_per_head spans_heads is_after_rope
    """,
    "LayerConfig": """
        window rope has_experts head_dim num_kv_heads intermediate_size are_values_keys kv_layer
    """,
    "ModelConfig": """
        architecture implementation vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads head_dim
        max_position_embeddings layers ropes norm is_parallel head_norms value_norm has_layer_scale qkv_clip
        attention_scale attention_softcap has_sinks query_scaling activation experts cross embedding_scale
        residual_scale logit_scale logit_softcap num_learned_positions has_qkv_bias has_key_bias has_output_bias
        has_mlp_bias has_head_bias has_state names dtype tie_word_embeddings quantization eos_token_ids bos_token_id
        output_rules language_ids vision audio
    """,
    "NormConfig": """
        kind eps has_weight has_bias offset
    """,
    "OutputRules": """
        suppressed_ids first_suppressed_ids no_timestamps_id max_first_timestamp end_id
    """,
    "QuantizationConfig": """
        layout weight_dtype block group_size zero_offset rounding
    """,
    "RopeConfig": """
        kind theta rotary_dim is_paired parameters sections is_interleaved
    """,
    "TensorNames": """
        embedding positions layers norm head input_norm attention_output_norm mlp_norm mlp_output_norm query key value
        qkv qkv_layout output query_norm key_norm cross_norm cross_query cross_key cross_value cross_output sinks gate
        up gate_up down experts expert_matrices are_experts_interleaved router choice_bias is_choice_bias_row
        shared_expert shared_gate router_scale expert_scales layer_scale beside_mlp_norms is_transposed roots ignored
        prefers_stored_head
    """,
    "VisionConfig": """
        family image_token_id hidden_size num_layers patch_size image_size merge_size num_deepstack is_bidirectional
        windowed_layers
    """,
}


def block_facts(spec: EngineSpec, kernels: str) -> bytes:
    """Return canonical JSON of all facts, except the weights, on which the bytes of a block depend. Engines with equal
    facts and weights can use each other's blocks. Under --deterministic the kernels and their sources count too, since
    other kernels give other bits. max_model_len counts if rotary embeddings depend on it."""
    config, groups = spec.config, spec.kv_groups
    facts: dict[str, object] = {
        "format": FORMAT if len(groups) == 1 else GROUPED_FORMAT,
        "model": _as_before(spec.model),
        "dtype": spec.numbers,
        "kv_cache_dtype": config.kv_cache_dtype,
        "quantization": config.quantization,
        "load_format": config.load_format,
        "block_size": config.block_size,
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_model_len": spec.max_model_len if spec.model.rope_depends_on_length else 0,
        "numerics": f"{spec.device} {kernels} {numerics_digest()}" if config.deterministic else "any",
    }
    if len(groups) > 1:
        facts["groups"] = [
            {"layers": group.layers, "window": group.window, "is_state": group.is_state} for group in groups
        ]
    if spec.draft is not None:  # whose keys and values lie in the blocks, too
        facts["draft"] = {"model": _as_before(spec.draft.model), "weights": spec.draft.weights}
        if spec.draft.head is not None:
            facts["head"] = msgspec.to_builtins(spec.draft.head)
    return json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()


def _as_before(config: msgspec.Struct) -> object:
    """Return the config as builtins, without later fields that have their default."""
    facts = msgspec.to_builtins(config)
    _drop_later(config, facts)
    return facts


def _drop_later(value: object, facts: Any) -> None:
    """Remove later fields that have their default from `facts`, which are `value` as builtins."""
    if isinstance(value, (list, tuple)):
        for each, its_facts in zip(value, facts, strict=True):
            _drop_later(each, its_facts)
    elif isinstance(value, msgspec.Struct):
        for field in msgspec.structs.fields(value):
            each = getattr(value, field.name)
            if is_later(type(value), field.name) and each == default_of(field):
                del facts[field.encode_name]
            else:
                _drop_later(each, facts[field.encode_name])


def is_later(config_type: type, name: str) -> bool:
    """Return whether the configs of this type had no such field when blocks were first stored. A type that did not
    exist then counts whole."""
    first = FIRST_FIELDS.get(config_type.__name__)
    return first is not None and name not in first.split()


def default_of(field: msgspec.structs.FieldInfo) -> object:
    """Return the default of a field; NODEFAULT if it has none."""
    if field.default_factory is msgspec.NODEFAULT:
        return field.default
    return field.default_factory()
