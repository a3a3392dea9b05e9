"""Memory that a checkpoint's weights and KV cache take, estimated from file headers and config.json alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ...ipc.spec.config.gguf_index import EXACT_KINDS, KEPT_BITS
from ...ipc.spec.config.weight_files import StoredTensor
from ...ipc.spec.kv.kv_groups import is_grouped, kv_groups
from ...ipc.spec.models.model_config import ModelConfig, StateConfig
from ...ipc.spec.models.multimodal import ENCODER_PREFIXES

FLOATS = ("F64", "F32", "F16", "BF16")
_ENCODERS = tuple(ENCODER_PREFIXES)
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_ON_LOAD_BITS = {"int8": 8.0, "int4": 4.75, "fp8": 8.5}  # bits of a weight that is quantized on load, with its scales
_CODES_PER_BYTE = {"I8": 1.0, "F8_E4M3": 1.0, "U8": 2.0, "I32": 2.0}  # in safetensors
_SCALE_BYTES = 4  # of a head's row
STEP_TOKENS = 512  # of a prompt in one step, next to a window


def weight_bytes(
    tensors: Mapping[str, StoredTensor],
    model: ModelConfig,
    dtype: str,
    *,
    keeps_codes: bool,
    has_integer_products: bool = False,
    keeps_blocks: bool = False,
    unpacks_blocks: bool = False,
) -> int:
    """Return the bytes that a model's stored tensors take in memory, over all ranks.

    keeps_codes: quantized matrices stay codes, else they become floats. has_integer_products: blocks of GGUF files stay
    codes, and any other head becomes int8. keeps_blocks: an embedding of a GGUF file stays as it is stored.
    unpacks_blocks: blocks stay codes that become floats in each product, if no code is rounded. An encoder of media
    always becomes floats, and is not loaded for text alone.
    """
    embedding, head = f"{model.names.embedding}.weight", f"{model.names.head}.weight"
    if model.tie_word_embeddings:
        head = head if model.names.prefers_stored_head and head in tensors else embedding
    item_bytes, num_bytes = _ITEM_BYTES[dtype], 0.0
    head_kinds: Collection[str] = EXACT_KINDS if unpacks_blocks else ()
    kept_kinds = head_kinds if model.quantization is None else ()
    if has_integer_products and _layout_of(model) == "gguf":
        kept_kinds = KEPT_BITS.keys()
    for name, each in tensors.items():
        if name == "lm_head.weight" != head and model.tie_word_embeddings:
            continue
        floats = each.num_elements * item_bytes
        if name.startswith(_ENCODERS):
            num_bytes += floats if model.encoder is not None else 0
        elif name == head and has_integer_products:
            num_bytes += each.num_elements * _head_bits(model, each.dtype) / 8
        elif name == embedding != head:
            num_bytes += each.num_bytes if keeps_blocks and each.dtype in KEPT_BITS else floats
        elif each.dtype in (head_kinds if name == head else kept_kinds):
            num_bytes += each.num_elements * KEPT_BITS[each.dtype] / 8
        elif each.dtype in (*FLOATS, *KEPT_BITS):
            is_rounded = keeps_codes and name != head and _layout_of(model) == "on_load"
            num_bytes += each.num_elements * _on_load_bits(model) / 8 if is_rounded else floats
        elif each.dtype == "F8_E4M3" and has_integer_products:
            num_bytes += each.num_elements * _ON_LOAD_BITS["fp8"] / 8
        elif keeps_codes or each.dtype not in _CODES_PER_BYTE:
            num_bytes += each.num_bytes
        else:
            num_bytes += each.num_bytes * _CODES_PER_BYTE[each.dtype] * item_bytes
    return int(num_bytes)


def kv_bytes(model: ModelConfig, dtype: str, num_tokens: int, *, is_8_bits: bool = False) -> int:
    """Return the bytes that keys, values and states of a request of `num_tokens` tokens take, over all ranks. In each
    KV group they are those of all its tokens, or of its window and a step, or its states. is_8_bits: numbers of keys
    and values take a byte, and each head of a token has a scale."""
    num_bytes = 0
    for group in kv_groups(model, num_tokens, is_grouped=is_grouped(model)):
        if group.is_state and model.state is not None:
            states = group.num_held(num_tokens, STEP_TOKENS, block_size=1)
            num_bytes += states * len(group.layers) * state_bytes(model.state, _ITEM_BYTES[dtype])
            continue
        head_bytes = group.head_dim + 4 if is_8_bits else group.head_dim * _ITEM_BYTES[dtype]
        token_bytes = len(group.layers) * 2 * group.num_kv_heads * head_bytes
        num_bytes += token_bytes * group.num_held(num_tokens, STEP_TOKENS, block_size=1)
    return num_bytes


def state_bytes(state: StateConfig, item_bytes: int) -> int:
    """Return the bytes of the state of a layer: of its scan, and of the last inputs of its convolution."""
    scan_bytes = 4 * state.num_heads * state.key_dim * state.value_dim
    num_channels = sum(map(state.part_size, state.conv_parts))
    return scan_bytes + (state.conv_size - 1) * num_channels * item_bytes


def _layout_of(model: ModelConfig) -> str:
    return "" if model.quantization is None else model.quantization.layout


def _head_bits(model: ModelConfig, kind: str) -> float:
    """Return the bits of an element of a head for products as integers."""
    if kind in EXACT_KINDS:
        return KEPT_BITS[kind]
    return 8 + 8 * _SCALE_BYTES / model.hidden_size


def _on_load_bits(model: ModelConfig) -> float:
    assert model.quantization is not None
    return _ON_LOAD_BITS[model.quantization.weight_dtype]
