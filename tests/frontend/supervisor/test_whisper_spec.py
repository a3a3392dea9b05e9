"""resolve lets clips take whole blocks, counts --max-model-len behind them, and refuses options that Whisper lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tokenloom.frontend.supervisor.resolve import resolve
from tokenloom.ipc.addresses import RunDirectory
from tokenloom.ipc.config.engine_config import EngineConfig
from tokenloom.ipc.config.engine_spec import EngineSpec
from tokenloom.ipc.errors import ConfigError
from tokenloom.tests.support.whisper_checkpoints import whisper_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper_checkpoint(tmp_path_factory.mktemp("whisper"))  # 37 rows of audio, 32 tokens of text


def spec_of(folder: Path, **options: Any) -> EngineSpec:
    return resolve(EngineConfig(model=str(folder), device="cpu", **options), RunDirectory(folder))


@pytest.mark.parametrize(("block_size", "num_tokens"), [(16, 48), (1, 37), (64, 64)])
def test_a_clip_takes_whole_blocks_in_front_of_the_models_tokens(
    block_size: int, num_tokens: int, folder: Path
) -> None:
    spec = spec_of(folder, block_size=block_size)
    assert spec.model.num_clip_tokens == num_tokens
    assert (spec.max_model_len, spec.max_text_len) == (num_tokens + 32, 32)
    assert spec_of(folder, block_size=block_size, max_model_len=20).max_model_len == num_tokens + 20


def test_rules_of_answers_are_the_files_unless_the_engines_own_defaults_are_wanted(folder: Path) -> None:
    assert spec_of(folder).model.output_rules is not None
    assert spec_of(folder, generation_config="vllm").model.output_rules is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 33}, "--max-model-len 33 is above the model's max_position_embeddings 32"),
        ({"enable_lora": True}, "cross attention, which takes no adapters"),
        ({"model_impl": "transformers"}, "is an encoder-decoder, which transformers' layers cannot run"),
    ],
)
def test_options_that_whisper_has_no_place_for_are_refused(options: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        spec_of(folder, **options)
