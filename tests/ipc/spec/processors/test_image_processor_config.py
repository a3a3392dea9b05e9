"""The image processor of a checkpoint is read as transformers reads it, and overridden by transformers' names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.models.vision_config import VisionConfig, VisionFamily
from tokenloom.ipc.spec.processors.image_processor_config import ImageProcessorConfig, ImageSize, load_image_processor
from tokenloom.ipc.spec.processors.processor_file import read_object


def vision_of(family: VisionFamily, **changes: Any) -> VisionConfig:
    fields: dict[str, Any] = {"image_token_id": 7, "hidden_size": 32, "num_layers": 2, "patch_size": 14}
    return VisionConfig(family=family, **(fields | changes))


def load(
    folder: Path, vision: VisionConfig, given: dict[str, Any], overrides: dict[str, Any] | None = None
) -> ImageProcessorConfig:
    (folder / "preprocessor_config.json").write_text(json.dumps(given))
    return load_image_processor(folder, vision, overrides)


QWEN = vision_of("qwen2_5_vl", merge_size=2)


def test_missing_and_null_settings_are_the_defaults_of_the_class(tmp_path: Path) -> None:
    config = load(tmp_path, QWEN, {"image_processor_type": "Qwen2VLImageProcessorFast", "resample": None})
    assert config.size == ImageSize(shortest_edge=3136, longest_edge=1003520)
    assert config.resample == 3
    config = load(tmp_path, vision_of("llava"), {"feature_extractor_type": "CLIPFeatureExtractor"})
    assert config.tile == (224, 224)
    config = load(tmp_path, vision_of("gemma3", patch_size=7, merge_size=2), {"do_pan_and_scan": None})
    assert (config.tile, config.resample, config.max_embeds) == ((224, 224), 2, 256)


def test_old_forms_of_the_hub_are_read(tmp_path: Path) -> None:
    old = {"image_processor_type": "Qwen2_5_VLImageProcessor", "min_pixels": 784, "max_pixels": 78400}
    assert load(tmp_path, QWEN, old).size == ImageSize(shortest_edge=784, longest_edge=78400)
    bounds = {"size": {"min_pixels": 784, "max_pixels": 78400}}
    assert load(tmp_path, QWEN, bounds).size == ImageSize(shortest_edge=784, longest_edge=78400)
    numbers = {"image_processor_type": "CLIPImageProcessor", "size": 336, "crop_size": 336}
    config = load(tmp_path, vision_of("llava", image_size=336), numbers)
    assert (config.size, config.tile) == (ImageSize(shortest_edge=336), (336, 336))


PUBLISHED: list[tuple[str, VisionConfig, dict[str, Any], int]] = [  # as their files on the hub say
    ("llava-1.5-7b", vision_of("llava", image_size=336), {"size": {"shortest_edge": 336}, "crop_size": 336}, 576),
    (
        "SmolVLM-256M",
        vision_of("idefics3", patch_size=16, merge_size=4, image_size=512),
        {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
        17 * 64,
    ),
    (
        "SmolVLM2-2.2B",
        vision_of("idefics3", merge_size=3, image_size=384),
        {"image_processor_type": "SmolVLMImageProcessorFast", "size": {"longest_edge": 1536}}
        | {"max_image_size": {"longest_edge": 384}},
        17 * 81,
    ),
    ("Idefics3-8B", vision_of("idefics3", merge_size=2, image_size=364), {}, 17 * 169),
    (
        "InternVL3-1B",
        vision_of("internvl", merge_size=2, image_size=448),
        {"size": {"height": 448, "width": 448}, "crop_to_patches": False, "max_patches": 12},
        13 * 256,
    ),
    ("pixtral-12b", vision_of("pixtral", patch_size=16), {"size": {"longest_edge": 1024}, "patch_size": 16}, 4096),
    ("Mistral-Small-3.1", vision_of("pixtral", merge_size=2), {"size": {"longest_edge": 1540}}, 55 * 55),
    ("gemma-3-4b", vision_of("gemma3", merge_size=4, image_size=896), {"size": {"height": 896, "width": 896}}, 256),
    ("Qwen2-VL-2B", vision_of("qwen2_vl", merge_size=2), {"min_pixels": 3136, "max_pixels": 12845056}, 16384),
    (
        "Qwen3-VL-4B",
        vision_of("qwen3_vl", patch_size=16, merge_size=2),
        {"size": {"longest_edge": 16777216, "shortest_edge": 65536}, "patch_size": 16},
        16384,
    ),
]


@pytest.mark.parametrize(("name", "vision", "given", "num_embeds"), PUBLISHED, ids=[each[0] for each in PUBLISHED])
def test_published_models_have_their_largest_image(
    tmp_path: Path, name: str, vision: VisionConfig, given: dict[str, Any], num_embeds: int
) -> None:
    assert load(tmp_path, vision, given).max_embeds == num_embeds


def test_settings_nested_in_processor_config_come_first(tmp_path: Path) -> None:
    nested = {"image_processor": {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 99}}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested | {"patch_size": 16}))
    config = load(tmp_path, vision_of("pixtral"), {"size": {"longest_edge": 5}})
    assert config.size == ImageSize(longest_edge=99)


def test_overrides_replace_the_settings_that_they_name(tmp_path: Path) -> None:
    given = {"min_pixels": 784, "max_pixels": 78400}
    assert load(tmp_path, QWEN, given, {"max_pixels": 7840}).size == ImageSize(shortest_edge=784, longest_edge=7840)
    alone = {"size": {"longest_edge": 7840}}
    assert load(tmp_path, QWEN, given, alone).size == ImageSize(shortest_edge=784, longest_edge=7840)
    smol = vision_of("idefics3", patch_size=16, merge_size=4)
    given = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
    assert load(tmp_path, smol, given).max_embeds == 17 * 64
    assert load(tmp_path, smol, given, {"size": {"longest_edge": 1024}}).max_embeds == 5 * 64
    assert load(tmp_path, smol, given, {"do_image_splitting": False}).max_embeds == 64


def test_settings_that_change_pixels_change_the_digest(tmp_path: Path) -> None:
    whole, small = load(tmp_path, QWEN, {}), load(tmp_path, QWEN, {}, {"max_pixels": 7840})
    assert whole.digest() == load(tmp_path, QWEN, {"image_std": [1, 1, 1]}).digest() != small.digest()
    assert whole.with_detail("high") == whole.with_detail("auto") == whole
    assert len({whole.digest(), small.digest(), whole.with_detail("low").digest()}) == 3


@pytest.mark.parametrize(
    ("strategy", "tower", "num_embeds"),
    [("default", {}, 576), ("full", {}, 577), ("full", {"model_type": "siglip_vision_model"}, 576)],
)
def test_llava_counts_the_class_embedding_only_if_the_model_keeps_it(
    tmp_path: Path, strategy: str, tower: dict[str, str], num_embeds: int
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"vision_feature_select_strategy": strategy, "vision_config": tower})
    )
    config = load(tmp_path, vision_of("llava", image_size=336), {"size": 336, "crop_size": 336})
    assert config.max_embeds == config.num_embeds((1, 24, 24)) == num_embeds


@pytest.mark.parametrize(
    ("vision", "given", "overrides", "words"),
    [
        (
            QWEN,
            {},
            {"max_tiles": 3, "size": 4},
            "max_tiles is no setting of Qwen2VLImageProcessor; known are do_resize",
        ),
        (QWEN, {}, {"max_pixels": "many"}, "mm-processor-kwargs: Expected `int . null`.* at `..max_pixels`"),
        (QWEN, {"min_pixels": 10, "max_pixels": 5}, {}, "min_pixels 10 and max_pixels 5 must be positive"),
        (QWEN, {"image_processor_type": "LlavaNextImageProcessor"}, {}, "served Qwen2VLImageProcessor"),
        (QWEN, {"do_resize": False}, {}, "do_resize is false"),
        (vision_of("llava", image_size=336), {}, {}, "makes images of 224 × 224 pixels, .* takes 336 × 336"),
        (vision_of("llava"), {"do_center_crop": False}, {}, "images would have different sizes"),
        (vision_of("pixtral"), {"size": {"longest_edge": 0}}, {}, "of at least 1 pixel"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(
    tmp_path: Path, vision: VisionConfig, given: dict[str, Any], overrides: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, vision, given, overrides)


def test_checkpoint_without_an_image_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no image processor: add the model"):
        load_image_processor(tmp_path, QWEN)


def test_a_file_that_cannot_be_read_is_an_error_of_one_line(tmp_path: Path) -> None:
    path = tmp_path / "preprocessor_config.json"
    path.write_text('{"a":' * 100_000)
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json cannot be read"):
        read_object(path)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json cannot be read"):
        read_object(path)
