"""The config of a model as an engine serves it: with --quantization applied, and without media that are turned off."""

from __future__ import annotations

from pathlib import Path

import msgspec

from ...errors import ConfigError, RequestError
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
    """Read the config of the model in `folder` and apply the engine's options to it.

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


def check_exchange(folder: Path, config: EngineConfig, model: ModelConfig) -> None:
    """Raise RequestError if the checkpoint in `folder` cannot be read, or has another shape than the served `model`, so
    that its weights cannot replace the model's."""
    try:
        shape = _shape(served_model(config, folder))
    except ConfigError as error:  # the caller's mistake here, not the operator's
        raise RequestError(str(error)) from None
    if shape != _shape(model):
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
        "--int8-activations": config.int8_activations,
        "a GGUF file": model.quantization is not None and model.quantization.layout == "gguf",
    }
    option = next((option for option, is_wanted in wanted.items() if is_wanted), None)
    if model.implementation == "transformers" and option is not None:
        raise ConfigError(f"{option}: {model.architecture} runs on transformers' layers, which cannot: leave it out")


def _quantized(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    method, stored = config.quantization, model.quantization
    if stored is not None and stored.layout == "gguf":
        if method in ("none", "gguf"):  # GGUF's codes are kept only if they are multiplied as integers
            keeps_codes = config.int8_activations and config.load_format != "dummy"
            return model if keeps_codes else msgspec.structs.replace(model, quantization=None)
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
