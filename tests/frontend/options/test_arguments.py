"""Every option is a flag, a keyword and a key of the YAML file, with one meaning."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import msgspec
import pytest

from tokenloom.frontend import launch
from tokenloom.frontend.options.arguments import add_engine_arguments, engine_config
from tokenloom.frontend.options.options import config_from_keywords
from tokenloom.ipc.config.engine_config import EngineConfig
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
        ("# sizes\nmax_num_seq: 7", r"engine.yaml line 2: unknown option max_num_seq: did you mean max_num_seqs\?"),
        ("modl: x", r"engine.yaml line 1: unknown option modl: did you mean model\?"),
        ("http: 80\n\nmax-num-seqs: many", r"engine.yaml line 3: max-num-seqs must be a whole number, got 'many'$"),
        ("max-num-seqs: 1.5", "max-num-seqs must be a whole number, got 1.5$"),
        ("max-num-seqs: true", "max-num-seqs must be a whole number, got True$"),
        ("max-num-seqs:", "max-num-seqs must be a whole number, got nothing$"),
        ("hang_timeout_s: [1]", r"engine.yaml line 1: hang_timeout_s must be a number, got \[1\]$"),
        ("insecure: maybe", "insecure must be true or false, got 'maybe'$"),
        ("dtype: half", "dtype must be one of auto, float32, bfloat16, float16, got 'half'$"),
        ("model: {a: b}", "model must be text, got {'a': 'b'}$"),
        ("block_size: 0", r"engine.yaml line 1: block_size must be in \[1, 1024\], got 0$"),
        ("model: a\nblock-size: 8\nmodel: b", "engine.yaml lines 1 and 3 both give model: keep one of them"),
        ("block_size: 8\nblock-size: 8", "engine.yaml lines 1 and 2 both give block-size"),
        ("- a list", "name: value"),
        ("model: x\na: [", "engine.yaml cannot be read: line 2 "),
        ("served_model_name: \udcff", "cannot be read"),  # a byte that is no UTF-8
        (
            "max_num_seqs: 64\nmax_num_batched_tokens: 8",
            "engine.yaml line 2: max_num_batched_tokens 8 is below max_num_seqs 64",
        ),
        ("listen: nowhere", "must be ipc:///PATH or tcp://HOST:PORT"),
        ("root_path: llm", "root_path llm must begin with / and not end with it"),
        ("root_path: /llm/", "must begin with / and not end with it"),
        ("uds_mode: rw", "uds_mode rw must be 3 or 4 octal digits"),
        ("http_timeout_s: 0", "http_timeout_s must be in"),
        ("ssl_certfile: cert.pem", "ssl_certfile is for --http, which is not given"),
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


def test_an_option_that_is_text_is_taken_as_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("http: 8000\nserved-model-name: 1.10\nrevision: 2024-01-01\napi-key: on\nlisten: null\n")
    config = parse("--config", str(file))
    assert config == parse(
        "--http", "8000", "--served-model-name", "1.10", "--revision", "2024-01-01", "--api-key", "on"
    )


@pytest.mark.parametrize("text", ["", "# max-num-seqs: 7\n", "---\n", "{}"])
def test_a_file_without_options_changes_nothing(tmp_path: Path, text: str) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(text)
    assert parse("--config", str(file)) == EngineConfig()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--modl x", "unknown option --modl: did you mean --model?"),
        ("--max-num-sequences=4", "unknown option --max-num-sequences: did you mean --max-num-seqs"),
        ("--max-num-seqs many", "--max-num-seqs must be a whole number, got 'many'"),
        ("--tp x", "--tensor-parallel-size must be a whole number, got 'x'"),
        ("--hang-timeout-s soon", "--hang-timeout-s must be a number, got 'soon'"),
        ("--dtype half", "--dtype must be one of auto, float32, bfloat16, float16, got 'half'"),
        ("--block-size 0", "--block-size must be in [1, 1024], got 0"),
        ("--http 8000 demo", "unexpected argument 'demo'"),
        ("chat --tempreature 1", "unknown option --tempreature: did you mean --temperature?"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_with_the_mend(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = launch.main(line.split())
    except SystemExit as ended:
        code = ended.code
    (said,) = capsys.readouterr().err.splitlines()
    assert code == 2 and re.fullmatch(rf"engine-launch( chat)?: {re.escape(message)}.*", said), said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": "x"}, "LLM(): max_num_seqs must be a whole number, got 'x'"),
        ({"block_size": 0}, "LLM(): block_size must be in [1, 1024], got 0"),
        ({"enforce_eager": 1}, "LLM(): enforce_eager must be true or false, got 1"),
        ({"device": "gpu"}, "LLM(): device must be one of auto, cpu, cuda, got 'gpu'"),
    ],
)
def test_keywords_are_checked_in_the_same_words(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_keywords("LLM", None, options)
    assert str(caught.value) == message
    assert config_from_keywords("LLM", None, {"http": 8000, "hang_timeout_s": 3}).http == "8000"
