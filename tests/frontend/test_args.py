"""Every option is a flag, a keyword and a key of the YAML file, with one meaning."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import pytest

from tokenloom.frontend.args import add_engine_arguments, engine_config
from tokenloom.frontend.engine_options import config_from_options
from tokenloom.ipc.config import EngineConfig
from tokenloom.ipc.errors import ConfigError


def parse(*argv: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return engine_config(parser.parse_args(argv))


def test_the_names_that_vllm_users_know() -> None:
    line = (
        "--tensor-parallel-size 2 --max-model-len 512 --max-num-seqs 4 --max-num-batched-tokens 64 --block-size 8 "
        "--gpu-memory-utilization 0.5 --num-kv-blocks 99 --dtype bfloat16 --enforce-eager --no-enable-prefix-caching "
        "--scheduling-policy priority --seed 7 --listen tcp://127.0.0.1:1 --insecure"
    )
    config = parse(*line.split())
    assert config == EngineConfig(
        tensor_parallel_size=2,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=8,
        gpu_memory_utilization=0.5,
        num_kv_blocks=99,
        dtype="bfloat16",
        enforce_eager=True,
        enable_prefix_caching=False,
        scheduling_policy="priority",
        seed=7,
        listen="tcp://127.0.0.1:1",
        insecure=True,
    )
    assert parse("--tp", "3").tensor_parallel_size == 3


def test_every_field_is_a_flag() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    text = parser.format_help()
    for field in msgspec.structs.fields(EngineConfig):
        assert "--" + field.name.replace("_", "-") in text
    assert parse() == EngineConfig()


def test_the_file_gives_options_and_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("max-num-seqs: 7\nblock_size: 8\nenable-prefix-caching: false\n")
    config = parse("--config", str(file), "--block-size", "32")
    assert (config.max_num_seqs, config.block_size, config.enable_prefix_caching) == (7, 32, False)


def test_the_environment_may_hold_the_api_key_and_file_and_command_line_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("api-key: of the file\n")
    assert parse().api_key is None
    monkeypatch.setenv("TOKENLOOM_API_KEY", "of the environment")
    assert parse().api_key == "of the environment"
    assert parse("--config", str(file)).api_key == "of the file"
    assert parse("--config", str(file), "--api-key", "typed").api_key == "typed"
    monkeypatch.setenv("TOKENLOOM_API_KEY", "")
    with pytest.raises(ConfigError, match="at least 1 printable"):  # else an empty secret would admit everyone
        parse()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_num_seq: 7", "did you mean max_num_seqs"),
        ("block_size: many", "block_size"),
        ("block_size: 0", r"--block-size must be in \[1, 1024\], got 0"),
        ("- a list", "name: value"),
        ("a: [", "cannot be read"),
        ("served_model_name: \udcff", "cannot be read"),  # a byte that is no UTF-8
        ("max_num_seqs: 64\nmax_num_batched_tokens: 8", "max-num-batched-tokens 8 is below --max-num-seqs 64"),
        ("listen: nowhere", "must be ipc:///PATH or tcp://HOST:PORT"),
    ],
)
def test_a_bad_file_is_one_line_with_the_mend(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "engine.yaml"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=message) as caught:
        parse("--config", str(file))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/nowhere\.yaml cannot be read"):
        parse("--config", "/nowhere.yaml")


def test_options_of_the_wrong_type_are_refused() -> None:
    with pytest.raises(ConfigError, match="block_size"):
        config_from_options({"block_size": "x"}, "LLM")
