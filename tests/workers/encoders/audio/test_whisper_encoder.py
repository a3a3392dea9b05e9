"""Whisper's encoder gives the rows of transformers' model, wherever its stages are cut."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.models.audio_config import AudioConfig
from tokenloom.ipc.models.model_file import load_model_config
from tokenloom.kernels.cpu.cpu_ops import load_cpu_ops
from tokenloom.tests.support.audio_oracle import random_clip
from tokenloom.tests.support.whisper_checkpoints import whisper_checkpoint
from tokenloom.tests.support.whisper_oracle import WhisperOracle
from tokenloom.tests.workers.encoders.audio.audio_items import item_of, random_item
from tokenloom.tests.workers.encoders.audio.test_audio_encoder import assert_close, encode, load_encoder
from tokenloom.workers.encoders.encoder import Encoder

NUM_ROWS = 50
WINDOW = NUM_ROWS * 320  # samples


class Loaded(NamedTuple):
    folder: Path
    audio: AudioConfig
    encoder: Encoder
    oracle: WhisperOracle


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    folder = whisper_checkpoint(tmp_path_factory.mktemp("whisper"), max_source_positions=NUM_ROWS)
    audio = load_model_config(folder).audio
    assert audio is not None
    return Loaded(folder, audio, load_encoder(folder, audio), WhisperOracle(folder))


@pytest.mark.parametrize("count", [1, 159, 1000, 7777, WINDOW - 1, WINDOW])
def test_rows_of_a_clip_are_those_of_transformers(count: int, loaded: Loaded) -> None:
    samples = random_clip(count, count)
    found = encode(loaded.encoder, item_of(loaded.audio, samples))
    assert found.shape[0] == loaded.audio.num_embeds(count) == NUM_ROWS
    assert_close(found, loaded.oracle.rows(samples))


def test_stages_in_pieces_give_the_same_whenever_the_pieces_run(loaded: Loaded) -> None:
    samples = random_clip(3, 9000)
    item, expected = item_of(loaded.audio, samples), loaded.oracle.rows(samples)
    for per_stage in (1, 3, NUM_ROWS):
        count = len(loaded.audio.stages) * per_stage
        rows = encode(loaded.encoder, item, pieces_per_stage=per_stage)
        assert_close(rows, expected)
        for pieces in ([1] * count, [per_stage + 1, 2 * per_stage - 1]):
            assert torch.equal(encode(loaded.encoder, item, *pieces, pieces_per_stage=per_stage), rows)


def test_our_kernels_compute_in_bfloat16_what_torch_does(loaded: Loaded, tmp_path: Path) -> None:
    ops = load_cpu_ops(torch.bfloat16, spare_folder=tmp_path)
    encoder, item = (
        load_encoder(loaded.folder, loaded.audio, torch.bfloat16, ops=ops),
        random_item(loaded.audio, 5, 9000),
    )
    expected = encode(loaded.encoder, item)
    assert (encode(encoder, item) - expected).abs().max() < 0.05 * expected.abs().max()


def test_a_clip_of_two_windows_is_refused(loaded: Loaded) -> None:
    item = random_item(loaded.audio, 1, WINDOW + 1)
    with pytest.raises(RequestError, match="has 2 windows, the model takes 1"):
        loaded.encoder.begin(item, item.grid)
