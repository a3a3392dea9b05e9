"""Flag, keyword and YAML key of an option have the same meaning."""

from __future__ import annotations

import argparse
import re
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tokenloom.frontend import launch
from tokenloom.frontend.cli.serve import new_serve_parser
from tokenloom.frontend.launcher.options.arguments import add_engine_arguments, given_options
from tokenloom.frontend.launcher.options.config_file import read_config_file
from tokenloom.frontend.launcher.options.options import as_given, config_from_keywords, keyword_errors, new_config
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.tests.support.hostile_fields import REMOVED, VALUES, Hostile, faults


def parse(*argv: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return new_config(given_options(parser.parse_args(argv)))


def served(line: str | list[str], **options: bool) -> EngineConfig:
    words = line.split() if isinstance(line, str) else line
    return new_config(given_options(new_serve_parser().parse(words), **options))


def test_every_field_is_a_flag() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    text = parser.format_help()
    for field in msgspec.structs.fields(EngineConfig):
        assert "--" + field.name.replace("_", "-") in text
    assert parse() == EngineConfig()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "engine.yaml"


def test_the_command_line_wins_over_the_file_which_may_have_a_mark_and_no_options(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.yaml cannot be read"):
        parse("--config", str(file))
    file.write_bytes(BOM_UTF8 + b"max-num-seqs: 7\nblock_size: 8\nenable-prefix-caching: false\n")
    config = parse("--config", str(file), "--block-size", "32")
    assert (config.max_num_seqs, config.block_size, config.enable_prefix_caching) == (7, 32, False)
    for text in ("", "# max-num-seqs: 7\n", "---\n", "{}"):
        file.write_text(text)
        assert parse("--config", str(file)) == EngineConfig()


def test_file_and_command_line_win_over_the_api_key_of_the_environment(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("api-key: of the file\n")
    assert parse().api_key is None
    monkeypatch.setenv("TOKENLOOM_API_KEY", "of the environment")
    assert parse().api_key == ["of the environment"]
    assert parse("--config", str(file)).api_key == ["of the file"]
    assert parse("--config", str(file), "--api-key", "typed").api_key == ["typed"]
    monkeypatch.setenv("TOKENLOOM_API_KEY", "")
    with pytest.raises(ConfigError, match="at least 1 printable"):  # else an empty secret would admit everyone
        parse()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# sizes\nmax_num_seq: 7", r"engine.yaml line 2: unknown option max_num_seq: did you mean max_num_seqs"),
        ("modl: x", r"engine.yaml line 1: unknown option modl: did you mean model\?"),
        ("http: 80\n\nmax-num-seqs: many", r"engine.yaml line 3: max-num-seqs must be a whole number, got 'many'$"),
        ("max-num-seqs: 1.5", "max-num-seqs must be a whole number, got 1.5$"),
        ("max-num-seqs: true", "max-num-seqs must be a whole number, got True$"),
        ("max-num-seqs:", "max-num-seqs must be a whole number, got nothing$"),
        ("hang_timeout_s: [1]", r"engine.yaml line 1: hang_timeout_s must be a number, got \[1\]$"),
        ("insecure: maybe", "insecure must be true or false, got 'maybe'$"),
        ("dtype: int4", "dtype must be one of auto, float32, bfloat16, float16, got 'int4'$"),
        ("model: {a: b}", "model must be text, got {'a': 'b'}$"),
        ("block_size: 0", r"engine.yaml line 1: block_size must be in \[1, 1024\], got 0$"),
        ("model: a\nblock-size: 8\nmodel: b", "engine.yaml lines 1 and 3 both give model: keep one of them"),
        ("block_size: 8\nblock-size: 8", "engine.yaml lines 1 and 2 both give block-size"),
        ("hf_overrides:\n  a: [{b: 1, b: 2}]", "engine.yaml line 1: b is given twice: keep one of them"),
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
def test_the_error_of_a_bad_file_is_one_line_with_the_mend(file: Path, text: str, message: str) -> None:
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=message) as caught:
        parse("--config", str(file))
    assert "\n" not in str(caught.value)


def test_a_text_option_keeps_its_spelling_in_the_file(file: Path) -> None:
    file.write_text("http: 8000\nserved-model-name: 1.10\nrevision: 2024-01-01\napi-key: on\nlisten: null\n")
    config = parse("--config", str(file))
    assert config == parse(
        "--http", "8000", "--served-model-name", "1.10", "--revision", "2024-01-01", "--api-key", "on"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--modl x", "unknown option --modl: did you mean --model?"),
        ("--max-num-sequences=4", "unknown option --max-num-sequences: did you mean --max-num-seqs"),
        ("--max-num-seqs many", "--max-num-seqs must be a whole number, got 'many'"),
        ("--tp x", "--tp must be a whole number, got 'x'"),
        ("-tp=x", "-tp must be a whole number, got 'x'"),
        ("--tensor_parallel_size x", "--tensor-parallel-size must be a whole number, got 'x'"),
        ("--num-gpu-blocks-override 0", "--num-gpu-blocks-override must be in [2, "),
        ("--nnodes 2", "--nnodes 2 is above --tensor-parallel-size 1: "),
        ("--hang-timeout-s soon", "--hang-timeout-s must be a number, got 'soon'"),
        ("--dtype int4", "--dtype must be one of auto, float32, bfloat16, float16, got 'int4'"),
        ("--block-size 0", "--block-size must be in [1, 1024], got 0"),
        ("--http 8000 demo twice", "unexpected argument 'twice'"),
        ("serve --api-key k1 a/b", "--api-key takes a/b as one of its values: name the model first"),
        ("serve a/b --model c/d", "a/b and --model c/d are two models: give one of them"),
        (
            "serve --model a/b --chat-template c d/e",
            "d/e and --model a/b are two models, or d/e is a second value of --chat-template, which takes one",
        ),
        ('--hf-overrides {"a":{"b":1,"b":2}}', "--hf-overrides must have each key once, b is there twice"),
        ("--hf-overrides.a 1 --hf-overrides.a 2", "--hf-overrides.a is given more than once: give it once"),
        ("chat --tempreature 1", "unknown option --tempreature: did you mean --temperature?"),
        ("--http 9 --port 8", "--port 8 is not that of --http 9: give one of them"),
        ("--http 127.0.0.1:9 --host 0.0.0.0", "--host 0.0.0.0 is not that of --http 127.0.0.1:9: give one of them"),
        ("--port 70000", "--port must be in [0, 65535], got 70000"),
        ("--max-model-len 1.5K", "--max-model-len must be a whole number, got '1.5K'"),
        ("--hf-overrides {", "--hf-overrides must be a JSON object, got '{': "),
        ("--hf-overrides [1]", "--hf-overrides must be a JSON object, got [1]"),
        ("--kv-transfer-config.kv_connector X", '--kv-transfer-config {"kv_connector": "X"} is not served: KV tiers'),
        ("--structured-outputs-config.disable_any_whitespace true", "--structured-outputs-config {"),
        ("--hf-overrides {} --hf-overrides.a 1", "--hf-overrides and --hf-overrides.a are both given: give one"),
        ("--hf-overrides.a 1 --hf-overrides.a.b 2", "--hf-overrides.a.b and a part of its name are both given"),
        ("--max-modl-len.a 1", "unknown option --max-modl-len.a: did you mean --max-model-len"),
        ("--max-model-len 0", "--max-model-len must be in [1, "),
        ("serve demo --block-size 0", "--block-size must be in [1, 1024], got 0"),
        ("demo --model other", "demo and --model other are two models: give one of them"),
        ("demo --pipeline-parallel-size 2", "--pipeline-parallel-size 2 is not served: there are no pipeline stages"),
    ],
)
def test_a_usage_error_is_one_line_with_the_mend(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = launch.main(line.split())
    except SystemExit as ended:
        code = ended.code
    (line,) = capsys.readouterr().err.splitlines()
    assert code == 2 and re.fullmatch(rf"engine-launch( chat)?: {re.escape(message)}.*", line), line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": "x"}, "LLM(): max_num_seqs must be a whole number, got 'x'"),
        ({"block_size": 0}, "LLM(): block_size must be in [1, 1024], got 0"),
        ({"enforce_eager": 1}, "LLM(): enforce_eager must be true or false, got 1"),
        ({"device": "gpu"}, "LLM(): device must be one of auto, cpu, cuda, got 'gpu'"),
    ],
)
def test_errors_of_keywords_have_the_words_of_flags(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_keywords("LLM", None, options)
    assert str(caught.value) == message
    assert config_from_keywords("LLM", None, {"http": 8000, "hang_timeout_s": 3}).http == "8000"


def test_an_error_of_the_start_names_the_options_as_they_were_given(file: Path) -> None:
    message = "--max-model-len 9 is above 8, --max-model-len-x and a--max-model-len are others: lower --block-size"
    with pytest.raises(ConfigError) as caught, keyword_errors("LLM", None, {"max_model_len": 9, "tp": 2}):
        raise ConfigError(message)
    assert str(caught.value) == message.replace("--max-model-len 9", "LLM(): max_model_len 9")
    file.write_text("# mine\nnum-gpu-blocks-override: 5\n")
    options = read_config_file(file)
    assert as_given("--num-kv-blocks 5 is too few", options) == f"{file} line 2: num-gpu-blocks-override 5 is too few"
    assert as_given("nothing to see", options) == "nothing to see"


# ── vLLM's spellings ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--dtype half", {"dtype": "float16"}),
        ("--dtype float", {"dtype": "float32"}),
        ("--max-model-len 8k", {"max_model_len": 8000}),
        ("--max-model-len 2K", {"max_model_len": 2048}),
        ("--max-model-len 25.6k", {"max_model_len": 25600}),
        ("--max-model-len 1m", {"max_model_len": 1_000_000}),
        ("--max-model-len auto", {"max_model_len": -1}),
        ("--max-model-len -1", {"max_model_len": -1}),
        ("--max-num-batched-tokens 48", {"max_num_batched_tokens": 48, "max_num_seqs": 48}),
        ("--max-num-batched-tokens 4096", {"max_num_batched_tokens": 4096}),
        (
            "--hf-overrides.rope_theta 7 --hf_overrides.a.b_c=[1]",
            {"hf_overrides": {"rope_theta": 7, "a": {"b_c": [1]}}},
        ),
        ("--structured-outputs-config.backend xgrammar --structured-outputs-config.disable_fallback", {}),
        ("--compilation-config.mode 3 --tp 2 -O.level 3 -cc.pass_config.fuse=true", {"tensor_parallel_size": 2}),
        ("--kv-cache-memory-bytes 3G", {"kv_cache_memory_bytes": 3 << 30}),
        ("--kv-host-bytes 32G --kv-disk-bytes 1.5t", {"kv_host_bytes": 32 << 30, "kv_disk_bytes": 15 * 10**11}),
        ("--kv-host-bytes 70000 --kv-disk-bytes 200M", {"kv_host_bytes": 70000, "kv_disk_bytes": 200 << 20}),
        ("-tp 2", {"tensor_parallel_size": 2}),
        ("--tensor_parallel_size=2", {"tensor_parallel_size": 2}),
        ("--served-model-name a b", {"served_model_name": ["a", "b"]}),
        ("--api-key k1 k2", {"api_key": ["k1", "k2"]}),
        ("--api-key k1 --api-key k2 k3", {"api_key": ["k1", "k2", "k3"]}),
        ('--allowed-origins ["http://a","http://b"]', {"cors_origins": "http://a,http://b"}),
        ('--hf-overrides {"rope_theta":1e6}', {"hf_overrides": {"rope_theta": 1e6}}),
        ("--enforce-eager --no-enable-prefix-caching", {"enforce_eager": True, "enable_prefix_caching": False}),
        ("--tool-call-parser llama3_json", {"tool_call_parser": "llama"}),
        ("--tool-call-parser deepseek_v31", {"tool_call_parser": "auto"}),
        ("--reasoning-parser deepseek_r1", {"reasoning_parser": "deepseek_r1"}),
        ("--reasoning-parser qwen3", {"reasoning_parser": "think"}),
        ("--max-logprobs -1", {"max_logprobs": -1}),
        ("--num-gpu-blocks-override 9", {"num_kv_blocks": 9}),
    ],
)
def test_vllms_spelling_of_an_option_has_vllms_meaning(line: str, expected: dict[str, Any]) -> None:
    assert served(line) == EngineConfig(**expected)


def test_of_a_repeated_flag_with_one_value_the_last_counts_and_a_line_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = "--http 0.0.0.0:8000 -tp 1 --served-model-name a --http 9000 --served-model-name b --tensor-parallel-size=2"
    config = served(line)
    assert (config.http, config.tensor_parallel_size, config.served_model_name) == ("9000", 2, ["a", "b"])
    assert capsys.readouterr().err.splitlines() == [
        f"engine-launch: {flag} is given more than once: the last one counts" for flag in ("--http", "--tp")
    ]


def test_file_and_keywords_accept_the_same_spellings(file: Path) -> None:
    file.write_text(
        "max-model-len: 8k\ndtype: half\nserved-model-name: [1.10, b]\nhf-overrides: {rope_theta: 7}\n"
        "num-gpu-blocks-override: 9\n"
    )
    expected = EngineConfig(
        max_model_len=8000,
        dtype="float16",
        served_model_name=["1.10", "b"],
        hf_overrides={"rope_theta": 7},
        num_kv_blocks=9,
    )
    assert parse("--config", str(file)) == expected
    options = {"max_model_len": "8k", "dtype": "half", "served_model_name": ("1.10", "b"), "log_level": "info"}
    more: dict[str, object] = {"hf_overrides": {"rope_theta": 7}, "num_gpu_blocks_override": 9}
    assert config_from_keywords("LLM", None, options | more) == expected
    assert config_from_keywords("LLM", None, {"served_model_name": "a"}).served_model_name == ["a"]
    file.write_text("num-kv-blocks: 9\nnum-gpu-blocks-override: 8\n")
    with pytest.raises(ConfigError, match="num-kv-blocks and num-gpu-blocks-override are the same option"):
        parse("--config", str(file))


def test_an_old_switch_sets_the_option_that_has_its_place(file: Path) -> None:
    file.write_text("int8-activations: true\n")
    by_keyword = config_from_keywords("LLM", None, {"int8_activations": True, "log_level": "info"})
    for config in (parse("--int8-activations"), parse("--config", str(file)), by_keyword):
        assert config == EngineConfig(quantized_products="integers")
    assert parse("--no-int8-activations").quantized_products == "floats"
    file.write_text("int8-activations: 3\n")
    with pytest.raises(ConfigError, match=r"line 1: int8-activations must be true or false, got 3$"):
        parse("--config", str(file))
    with pytest.raises(ConfigError, match="--quantized-products and --int8-activations are the same option: give one"):
        parse("--quantized-products", "floats", "--int8-activations")


@pytest.mark.parametrize(
    ("options", "address"),
    [
        ({}, None),
        ({"port": 9}, ":9"),
        ({"port": 0}, ":0"),
        ({"host": "0.0.0.0"}, "0.0.0.0:8000"),
        ({"host": "::", "port": 9}, "[::]:9"),
        ({"http": "9"}, "9"),
        ({"http": "9", "host": "0.0.0.0"}, "0.0.0.0:9"),
        ({"http": "0.0.0.0:9", "port": 9, "host": "0.0.0.0"}, "0.0.0.0:9"),
        ({"http": "[::1]:9", "host": "::1"}, "[::1]:9"),
    ],
)
def test_host_and_port_set_the_http_address_alone_or_with_http(options: dict[str, Any], address: str) -> None:
    assert EngineConfig(**options).http_address == address


def test_serve_listens_on_port_8000_unless_an_option_names_an_address() -> None:
    lines = {"m": ":8000", "m --http 9": "9", "m --host 0.0.0.0": "0.0.0.0:8000", "m --uds /run/x.sock": None}
    assert {line: served(line, has_http=True).http_address for line in lines} == lines


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "words",
    [
        ["--hf-overrides", DEEP],
        ["--hf-overrides.a", DEEP],
        ["--speculation", DEEP],
        ["--kernel-config", DEEP],
        ["--kv-listen", "a\nb"],
        ["--cores", "x" * 100_000],
        ["--served-model-name", "\udcff"],
    ],
)
def test_values_of_any_form_are_used_or_refused_in_one_short_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        refusal = ""
        served(words)
    except (SystemExit, ConfigError) as error:
        refusal = str(error) + capsys.readouterr().err
    assert not refusal or words[0] in refusal
    assert len(refusal.splitlines()) <= 1
    assert len(refusal) < 3000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"hf_overrides: {DEEP[:500]}", "recursion"),
        ("seed: 1\nseed: 1\n", "lines 1 and 2 both give seed"),
        ("# " + "x" * (1 << 20), "more than 1048576 bytes"),
        ("hf_overrides: &a {x: *a}", "recursive"),
    ],
)
def test_a_file_of_any_form_is_refused_in_one_line(text: str, message: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_config_file(file)
    assert str(caught.value).count("engine.yaml") == 1


def test_aliases_in_a_file_are_visited_once(file: Path) -> None:
    levels = ["a0: &a0 [1]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 200))]
    file.write_text(f"hf_overrides: {{{', '.join(levels)}}}")
    assert list(read_config_file(file)) == ["hf_overrides"]


# ── hostile values ───────────────────────────────────────────────────────────────────────────────────────────────────

NAMES = [name for name in EngineConfig.__struct_fields__ if name != "model"]
VALUE_NAMES = [value for value in VALUES if VALUES[value] is not REMOVED]


def read(change: Hostile) -> None:
    (name,) = change.path
    try:
        config_from_keywords("LLM", None, {str(name): VALUES[change.value]})
    except ValueError as error:
        raise type(error)(str(error).replace("-", "_")) from None


def test_a_hostile_keyword_is_refused_by_its_name() -> None:
    found = faults((Hostile((name,), value) for name in NAMES for value in VALUE_NAMES), read)
    assert not found, found
