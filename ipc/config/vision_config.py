"""VisionConfig: the image side of a model, as far as processes other than the workers know it."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from ..errors import ConfigError

VisionFamily: TypeAlias = Literal[
    "llava", "pixtral", "idefics3", "internvl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3"
]
Stage: TypeAlias = Literal["patches", "layer", "windowed layer", "projector"]


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The encoder of a model that sees images. Sizes count elements; patches and images are squares."""

    family: VisionFamily  # how images are prepared, expanded in prompts and encoded; SmolVLM is idefics3
    image_token_id: int  # the placeholder, whose embedding the encoder gives
    hidden_size: int  # of the encoder
    num_layers: int  # of the encoder
    patch_size: int  # pixels
    image_size: int = 0  # pixels of the only size that the encoder takes; 0: any
    merge_size: int = 1  # patches on each side of the square behind an embedding
    num_deepstack: int = 0  # first layers of the language model to which the encoder adds features of their own
    is_bidirectional: bool = False  # the placeholders of an image attend to all others of that image
    windowed_layers: tuple[int, ...] = ()  # of the encoder, that attend within windows

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The parts of an encode, one after the other; those of one kind take equally long."""
        windowed = set(self.windowed_layers)
        layers: list[Stage] = ["windowed layer" if i in windowed else "layer" for i in range(self.num_layers)]
        return ("patches", *layers, "projector")


MEDIA_KINDS = ("image", "video", "audio")  # that --limit-mm-per-prompt may name, as in vLLM


def media_limits(given: dict[str, Any] | None) -> dict[str, int]:
    """Return how many media of each kind --limit-mm-per-prompt allows in a prompt, by kind; ConfigError if invalid.

    A limit is a number, or vLLM's {"count": number, …}, whose other fields only estimate sizes.
    """
    limits = {}
    for kind, limit in (given or {}).items():
        if kind not in MEDIA_KINDS:
            raise ConfigError(f"--limit-mm-per-prompt {kind!r:.80} must be one of {', '.join(MEDIA_KINDS)}")
        count = limit.get("count") if isinstance(limit, dict) else limit
        if isinstance(limit, dict) and count is None:
            continue
        if type(count) is not int or not 0 <= count <= 1 << 20:
            raise ConfigError(f"--limit-mm-per-prompt {kind} must be in [0, {1 << 20}], got {limit!r:.80}")
        limits[kind] = count
    return limits
