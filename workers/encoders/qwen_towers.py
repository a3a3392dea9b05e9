"""Towers of Qwen's vision-language models: patches of images of any size, with two-dimensional rotary positions.

Attention reads its bounds on the host, so grids stay there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import vision_utils

from .pixels import patchify
from .towers import EncoderState, Parts


class Qwen2VLTower:
    """Qwen2-VL: each layer attends to all patches."""

    def __init__(self, parts: Parts, config: Any) -> None:
        self._tower = parts["visual"]
        self._layers = self._tower.blocks
        self._patch_size, self._merge_size = config.vision_config.patch_size, config.vision_config.spatial_merge_size
        self.num_layers = len(self._layers)

    def begin(self, pixels: Tensor, grid: tuple[int, int, int]) -> EncoderState:
        grids = torch.tensor([grid])
        hidden = self._tower.patch_embed(patchify(pixels, self._patch_size, self._merge_size))
        inputs = {
            "position_embeddings": self._rotary(hidden, grids),
            "cu_seqlens": vision_utils.get_vision_cu_seqlens(grids),
        }
        return EncoderState(hidden, grid, inputs)

    def _rotary(self, hidden: Tensor, grids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of each patch."""
        places = vision_utils.get_vision_position_ids(grids, self._merge_size).to(hidden.device)
        cosines, sines = self._tower.rotary_pos_emb(hidden, places)
        return cosines, sines

    def run_layer(self, state: EncoderState) -> None:
        state.hidden = self._layers[state.next_layer](state.hidden, **state.inputs)
        state.next_layer += 1

    def finish(self, state: EncoderState) -> Tensor:
        embeds: Tensor = self._tower.merger(state.hidden)
        return embeds


class Qwen25VLTower(Qwen2VLTower):
    """Qwen2.5-VL: most layers attend within windows, for which the patches are put in another order."""

    def begin(self, pixels: Tensor, grid: tuple[int, int, int]) -> EncoderState:
        state = super().begin(pixels, grid)
        tower, count = self._tower, len(state.hidden)
        order, bounds = vision_utils.get_vision_window_index(
            torch.tensor([grid]), tower.spatial_merge_size, tower.window_size, tower.patch_size
        )
        index = order.to(state.hidden.device)
        state.hidden = tower.permute_input_for_window_attn(state.hidden, index, count)
        state.inputs["position_embeddings"] = tuple(
            tower.permute_input_for_window_attn(each, index, count) for each in state.inputs["position_embeddings"]
        )
        state.inputs["bounds"] = state.inputs.pop("cu_seqlens"), bounds
        state.inputs["order"] = torch.argsort(index)
        return state

    def run_layer(self, state: EncoderState) -> None:
        of_image, of_windows = state.inputs["bounds"]
        state.hidden = self._layers[state.next_layer](
            state.hidden,
            cu_seqlens=of_image if state.next_layer in self._tower.fullatt_block_indexes else of_windows,
            position_embeddings=state.inputs["position_embeddings"],
        )
        state.next_layer += 1

    def finish(self, state: EncoderState) -> Tensor:
        return super().finish(state)[state.inputs["order"]]


class Qwen3VLTower(Qwen2VLTower):
    """Qwen3-VL: learned positions, interpolated to the image's grid, and features of inner layers, which the first
    layers of the language model get."""

    def begin(self, pixels: Tensor, grid: tuple[int, int, int]) -> EncoderState:
        state, tower = super().begin(pixels, grid), self._tower
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            torch.tensor([grid]),
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=self._merge_size,
        )
        device = state.hidden.device
        places = (tower.pos_embed(indices.to(device)) * weights.to(device)[:, :, None]).sum(1)
        state.hidden = state.hidden + places.to(state.hidden.dtype)
        return state

    def run_layer(self, state: EncoderState) -> None:
        layer = state.next_layer
        super().run_layer(state)
        if layer in self._tower.deepstack_visual_indexes:
            merger = self._tower.deepstack_merger_list[self._tower.deepstack_visual_indexes.index(layer)]
            state.kept[layer] = merger(state.hidden)

    def finish(self, state: EncoderState) -> Tensor:
        inner = [state.kept[layer] for layer in self._tower.deepstack_visual_indexes]
        return torch.cat([super().finish(state), *inner], dim=-1)
