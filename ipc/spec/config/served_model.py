"""The config of a model as an engine serves it: with --quantization applied, and without media that are turned off.

A CPU multiplies quantized weights as integers or as floats. As integers, the weights take the memory of their codes,
and each row of activations is rounded to 8 bits before a product. As floats, they are dequantized while being loaded.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ...errors import ConfigError, RequestError
from ...processor import has_avx2
from ..models.model_config import ModelConfig
from ..models.model_file import load_model_config
from ..models.quantization_config import QuantizationConfig
from .engine_config import EngineConfig

_STORED_AS = {  # value of --quantization → layouts of the checkpoints that it describes
    "awq": ("awq",),
    "gptq": ("gptq",),
    "compressed-tensors": ("packed", "scaled"),
    "fp8": ("scaled",),
    "gguf": ("gguf",),
}
ROUNDINGS = {"int4": 1}  # QuantizationConfig.rounding by kind: raised with each change of the codes that we make


def served_model(config: EngineConfig, folder: Path, generation_folder: Path | None = None) -> ModelConfig:
    """Read the config of the model in `folder` and apply the engine's options to it, but for `with_floats`.

    `generation_folder`: the folder of generation_config.json, if it is not `folder`. ConfigError if the config is
    unreadable or not supported, or if an option does not suit the model."""
    model = load_model_config(folder, config.hf_overrides, generation_folder, config.model_impl)
    _check_borrowed(config, model)
    model = _quantized(config, model)
    if config.generation_config == "vllm":
        model = msgspec.structs.replace(model, output_rules=None)
    if model.encoder is not None and config.max_media(model.encoder.kind) == 0:
        model = msgspec.structs.replace(model, vision=None, audio=None)
    return _with_whole_clips(config, model)


def has_integer_products(config: EngineConfig, model: ModelConfig, dtype: str, device: str) -> bool:
    """Return whether an engine multiplies its quantized weights as integers. --quantized-products auto: wherever it is
    possible."""
    if device != "cpu" or config.quantized_products == "floats":
        return False
    return config.quantized_products == "integers" or not integer_obstacle(config, model, dtype)


def integer_obstacle(config: EngineConfig, model: ModelConfig, dtype: str) -> str:
    """Return the reason why products as integers are not possible, with the remedy, for an error message; "" if they
    are."""
    if model.quantization is None:
        return "no quantized weights: give --quantization int8 or int4"
    if dtype != "bfloat16":
        return f"activations of {dtype}: give --dtype bfloat16"
    if model.implementation == "transformers":
        return "transformers' layers: leave it out"
    if config.enforce_reference:
        return "plain torch: leave out --enforce-reference"
    if not has_avx2():
        return "plain torch on a processor without AVX2: leave it out"
    return ""


def with_floats(model: ModelConfig) -> ModelConfig:
    """Return the config of a model whose products are floats: a GGUF file's codes are dequantized while they are
    read. Other codes are kept, for layers that multiply them as floats."""
    if model.quantization is None or model.quantization.layout != "gguf":
        return model
    return msgspec.structs.replace(model, quantization=None)


def check_exchange(folder: Path, config: EngineConfig, model: ModelConfig, *, has_integer_products: bool) -> None:
    """Raise RequestError if the checkpoint in `folder` cannot be read, or has another shape than the served `model`, so
    that its weights cannot replace the model's."""
    try:
        found = served_model(config, folder)
    except ConfigError as error:  # the caller's mistake here, not the operator's
        raise RequestError(str(error)) from None
    if not has_integer_products:
        found = with_floats(found)
    if _shape(found) != _shape(model):
        raise RequestError(f"{folder} has another architecture or shape than the served model: start a new engine")


def _shape(model: ModelConfig) -> ModelConfig:
    """Return the model's config with only the fields that must be equal to exchange weights in place. Values from
    generation_config.json are not compared: an exchange does not change them."""
    return msgspec.structs.replace(
        model, eos_token_ids=[], bos_token_id=None, dtype="", output_rules=None, language_ids=None
    )


def _check_borrowed(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError if the model runs on transformers' layers and an option asks for more than they can do."""
    wanted = {
        f"--quantization {config.quantization}": config.quantization != "none",
        "--deterministic": config.deterministic,
        "--quantized-products integers": config.quantized_products == "integers",
        "a GGUF file": model.quantization is not None and model.quantization.layout == "gguf",
    }
    option = next((option for option, is_wanted in wanted.items() if is_wanted), None)
    if model.implementation == "transformers" and option is not None:
        raise ConfigError(f"{option}: {model.architecture} runs on transformers' layers, which cannot: leave it out")


def _quantized(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    method, stored = config.quantization, model.quantization
    if stored is not None and stored.layout == "gguf":
        if method in ("none", "gguf"):
            return with_floats(model) if config.load_format == "dummy" else model
        stored = None  # to be rounded again
    if stored is not None and method != "none":
        is_same = stored.layout in _STORED_AS.get(method, ()) and (method != "fp8" or stored.weight_dtype == "fp8")
        if not is_same:
            raise ConfigError(
                f"--quantization {method}: the checkpoint is quantized already ({stored.weight_dtype}): leave it out"
            )
    if config.load_format == "dummy" and stored is not None:
        if stored.weight_dtype == "int4":
            raise ConfigError("--load-format dummy makes no 4-bit weights: give 8 bits with --hf-overrides")
        if stored.weight_dtype == "mxfp4":  # these become floats on load, as random weights are
            return msgspec.structs.replace(model, quantization=None)
        method = stored.weight_dtype
    elif stored is not None or method == "none":
        return model
    if method not in ("int8", "int4", "fp8"):
        raise ConfigError(f"--quantization {method}: the checkpoint is not quantized in this format: leave it out")
    return quantized_on_load(model, method)


def quantized_on_load(model: ModelConfig, kind: str) -> ModelConfig:
    """Return the config of a model with matrices that are rounded to `kind` (int8, int4, fp8) while they are loaded."""
    fields = {"layout": "on_load", "weight_dtype": kind, "rounding": ROUNDINGS.get(kind, 0)}
    on_load = msgspec.convert(fields, QuantizationConfig)
    return msgspec.structs.replace(model, quantization=on_load)


def _with_whole_clips(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """Return the config in which the clip at a request's start takes whole KV blocks, if the model has cross attention.
    ConfigError if such a model is to be served without audio."""
    if model.cross is None:
        return model
    if model.audio is None:
        raise ConfigError(
            f"{model.architecture} answers to audio alone: leave out --language-model-only, and audio of "
            "--limit-mm-per-prompt"
        )
    return msgspec.structs.replace(model, cross=model.cross.in_blocks(config.block_size))
