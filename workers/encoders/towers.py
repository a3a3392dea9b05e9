"""Towers: transformers' vision encoders with their projectors, run layer by layer.

    pixels → begin (patches, positions) → layers, some at a time → finish (norm, merger, projector) → embeddings

The modules are transformers' own; the loop over their layers is here, since an encoder's work is scheduled by layers.
Each tower takes one medium at a time, with all its tiles, and gives the results of its model's `get_image_features`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

Parts = dict[str, Any]  # modules by their root in the names of weights


@dataclass(eq=False)
class EncoderState:
    """A medium between two layers of an encoder."""

    hidden: Tensor
    grid: tuple[int, int, int]
    inputs: dict[str, Any] = field(default_factory=dict)  # further inputs of each layer
    next_layer: int = 0
    kept: dict[int, Tensor] = field(default_factory=dict)  # outputs, by the number of layers before them


class Tower(Protocol):
    """An encoder of one family. pixels: [tiles, 3, height, width]."""

    num_layers: int  # that the embeddings need

    def begin(self, pixels: Tensor, grid: tuple[int, int, int]) -> EncoderState: ...

    def run_layer(self, state: EncoderState) -> None:
        """Run the state's next layer."""
        ...

    def finish(self, state: EncoderState) -> Tensor:
        """Return the embeddings [num_embeds, (1 + num_deepstack) × hidden]."""
        ...


class _Features:
    """Outputs of layers that a projector takes side by side: config.vision_feature_layer, and without the class token
    if the strategy is "default"."""

    def __init__(self, config: Any, num_layers: int) -> None:
        chosen = config.vision_feature_layer
        self._layers = [each % (num_layers + 1) for each in (chosen if isinstance(chosen, list | tuple) else [chosen])]
        self._first = 1 if getattr(config, "vision_feature_select_strategy", "full") == "default" else 0
        self.num_layers = max(self._layers)

    def keep(self, state: EncoderState) -> None:
        if state.next_layer in self._layers:
            state.kept[state.next_layer] = state.hidden

    def take(self, state: EncoderState) -> Tensor:
        found = [state.kept[layer][:, self._first :] for layer in self._layers]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


class LlavaTower:
    """CLIP or SigLIP, of which LLaVA's projector takes an inner layer."""

    def __init__(self, parts: Parts, config: Any) -> None:
        self._tower, self._projector = parts["vision_tower"], parts["multi_modal_projector"]
        self._layers = self._tower.encoder.layers
        self._features = _Features(config, len(self._layers))
        self.num_layers = self._features.num_layers

    def begin(self, pixels: Tensor, grid: tuple[int, int, int]) -> EncoderState:
        hidden = self._tower.embeddings(pixels)
        if hasattr(self._tower, "pre_layrnorm"):
            hidden = self._tower.pre_layrnorm(hidden)
        state = EncoderState(hidden, grid)
        self._features.keep(state)
        return state

    def run_layer(self, state: EncoderState) -> None:
        state.hidden = self._layers[state.next_layer](state.hidden, None)
        state.next_layer += 1
        self._features.keep(state)

    def finish(self, state: EncoderState) -> Tensor:
        embeds: Tensor = self._projector(self._features.take(state))
        return embeds.flatten(0, 1)


class InternVLTower(LlavaTower):
    """InternViT, whose patches are merged by a pixel shuffle in each tile."""

    def __init__(self, parts: Parts, config: Any) -> None:
        self._tower, self._projector = parts["vision_tower"], parts["multi_modal_projector"]
        self._layers = self._tower.encoder.layer
        self._features = _Features(config, len(self._layers))
        self._is_normed = config.vision_feature_layer == -1
        self._factor = round(1 / config.downsample_ratio)
        self.num_layers = self._features.num_layers

    def begin(self, pixels: Tensor, grid: tuple[int, int, int]) -> EncoderState:
        state = EncoderState(self._tower.embeddings(pixels), grid)
        self._features.keep(state)
        return state

    def run_layer(self, state: EncoderState) -> None:
        state.hidden = self._layers[state.next_layer](state.hidden)
        state.next_layer += 1
        self._features.keep(state)

    def finish(self, state: EncoderState) -> Tensor:
        if self._is_normed:
            state.kept[self.num_layers] = self._tower.layernorm(state.hidden)
        embeds: Tensor = self._projector(shuffle_pixels(self._features.take(state), self._factor))
        return embeds.flatten(0, 1)


class PixtralTower:
    """Pixtral's encoder of images of any size, with LLaVA's projector or Mistral 3's, which merges patches."""

    def __init__(self, parts: Parts, config: Any) -> None:
        self._tower, self._projector = parts["vision_tower"], parts["multi_modal_projector"]
        self._layers = self._tower.transformer.layers
        self._features = _Features(config, len(self._layers))
        self._merges = hasattr(self._projector, "patch_merger")
        self.num_layers = self._features.num_layers

    def begin(self, pixels: Tensor, grid: tuple[int, int, int]) -> EncoderState:
        patches = self._tower.patch_conv(pixels)[0]
        rows, columns = patches.shape[-2:]
        hidden = self._tower.ln_pre(patches.flatten(1).T.contiguous().unsqueeze(0))
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).to(pixels.device)
        inputs = {"attention_mask": None, "position_embeddings": self._tower.patch_positional_embedding(hidden, places)}
        state = EncoderState(hidden, (1, rows, columns), inputs)
        self._features.keep(state)
        return state

    def run_layer(self, state: EncoderState) -> None:
        state.hidden = self._layers[state.next_layer](state.hidden, **state.inputs)
        state.next_layer += 1
        self._features.keep(state)

    def finish(self, state: EncoderState) -> Tensor:
        features, (_, rows, columns) = self._features.take(state)[0], state.grid
        size = (rows * self._tower.patch_size, columns * self._tower.patch_size)
        embeds: Tensor = self._projector(features, [size]) if self._merges else self._projector(features)
        return embeds


class Idefics3Tower:
    """SigLIP over tiles, whose patches are merged by a pixel shuffle."""

    def __init__(self, parts: Parts, config: Any) -> None:
        self._tower, self._connector = parts["vision_model"], parts["connector"]
        self._layers = self._tower.encoder.layers
        self._patch_size = config.vision_config.patch_size
        self.num_layers = len(self._layers)

    def begin(self, pixels: Tensor, grid: tuple[int, int, int]) -> EncoderState:
        shape = (len(pixels), pixels.shape[2] // self._patch_size, pixels.shape[3] // self._patch_size)
        mask = torch.ones(shape, dtype=torch.bool, device=pixels.device)
        return EncoderState(self._tower.embeddings(pixel_values=pixels, patch_attention_mask=mask), grid)

    def run_layer(self, state: EncoderState) -> None:
        state.hidden = self._layers[state.next_layer](state.hidden, None)
        state.next_layer += 1

    def finish(self, state: EncoderState) -> Tensor:
        embeds: Tensor = self._connector(self._tower.post_layernorm(state.hidden))
        return embeds.flatten(0, 1)


class Gemma3Tower:
    """SigLIP with averages of its patches."""

    def __init__(self, parts: Parts, config: Any) -> None:
        self._tower, self._projector = parts["vision_tower"], parts["multi_modal_projector"]
        self._layers = self._tower.encoder.layers
        self.num_layers = len(self._layers)

    def begin(self, pixels: Tensor, grid: tuple[int, int, int]) -> EncoderState:
        return EncoderState(self._tower.embeddings(pixels), grid)

    def run_layer(self, state: EncoderState) -> None:
        state.hidden = self._layers[state.next_layer](state.hidden, None)
        state.next_layer += 1

    def finish(self, state: EncoderState) -> Tensor:
        embeds: Tensor = self._projector(self._tower.post_layernorm(state.hidden))
        return embeds.flatten(0, 1)


def shuffle_pixels(features: Tensor, factor: int) -> Tensor:
    """Merge squares of factor² patches of square tiles: [tiles, n, d] → [tiles, n / factor², d × factor²].

    As InternVLModel.pixel_shuffle, which has tiles' width before their height.
    """
    tiles, count, size = features.shape
    side = int(count**0.5)
    small = side // factor
    rows = features.reshape(tiles, side, small, size * factor).permute(0, 2, 1, 3).contiguous()
    merged = rows.view(tiles, small, small, size * factor**2).permute(0, 2, 1, 3).contiguous()
    return merged.view(tiles, small * small, size * factor**2)
