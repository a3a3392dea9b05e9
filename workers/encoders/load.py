"""Loading of a tower: transformers' modules are made without memory and filled from the checkpoint.

Neither the language model nor a processor is made. Weights may have the names of older or newer files, which differ in
"model." and "vision_model.". Tables that are not in files are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

import torch
import transformers
from torch import Tensor, nn

from ...ipc.errors import ConfigError
from ...ipc.spec.models.audio_config import AudioConfig
from ...ipc.spec.models.model_config import Encoder as EncoderConfig
from ...kernels.select import Ops
from ..borrowed.linear import pack_layers
from ..weights.checkpoint import Checkpoint, TensorSlice
from .audio.audio_files import AudioFiles
from .audio.convolutions import pack_convolutions
from .audio.towers import Qwen2AudioTower, Qwen3ASRTower, VoxtralTower, WhisperTower
from .blocks import Parts, Tower
from .fused import fuse
from .images.image_files import ImageFiles
from .images.patches import pack_patches
from .images.qwen_towers import Qwen2VLTower, Qwen3VLTower, Qwen25VLTower
from .images.towers import Gemma3Tower, Idefics3Tower, InternVLTower, LlavaTower, PixtralTower

UNUSED = ("head", "post_layernorm")  # parts of CLIP's and SigLIP's encoders after the layer that LLaVA takes


MakeTower: TypeAlias = Callable[[Parts, Any, Any], Tower[Any]]  # parts, transformers' config, ImageFiles or AudioFiles


class _Kind(NamedTuple):
    """A kind of model: its tower, transformers' classes of its encoder and projector, and the prefixes (roots) of their
    weights' names."""

    tower: MakeTower
    encoder_root: str
    encoder: str  # class; "": the one that belongs to the encoder's config
    projector_root: str = ""
    projector: str = ""  # class; "": the encoder includes the projector
    config: str = "vision_config"  # field of the model's config that holds the encoder's; "": the model's config itself


def _hearing(tower: MakeTower, projector: str) -> _Kind:
    return _Kind(tower, "audio_tower", "", "multi_modal_projector", projector, "audio_config")


KINDS = {  # by model_type
    "llava": _Kind(LlavaTower, "vision_tower", "", "multi_modal_projector", "LlavaMultiModalProjector"),
    "mistral3": _Kind(PixtralTower, "vision_tower", "", "multi_modal_projector", "Mistral3MultiModalProjector"),
    "idefics3": _Kind(Idefics3Tower, "vision_model", "Idefics3VisionTransformer", "connector", "Idefics3Connector"),
    "smolvlm": _Kind(Idefics3Tower, "vision_model", "SmolVLMVisionTransformer", "connector", "SmolVLMConnector"),
    "internvl": _Kind(InternVLTower, "vision_tower", "", "multi_modal_projector", "InternVLMultiModalProjector"),
    "qwen2_vl": _Kind(Qwen2VLTower, "visual", "Qwen2VisionTransformerPretrainedModel"),
    "qwen2_5_vl": _Kind(Qwen25VLTower, "visual", "Qwen2_5_VisionTransformerPretrainedModel"),
    "qwen3_vl": _Kind(Qwen3VLTower, "visual", "Qwen3VLVisionModel"),
    "gemma3": _Kind(Gemma3Tower, "vision_tower", "", "multi_modal_projector", "Gemma3MultiModalProjector"),
    "qwen2_audio": _hearing(Qwen2AudioTower, "Qwen2AudioMultiModalProjector"),
    "voxtral": _hearing(VoxtralTower, "VoxtralMultiModalProjector"),
    "qwen3_asr": _hearing(Qwen3ASRTower, "Qwen3ASRMultiModalProjector"),
    "whisper": _Kind(WhisperTower, "encoder", "WhisperEncoder", config=""),
}


def make_parts(config: Any) -> dict[str, nn.Module]:
    """Return the modules of a model's encoder and projector, on the meta device, by their roots."""
    name, kind = config.model_type, KINDS[config.model_type]
    automatic: Any = transformers.AutoModel
    module = import_module(f"transformers.models.{name}.modeling_{name}")
    tower_config = getattr(config, kind.config) if kind.config else config
    with torch.device("meta"):
        if kind.encoder:
            parts = {kind.encoder_root: getattr(module, kind.encoder)._from_config(tower_config)}
        else:
            parts = {kind.encoder_root: automatic.from_config(tower_config)}
        if kind.projector:
            parts[kind.projector_root] = getattr(module, kind.projector)(config)
    if name == "llava":
        for unused in UNUSED:
            if hasattr(parts[kind.encoder_root], unused):
                delattr(parts[kind.encoder_root], unused)
    return {root: part.eval().requires_grad_(False) for root, part in parts.items()}


def load_tower(
    theirs: Any, config: EncoderConfig, checkpoint: Checkpoint, ops: Ops | None = None
) -> tuple[Tower[Any], int]:
    """Build the tower for `theirs`, a config of transformers, with the weights of an open checkpoint; return it and the
    bytes of its weights. `ops`: operations that compute its layers, or at least their products; None: torch.
    ConfigError if the model's type has no encoder here, the checkpoint lacks a tensor or has another shape of it, or
    the checkpoint's processor config is missing or not supported."""
    kind = KINDS.get(theirs.model_type)
    if kind is None:
        raise ConfigError(f"config.json: model_type {theirs.model_type} has no encoder here")
    files = _files(checkpoint, config)
    parts = make_parts(theirs)
    num_bytes = 0
    for root, part in parts.items():
        for name, parameter in list(part.named_parameters()):
            stored = _stored_name(root, name, checkpoint)
            tensor = checkpoint.load(TensorSlice(stored, tuple(parameter.shape)))
            _put(part, name, nn.Parameter(tensor, requires_grad=False))
            num_bytes += tensor.nbytes
        _make_tables(part, checkpoint.device)
    make: MakeTower = PixtralTower if config.family == "pixtral" else kind.tower
    tower = make(parts, theirs, files)
    if ops is None:
        return tower, num_bytes
    fused = fuse(ops, tower.blocks, checkpoint.dtype)
    for part in parts.values():
        pack_layers(part, ops, checkpoint.dtype)
        pack_patches(part, ops, checkpoint.dtype)
        pack_convolutions(part, ops, checkpoint.dtype)
    if fused is None:
        return make(parts, theirs, files), num_bytes
    tower.fused = fused
    return tower, num_bytes


def _files(checkpoint: Checkpoint, config: EncoderConfig) -> ImageFiles | AudioFiles:
    if isinstance(config, AudioConfig):
        return AudioFiles.load(checkpoint.folder, config, checkpoint.device)
    return ImageFiles.load(checkpoint.folder, config, checkpoint.dtype, checkpoint.device)


def _stored_name(root: str, name: str, checkpoint: Checkpoint) -> str:
    """Return the name under which the checkpoint has a weight; if it has none, the name in the newest files."""
    names = [f"{start}{root}.{middle}{name}" for middle in ("", "vision_model.") for start in ("model.", "")]
    return next((each for each in names if each in checkpoint), names[0])


def _put(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, field = name.rpartition(".")
    setattr(module.get_submodule(owner), field, parameter)


def _make_tables(part: nn.Module, device: torch.device) -> None:
    """Compute the buffers of a part, which are not in files: rotary frequencies, sinusoids, and position ids."""
    for module in part.modules():
        names = [name for name, _ in module.named_buffers(recurse=False)]
        if not names:
            continue
        if "position_ids" in names:
            count = module.get_buffer("position_ids").shape[-1]
            made: dict[str, Tensor] = {"position_ids": torch.arange(count).expand((1, -1))}
        elif "positional_embedding" in names:
            made = dict(type(module)(module.length, module.channels, module.max_timescale).named_buffers(recurse=False))
        else:
            made = dict(type(module)(module.config).named_buffers(recurse=False))
        for name in names:
            setattr(module, name, made[name].to(device))
