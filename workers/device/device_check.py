"""Checks, before anything is loaded, that a rank's device supports the options. If not, they raise ConfigError."""

from __future__ import annotations

import torch

from ...ipc.errors import ConfigError
from ...ipc.spec.config.engine_spec import EngineSpec
from ...ipc.spec.config.served_model import integer_obstacle

FP8_CAPABILITY = (8, 9)  # the first with conversions from and to e4m3
MAX_DETERMINISTIC_RANKS = 2  # a sum of two numbers does not depend on their order


def check_options(spec: EngineSpec, num_ranks: int) -> None:
    """Raise ConfigError for options that no device supports with this model and number of ranks."""
    if spec.config.deterministic and num_ranks > MAX_DETERMINISTIC_RANKS:
        raise ConfigError(
            f"--deterministic runs with at most {MAX_DETERMINISTIC_RANKS} ranks, these are {num_ranks}: lower "
            "--tensor-parallel-size or leave it out"
        )
    if spec.config.enable_lora and spec.model.implementation == "transformers":
        raise ConfigError(
            f"--enable-lora serves models with layers of this engine, {spec.model.architecture} has those of "
            "transformers: leave it out and merge adapters into their base"
        )
    sizes = {spec.model.at_layer(layer).head_dim for layer in range(spec.model.num_layers)}
    odd = sorted(size for size in sizes if size % 4)
    kind = spec.config.kv_cache_dtype
    if kind != "auto" and odd:
        raise ConfigError(
            f"--kv-cache-dtype {kind} needs heads of a multiple of 4 elements, these have {odd[0]}: leave it out"
        )


def check_cpu(spec: EngineSpec) -> None:
    """Raise ConfigError if this processor lacks the level of --cpu-isa, or if the processor, the model or another
    option does not allow --quantized-products integers."""
    from ...kernels.select import levels_up_to

    try:
        levels_up_to(spec.config.cpu_isa)
    except ValueError as error:
        raise ConfigError(f"--cpu-isa: {error}") from None
    if spec.has_integer_products and (obstacle := integer_obstacle(spec.config, spec.model, spec.dtype)):
        raise ConfigError(
            f"--quantized-products integers is for int8 and int4 weights in bfloat16 layers, here are {obstacle}"
        )


def select_gpu(device: torch.device) -> None:
    """Make `device` torch's current GPU. ConfigError if there is no GPU with its index."""
    rank = device.index or 0
    if rank >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {rank} has no GPU, {torch.cuda.device_count()} are visible: lower --tensor-parallel-size or "
            "--data-parallel-size, or give --device cpu"
        )
    torch.cuda.set_device(device)


def check_gpu(spec: EngineSpec, device: torch.device, *, has_kernels: bool) -> None:
    """Raise ConfigError for options that this GPU does not support, or if Triton cannot launch kernels although there
    are some. `has_kernels`: there are Triton kernels, so steps can sample on the device."""
    from ...kernels.gpu.load import launch_obstacle

    if spec.config.quantized_products == "integers":
        raise ConfigError(
            "--quantized-products integers is for CPUs: leave it out, a GPU keeps quantized weights as they are"
        )
    if spec.config.deterministic and not has_kernels:
        raise ConfigError(
            f"--deterministic has no kernels for this model on {device}: give --device cpu or leave it out"
        )
    if has_kernels and (obstacle := launch_obstacle()) is not None:
        raise ConfigError(
            f"triton cannot launch kernels ({obstacle:.300}): install a C compiler and Python's headers (gcc and "
            "python3-dev), or set --enforce-reference to do without kernels"
        )
    capability = torch.cuda.get_device_capability(device)
    if spec.config.kv_cache_dtype == "fp8" and capability < FP8_CAPABILITY:
        raise ConfigError(
            f"--kv-cache-dtype fp8 needs compute capability {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]}, {device} has "
            f"{capability[0]}.{capability[1]}: give int8"
        )


def describe_device(device: torch.device) -> str:
    """Return the device's name, for logs."""
    if device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} threads"
    return f"{device}, {torch.cuda.get_device_name(device)}"
