"""Sampling defaults come from generation_config.json, the operator's overrides or the engine."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import transformers

from tokenloom.frontend.checkpoint.generation_config import NAMES, NOT_APPLIED, default_sampling_params
from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER, resolve
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.sockets.addresses import RunDirectory
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.engine_spec import EngineSpec
from tokenloom.tests.support.hostile_fields import Hostile, faults, hostile_changes

FILE = {
    "eos_token_id": [1, 2],
    "do_sample": True,
    "temperature": 0.6,
    "top_p": 0.95,
    "max_new_tokens": 7,
    "min_p": None,
}
OF_FILE = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 7}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_FOLDER, folder, ignore=shutil.ignore_patterns("facts"))
    (folder / "generation_config.json").write_text(json.dumps(FILE))
    return folder


def spec_of(model: Path | None, **options: object) -> EngineSpec:
    config = EngineConfig(model=None if model is None else str(model), device="cpu", **options)  # type: ignore[arg-type]
    return resolve(config, RunDirectory(Path("/nowhere")))


def test_overrides_win_over_the_defaults_of_generation_config_json(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tokenloom.supervisor"):
        assert spec_of(None).default_sampling_params == {}
        (line,) = caplog.messages
        assert "names no sampling defaults" in line and "temperature 0.7, top_p 0.9, top_k 40;" in line
        caplog.clear()
        assert spec_of(model).default_sampling_params == OF_FILE
    (line,) = caplog.messages
    assert "temperature 0.6, top_p 0.95, max_tokens 7; --generation-config vllm" in line
    changed = spec_of(model, override_generation_config={"temperature": 0.0, "top_k": 5})
    assert changed.default_sampling_params == OF_FILE | {"temperature": 0.0, "top_k": 5}


def test_the_longest_answer_is_the_overrides_then_the_operators_then_the_models(model: Path) -> None:
    override = {"override_generation_config": {"max_new_tokens": 3}}
    for options, longest in (({}, 7), ({"default_max_tokens": 5}, 5), ({"default_max_tokens": 5, **override}, 3)):
        assert spec_of(model, **options).default_sampling_params["max_tokens"] == longest


# Fields of transformers' GenerationConfig with no effect on tokens: caches, outputs, assistants, and beams' details.
WITHOUT_EFFECT = {
    *("max_length", "use_cache", "cache_implementation", "cache_config", "max_cache_len", "use_mtp", "is_assistant"),
    *("early_stopping", "length_penalty", "renormalize_logits", "remove_invalid_values", "do_sample", "low_memory"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    *("pad_token_id", "decoder_start_token_id", "compile_config", "disable_compile", "continuous_batching_config"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "speculation_type"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size", "assistant_early_exit", "assistant_lookbehind"),
    *("target_lookbehind", "assistant_ensemble_weight", "prefill_chunk_size", "_from_model_config"),
    "transformers_version",
}
ELSEWHERE = {"eos_token_id", "bos_token_id", "suppress_tokens", "begin_suppress_tokens"}  # of ModelConfig


def test_every_field_of_transformers_is_applied_or_named_or_known_to_have_no_effect() -> None:
    fields = set(transformers.GenerationConfig().to_dict())
    assert fields <= NAMES.keys() | NOT_APPLIED.keys() | WITHOUT_EFFECT | ELSEWHERE


def test_fields_that_do_not_act_here_are_named_in_one_line(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = model / "generation_config.json"
    neutral = {name: (values or (None,))[0] for name, values in NOT_APPLIED.items()}
    for changes in (neutral, {"no_repeat_ngram_size": 3, "num_beams": 4, "bad_words_ids": [[5]]}):
        assert not [record for record in caplog.records if record.levelno == logging.WARNING]
        file.write_text(json.dumps(FILE | changes))
        spec_of(model)
    line = f"{file}: not applied to answers: no_repeat_ngram_size 3, num_beams 4, bad_words_ids [[5]]"
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [line]


def test_generation_config_is_vllms_defaults_or_a_folder_with_defaults_and_eos_tokens(
    model: Path, tmp_path: Path
) -> None:
    spec = spec_of(model, generation_config="vllm", override_generation_config={"top_k": 5})
    assert spec.default_sampling_params == {"top_k": 5} and spec.model.eos_token_ids == [1, 2]
    with pytest.raises(ConfigError, match=f"--generation-config {tmp_path} must be auto, vllm or a folder with gen"):
        spec_of(model, generation_config=str(tmp_path))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 2, "top_k": 9}')
    spec = spec_of(model, generation_config=str(tmp_path))
    assert spec.default_sampling_params == {"top_k": 9} and spec.model.eos_token_ids == [2]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temprature": 1}, "--override-generation-config has temprature: it may have temperature, "),
        ({"temperature": -1}, "--override-generation-config: temperature must be"),
        ({"top_p": "much"}, "--override-generation-config: "),
    ],
)
def test_an_invalid_default_is_refused_at_the_start(model: Path, given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        spec_of(model, override_generation_config=given)


def test_an_integer_default_stays_an_integer_in_other_processes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(model)
    monkeypatch.setattr("os.environ", spec.environment())
    found = EngineSpec.from_environment()
    assert found == spec and isinstance(found.default_sampling_params["max_tokens"], int)


def test_hostile_values_are_refused_by_their_fields(tmp_path: Path) -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    given |= {"presence_penalty": 0.1, "frequency_penalty": 0.2, "max_new_tokens": 100, "num_beams": 1, "min_length": 0}

    def read(change: Hostile) -> None:
        (tmp_path / "generation_config.json").write_text(json.dumps(change.of(given)))
        default_sampling_params(EngineConfig(), tmp_path)

    assert not faults(hostile_changes(given), read)
