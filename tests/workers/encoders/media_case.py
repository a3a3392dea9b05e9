"""MediaCase: the encoder of one tiny model, media for it, and their embeddings by transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import transformers
from torch import Tensor

from tokenloom.ipc.blobs.media_file import MediaFile
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.tests.support.audio_checkpoints import audio_checkpoint
from tokenloom.tests.support.audio_configs import AUDIO_MODELS
from tokenloom.tests.support.audio_oracle import AudioOracle
from tokenloom.tests.support.vision_checkpoints import vision_checkpoint
from tokenloom.tests.support.vision_configs import VISION_MODELS
from tokenloom.tests.support.whisper_checkpoints import whisper_checkpoint
from tokenloom.tests.support.whisper_oracle import WhisperOracle
from tokenloom.tests.workers.encoders.audio import audio_items
from tokenloom.tests.workers.encoders.images import image_items
from tokenloom.workers.encoders.encoder import Encoder
from tokenloom.workers.encoders.images.pixels import PixelScale

CPU = torch.device("cpu")
WHISPER = "whisper"
MODELS = [*VISION_MODELS, *AUDIO_MODELS, WHISPER]
WINDOW = 32_000  # samples of the tiny models' windows, and of Qwen3-ASR's two that attend to each other
WHISPER_ROWS = 50
COUNTS = {  # of samples
    "qwen2_audio": [321, 480, 481, 7777, 16_000, 31_699, WINDOW, 31_990],
    "voxtral": [1, 1000, 31_801, WINDOW, WINDOW + 1, 3 * WINDOW, 3 * WINDOW - 50],
    "qwen3_asr": [1, 7_601, 8001, 16_159, 16_160, WINDOW, WINDOW + 159, 88_000, 2 * WINDOW + 12_345],
    WHISPER: [1, 159, 1000, 7777, WHISPER_ROWS * 320, WHISPER_ROWS * 320 - 1],
}
SIZES = [(1, 6, 4), (4, 3, 5), (3, 7, 5)]  # tiles, rows and columns of images


@dataclass
class MediaCase:
    """A model in a folder. `config`: of its encoder."""

    folder: Path
    config: Any
    items: list[MediaFile]
    others: list[MediaFile]  # of the same sizes
    expected: Callable[[MediaFile], Tensor]
    num_rows: Callable[[MediaFile], int]  # that pieces of a stage share
    num_exact: int  # items whose embeddings have the bits of transformers

    @cached_property
    def encoder(self) -> Encoder:
        return self.load()

    def load(self, dtype: torch.dtype = torch.float32, folder: Path | None = None, **options: Any) -> Encoder:
        return Encoder.load(folder or self.folder, self.config, dtype, CPU, **options)

    def copy_settings(self, target: Path) -> None:
        """Copy all files except the weights."""
        for file in self.folder.glob("*.json"):
            if "index" not in file.name:
                (target / file.name).write_bytes(file.read_bytes())

    def cuts(self, pieces_per_stage: int) -> Iterator[list[int]]:
        """Yield numbers of pieces of calls: one by one, across the ends of stages, of two stages and more."""
        count = len(self.config.stages) * pieces_per_stage
        yield from ([1] * count, [3] * (count // 3), [pieces_per_stage + 1, 2 * pieces_per_stage - 1])


Cases: TypeAlias = Callable[[str], MediaCase]


def encode(encoder: Encoder, item: MediaFile, *pieces: int, pieces_per_stage: int = 1) -> Tensor:
    """The item's embeddings, by calls of these numbers of pieces and one of the rest."""
    state = encoder.begin(item, item.grid, pieces_per_stage)
    for count in pieces:
        encoder.advance(state, count)
    return encoder.finish(state)


def make_case(name: str, folder: Path) -> MediaCase:
    if name in VISION_MODELS:
        return image_case(name, folder)
    return audio_case(name, folder)


def image_case(name: str, folder: Path) -> MediaCase:
    vision_checkpoint(folder, name)
    vision = load_model_config(folder).vision
    assert vision is not None
    items, others = ([image_items.random_item(vision, seed, *size) for size in SIZES] for seed in (1, 9))
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)

    def expected(item: MediaFile) -> Tensor:
        return image_items.their_features(model, vision, scaled(folder, vision, item), item.grid)

    return MediaCase(folder, vision, items, others, expected, lambda item: item.grid[1] * item.grid[2], 2)


def scaled(folder: Path, vision: Any, item: MediaFile, dtype: torch.dtype = torch.float32) -> Tensor:
    image = torch.frombuffer(bytearray(item.data), dtype=torch.uint8).view(item.shape)
    return PixelScale.load(folder, vision.family, dtype, CPU).scale(image)


def audio_case(name: str, folder: Path) -> MediaCase:
    embeds: Callable[[Any], Tensor]
    if name == WHISPER:
        embeds = WhisperOracle(whisper_checkpoint(folder, max_source_positions=WHISPER_ROWS)).rows
    else:
        oracle = AudioOracle(audio_checkpoint(folder, name))
        embeds = oracle.embeds
    audio = load_model_config(folder).audio
    assert audio is not None
    items, others = (
        [audio_items.random_item(audio, seed + count, count) for count in COUNTS[name]] for seed in (0, 50)
    )

    def expected(item: MediaFile) -> Tensor:
        samples = np.frombuffer(item.data, np.float32)
        found = embeds(samples)
        assert len(found) == audio.num_embeds(len(samples))
        assert name == WHISPER or len(found) == oracle.num_placeholders(samples)
        return found

    def num_rows(item: MediaFile) -> int:
        return audio.num_rows(audio.num_embeds(item.shape[2]))

    return MediaCase(folder, audio, items, others, expected, num_rows, 0)
