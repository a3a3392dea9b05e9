"""Encoders of audio give the embeddings of transformers' models, wherever their stages are cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokenloom.ipc.blobs.media_file import MediaFile
from tokenloom.ipc.errors import ConfigError, RequestError
from tokenloom.ipc.models.audio_config import AudioConfig
from tokenloom.ipc.models.model_file import load_model_config
from tokenloom.kernels.cpu.cpu_ops import load_cpu_ops
from tokenloom.tests.support.audio_checkpoints import audio_checkpoint
from tokenloom.tests.support.audio_configs import AUDIO_MODELS
from tokenloom.tests.support.audio_oracle import AudioOracle, random_clip
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.encoders.audio.audio_items import item_of, random_item
from tokenloom.workers.encoders.encoder import Encoder

CPU = torch.device("cpu")
WINDOW = 32_000  # samples of the tiny models' windows, and of Qwen3-ASR's two that attend to each other
COUNTS = {  # of samples
    "qwen2_audio": [321, 480, 481, 7777, 16_000, 31_699, 31_990, WINDOW],
    "voxtral": [1, 1000, 31_801, WINDOW, WINDOW + 1, 3 * WINDOW - 50, 3 * WINDOW],
    "qwen3_asr": [1, 7_601, 8001, 16_159, 16_160, WINDOW, WINDOW + 159, 2 * WINDOW + 12_345, 88_000],
}


class Loaded(NamedTuple):
    folder: Path
    audio: AudioConfig
    encoder: Encoder
    oracle: AudioOracle


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    """Each model once."""
    cache = dict[str, Loaded]()

    def load(name: str) -> Loaded:
        if name not in cache:
            folder = audio_checkpoint(tmp_path_factory.mktemp("models") / name, name)
            audio = load_model_config(folder).audio
            assert audio is not None
            cache[name] = Loaded(folder, audio, load_encoder(folder, audio), AudioOracle(folder))
        return cache[name]

    return load


def load_encoder(folder: Path, audio: AudioConfig, dtype: torch.dtype = torch.float32, **options: Any) -> Encoder:
    return Encoder.load(folder, audio, dtype, CPU, **options)


def encode(encoder: Encoder, item: MediaFile, *pieces: int, pieces_per_stage: int = 1) -> Tensor:
    """The item's embeddings, by these numbers of pieces."""
    state = encoder.begin(item, item.grid, pieces_per_stage)
    for count in pieces:
        encoder.advance(state, count)
    return encoder.finish(state)


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", some(list(AUDIO_MODELS), 1))
def test_embeddings_are_those_of_transformers_for_any_length(loaded: Callable[[str], Loaded], name: str) -> None:
    _, audio, encoder, oracle = loaded(name)
    for count in COUNTS[name]:
        samples = random_clip(count, count)
        expected = oracle.embeds(samples)
        found = encode(encoder, item_of(audio, samples))
        assert len(found) == len(expected) == audio.num_embeds(count) == oracle.num_placeholders(samples)
        assert_close(found, expected)
        other = encode(encoder, random_item(audio, count + 1, count))
        assert count < 1000 or (other - found).abs().max() > 0.05


@pytest.mark.parametrize("name", some(list(AUDIO_MODELS), 1))
def test_stages_in_pieces_give_the_same_to_rounding_whenever_the_pieces_run(
    loaded: Callable[[str], Loaded], name: str
) -> None:
    _, audio, encoder, oracle = loaded(name)
    samples = random_clip(3, COUNTS[name][-2])
    item, expected = item_of(audio, samples), oracle.embeds(samples)
    for per_stage in (1, 2, 5, 23):
        count = len(audio.stages) * per_stage
        embeds = encode(encoder, item, pieces_per_stage=per_stage)
        assert_close(embeds, expected)
        for pieces in ([1] * count, [3] * (count // 3), [per_stage + 1, 2 * per_stage - 1]):
            assert torch.equal(encode(encoder, item, *pieces, pieces_per_stage=per_stage), embeds)


@pytest.mark.parametrize("name", some(list(AUDIO_MODELS), 1))
def test_as_many_pieces_as_rows_give_the_same(loaded: Callable[[str], Loaded], name: str) -> None:
    _, audio, encoder, oracle = loaded(name)
    for count in COUNTS[name][:3]:
        samples, num_rows = random_clip(4, count), audio.num_rows(audio.num_embeds(count))
        assert_close(encode(encoder, item_of(audio, samples), pieces_per_stage=num_rows), oracle.embeds(samples))


@pytest.mark.parametrize("name", some(list(AUDIO_MODELS), 1))
def test_our_kernels_compute_in_bfloat16_what_torch_does_wherever_the_pieces_are_cut(
    loaded: Callable[[str], Loaded], name: str, tmp_path: Path
) -> None:
    folder, audio, exact, _ = loaded(name)
    encoder = load_encoder(folder, audio, torch.bfloat16, ops=load_cpu_ops(torch.bfloat16, spare_folder=tmp_path))
    for count in (COUNTS[name][1], COUNTS[name][-2]):
        item = random_item(audio, 5, count)
        expected = encode(exact, item)
        for per_stage in (1, 2, 5) if count > 1000 else (1, 2):
            total = len(audio.stages) * per_stage
            embeds = encode(encoder, item, pieces_per_stage=per_stage)
            assert (embeds - expected).abs().max() < 0.05 * expected.abs().max()
            for pieces in ([1] * total, [3] * (total // 3), [per_stage + 1, 2 * per_stage - 1]):
                assert torch.equal(encode(encoder, item, *pieces, pieces_per_stage=per_stage), embeds)


@pytest.mark.parametrize("name", some(list(AUDIO_MODELS), 1))
def test_our_kernels_replace_all_products(loaded: Callable[[str], Loaded], name: str, tmp_path: Path) -> None:
    folder, audio, exact, _ = loaded(name)
    encoder = load_encoder(folder, audio, torch.bfloat16, ops=load_cpu_ops(torch.bfloat16, spare_folder=tmp_path))
    modules: list[Any] = list(encoder._tower._tower.modules())  # type: ignore[attr-defined]
    assert not any(type(each) in (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d) for each in modules)
    assert encoder._tower.fused is not None
    assert exact._tower.fused is None


def test_numbers_are_limited_in_float16_as_by_transformers(loaded: Callable[[str], Loaded], tmp_path: Path) -> None:
    folder, audio, _, _ = loaded("voxtral")
    tensors = load_file(folder / "model.safetensors")
    tensors["audio_tower.layers.1.fc2.weight"] *= 1e5
    save_file(tensors, tmp_path / "model.safetensors")
    copy_files(folder, tmp_path)
    samples = random_clip(1, 16_000)
    expected = AudioOracle(tmp_path, torch.float16).embeds(samples)
    found = encode(load_encoder(tmp_path, audio, torch.float16), item_of(audio, samples))
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)


def test_items_do_not_see_each_other_between_layers(loaded: Callable[[str], Loaded]) -> None:
    _, audio, encoder, _ = loaded("qwen3_asr")
    items = [random_item(audio, 1, 70_000), random_item(audio, 2, 20_000)]
    states = [encoder.begin(item, item.grid, pieces) for pieces, item in enumerate(items, 1)]
    for _ in range(len(audio.stages)):
        for state in states:
            encoder.advance(state, 1)
    for state, item, pieces in zip(states, items, (1, 2), strict=True):
        assert torch.equal(encoder.finish(state), encode(encoder, item, pieces_per_stage=pieces))


@pytest.mark.parametrize("name", some(list(AUDIO_MODELS), 1))
def test_weights_are_found_by_older_and_newer_names(loaded: Callable[[str], Loaded], name: str, tmp_path: Path) -> None:
    folder, audio, encoder, _ = loaded(name)
    tensors = load_file(folder / "model.safetensors")
    has_root = any(key.startswith("model.audio_tower.") for key in tensors)
    renamed = {key.removeprefix("model.") if has_root else f"model.{key}": each for key, each in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    copy_files(folder, tmp_path)
    item = random_item(audio, 1, 16_000)
    assert torch.equal(encode(load_encoder(tmp_path, audio), item), encode(encoder, item))


def copy_files(source: Path, target: Path) -> None:
    for file in source.glob("*.json"):
        if "index" not in file.name:
            (target / file.name).write_bytes(file.read_bytes())


def test_a_checkpoint_without_a_weight_is_refused_by_name(loaded: Callable[[str], Loaded], tmp_path: Path) -> None:
    folder, audio, _, _ = loaded("voxtral")
    tensors = load_file(folder / "model.safetensors")
    del tensors["multi_modal_projector.linear_1.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    copy_files(folder, tmp_path)
    with pytest.raises(ConfigError, match=r"multi_modal_projector\.linear_1\.weight is missing"):
        load_encoder(tmp_path, audio)


@pytest.mark.parametrize("name", some(list(AUDIO_MODELS), 1))
def test_dummy_weights_need_no_weight_files(loaded: Callable[[str], Loaded], name: str, tmp_path: Path) -> None:
    folder, audio, encoder, _ = loaded(name)
    copy_files(folder, tmp_path)
    dummy, item = load_encoder(tmp_path, audio, is_dummy=True), random_item(audio, 1, 16_000)
    assert dummy.weight_bytes == encoder.weight_bytes > 0
    embeds = encode(dummy, item)
    assert embeds.shape == encode(encoder, item).shape
    assert embeds.isfinite().all()


@pytest.mark.parametrize("name", some(list(AUDIO_MODELS), 1))
def test_media_that_are_no_audio_of_the_models_are_refused(loaded: Callable[[str], Loaded], name: str) -> None:
    _, audio, encoder, _ = loaded(name)
    item = random_item(audio, 1, 16_000)
    with pytest.raises(RequestError, match="its prompt says"):
        encoder.begin(item, (1, 1, 77))
    for shape in ((1, 1, 15_999, 4), (16_000, 1, 1, 4), (1, 1, 16_000, 3), (1, 1, 0, 4)):
        with pytest.raises(RequestError, match="no audio that fits the model"):
            encoder.begin(item._replace(shape=shape), item.grid)
    wrong = item._replace(grid=(2, 1, 16_000))
    with pytest.raises(RequestError, match="no audio that fits the model"):
        encoder.begin(wrong, wrong.grid)


def test_an_audio_with_no_embedding_or_with_too_many_windows_is_refused(loaded: Callable[[str], Loaded]) -> None:
    _, audio, encoder, _ = loaded("qwen2_audio")
    short, long = random_item(audio, 1, 320), random_item(audio, 1, WINDOW + 1)
    with pytest.raises(RequestError, match="no audio that fits the model"):
        encoder.begin(short, short.grid)
    with pytest.raises(RequestError, match="has 2 windows, the model takes 1: send a shorter one"):
        encoder.begin(long, long.grid)
