"""Loading of a borrowed model: from config.json and safetensors to a BorrowedModel, after a check of its architecture.

Code in a checkpoint is never run: an architecture that the installed transformers does not have is refused.
"""

from __future__ import annotations

import difflib
import logging
import re
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ...ipc.errors import ConfigError
from ...ipc.process.machine_memory import available_bytes, gib
from ...ipc.spec.config.engine_config import EngineConfig
from ...ipc.spec.models.config_file import overridden, read_json
from ...ipc.spec.models.model_config import ModelConfig
from ...ipc.spec.models.model_file import NATIVE
from ...ipc.spec.models.quantization_config import QuantizationConfig
from ...kernels.select import Ops
from ..machine.parallel import ParallelGroup
from .attention import IMPLEMENTATION, Unserved
from .dequantized import dequantized
from .model import BorrowedModel
from .self_check import check_architecture
from .shards import shard_model

logger = logging.getLogger("tokenloom.borrowed")

# Model types whose layers compute attention or keep state without our attention function or a cache object.
REFUSED = {
    "axk2": "its layers choose keys with an indexer (sparse attention)",
    "bloom": "its attention is computed inline, with ALiBi",
    "codegen": "its attention is computed inline",
    "deepseek_v32": "its layers choose keys with an indexer (sparse attention)",
    "diffllama": "its layers attend twice",
    "doge": "its layers make masks of their own",
    "glm_moe_dsa": "its layers choose keys with an indexer (sparse attention)",
    "hrm_text": "its layers run in loops",
    "hy_v4": "its layers choose keys with an indexer (sparse attention)",
    "inkling_text": "its attention has a position bias",
    "minimax": "its linear attention reads the mask of a batch",
    "mpt": "its attention is computed inline, with ALiBi",
    "recurrent_gemma": "its state is kept outside the cache",
    "rwkv": "its state is kept outside the cache",
    "zamba2": "its layers share attention with other inputs",
}
# Models of text and media, by model_type, whose language model is served without the rest: it gives the same logits.
AS_TEXT = frozenset(("aya_vision", "cohere2_vision", "lfm2_vl", "llava_next", "llava_onevision"))
OF_CAUSAL_HEAD = {
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "final_logit_softcapping": None,
}  # fields of text models that models of media ignore: set to values without effect
TEXT_NAMES = {r"^language_model\.lm_head\.": "lm_head.", r"^(model\.)?language_model\.(model\.)?": "model."}
SUFFIX = re.compile("For[A-Z][A-Za-z]+$|LMHeadModel$")  # of architecture names
CLOSE = 0.7  # smallest difflib ratio of names that count as similar
ORIGINAL_LENGTH = "original_max_position_embeddings"
# Tensors that text prompts do not need: heads that draft tokens, vision and audio.
UNUSED = re.compile(
    r"(^|\.)(mtp|nextn|vision|visual|audio|multi_modal_projector|embed_vision|embed_audio|image_newline)([._]|$)|^mtp"
)


def load_borrowed(
    folder: Path,
    model_config: ModelConfig,
    config: EngineConfig,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    ops: Ops,
    group: ParallelGroup | None = None,
    *,
    is_dummy: bool = False,
) -> BorrowedModel:
    """Load the model of `folder`, or this rank's shard of it, to `device` as `dtype`.

    ConfigError if transformers' layers cannot serve it, the checkpoint is invalid, or states do not fit in memory.
    is_dummy: random weights; only config.json is read.
    """
    log: Any = transformers.logging
    log.set_verbosity_error()
    log.disable_progress_bar()
    whole = read_config(folder, config.hf_overrides)
    theirs = language_model(whole, model_config.architecture)
    names = None if theirs is whole else TEXT_NAMES
    text = theirs.get_text_config(decoder=True)
    for each in (theirs, text):  # we read such checkpoints as floats
        each.__dict__.pop("quantization_config", None)
    _check_known(text, model_config.architecture)
    _check_rotary(text, max_model_len)
    is_stepwise = False
    try:
        if not config.skip_self_check:
            begun = time.monotonic()
            is_stepwise = check_architecture(text, group=group)
            logger.info("self-check of %s passed in %.1f s", model_config.architecture, time.monotonic() - begun)
        quantization = model_config.quantization
        weights: Any = _random(theirs, dtype) if is_dummy else _read(folder, theirs, dtype, quantization, names)
        if group is not None:
            shard_model(weights, group)
        model = BorrowedModel(weights.to(device), ops, dtype, group)
    except Unserved as error:
        raise ConfigError(_refusal(model_config.architecture, str(error))) from error
    model.rows.is_stepwise = is_stepwise
    check_state(model, model_config, config.max_num_seqs)
    return model


def read_config(folder: Path, overrides: dict[str, Any] | None) -> PreTrainedConfig:
    """Read config.json as transformers does. ConfigError if the installed transformers does not know its model_type, or
    a value is invalid."""
    raw = overridden(read_json(folder / "config.json"), overrides or {})
    kind = str(raw.get("model_type"))
    if kind not in transformers.CONFIG_MAPPING:
        brings = " and brings code of its own, which is never run" if raw.get("auto_map") else ""
        nearest = _nearest(str((raw.get("architectures") or [kind])[0]))
        raise ConfigError(
            f"{folder / 'config.json'}: model_type {kind} is unknown to transformers {transformers.__version__}{brings}"
            f"{nearest}"
        )
    try:
        decoded, _ = PreTrainedConfig.get_config_dict(folder)  # infinities are objects in the file
        found: PreTrainedConfig = transformers.CONFIG_MAPPING[kind].from_dict(overridden(decoded, overrides or {}))
    except Exception as error:  # each configuration class checks in its own way
        raise ConfigError(f"{folder / 'config.json'} has an invalid value: {_one_line(error)}") from error
    return found


def language_model(config: PreTrainedConfig, architecture: str) -> PreTrainedConfig:
    """Return the config of the causal language model: `config`, or its part for the text model. ConfigError if
    transformers has no causal language model for it that can be served alone."""
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    if config.model_type not in AS_TEXT:
        raise ConfigError(
            f"{architecture} cannot be served: transformers {transformers.__version__} has no causal language model of "
            f"type {config.model_type}, and its language model is not served alone"
        )
    text = config.get_text_config(decoder=True)
    text.tie_word_embeddings = config.tie_word_embeddings
    for name, value in OF_CAUSAL_HEAD.items():
        if hasattr(text, name):
            setattr(text, name, value)
    logger.info("%s is served as its language model, %s: for text alone", architecture, text.model_type)
    return text


def _check_known(config: PreTrainedConfig, architecture: str) -> None:
    reason = REFUSED.get(config.model_type)
    if reason is not None:
        raise ConfigError(_refusal(architecture, f"{reason}, so that answers would be wrong"))


def _refusal(architecture: str, reason: str) -> str:
    return f"{architecture} cannot be served with transformers' layers: {reason}{_nearest(architecture)}"


def _nearest(architecture: str) -> str:
    """Return the end of an error message, which names the native architecture with the most similar name; "" if none is
    similar."""
    natives = {SUFFIX.sub("", name): name for name in NATIVE}
    found = difflib.get_close_matches(SUFFIX.sub("", architecture), natives, 1, CLOSE)
    return f"; the nearest native model is {natives[found[0]]}" if found else ""


def _check_rotary(config: PreTrainedConfig, max_model_len: int) -> None:
    """Raise ConfigError if rotary angles would depend on the longest row of a step."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    for each in kinds:
        if each.get("rope_type") not in ("dynamic", "longrope"):
            continue
        known = each.get(ORIGINAL_LENGTH) or getattr(config, ORIGINAL_LENGTH, None)
        length = known or config.max_position_embeddings
        if max_model_len > length:
            raise ConfigError(
                f"--max-model-len {max_model_len}: beyond {length} positions angles ({each['rope_type']}) depend on "
                f"the other requests of a step: give --max-model-len {length}"
            )


def _build(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    make: Any = AutoModelForCausalLM.from_config
    model: PreTrainedModel = make(config, dtype=dtype, attn_implementation=IMPLEMENTATION)
    return model


def _random(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Make a model with random weights, equal on all ranks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _build(config, dtype)


def _read(
    folder: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    quantization: QuantizationConfig | None,
    names: dict[str, str] | None,
) -> PreTrainedModel:
    """Return the model with the weights of `folder`. ConfigError if they cannot be read, or if tensors are missing,
    unused or of a wrong shape. names: replacements in the names of the file's tensors, by pattern."""
    load: Any = AutoModelForCausalLM.from_pretrained
    source: dict[str, Any] = {"config": config}
    place: Path | None = folder
    if quantization is not None:
        with torch.device("meta"):
            empty = _build(config, dtype)
        load, place = type(empty).from_pretrained, None
        source = {"config": empty.config, "state_dict": dequantized(folder, quantization, dtype)}
    try:
        model, found = load(
            place,
            **source,
            dtype=dtype,
            attn_implementation=IMPLEMENTATION,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            key_mapping=names,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # transformers raises many types for invalid files
        raise ConfigError(f"{folder}: {type(error).__name__}: {_one_line(error)}") from error
    surplus = sorted(name for name in found["unexpected_keys"] if not UNUSED.search(name))
    for problem, wrong in (
        ("lacks the tensors", sorted(found["missing_keys"])),
        ("has tensors of other shapes", sorted(f"{name} {list(own)}" for name, own, _ in found["mismatched_keys"])),
        ("has tensors that the model does not use", surplus),
    ):
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise ConfigError(f"{folder} {problem} {', '.join(wrong[:5])}{more}")
    read: PreTrainedModel = model
    return read


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def check_state(model: BorrowedModel, config: ModelConfig, max_num_seqs: int) -> None:
    """Raise ConfigError if the model keeps recurrent states that config.json does not announce, or if those of
    max_num_seqs requests do not fit in the available memory."""
    if not model.rows.layers:
        return
    if not config.has_state:
        raise ConfigError(
            f"{config.architecture} keeps states in {model.rows.layers[0]}, which its config.json does not tell: give "
            '--hf-overrides {"layer_types": …} with linear_attention for such layers'
        )
    needed, available = model.state_bytes * max_num_seqs, available_bytes()
    if needed > available:
        raise ConfigError(
            f"the states of {max_num_seqs} requests take {gib(needed)}, {gib(available)} of memory can be had: lower "
            f"--max-num-seqs to {available // 2 // model.state_bytes} or less"
        )
    logger.info("%s of states per request in %d layers", gib(model.state_bytes), len(model.rows.layers))
