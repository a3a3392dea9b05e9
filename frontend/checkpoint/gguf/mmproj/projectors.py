"""PROJECTORS: the families of mmproj files that are served, by `clip.projector_type`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .....ipc.errors import ConfigError
from ..metadata import Metadata
from .any_size_projectors import MISTRAL3, PIXTRAL, QWEN2_5_VL, QWEN2_VL, QWEN3_VL
from .audio_projectors import QWEN2_AUDIO, VOXTRAL
from .projector import Projector
from .tile_projectors import GEMMA3, IDEFICS3, INTERNVL, LLAVA

LLAVA_TYPE = "mlp"  # also of files from before there was a projector_type
PROJECTORS: Mapping[str, Projector] = {
    "gemma3": GEMMA3,
    "idefics3": IDEFICS3,
    "internvl": INTERNVL,
    LLAVA_TYPE: LLAVA,
    "pixtral": PIXTRAL,
    "qwen2.5vl_merger": QWEN2_5_VL,
    "qwen2a": QWEN2_AUDIO,
    "qwen2vl_merger": QWEN2_VL,
    "qwen3vl_merger": QWEN3_VL,
    "voxtral": VOXTRAL,
}
VARIANTS: Mapping[str, tuple[Callable[[Metadata], bool], Projector]] = {
    "pixtral": (lambda data: data.has("mm.patch_merger.weight"), MISTRAL3),
}
ALL = (*PROJECTORS.values(), *(variant for _, variant in VARIANTS.values()))
TOKENS = frozenset(text for each in ALL for texts in each.tokens.values() for text in texts)  # whose ids are looked up
WITH_ENCODERS = frozenset(name for each in ALL for name in each.texts)  # architectures of language models
TEXT_ALONE = frozenset({"qwen35", "qwen35moe"})  # language models that are served without their encoders
NEXT = ("model.image_newline", "v.image_newline")  # tensors of LLaVA-NeXT, whose images become tiles of several shapes


class UnknownProjector(ConfigError):
    """An mmproj file of a family that is not served."""


def projector_of(data: Metadata) -> Projector:
    """Return the family of an mmproj file; UnknownProjector if it is not served."""
    kind = data.get("projector_type") or data.get("vision.projector_type") or data.get("audio.projector_type")
    kind = LLAVA_TYPE if kind is None and data.get("has_llava_projector") is True else kind
    served = ", ".join(PROJECTORS)
    if not isinstance(kind, str) or kind not in PROJECTORS:
        raise UnknownProjector(f"{data.path}: clip.projector_type {kind!r:.100} is not served, these are: {served}")
    if kind == LLAVA_TYPE and any(map(data.has, NEXT)):
        raise UnknownProjector(
            f"{data.path}: it is the encoder of LLaVA-NeXT, which is not served; these are: {served}"
        )
    fits, variant = VARIANTS.get(kind, (lambda _: False, PROJECTORS[kind]))
    return variant if fits(data) else PROJECTORS[kind]
