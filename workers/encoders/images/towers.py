"""Towers of vision models: transformers' encoders with their projectors, as blocks that run in pieces (`blocks.py`).

    pixels → begin (patches, positions) → layers → features (norm, merging of patches) → project → embeddings

Each tower takes one image at a time, with all its tiles, and computes the results of the model's `get_image_features`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ....ipc.spec.models.vision_config import Grid
from ..blocks import Block, Parts
from .image_files import ImageFiles
from .image_tower import ImageState, ImageTower


class _Features:
    """Outputs of the layers config.vision_feature_layer, which a projector takes side by side; without the class token
    if config.vision_feature_select_strategy is "default"."""

    def __init__(self, config: Any, num_layers: int) -> None:
        chosen = config.vision_feature_layer
        self.layers = [each % (num_layers + 1) for each in (chosen if isinstance(chosen, list | tuple) else [chosen])]
        self._first = 1 if getattr(config, "vision_feature_select_strategy", "full") == "default" else 0

    def take(self, state: ImageState) -> Tensor:
        """Return the outputs by tiles: [tiles, rows, size]."""
        found = [by_tiles(state, state.kept[layer])[:, self._first :] for layer in self.layers]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


class LlavaTower(ImageTower):
    """CLIP or SigLIP; LLaVA's projector takes the outputs of inner layers."""

    def __init__(self, parts: Parts, config: Any, files: ImageFiles) -> None:
        self._tower, self._projector = parts["vision_tower"], parts["multi_modal_projector"]
        layers = self._tower.encoder.layers
        self._features = _Features(config, len(layers))
        super().__init__(
            files, [siglip_block(each) for each in layers[: max(self._features.layers)]], self._features.layers
        )

        self._num_rows = self._tower.embeddings.position_embedding.num_embeddings  # rows per tile

    def begin(self, image: Tensor, grid: Grid) -> ImageState:
        return of_tiles(image, self._num_rows, grid)

    def embed(self, state: ImageState, pixels: Tensor, first: int) -> Tensor:
        hidden: Tensor = self._tower.embeddings(pixels)
        if hasattr(self._tower, "pre_layrnorm"):
            hidden = self._tower.pre_layrnorm(hidden)
        return hidden.flatten(0, 1)

    def features(self, state: ImageState) -> tuple[Tensor, ...]:
        return (self._features.take(state).flatten(0, 1),)

    def project(self, *features: Tensor) -> Tensor:
        embeds: Tensor = self._projector(*features)
        return embeds


class InternVLTower(ImageTower):
    """InternViT; a pixel shuffle merges the patches of each tile."""

    def __init__(self, parts: Parts, config: Any, files: ImageFiles) -> None:
        self._tower, self._projector = parts["vision_tower"], parts["multi_modal_projector"]
        layers = self._tower.encoder.layer
        self._features = _Features(config, len(layers))
        self._is_normed = config.vision_feature_layer == -1
        self._factor = round(1 / config.downsample_ratio)
        super().__init__(
            files, [internvl_block(each) for each in layers[: max(self._features.layers)]], self._features.layers
        )

        self._num_rows = self._tower.embeddings.position_embeddings.shape[1]  # rows per tile

    def begin(self, image: Tensor, grid: Grid) -> ImageState:
        return of_tiles(image, self._num_rows, grid)

    def embed(self, state: ImageState, pixels: Tensor, first: int) -> Tensor:
        hidden: Tensor = self._tower.embeddings(pixels)
        return hidden.flatten(0, 1)

    def features(self, state: ImageState) -> tuple[Tensor, ...]:
        if self._is_normed:
            state.kept[self.num_layers] = self._tower.layernorm(state.kept[self.num_layers])
        return (shuffle_pixels(self._features.take(state), self._factor).flatten(0, 1),)

    def project(self, *features: Tensor) -> Tensor:
        embeds: Tensor = self._projector(*features)
        return embeds


class PixtralTower(ImageTower):
    """Pixtral's encoder for images of any size, with LLaVA's projector or that of Mistral 3, which merges patches."""

    def __init__(self, parts: Parts, config: Any, files: ImageFiles) -> None:
        self._tower, self._projector = parts["vision_tower"], parts["multi_modal_projector"]
        layers = self._tower.transformer.layers
        self._features = _Features(config, len(layers))
        self._merger = getattr(self._projector, "patch_merger", None)
        super().__init__(
            files, [pixtral_block(each) for each in layers[: max(self._features.layers)]], self._features.layers
        )

    def begin(self, image: Tensor, grid: Grid) -> ImageState:
        size = self._tower.patch_size
        rows, columns = image.shape[1] // size, image.shape[2] // size
        bands = image.view(rows, size, columns * size, 3)
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).to(image.device)
        like = self._tower.patch_conv.weight[:0]
        cosines, sines = (each.view(len(places), -1) for each in self._tower.patch_positional_embedding(like, places))
        return ImageState(bands, columns, (1, rows, columns), bounds=[0, rows * columns], rotations=(cosines, sines))

    def embed(self, state: ImageState, pixels: Tensor, first: int) -> Tensor:
        patches = self._tower.patch_conv(pixels)  # [bands, hidden, 1, columns]
        hidden: Tensor = self._tower.ln_pre(patches[:, :, 0].transpose(1, 2).flatten(0, 1).contiguous())
        return hidden

    def features(self, state: ImageState) -> tuple[Tensor, ...]:
        features, (_, rows, columns) = self._features.take(state)[0], state.grid
        if self._merger is None:
            return (features,)
        image = self._projector.norm(features).view(1, rows, columns, -1).permute(0, 3, 1, 2)
        size = self._merger.spatial_merge_size
        return (torch.nn.functional.unfold(image, kernel_size=size, stride=size)[0].T,)

    def project(self, *features: Tensor) -> Tensor:
        projector = self._projector
        if self._merger is None:
            embeds: Tensor = projector(*features)
        else:
            embeds = projector.linear_2(projector.act(projector.linear_1(self._merger.merging_layer(*features))))
        return embeds


class Idefics3Tower(ImageTower):
    """SigLIP over tiles; a pixel shuffle merges their patches."""

    def __init__(self, parts: Parts, config: Any, files: ImageFiles) -> None:
        self._tower, self._connector = parts["vision_model"], parts["connector"]
        self._patch_size = config.vision_config.patch_size
        super().__init__(files, [siglip_block(each) for each in self._tower.encoder.layers])

    def begin(self, image: Tensor, grid: Grid) -> ImageState:
        return of_tiles(image, (image.shape[1] // self._patch_size) * (image.shape[2] // self._patch_size), grid)

    def embed(self, state: ImageState, pixels: Tensor, first: int) -> Tensor:
        shape = (len(pixels), pixels.shape[2] // self._patch_size, pixels.shape[3] // self._patch_size)
        mask = torch.ones(shape, dtype=torch.bool, device=pixels.device)
        hidden: Tensor = self._tower.embeddings(pixel_values=pixels, patch_attention_mask=mask)
        return hidden.flatten(0, 1)

    def features(self, state: ImageState) -> tuple[Tensor, ...]:
        hidden = self._tower.post_layernorm(state.kept[self.num_layers])
        shuffled = self._connector.pixel_shuffle(by_tiles(state, hidden), self._connector.scale_factor)
        return (shuffled.flatten(0, 1),)

    def project(self, *features: Tensor) -> Tensor:
        embeds: Tensor = self._connector.modality_projection(*features)
        return embeds


class Gemma3Tower(ImageTower):
    """SigLIP; the projector averages its patches."""

    def __init__(self, parts: Parts, config: Any, files: ImageFiles) -> None:
        self._tower, self._projector = parts["vision_tower"], parts["multi_modal_projector"]
        super().__init__(files, [siglip_block(each) for each in self._tower.encoder.layers])

        self._num_rows = self._tower.embeddings.position_embedding.num_embeddings  # rows per tile

    def begin(self, image: Tensor, grid: Grid) -> ImageState:
        return of_tiles(image, self._num_rows, grid)

    def embed(self, state: ImageState, pixels: Tensor, first: int) -> Tensor:
        hidden: Tensor = self._tower.embeddings(pixels)
        return hidden.flatten(0, 1)

    def features(self, state: ImageState) -> tuple[Tensor, ...]:
        hidden = self._tower.post_layernorm(state.kept[self.num_layers])
        embeds: Tensor = self._projector(by_tiles(state, hidden))
        return (embeds.flatten(0, 1),)  # projected here: they are few, as each is an average of 16 patches

    def project(self, *features: Tensor) -> Tensor:
        return features[0]


def of_tiles(image: Tensor, num_rows: int, grid: Grid) -> ImageState:
    """Return the initial state of an image whose tiles have `num_rows` rows each; rows attend within their tile."""
    return ImageState(image, num_rows, grid, bounds=[num_rows * tile for tile in range(len(image) + 1)])


def by_tiles(state: ImageState, rows: Tensor) -> Tensor:
    """View rows [rows, hidden] by tiles: [tiles, n, hidden]."""
    return rows.view(len(state.bounds) - 1, -1, rows.shape[-1])


def siglip_block(layer: Any) -> Block:
    """Return the Block for a layer of SigLIP, CLIP or Idefics3."""
    inner = layer.self_attn
    projections, out = (inner.q_proj, inner.k_proj, inner.v_proj), inner.out_proj
    return Block(layer, layer.layer_norm1, projections, inner.num_heads, inner.scale, out, layer.layer_norm2, layer.mlp)


def internvl_block(layer: Any) -> Block:
    inner = layer.attention
    head_norms = () if isinstance(inner.q_norm, nn.Identity) else (inner.q_norm, inner.k_norm)
    return Block(
        layer,
        layer.layernorm_before,
        (inner.q_proj, inner.k_proj, inner.v_proj),
        inner.num_heads,
        inner.scale,
        inner.projection_layer,
        layer.layernorm_after,
        layer.mlp,
        head_norms,
        (layer.lambda_1, layer.lambda_2),
    )


def pixtral_block(layer: Any) -> Block:
    inner = layer.attention
    projections, out = (inner.q_proj, inner.k_proj, inner.v_proj), inner.o_proj
    return Block(
        layer,
        layer.attention_norm,
        projections,
        inner.num_heads,
        inner.scaling,
        out,
        layer.ffn_norm,
        layer.feed_forward,
    )


def shuffle_pixels(features: Tensor, factor: int) -> Tensor:
    """Merge squares of factor² patches of square tiles: [tiles, n, d] → [tiles, n / factor², d × factor²].

    Like InternVLModel.pixel_shuffle, in which a tile's width is before its height.
    """
    tiles, count, size = features.shape
    side = int(count**0.5)
    small = side // factor
    rows = features.reshape(tiles, side, small, size * factor).permute(0, 2, 1, 3).contiguous()
    merged = rows.view(tiles, small, small, size * factor**2).permute(0, 2, 1, 3).contiguous()
    return merged.view(tiles, small * small, size * factor**2)
