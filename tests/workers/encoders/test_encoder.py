"""Our loop over the layers of transformers' towers gives their embeddings, wherever it is interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tokenloom.ipc.errors import ConfigError
from tokenloom.kernels.cpu.cpu_ops import load_cpu_ops, make_cpu_ops
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.kernels.cpu.levels import LEVELS, kinds
from tokenloom.tests.support.audio_oracle import AudioOracle, random_clip
from tokenloom.tests.support.today import some
from tokenloom.tests.support.vision_configs import VISION_MODELS
from tokenloom.tests.workers.encoders.audio.audio_items import item_of
from tokenloom.tests.workers.encoders.images.image_items import their_features
from tokenloom.tests.workers.encoders.media_case import MODELS, WHISPER, Cases, encode, scaled
from tokenloom.workers.encoders.fused import fuse

SOME_MODELS = [*some(list(VISION_MODELS), 2), *some([name for name in MODELS if name not in VISION_MODELS], 1)]

PADDED = ["gemma3", "qwen3_vl"]  # with heads that kernels pad
KINDS = [kind for kind in kinds() if kind[1] in LEVELS]


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SOME_MODELS)
def test_embeddings_are_those_of_transformers_wherever_the_stages_are_cut(case_of: Cases, name: str) -> None:
    case = case_of(name)
    for number, item in enumerate(case.items):
        expected, found = case.expected(item), encode(case.encoder, item)
        assert_close(found, expected)
        assert torch.equal(found, expected) or number >= case.num_exact
    count = len(case.config.stages)
    for cut in range(count):
        assert torch.equal(encode(case.encoder, item, cut, count - cut), found)
    assert not torch.allclose(encode(case.encoder, case.others[-1]), found, atol=1e-2)


@pytest.mark.parametrize("name", SOME_MODELS)
def test_stages_in_pieces_of_rows_give_the_same_to_rounding_whenever_the_pieces_run(case_of: Cases, name: str) -> None:
    case = case_of(name)
    for item, numbers in ((case.items[-1], (2, 3, 7)), (case.items[0], (case.num_rows(case.items[0]),))):
        expected = case.expected(item)
        for per_stage in numbers:
            embeds = encode(case.encoder, item, pieces_per_stage=per_stage)
            assert_close(embeds, expected)
            for pieces in case.cuts(per_stage):
                assert torch.equal(encode(case.encoder, item, *pieces, pieces_per_stage=per_stage), embeds)


def test_embeddings_in_bfloat16_are_those_of_transformers(case_of: Cases) -> None:
    case, dtype = case_of("qwen3_vl"), torch.bfloat16
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(case.folder, dtype=dtype)
    item = case.items[0]
    expected = their_features(model, case.config, scaled(case.folder, case.config, item, dtype), item.grid)
    assert torch.equal(encode(case.load(dtype), item), expected)


def test_numbers_are_limited_in_float16_as_by_transformers(case_of: Cases, tmp_path: Path) -> None:
    case = case_of("voxtral")
    tensors = load_file(case.folder / "model.safetensors")
    tensors["audio_tower.layers.1.fc2.weight"] *= 1e5
    save_file(tensors, tmp_path / "model.safetensors")
    case.copy_settings(tmp_path)
    samples = random_clip(1, 16_000)
    expected = AudioOracle(tmp_path, torch.float16).embeds(samples)
    found = encode(case.load(torch.float16, tmp_path), item_of(case.config, samples))
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("name", [*PADDED, *some([name for name in MODELS if name not in PADDED], 1)])
@pytest.mark.parametrize(("dtype", "level"), some(KINDS, 3))
def test_our_kernels_compute_what_torch_does_wherever_the_pieces_are_cut(
    case_of: Cases, name: str, dtype: torch.dtype, level: str
) -> None:
    case, tolerance = case_of(name), 2e-4 if dtype == torch.float32 else 0.05
    encoder = case.load(dtype, ops=make_cpu_ops(dtype, level))
    for item in (case.items[0], case.items[-1]):
        expected = encode(case.encoder, item)
        for per_stage in (each for each in (1, 2, 5) if each <= case.num_rows(item)):
            embeds = encode(encoder, item, pieces_per_stage=per_stage)
            assert (embeds - expected).abs().max() < tolerance * expected.abs().max()
            for pieces in case.cuts(per_stage):
                assert torch.equal(encode(encoder, item, *pieces, pieces_per_stage=per_stage), embeds)


@pytest.mark.parametrize("name", SOME_MODELS)
def test_our_kernels_replace_all_layers(case_of: Cases, name: str, tmp_path: Path) -> None:
    case = case_of(name)
    encoder = case.load(torch.bfloat16, ops=load_cpu_ops(torch.bfloat16, spare_folder=tmp_path))
    modules: list[Any] = list(encoder._tower._tower.modules())  # type: ignore[attr-defined]
    replaced = (nn.Linear,) if name in VISION_MODELS else (nn.Linear, nn.Conv1d, nn.Conv2d)
    assert not any(type(each) in replaced for each in modules)
    assert encoder._tower.fused is not None
    assert case.encoder._tower.fused is None


def test_layers_with_other_parts_or_without_kernels_are_left_as_they_are(case_of: Cases) -> None:
    blocks = case_of("llava").load()._tower.blocks
    assert fuse(ReferenceOps(), list(blocks), torch.float32) is None
    others = [block._replace(mlp=nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))) for block in blocks]
    assert fuse(make_cpu_ops(torch.float32, LEVELS[-1]), others, torch.float32) is None
    assert len(others) == len(blocks) and all(block.module._modules for block in blocks)


def test_gains_count_once_with_operations_that_have_no_encoder_kernel(case_of: Cases, tmp_path: Path) -> None:
    case, dtype = case_of("internvl"), torch.bfloat16
    tensors = load_file(case.folder / "model.safetensors")
    strong = {name: 20 * each if "lambda_" in name else each for name, each in tensors.items()}
    save_file(strong, tmp_path / "model.safetensors")
    case.copy_settings(tmp_path)
    expected = encode(case.load(dtype, tmp_path), case.items[0])
    found = encode(case.load(dtype, tmp_path, ops=ReferenceOps()), case.items[0])
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_asr"])
def test_items_do_not_see_each_other_between_layers(case_of: Cases, name: str) -> None:
    case = case_of(name)
    items, encoder = case.items[-2:], case.encoder
    states = [encoder.begin(item, item.grid, pieces) for pieces, item in enumerate(items, 1)]
    for _ in range(len(case.config.stages)):
        for state in states:
            encoder.advance(state, 1)
    for state, item, pieces in zip(states, items, (1, 2), strict=True):
        assert torch.equal(encoder.finish(state), encode(encoder, item, pieces_per_stage=pieces))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    some(
        [
            ("llava", "vision_tower.vision_model.", "model.vision_tower."),
            ("gemma3", "vision_tower.vision_model.", "model.vision_tower.vision_model."),
            ("internvl", "vision_tower.", "model.vision_tower."),
            ("qwen2_vl", "visual.", "model.visual."),
            ("qwen3_vl", "model.visual.", "visual."),
            ("idefics3", "model.vision_model.", "vision_model."),
            ("qwen2_audio", "", "model."),
            ("voxtral", "", "model."),
            ("qwen3_asr", "model.", ""),
        ],
        3,
    ),
)
def test_weights_are_found_by_older_and_newer_names(
    case_of: Cases, name: str, old: str, new: str, tmp_path: Path
) -> None:
    case = case_of(name)
    tensors = load_file(case.folder / "model.safetensors")
    renamed = {key.replace(old, new, 1) if key.startswith(old) else key: each for key, each in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, tmp_path / "model.safetensors")
    case.copy_settings(tmp_path)
    found = encode(case.load(folder=tmp_path), case.items[-1])
    assert torch.equal(found, encode(case.encoder, case.items[-1]))


@pytest.mark.parametrize(
    ("name", "weight"),
    [("qwen2_vl", "visual.merger.mlp.0.weight"), ("voxtral", "multi_modal_projector.linear_1.weight")],
)
def test_a_checkpoint_without_a_weight_is_refused_by_name(
    case_of: Cases, name: str, weight: str, tmp_path: Path
) -> None:
    case = case_of(name)
    tensors = load_file(case.folder / "model.safetensors")
    del tensors[weight]
    save_file(tensors, tmp_path / "model.safetensors")
    case.copy_settings(tmp_path)
    with pytest.raises(ConfigError, match=f"{weight} is missing"):
        case.load(folder=tmp_path)


@pytest.mark.parametrize("name", some([name for name in MODELS if name != WHISPER], 2))
def test_dummy_weights_need_no_weight_files(case_of: Cases, name: str, tmp_path: Path) -> None:
    case = case_of(name)
    case.copy_settings(tmp_path)
    dummy = case.load(folder=tmp_path, is_dummy=True)
    assert dummy.weight_bytes == case.encoder.weight_bytes > 0
    embeds = encode(dummy, case.items[-1])
    assert embeds.shape == encode(case.encoder, case.items[-1]).shape
    assert embeds.isfinite().all()
