"""VisionConfig: the image encoder of a model, as far as processes other than the workers need to know it."""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

import msgspec

VisionFamily: TypeAlias = Literal[
    "llava", "pixtral", "idefics3", "internvl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "gemma3"
]
Stage: TypeAlias = Literal["patches", "frames", "convolutions", "layer", "windowed layer", "projector"]
Grid: TypeAlias = tuple[int, int, int]  # of a media file, in the units of its family


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The image encoder of a model. Sizes count elements; patches and images are squares."""

    kind: ClassVar[Literal["image"]] = "image"

    family: VisionFamily  # how images are prepared, expanded in prompts and encoded; SmolVLM is idefics3
    image_token_id: int  # placeholder of an embedding of the encoder
    hidden_size: int  # of the encoder
    num_layers: int  # of the encoder
    patch_size: int  # pixels
    image_size: int = 0  # pixels of the only size that the encoder takes; 0: any
    merge_size: int = 1  # patches on each side of the square that one embedding covers
    num_deepstack: int = 0  # number of first layers of the language model to which the encoder adds features
    is_bidirectional: bool = False  # the placeholders of an image attend to all others of that image
    windowed_layers: tuple[int, ...] = ()  # layers of the encoder that attend within windows

    @property
    def placeholder_id(self) -> int:
        return self.image_token_id

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of encoding an image, in order; stages of one kind take equally long."""
        windowed = set(self.windowed_layers)
        layers: list[Stage] = ["windowed layer" if i in windowed else "layer" for i in range(self.num_layers)]
        return ("patches", *layers, "projector")

    def num_rows(self, num_embeds: int) -> int:
        """Return the number of rows of an image in the encoder, which are its patches."""
        return num_embeds * self.merge_size**2

    def num_keys(self, num_rows: int) -> int:
        """Return the largest number of rows to which one row of an image attends."""
        return num_rows

    def num_products(self, num_rows: int) -> int:
        """Return the number of multiplications of the largest stage for `num_rows` rows."""
        return num_rows * row_products(self.hidden_size, self.num_keys(num_rows))


def row_products(hidden_size: int, num_keys: int) -> int:
    """Return the number of multiplications per row in a layer of an encoder: those of the matrices and of attention."""
    return 12 * hidden_size**2 + 2 * num_keys * hidden_size
