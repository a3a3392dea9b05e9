"""Greedy answers of transformers to prompts with images, in float32: the oracle of the engine's image tests.

    oracle = VisionOracle(folder)
    tokens = oracle.generate("<image>\\nWhat is this?", [image], max_tokens=12)

Placeholders are expanded as the families' processors do it, but here: AutoProcessor cannot be built for some families
without torchvision and num2words. Images are prepared by transformers' PIL processors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from .media_oracle import Expanded, MediaOracle

PIL_CLASSES = {"Qwen2VLImageProcessorFast": "Qwen2VLImageProcessor"}


class VisionOracle(MediaOracle[Image.Image]):
    """Transformers' model, image processor and tokenizer of a checkpoint."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        import transformers

        self._config = _read(folder / "config.json")
        self._processing = _read(folder / "processor_config.json")
        settings = _read(folder / "preprocessor_config.json")
        kind = settings.pop("image_processor_type")
        self.image_processor = getattr(transformers, f"{PIL_CLASSES.get(kind, kind)}Pil")(**settings)
        self.tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
        architecture = getattr(transformers, self._config["architectures"][0])
        self.model = architecture.from_pretrained(folder, dtype=dtype).eval()

    def num_placeholders(self, image: Image.Image) -> int:
        """Return the number of embeddings of an image."""
        return self.expand(self._marker(), [image]).token_ids.count(self.placeholder_id)

    def expand(self, prompt: str, images: Sequence[Image.Image]) -> Expanded:
        """Return the token ids with all placeholders and the inputs of the images."""
        if not images:
            return Expanded(self.tokenizer(prompt)["input_ids"], {})
        extra = {"return_row_col_info": True} if self._is("idefics3", "smolvlm") else {}
        if self._config["model_type"] == "mistral3":
            side = self._processing["patch_size"] * self._processing["spatial_merge_size"]
            extra["patch_size"] = {"height": side, "width": side}
        batch = [list(images)] if self._is("idefics3", "smolvlm") else list(images)
        inputs = dict(self.image_processor(batch, return_tensors="pt", **extra))
        texts = iter(self._texts(inputs, len(images)))
        marker = re.escape(self._marker())
        token_ids = self.tokenizer(re.sub(marker, lambda _: next(texts), prompt))["input_ids"]
        for name in ("rows", "cols", "num_patches", "num_crops"):
            inputs.pop(name, None)
        is_image = (np.array(token_ids) == self.placeholder_id).astype(int)
        if self._is("gemma3"):
            inputs["token_type_ids"] = torch.tensor(is_image)[None]
        elif self._is("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
            inputs["mm_token_type_ids"] = torch.tensor(is_image)[None]
        return Expanded(token_ids, inputs)

    def _is(self, *model_types: str) -> bool:
        return self._config["model_type"] in model_types

    @property
    def placeholder_id(self) -> int:
        token_id = self._config.get("image_token_id", self._config.get("image_token_index"))
        assert isinstance(token_id, int)
        return token_id

    def _placeholder(self) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(self.placeholder_id))

    def _marker(self) -> str:
        """Return the token that stands for an image before the expansion."""
        return str(self.tokenizer.boi_token) if self._is("gemma3") else self._placeholder()

    def _texts(self, inputs: dict[str, Any], num_images: int) -> list[str]:
        """Return what each image becomes in the text."""
        token = self._placeholder()
        if self._is("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
            merged = self.image_processor.merge_size**2
            return [token * (int(grid.prod()) // merged) for grid in inputs["image_grid_thw"]]
        if self._is("idefics3", "smolvlm"):
            shapes = zip(inputs["rows"][0], inputs["cols"][0], strict=True)
            return [self._tiles(int(rows), int(columns), token) for rows, columns in shapes]
        if self._is("internvl"):
            length = self._processing["image_seq_length"]
            return [f"<img>{token * (length * int(tiles))}</img>" for tiles in inputs["num_patches"]]
        if self._is("gemma3"):
            length = self._processing["image_seq_length"]
            return [f"\n\n{self.tokenizer.boi_token}{token * length}{self.tokenizer.eoi_token}\n\n"] * num_images
        if "image_sizes" in inputs:
            side = self._processing["patch_size"] * self._processing.get("spatial_merge_size", 1)
            return [
                self._rows(int(height) // side, int(width) // side, token) for height, width in inputs["image_sizes"]
            ]
        height, width = inputs["pixel_values"].shape[-2:]
        side = self._processing["patch_size"]
        num_class_tokens = self._processing["num_additional_image_tokens"]
        num_dropped = self._processing["vision_feature_select_strategy"] == "default"
        return [token * ((height // side) * (width // side) + num_class_tokens - num_dropped)] * num_images

    def _tiles(self, rows: int, columns: int, token: str) -> str:
        """Return Idefics3's text of an image: its tiles row by row, then the whole image."""
        fake, tile = "<fake_token_around_image>", token * self._processing["image_seq_len"]
        whole = f"{fake}<global-img>{tile}{fake}"
        if not rows:
            return whole
        lines = [
            "".join(f"{fake}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        return "".join(lines) + "\n" + whole

    @staticmethod
    def _rows(height: int, width: int, token: str) -> str:
        """Return Pixtral's text of an image: rows of placeholders with breaks between them and an end."""
        return "[IMG_BREAK]".join([token * width] * height) + "[IMG_END]"


def random_image(seed: int, width: int, height: int) -> Image.Image:
    """Return an image of colored rectangles, which resizing does not average into one gray."""
    rng = np.random.default_rng(seed)
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[:] = rng.integers(0, 256, 3)
    for _ in range(6):
        top, left = int(rng.integers(0, height)), int(rng.integers(0, width))
        bottom, right = top + 1 + int(rng.integers(0, height)), left + 1 + int(rng.integers(0, width))
        pixels[top:bottom, left:right] = rng.integers(0, 256, 3)
    return Image.fromarray(pixels)


def _read(file: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return value
