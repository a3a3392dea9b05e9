"""resolve sizes the encoder cache, and a step, by the largest image of the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenloom.frontend.supervisor.resolve import resolve
from tokenloom.ipc.addresses import RunDirectory
from tokenloom.ipc.config.engine_config import EngineConfig
from tokenloom.ipc.config.engine_spec import EngineSpec
from tokenloom.ipc.errors import ConfigError
from tokenloom.tests.support.vision_checkpoints import vision_checkpoint


def spec_of(folder: Path, **options: object) -> EngineSpec:
    config = EngineConfig(model=str(folder), device="cpu", **options)  # type: ignore[arg-type]
    return resolve(config, RunDirectory(folder))


def test_the_cache_holds_two_of_the_largest_images_or_those_of_a_step(tmp_path: Path) -> None:
    folder = vision_checkpoint(tmp_path, "gemma3")
    spec = spec_of(folder, max_num_seqs=4, max_num_batched_tokens=4)
    largest = spec.max_item_embeds
    assert 4 < largest <= spec.max_model_len
    assert spec.max_num_batched_tokens == largest + 4, "an image of Gemma 3 is computed in one step"
    assert spec.encoder_cache_tokens == 2 * largest
    assert spec_of(folder, max_num_batched_tokens=4096).encoder_cache_tokens == 4096
    assert spec_of(folder, encoder_cache_tokens=largest).encoder_cache_tokens == largest
    with pytest.raises(ConfigError, match=f"{largest - 1} is below the {largest} embeddings of the largest image"):
        spec_of(folder, encoder_cache_tokens=largest - 1)
    text = spec_of(folder, language_model_only=True, max_num_seqs=4, max_num_batched_tokens=4)
    assert (text.encoder_cache_tokens, text.max_num_batched_tokens) == (0, 4)


def test_an_image_longer_than_any_prompt_takes_no_memory(tmp_path: Path) -> None:
    folder = vision_checkpoint(tmp_path, "qwen2_5_vl")
    whole, short = spec_of(folder, max_num_batched_tokens=256), spec_of(folder, max_model_len=16)
    assert short.max_item_embeds == 16 < whole.max_item_embeds
    assert whole.max_num_batched_tokens == 256, "its images span steps"
