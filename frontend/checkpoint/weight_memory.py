"""Memory that a checkpoint's weights and KV cache take, estimated from file headers and config.json alone."""

from __future__ import annotations

from pathlib import Path

from ...ipc.errors import ConfigError
from ...ipc.process.machine_memory import available_bytes, gib, swap_bytes
from ...ipc.spec.config.gguf_index import BLOCKS, CODE_BITS
from ...ipc.spec.config.weight_files import StoredTensor, stored_tensors
from ...ipc.spec.models.model_config import ModelConfig

_FLOATS = ("F64", "F32", "F16", "BF16")
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_CODE_BYTES = {"int8": 1.0, "int4": 0.66}  # per weight that is quantized on load, with its share of scales and zeros


def check_weights(
    folder: Path,
    model: ModelConfig,
    dtype: str,
    device: str,
    local_share: float = 1.0,
    *,
    has_integer_products: bool = False,
    shown: str,
) -> None:
    """Raise ConfigError if a weight file is missing, truncated or unreadable or, on a CPU, if `local_share` × the
    weights need more than this machine's free memory and swap. `shown`: the model as the operator named it."""
    tensors = stored_tensors(folder)
    if device != "cpu":
        return
    num_bytes = int(weight_bytes(tensors, model, dtype, has_integer_products=has_integer_products) * local_share)
    free_bytes = available_bytes() + swap_bytes()
    if num_bytes > free_bytes:
        raise ConfigError(
            f"the weights of {shown} take {gib(num_bytes)} as {dtype}, {gib(free_bytes)} of memory can be had here: "
            "free memory, raise the limit of its cgroup, or choose a smaller model"
        )


def weight_bytes(
    tensors: dict[str, StoredTensor], model: ModelConfig, dtype: str, *, has_integer_products: bool = False
) -> int:
    """Return the bytes that a model's stored tensors take in memory, over all ranks."""
    tensors = dict(tensors)
    if model.tie_word_embeddings and not model.names.prefers_stored_head:
        tensors.pop("lm_head.weight", None)
    item_bytes: float = _ITEM_BYTES[dtype]
    if has_integer_products and model.quantization is not None and model.quantization.layout == "on_load":
        item_bytes = _CODE_BYTES[model.quantization.weight_dtype]
    keeps_blocks = model.quantization is not None and model.quantization.layout == "gguf"
    floats = {*_FLOATS, *(() if keeps_blocks else BLOCKS)}
    num_bytes: float = sum(
        each.num_elements * (item_bytes if each.dtype in floats else _bytes_kept(each)) for each in tensors.values()
    )
    has_floats = model.quantization is not None and model.quantization.layout == "mxfp4" and not has_integer_products
    if has_floats:  # a byte becomes two
        num_bytes += sum(each.num_bytes * (2 * item_bytes - 1) for each in tensors.values() if each.dtype == "U8")
    return int(num_bytes)


def kv_bytes(model: ModelConfig, dtype: str, num_tokens: int) -> int:
    """Return the bytes that the keys and values of `num_tokens` tokens take, over all ranks. As in the KV cache, each
    layer has as much room as the largest."""
    shapes = [model.at_layer(layer) for layer in range(model.num_layers)]
    width = max((each.num_kv_heads * each.head_dim for each in shapes), default=0)
    return model.num_cached_layers * 2 * width * _ITEM_BYTES[dtype] * num_tokens


def _bytes_kept(tensor: StoredTensor) -> float:
    """Return the bytes in memory per element of a tensor that keeps its codes; a GGUF tensor has a scale and a minimum
    for every 32 elements."""
    if tensor.dtype in BLOCKS:
        return CODE_BITS.get(tensor.dtype, 8) / 8 + 4 / 32
    return tensor.num_bytes / max(tensor.num_elements, 1)
