"""From EngineConfig to EngineSpec: find the checkpoint, read its shape, settle everything automatic.

Needs neither torch nor transformers; the hub client is imported only for a hub id.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from pathlib import Path
from typing import Literal, cast, get_args

import msgspec

from ...ipc.addresses import RunDirectory
from ...ipc.config.engine_config import EngineConfig
from ...ipc.config.engine_spec import EngineSpec
from ...ipc.config.model_config import ModelConfig
from ...ipc.config.quantization_config import QuantizationConfig
from ...ipc.errors import ConfigError
from ...ipc.keys import Keys
from ..listening.tls import new_ssl_context
from .start_check import check_gpu, check_weights

DType = Literal["float32", "bfloat16", "float16"]
DEMO_FOLDER = Path(__file__).resolve().parents[2] / "demo"
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]


def resolve(config: EngineConfig, run_directory: RunDirectory) -> EngineSpec:
    """Raises ConfigError for whatever can be known to fail before a process is started."""
    if config.key_file is not None:
        Keys.load(config.key_file)
    new_ssl_context(config)
    folder = find_checkpoint(config.model, config.revision)
    model = _quantized(config, ModelConfig.load(folder))
    check_parallel(model, config.tensor_parallel_size)
    dtype, device = _dtype(config, model), _device(config)
    check_weights(folder, model, dtype, device)
    return EngineSpec(
        run_id=secrets.token_hex(8),
        run_directory=str(run_directory.path),
        client_address=config.listen or run_directory.address("client"),
        config=config,
        model=model,
        model_folder=str(folder),
        tokenizer_folder=str(find_checkpoint(config.tokenizer, None, "--tokenizer") if config.tokenizer else folder),
        served_model_name=config.served_model_name or config.model or "tokenloom-demo",
        dtype=dtype,
        device=device,
        max_model_len=_max_model_len(config, model),
    )


def find_checkpoint(name: str | None, revision: str | None, what: str = "--model") -> Path:
    """The folder of `name`: a folder, or a hub id whose files are fetched unless cached; None, demo: the demo.
    An error calls it by `what` it was given as."""
    if name is not None and os.path.isdir(name):
        return Path(name).resolve()
    if name in (None, "demo"):
        return DEMO_FOLDER
    if not _HUB_ID.fullmatch(name):
        raise ConfigError(f"{what} {name} is neither a folder, nor a hub id of the form owner/name, nor demo")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    from .hub_progress import HubProgress

    try:
        progress = None if sys.stderr.isatty() else HubProgress  # on a terminal the hub's own bars
        return Path(snapshot_download(name, revision=revision, allow_patterns=_HUB_FILES, tqdm_class=progress))
    except RepositoryNotFoundError:
        raise ConfigError(f"{what} {name}: no such folder, and the hub knows no such repository") from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(f"{what} {name} is no folder and cannot be fetched: {str(error).splitlines()[0]}") from None


def check_parallel(model: ModelConfig, size: int) -> None:
    """Whether the model's layers can be shared by `size` ranks."""
    if model.num_heads % size:
        raise ConfigError(
            f"{model.num_heads} attention heads do not divide among --tensor-parallel-size {size}: choose a divisor"
        )
    if model.num_kv_heads % size and size % model.num_kv_heads:
        raise ConfigError(
            f"{model.num_kv_heads} KV heads neither divide among nor replicate over --tensor-parallel-size {size}"
        )
    inner_sizes = {model.intermediate_size} if model.experts is None else {model.experts.intermediate_size}
    if model.experts is not None and len(model.experts.layers) < model.num_layers:
        inner_sizes.add(model.intermediate_size)
    for inner_size in sorted(inner_sizes):
        if inner_size % size:
            raise ConfigError(f"intermediate_size {inner_size} does not divide among {size} ranks")


def _quantized(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    if config.quantization == "none":
        return model
    if model.quantization is not None:
        raise ConfigError(
            f"--quantization {config.quantization} rounds matrices of floats, this checkpoint's are quantized already "
            f"({model.quantization.codes}): leave it out"
        )
    on_load = QuantizationConfig(layout="on_load", codes=config.quantization)
    return msgspec.structs.replace(model, quantization=on_load)


def _dtype(config: EngineConfig, model: ModelConfig) -> DType:
    name = model.dtype if config.dtype == "auto" else config.dtype
    if name not in get_args(DType):
        raise ConfigError(f"the checkpoint's dtype {name} is not supported: give --dtype float32, bfloat16 or float16")
    return cast(DType, name)


def _device(config: EngineConfig) -> Literal["cpu", "cuda"]:
    if config.device == "auto":
        return "cuda" if os.path.exists("/dev/nvidiactl") else "cpu"
    if config.device == "cuda":
        check_gpu()
    return config.device


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is above the model's max_position_embeddings {longest}: lower it"
        )
    return config.max_model_len
