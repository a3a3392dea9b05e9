"""Towers of audio models: transformers' encoders with their projectors, as blocks that run in pieces (`blocks.py`).

Each computes the same numbers as the model's audio path in transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..blocks import Block, Parts
from .audio_files import AudioFiles
from .audio_tower import AudioTower

HALF_LIMIT = torch.finfo(torch.float16).max - 1000  # bound of a layer's outputs in float16


class WhisperTower(AudioTower):
    """Whisper's encoder: two convolutions and a table of positions, for windows of half a minute, padded with
    silence."""

    def __init__(self, parts: Parts, config: Any, files: AudioFiles) -> None:
        self._tower = parts["encoder" if "encoder" in parts else "audio_tower"]
        self._projector: Any = parts.get("multi_modal_projector")  # Whisper has none
        super().__init__(files, [whisper_block(each) for each in self._tower.layers], self._tower, ("conv1", "conv2"))

    def length_of(self, count: int) -> int:
        return self._audio.num_windows(count) * self._audio.window_samples

    def embed(self, outputs: Tensor, first: int) -> Tensor:
        rows = outputs.transpose(1, 2)
        places: Tensor = self._tower.embed_positions.weight
        return rows + places[first : first + rows.shape[1]]

    def project(self, *features: Tensor) -> Tensor:
        rows: Tensor = self._tower.layer_norm(features[0].flatten(0, 1))
        return rows


class Qwen2AudioTower(WhisperTower):
    """Qwen2-Audio: rows attend only to rows of the clip, not of padding, and each embedding is the mean of two rows."""

    def project(self, *features: Tensor) -> Tensor:
        embeds: Tensor = self._projector(self._tower.layer_norm(features[0].mean(dim=1)))
        return embeds


class VoxtralTower(WhisperTower):
    """Voxtral: whole windows, and a projector that takes several rows side by side."""

    def project(self, *features: Tensor) -> Tensor:
        embeds: Tensor = self._projector(self._tower.layer_norm(features[0]).flatten(1))
        return embeds


class Qwen3ASRTower(AudioTower):
    """Qwen3-ASR: three convolutions over time and mel bins, in windows of a second; rows attend to the rows of a group
    of consecutive windows. The last window has zeros after the clip's end."""

    def __init__(self, parts: Parts, config: Any, files: AudioFiles) -> None:
        self._tower, self._projector = parts["audio_tower"], parts["multi_modal_projector"]
        names = ("conv2d1", "conv2d2", "conv2d3")
        super().__init__(files, [whisper_block(each) for each in self._tower.layers], self._tower, names)

    def length_of(self, count: int) -> int:
        return max(count, self._audio.min_samples)

    def embed(self, outputs: Tensor, first: int) -> Tensor:
        rows: Tensor = self._tower.conv_out(outputs.permute(0, 3, 1, 2).flatten(2))
        places: Tensor = self._tower.positional_embedding.positional_embedding
        return rows + places[first : first + rows.shape[1]].to(rows.dtype)

    def project(self, *features: Tensor) -> Tensor:
        embeds: Tensor = self._projector(self._tower.ln_post(features[0].flatten(0, 1)))
        return embeds


class FeedForward(nn.Module):
    """The feed-forward block of a Whisper layer, built from the layer's own linear layers and activation."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.fc1, self.activation, self.fc2 = layer.fc1, layer.activation_fn, layer.fc2

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc2(self.activation(self.fc1(x)))
        return found


def whisper_block(layer: Any) -> Block:
    inner = layer.self_attn
    return Block(
        layer,
        layer.self_attn_layer_norm,
        (inner.q_proj, inner.k_proj, inner.v_proj),
        inner.num_heads,
        inner.scaling,
        inner.out_proj,
        layer.final_layer_norm,
        FeedForward(layer),
        limit=HALF_LIMIT if layer.final_layer_norm.weight.dtype == torch.float16 else 0.0,
    )
