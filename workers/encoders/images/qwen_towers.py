"""Towers of Qwen's vision-language models: patches of images of any size, with two-dimensional rotary positions.

Attention needs its bounds on the host, so grids are tensors on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import vision_utils

from ....ipc.spec.models.vision_config import Grid
from ..blocks import Block, Parts
from .image_files import ImageFiles
from .image_tower import ImageState, ImageTower
from .pixels import TEMPORAL_PATCH_SIZE, patchify


class Qwen2VLTower(ImageTower):
    """Qwen2-VL: each layer attends to all patches, and the projector takes squares of them."""

    def __init__(
        self,
        parts: Parts,
        config: Any,
        files: ImageFiles,
        inner_layers: Sequence[int] = (),
        windowed: Sequence[int] = (),
    ) -> None:
        """inner_layers: numbers of further layers whose outputs go to the language model."""
        self._tower = parts["visual"]
        self._patch_size, self._merge_size = config.vision_config.patch_size, config.vision_config.spatial_merge_size
        blocks, self._inner_layers = [qwen_block(each) for each in self._tower.blocks], inner_layers
        super().__init__(files, blocks, [len(blocks), *inner_layers], frozenset(windowed))

    def begin(self, image: Tensor, grid: Grid) -> ImageState:
        grids, patches = torch.tensor([grid]), patchify(image, self._patch_size, self._merge_size)
        places = vision_utils.get_vision_position_ids(grids, self._merge_size).to(image.device)
        like = next(self._tower.parameters())[:0]
        cosines, sines = self._tower.rotary_pos_emb(like, places)
        bounds = vision_utils.get_vision_cu_seqlens(grids).tolist()
        return ImageState(patches, 1, grid, bounds=bounds, rotations=(cosines.float(), sines.float()))

    def embed(self, state: ImageState, pixels: Tensor, first: int) -> Tensor:
        frames = pixels.unsqueeze(2).expand(-1, -1, TEMPORAL_PATCH_SIZE, -1, -1)
        hidden: Tensor = self._tower.patch_embed(frames.flatten(1))
        return hidden

    def features(self, state: ImageState) -> tuple[Tensor, ...]:
        """Return squares of patches, [num_embeds, merge_size², hidden], from the last layer and each inner one."""
        kept = (state.kept[layer] for layer in (self.num_layers, *self._inner_layers))
        return tuple(each.view(-1, self._merge_size**2, each.shape[-1]) for each in kept)

    def project(self, *features: Tensor) -> Tensor:
        embeds: Tensor = self._tower.merger(features[0].flatten(0, 1))
        return embeds


class Qwen25VLTower(Qwen2VLTower):
    """Qwen2.5-VL: most layers attend within windows; the patches are reordered so that windows are contiguous."""

    def __init__(self, parts: Parts, config: Any, files: ImageFiles) -> None:
        whole = parts["visual"].fullatt_block_indexes
        windowed = [i for i in range(len(parts["visual"].blocks)) if i not in whole]
        super().__init__(parts, config, files, windowed=windowed)

    def begin(self, image: Tensor, grid: Grid) -> ImageState:
        state, tower = super().begin(image, grid), self._tower
        order, bounds = vision_utils.get_vision_window_index(
            torch.tensor([grid]), tower.spatial_merge_size, tower.window_size, tower.patch_size
        )
        index, square = order.to(image.device), self._merge_size**2

        def permuted(rows: Tensor) -> Tensor:
            return rows.view(-1, square, *rows.shape[1:])[index].flatten(0, 1)

        assert state.rotations is not None
        cosines, sines = state.rotations
        state.units, state.rotations = permuted(state.units), (permuted(cosines), permuted(sines))
        state.window_bounds, state.order = bounds.tolist(), torch.argsort(index)
        return state


class Qwen3VLTower(Qwen2VLTower):
    """Qwen3-VL: learned positions, interpolated to the image's grid, and features of inner layers, which are added in
    the first layers of the language model."""

    def __init__(self, parts: Parts, config: Any, files: ImageFiles) -> None:
        super().__init__(parts, config, files, [layer + 1 for layer in parts["visual"].deepstack_visual_indexes])

    def begin(self, image: Tensor, grid: Grid) -> ImageState:
        state, tower = super().begin(image, grid), self._tower
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            torch.tensor([grid]),
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=self._merge_size,
        )
        state.places = (tower.pos_embed(indices.to(image.device)) * weights.to(image.device)[:, :, None]).sum(1)
        return state

    def embed(self, state: ImageState, pixels: Tensor, first: int) -> Tensor:
        assert state.places is not None
        hidden = super().embed(state, pixels, first)
        return hidden + state.places[first : first + len(hidden)].to(hidden.dtype)

    def project(self, *features: Tensor) -> Tensor:
        mergers = (self._tower.merger, *self._tower.deepstack_merger_list)
        return torch.cat([merger(each.flatten(0, 1)) for merger, each in zip(mergers, features, strict=True)], dim=-1)


def qwen_block(layer: Any) -> Block:
    inner = layer.attn
    return Block(layer, layer.norm1, (inner.qkv,), inner.num_heads, inner.scaling, inner.proj, layer.norm2, layer.mlp)
