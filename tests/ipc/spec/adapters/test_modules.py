"""Options of adapters are checked before any process starts, each with its own line."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tokenloom.ipc.errors import ConfigError, RequestError
from tokenloom.ipc.spec.adapters.modules import ModuleOption, check_adapter_options, check_name, parse_modules
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.frontend.server.adapters.samples import write_adapter
from tokenloom.tests.support.engine_specs import new_spec

MODEL = new_spec().model


def check(**options: object) -> None:
    check_adapter_options(EngineConfig(**options), MODEL, ["model"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        (["a"], "--lora-modules a: give NAME=FOLDER or"),
        (["a="], "give NAME=FOLDER or"),
        (["=/x"], "lora_name is '': give 1 to 200 printable characters"),
        (["../a=/x"], "leave out '..'"),
        (["model=/x"], "lora_name 'model' is the name of the model itself: choose another"),
        (["a=/x", "a=/y"], "the name 'a' is there twice: choose another for one of them"),
        (['{"name": "a"}'], "missing required field `path`"),
        (['{"name": "a", "path": "/x", "base_model_name": "other"}'], "base_model_name 'other' is not model"),
    ],
)
def test_a_module_is_a_name_and_a_folder_or_json_and_others_are_named(items: list[str], reason: str) -> None:
    good = EngineConfig(lora_modules=["a=/x/y=z", '{"name": "b", "path": "/b", "base_model_name": "model"}'])
    assert parse_modules(good, ["model"]) == [ModuleOption("a", "/x/y=z"), ModuleOption("b", "/b", "model")]
    with pytest.raises(ConfigError) as error:
        parse_modules(EngineConfig(lora_modules=items), ["model"])
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_a_name_that_could_be_a_path_elsewhere_is_refused() -> None:
    for name in ("sql", "org/sql-v1.2", "日本", "a" * 200):
        check_name(name, ["model"])
    for name in ("", " a", "a\n", "a" * 201, "..", "a/..", "./a", "a//b", "/a", "a\\b"):
        with pytest.raises(RequestError, match="lora_name is"):
            check_name(name, ["model"])


def test_options_of_adapters_need_each_other_and_layers_that_take_adapters(tmp_path: Path) -> None:
    check()
    check(enable_lora=True, adapter_folder=str(tmp_path), allow_runtime_lora=True)
    for option, value in (("lora_modules", ["a=/x"]), ("adapter_folder", "/x"), ("allow_runtime_lora", True)):
        with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} needs --enable-lora"):
            check(**{option: value})
    with pytest.raises(ConfigError, match="--allow-runtime-lora needs --adapter-folder"):
        check(enable_lora=True, allow_runtime_lora=True)
    with pytest.raises(ConfigError, match="--adapter-folder /nonexistent is not a folder: create it"):
        check(enable_lora=True, adapter_folder="/nonexistent")
    model = msgspec.structs.replace(MODEL, implementation="transformers")
    with pytest.raises(ConfigError, match="runs on transformers' layers, which take no adapters"):
        check_adapter_options(EngineConfig(enable_lora=True), model, ["model"])


def test_a_module_that_does_not_fit_the_model_is_refused_before_the_start(tmp_path: Path) -> None:
    write_adapter(tmp_path / "good")
    check(enable_lora=True, lora_modules=[f"a={tmp_path}/good"])
    with pytest.raises(ConfigError, match=r"--lora-modules a: .*missing/adapter_config\.json cannot be read"):
        check(enable_lora=True, lora_modules=[f"a={tmp_path}/missing"])
