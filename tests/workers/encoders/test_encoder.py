"""Our loop over the layers of transformers' towers gives what transformers gives, wherever it is interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokenloom.ipc.blobs.media_file import MediaFile
from tokenloom.ipc.errors import ConfigError, RequestError
from tokenloom.ipc.models.model_file import load_model_config
from tokenloom.ipc.models.vision_config import VisionConfig
from tokenloom.kernels.cpu.cpu_ops import load_cpu_ops
from tokenloom.tests.support.today import some
from tokenloom.tests.support.vision_checkpoints import vision_checkpoint
from tokenloom.tests.support.vision_configs import VISION_MODELS
from tokenloom.tests.workers.encoders.images.image_items import random_item, their_features
from tokenloom.workers.encoders.encoder import Encoder
from tokenloom.workers.encoders.images.pixels import PixelScale

CPU = torch.device("cpu")


class Loaded(NamedTuple):
    folder: Path
    vision: VisionConfig
    encoder: Encoder


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    """Each model once."""
    cache = dict[str, Loaded]()

    def load(name: str) -> Loaded:
        if name not in cache:
            folder = vision_checkpoint(tmp_path_factory.mktemp("models") / name, name)
            vision = load_model_config(folder).vision
            assert vision is not None
            cache[name] = Loaded(folder, vision, load_encoder(folder, vision))
        return cache[name]

    return load


def load_encoder(folder: Path, vision: VisionConfig, dtype: torch.dtype = torch.float32, **options: Any) -> Encoder:
    return Encoder.load(folder, vision, dtype, CPU, **options)


def encode(encoder: Encoder, item: MediaFile, *pieces: int, pieces_per_stage: int = 1) -> Tensor:
    """The item's embeddings, by these numbers of pieces."""
    state = encoder.begin(item, item.grid, pieces_per_stage)
    for count in pieces:
        encoder.advance(state, count)
    return encoder.finish(state)


def their_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)


def scaled(folder: Path, vision: VisionConfig, item: MediaFile, dtype: torch.dtype = torch.float32) -> Tensor:
    image = torch.frombuffer(bytearray(item.data), dtype=torch.uint8).view(item.shape)
    return PixelScale.load(folder, vision.family, dtype, CPU).scale(image)


@pytest.mark.parametrize("name", some(list(VISION_MODELS), 3))
def test_embeddings_are_those_of_transformers_wherever_the_stages_are_cut(
    loaded: Callable[[str], Loaded], name: str
) -> None:
    folder, vision, encoder = loaded(name)
    model = their_model(folder)
    for seed, size in enumerate(((1, 6, 4), (4, 3, 5))):
        item = random_item(vision, seed, *size)
        expected = their_features(model, vision, scaled(folder, vision, item), item.grid)
        count = len(vision.stages)
        assert torch.equal(encode(encoder, item, count), expected)
        for cut in range(count):
            assert torch.equal(encode(encoder, item, cut, count - cut), expected)
    assert torch.equal(encode(encoder, item, *[1] * count), expected)
    assert torch.equal(encode(encoder, item), expected)
    assert not torch.equal(encode(encoder, random_item(vision, 9, *size)), expected)


@pytest.mark.parametrize("name", some(list(VISION_MODELS), 3))
def test_stages_in_pieces_of_rows_give_the_same_to_rounding_whenever_the_pieces_run(
    loaded: Callable[[str], Loaded], name: str
) -> None:
    folder, vision, encoder = loaded(name)
    item, model = random_item(vision, 3, 3, 7, 5), their_model(folder)
    expected = their_features(model, vision, scaled(folder, vision, item), item.grid)
    for pieces_per_stage in (2, 3, 7):
        count = len(vision.stages) * pieces_per_stage
        embeds = encode(encoder, item, pieces_per_stage=pieces_per_stage)
        torch.testing.assert_close(embeds, expected, rtol=1e-4, atol=1e-5)
        for pieces in ([1] * count, [3] * (count // 3), [pieces_per_stage + 1, 2 * pieces_per_stage - 1]):
            assert torch.equal(encode(encoder, item, *pieces, pieces_per_stage=pieces_per_stage), embeds)


def test_embeddings_in_bfloat16_are_those_of_transformers(loaded: Callable[[str], Loaded]) -> None:
    folder, vision, _ = loaded("qwen3_vl")
    encoder, item = load_encoder(folder, vision, torch.bfloat16), random_item(vision)
    pixels = scaled(folder, vision, item)
    expected = their_features(their_model(folder, torch.bfloat16), vision, pixels, item.grid)
    assert torch.equal(encode(encoder, item), expected)


@pytest.mark.parametrize("name", some(list(VISION_MODELS), 3))
def test_our_kernels_compute_in_bfloat16_what_torch_does_wherever_the_pieces_are_cut(
    loaded: Callable[[str], Loaded], name: str, tmp_path: Path
) -> None:
    folder, vision, exact = loaded(name)
    encoder = load_encoder(folder, vision, torch.bfloat16, ops=load_cpu_ops(torch.bfloat16, spare_folder=tmp_path))
    for seed, size in enumerate(((1, 1, 1), (3, 7, 5))):
        item = random_item(vision, seed, *size)
        expected = encode(exact, item)
        for per_stage in (1, 2, 5):
            if per_stage > item.grid[1] * item.grid[2]:
                continue
            count = len(vision.stages) * per_stage
            embeds = encode(encoder, item, pieces_per_stage=per_stage)
            assert (embeds - expected).abs().max() < 0.05 * expected.abs().max()
            for pieces in ([1] * count, [3] * (count // 3), [per_stage + 1, 2 * per_stage - 1]):
                assert torch.equal(encode(encoder, item, *pieces, pieces_per_stage=per_stage), embeds)


@pytest.mark.parametrize("name", some(list(VISION_MODELS), 3))
def test_our_kernels_replace_all_layers(loaded: Callable[[str], Loaded], name: str, tmp_path: Path) -> None:
    folder, vision, exact = loaded(name)
    encoder = load_encoder(folder, vision, torch.bfloat16, ops=load_cpu_ops(torch.bfloat16, spare_folder=tmp_path))
    modules: list[Any] = list(encoder._tower._tower.modules())  # type: ignore[attr-defined]
    assert not any(type(each) is torch.nn.Linear for each in modules)
    assert encoder._tower.fused is not None
    assert exact._tower.fused is None


def test_items_do_not_see_each_other_between_layers(loaded: Callable[[str], Loaded]) -> None:
    _, vision, encoder = loaded("qwen2_5_vl")
    items = [random_item(vision, 1, 1, 6, 4), random_item(vision, 2, 1, 5, 5)]
    states = [encoder.begin(item, item.grid, pieces) for pieces, item in enumerate(items, 1)]
    for _ in range(len(vision.stages)):
        for state in states:
            encoder.advance(state, 1)
    for state, item, pieces in zip(states, items, (1, 2), strict=True):
        assert torch.equal(encoder.finish(state), encode(encoder, item, pieces_per_stage=pieces))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("llava", "vision_tower.vision_model.", "model.vision_tower."),
        ("gemma3", "vision_tower.vision_model.", "model.vision_tower.vision_model."),
        ("internvl", "vision_tower.", "model.vision_tower."),
        ("qwen2_vl", "visual.", "model.visual."),
        ("qwen3_vl", "model.visual.", "visual."),
        ("idefics3", "model.vision_model.", "vision_model."),
    ],
)
def test_weights_are_found_by_older_and_newer_names(
    loaded: Callable[[str], Loaded], name: str, old: str, new: str, tmp_path: Path
) -> None:
    folder, vision, encoder = loaded(name)
    tensors = load_file(folder / "model.safetensors")
    renamed = {key.replace(old, new, 1) if key.startswith(old) else key: each for key, each in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / "model.safetensors")
    for file in folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    item = random_item(vision)
    assert torch.equal(encode(load_encoder(tmp_path, vision), item), encode(encoder, item))


def test_a_checkpoint_without_a_weight_is_refused_by_name(loaded: Callable[[str], Loaded], tmp_path: Path) -> None:
    folder, vision, _ = loaded("qwen2_vl")
    tensors = load_file(folder / "model.safetensors")
    del tensors["visual.merger.mlp.0.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    for file in folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match=r"visual\.merger\.mlp\.0\.weight is missing"):
        load_encoder(tmp_path, vision)


@pytest.mark.parametrize("name", ["llava", "mistral3", "internvl", "qwen2_vl"])
def test_media_of_other_sizes_than_the_models_are_refused(loaded: Callable[[str], Loaded], name: str) -> None:
    _, vision, encoder = loaded(name)
    item = random_item(vision)
    tiles, height, width, channels = item.shape
    with pytest.raises(RequestError, match="its prompt says"):
        encoder.begin(item, (1, 1, 77))
    for shape in ((tiles, height - 1, width, channels), (0, height, width, channels), (tiles, 0, width, channels)):
        with pytest.raises(RequestError, match="does not fit the model"):
            encoder.begin(item._replace(shape=shape), item.grid)


@pytest.mark.parametrize("name", ["idefics3", "qwen2_5_vl"])
def test_dummy_weights_need_no_weight_files(loaded: Callable[[str], Loaded], name: str, tmp_path: Path) -> None:
    folder, vision, encoder = loaded(name)
    for file in folder.glob("*.json"):
        if "index" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    dummy, item = load_encoder(tmp_path, vision, is_dummy=True), random_item(vision)
    assert dummy.weight_bytes == encoder.weight_bytes > 0
    embeds = encode(dummy, item)
    assert embeds.shape == encode(encoder, item).shape
    assert embeds.isfinite().all()
