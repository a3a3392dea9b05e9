"""Resolution of an EngineConfig to an EngineSpec: finds the checkpoint, reads its shape, chooses dtype and device.

Before any process starts, it checks that the device seems to exist, that the weight files are complete, and that a CPU
model's weights fit into memory. Needs neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import secrets
from functools import partial
from pathlib import Path
from typing import Literal, cast, get_args

import msgspec

from ...ipc.errors import ConfigError
from ...ipc.messages.core import ModelDigest
from ...ipc.messages.media import MediaKind
from ...ipc.processor import has_amx
from ...ipc.sockets.addresses import RunDirectory
from ...ipc.sockets.endpoints import Endpoints
from ...ipc.sockets.keys import Keys
from ...ipc.spec.adapters.modules import check_adapter_options
from ...ipc.spec.config.checkpoint_digest import checkpoint_digest, tokenizer_digest
from ...ipc.spec.config.engine_config import EngineConfig
from ...ipc.spec.config.engine_spec import EngineSpec, numbers_of
from ...ipc.spec.config.host_places import check_private, host_address, ray_listen_address
from ...ipc.spec.config.option_ranges import AUTO_LENGTH
from ...ipc.spec.config.served_model import has_integer_products, integer_obstacle, served_model, with_floats
from ...ipc.spec.config.weight_files import weight_paths
from ...ipc.spec.models.model_config import ModelConfig
from ...ipc.spec.processors.processor import Processor, load_processor
from ..listening.tls import new_ssl_context
from .draft_model import with_draft_model
from .generation_config import default_sampling_params, generation_folder, tell_missing_defaults
from .gguf.folder import add_tokenizer, skipped_layers
from .given_name import default_name, name_as_given
from .hub import DEMO_FOLDER as DEMO_FOLDER
from .hub import find_checkpoint as find_checkpoint
from .memory_check import DType, Served, check_memory

logger = logging.getLogger("tokenloom.supervisor")

ANY_NAME = "*"  # of --served-model-name
GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # NVIDIA's driver, WSL, AMD's driver
_LARGEST: dict[MediaKind, str] = {  # kind of media → the largest medium, with the remedy, for an error
    "image": "largest image: raise it, or make images smaller with --mm-processor-kwargs",
    "audio": "longest audio clip: raise it, or lower --max-audio-s",
}


def resolve(config: EngineConfig, run_directory: RunDirectory) -> EngineSpec:
    """Return the EngineSpec for a configuration. ConfigError for every failure that is certain before a process
    starts."""
    for key_file in (config.key_file, config.hosts_key_file):
        if key_file is not None:
            Keys.load(key_file)
    new_ssl_context(config)
    if config.distributed_executor_backend == "ray":
        check_ray()
    folder = find_checkpoint(config.model, config.revision, config=config, spare=run_directory.path)
    try:
        return _resolve(config, run_directory, folder)
    except ConfigError as error:
        raise ConfigError(name_as_given(str(error), config.model, folder)) from None


def _resolve(config: EngineConfig, run_directory: RunDirectory, folder: Path) -> EngineSpec:
    generation = generation_folder(config, folder)
    model = served_model(config, folder, generation)
    check_audio(model)
    check_parallel(model, config.tensor_parallel_size)
    check_encoder_options(config, model)
    served = as_served(config, model)
    dtype, device, has_integers = served.dtype, served.device, served.has_integer_products
    _log_products(config, model, dtype, device, has_integers=has_integers)
    if num_skipped := skipped_layers(folder):
        logger.info("layers in the file that predict further tokens (MTP) are skipped: %d", num_skipped)
    model = served.model
    if config.cores is None and config.load_format != "dummy":
        num_local = len(range(0, config.tensor_parallel_size * config.data_parallel_size, config.hosts))
        serve = partial(_serve, folder=folder, generation=generation)
        check_memory(folder, config, serve, num_local, config.model or "the demo model")
    given = config.served_model_name or []
    names = [name for name in given if name != ANY_NAME] or [default_name(config.model)]
    check_adapter_options(config, model, names)
    tokenizer, max_model_len = _tokenizer_folder(config, folder, run_directory.path), _max_model_len(config, model)
    numbers = numbers_of(dtype, has_integer_products=has_integers)
    sampling = default_sampling_params(config, generation)
    if model.is_generative:
        tell_missing_defaults(sampling)
    agents = _agents_address(config)
    spec = EngineSpec(
        run_id=secrets.token_hex(8),
        run_directory=str(run_directory.path),
        endpoints=msgspec.structs.replace(Endpoints.in_folder(run_directory.path, config.listen), agents=agents),
        config=config,
        model=model,
        model_folder=str(folder),
        tokenizer_folder=str(tokenizer),
        served_model_name=names[0],
        model_aliases=names[1:],
        takes_any_name=ANY_NAME in given,
        default_sampling_params=sampling,
        dtype=dtype,
        device=device,
        has_integer_products=has_integers,
        max_model_len=max_model_len,
        host_address=host_address(agents) if agents else "",
        digest=_digest(config, model, folder, tokenizer, numbers, max_model_len),
        group_keys=None if config.hosts == 1 else Keys.generate(),
    )
    spec = with_draft_model(spec, run_directory.path)
    if config.hosts > 1 and config.hosts_key_file is None:
        Keys.generate().save(spec.hosts_key_file)
    if model.encoder is not None:
        spec = _with_encoder_cache(spec, load_processor(folder, model.encoder, config))
        spec = msgspec.structs.replace(spec, digest=_with_media(spec))
    if config.has_tiers and not spec.uses_tiers:
        why = "prefix caching is off"
        if model.has_state:
            why = f"layers of {model.architecture} keep states"
        elif model.is_encoder:
            why = f"{model.architecture} is an encoder, which keeps no keys"
        logger.warning("no KV tiers: %s, so that no block is found again", why)
    return spec


def as_served(config: EngineConfig, model: ModelConfig) -> Served:
    """Return how an engine serves a model, of which `served_model` has read the config. ConfigError if it cannot."""
    dtype, device = dtype_of(config, model), device_of(config)
    has_integers = has_integer_products(config, model, dtype, device)
    return Served(model if has_integers else with_floats(model), dtype, device, has_integers)


def _serve(config: EngineConfig, folder: Path, generation: Path) -> Served:
    return as_served(config, served_model(config, folder, generation))


def _log_products(config: EngineConfig, model: ModelConfig, dtype: DType, device: str, *, has_integers: bool) -> None:
    """Log how a CPU multiplies quantized weights, unless an option says it."""
    if model.quantization is None or device != "cpu" or config.quantized_products != "auto":
        return
    if has_integers:
        logger.info(
            "quantized weights keep their codes and are multiplied as integers, at 1.001 to 1.006 times the perplexity "
            "of floats on SmolLM2; --quantized-products floats multiplies floats%s",
            ", on this processor faster for prompts, and slower for few requests" if has_amx() else "",
        )
    else:
        logger.info("quantized weights are multiplied as floats: %s", integer_obstacle(config, model, dtype))


def _digest(
    config: EngineConfig, model: ModelConfig, folder: Path, tokenizer: Path, numbers: str, max_model_len: int
) -> ModelDigest:
    """Return the digests that gateways, engines and clients compare, without media. numbers: EngineSpec.numbers."""
    shape = msgspec.json.encode(msgspec.structs.replace(model, vision=None, audio=None), order="deterministic")
    weights = checkpoint_digest(folder) if weight_paths(folder) else ""
    return ModelDigest(
        weights="dummy" if config.load_format == "dummy" else weights,
        model=hashlib.sha256(shape).hexdigest(),
        tokenizer=tokenizer_digest(tokenizer),
        dtype=numbers,
        kv_cache_dtype=config.kv_cache_dtype,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_lora_rank=config.max_lora_rank if config.enable_lora else 0,
        lora_targets=",".join(sorted(config.lora_target_modules or ())) if config.enable_lora else "",
    )


def _with_media(spec: EngineSpec) -> ModelDigest:
    """Return the digest with `media` set to a digest of everything that must be equal to give media the same
    embeddings."""
    assert spec.digest is not None, "_digest made it"
    parts = msgspec.json.encode([spec.model.vision, spec.model.audio, spec.max_item_embeds], order="deterministic")
    return msgspec.structs.replace(spec.digest, media=hashlib.sha256(parts).hexdigest())


def _with_encoder_cache(spec: EngineSpec, processor: Processor) -> EngineSpec:
    """Return the spec with the size of the largest medium and of the encoder cache. By default the cache holds two of
    the largest media, and at least as many embeddings as a step has tokens. ConfigError if it is too small for one
    medium."""
    largest, budget = min(processor.max_embeds, spec.max_model_len), spec.max_num_batched_tokens
    spec = msgspec.structs.replace(spec, max_item_embeds=largest)
    size = spec.config.encoder_cache_tokens or max(2 * largest, spec.max_num_batched_tokens)
    if size < largest:
        raise ConfigError(
            f"--encoder-cache-tokens {size} is below the {largest} embeddings of the {_LARGEST[processor.kind]}"
        )
    if spec.max_num_batched_tokens > budget:
        logger.info(
            "a step has up to %d tokens, not %d: it must hold an image of %d and a token of each other request",
            spec.max_num_batched_tokens,
            budget,
            largest,
        )
    return msgspec.structs.replace(spec, encoder_cache_tokens=size)


def _tokenizer_folder(config: EngineConfig, folder: Path, spare: Path) -> Path:
    if config.tokenizer is not None or config.tokenizer_revision is not None:
        name = config.tokenizer or config.model
        folder = find_checkpoint(name, config.tokenizer_revision, "--tokenizer", config, spare)
    return add_tokenizer(folder, spare)


def check_ray() -> None:
    """Raise ConfigError if Ray is not installed. Does not import it."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(
            "--distributed-executor-backend ray: Ray is not installed for this Python: pip install 'tokenloom[ray]'"
        )


def check_audio(model: ModelConfig) -> None:
    """Raise ConfigError if the model takes audio and the libraries that decode it are not installed. Does not import
    them."""
    if model.audio is not None and not all(map(importlib.util.find_spec, ("soundfile", "soxr"))):
        raise ConfigError(
            f"{model.architecture} hears audio, which is read with the extra tokenloom[audio], which is not installed: "
            "pip install 'tokenloom[audio]'"
        )


def _agents_address(config: EngineConfig) -> str:
    """Return the address at which agents of other hosts reach this host; "" if there are no other hosts."""
    if config.hosts == 1 or config.listen_hosts is not None:
        return config.listen_hosts or ""
    address = ray_listen_address()
    check_private(address, config.insecure)
    return address


def check_encoder_options(config: EngineConfig, model: ModelConfig) -> None:
    """Raise ConfigError if options choose the form or the size of a KV cache, and the model is an encoder."""
    given = {
        "--kv-cache-dtype": config.kv_cache_dtype != "auto",
        "--num-kv-blocks": config.num_kv_blocks is not None,
        "--kv-cache-memory-bytes": config.kv_cache_memory_bytes is not None,
    }
    for option, is_given in given.items():
        if model.is_encoder and is_given:
            raise ConfigError(
                f"{option} is given, but {model.architecture} is an encoder, which keeps no keys and values: leave it "
                "out"
            )


def check_parallel(model: ModelConfig, size: int) -> None:
    """Raise ConfigError if the model's layers cannot be sharded over `size` ranks."""
    if model.num_heads % size:
        raise ConfigError(
            f"{model.num_heads} attention heads do not divide among --tensor-parallel-size {size}: choose a divisor"
        )
    if model.implementation == "transformers" and model.num_kv_heads % size:
        raise ConfigError(
            f"{model.num_kv_heads} KV heads do not divide among --tensor-parallel-size {size}, and transformers' "
            "layers do not replicate them: choose a divisor"
        )
    for num_kv_heads in {layer.num_kv_heads or model.num_kv_heads for layer in model.layers}:
        if num_kv_heads % size and size % num_kv_heads:
            raise ConfigError(
                f"{num_kv_heads} KV heads neither divide among nor replicate over --tensor-parallel-size {size}"
            )
    experts = model.experts
    inner_sizes = {0} if experts is None else {experts.intermediate_size, experts.shared_size}
    if experts is None or experts.is_beside_mlp or model.num_expert_layers < model.num_layers:
        inner_sizes.add(model.intermediate_size)
    for inner_size in sorted(inner_sizes):
        if inner_size % size:
            raise ConfigError(f"intermediate_size {inner_size} does not divide among {size} ranks")


def dtype_of(config: EngineConfig, model: ModelConfig) -> DType:
    """Return the dtype in which a model is served; ConfigError if it is not supported."""
    name = model.dtype if config.dtype == "auto" else config.dtype
    if name not in get_args(DType):
        raise ConfigError(f"the checkpoint's dtype {name} is not supported: give --dtype float32, bfloat16 or float16")
    return cast(DType, name)


def device_of(config: EngineConfig) -> Literal["cpu", "cuda"]:
    """Return the device of an engine's workers; ConfigError if it is to be a GPU and there is none."""
    if config.cores is not None:  # a gateway computes nothing
        return "cpu"
    if config.device == "auto":
        return "cuda" if os.path.exists("/dev/nvidiactl") else "cpu"
    if config.device == "cuda":
        check_gpu()
    return config.device


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Return the most tokens of a request: --max-model-len, or the model's limit, plus the tokens of a clip at the
    start of each request. ConfigError if the option exceeds the model's limit."""
    longest = model.max_position_embeddings
    if config.max_model_len in (None, AUTO_LENGTH):
        return min(longest, model.pooling.max_tokens or longest) + model.num_clip_tokens
    if config.max_model_len > longest:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is above the model's max_position_embeddings {longest}: lower it"
            + (", or give a model: without one the small demo is served" if config.model in (None, "demo") else "")
        )
    return config.max_model_len + model.num_clip_tokens


def check_gpu() -> None:
    """Raise ConfigError if no device node of a GPU exists; a node does not prove that the driver works."""
    if not any(map(os.path.exists, GPU_NODES)):
        raise ConfigError(
            "--device cuda: there is no GPU here (none of " + ", ".join(GPU_NODES) + "): check the driver and, in a "
            "container, which devices it is given, or give --device cpu"
        )
