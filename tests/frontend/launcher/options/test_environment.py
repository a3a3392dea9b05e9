"""A variable of the environment that is meant for a server is taken, or named; a key never leaves a server open."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import msgspec
import pytest

from tokenloom.frontend.launcher.options.environment import INSTEAD, KEY_VARIABLES, check_environment, with_key
from tokenloom.frontend.launcher.options.options import config_from_keywords, new_config
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.engine_config import EngineConfig

PAGE = Path(__file__).resolve().parents[4] / "docs/learn/coming_from_vllm.md"
HTTP = EngineConfig(http="8000")

# Of vllm/envs.py, besides those of INSTEAD: some that change security, answers or addresses, and some speed alone.
VLLM = ("VLLM_USE_V1", "VLLM_LOGGING_LEVEL", "VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_PORT")
OTHERS = ("SGLANG_ENABLE_JIT", "SGL_CACHE", "LLAMA_ARG_HOST", "LLAMA_CACHE", "OLLAMA_HOST", "TOKENLOOM_PROT")
OF_CLIENTS = (
    "OPENAI_API_KEY",
    "OPENAI_BASE_URL",
    "ANTHROPIC_API_KEY",
    "HF_TOKEN",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "PATH",
)


def key_of(**environment: str) -> list[str] | None:
    return new_config(with_key({}, environment)).api_key


@pytest.mark.parametrize("name", (*INSTEAD, *VLLM, *OTHERS))
def test_a_variable_that_is_not_read_is_named_in_one_line(name: str, caplog: pytest.LogCaptureFixture) -> None:
    check_environment(HTTP, {name: "1", "PATH": "/bin"})
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and re.fullmatch(
        rf"set in the environment, but not read: {name}( \(see --[a-z-]+.*\))?", record.getMessage()
    )


def test_variables_of_clients_and_those_that_kubernetes_sets_for_our_services_are_not_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_80_TCP", "PORT_80_TCP_ADDR", "PORT_80_TCP_PORT")
    services = {f"{server}_{name}": "10.0.0.7" for name in names for server in ("TOKENLOOM", "VLLM")}
    services |= {"TOKENLOOM_PORT": "tcp://10.0.0.7:80", "VLLM_API_PORT": "tcp://10.0.0.7:80"}
    check_environment(HTTP, services | dict.fromkeys(OF_CLIENTS, "1"))
    assert not caplog.records and key_of(**dict.fromkeys(OF_CLIENTS, "secret")) is None


@pytest.mark.parametrize("name", KEY_VARIABLES)
def test_the_key_of_another_server_is_taken_and_a_line_says_so(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert key_of(**{name: "abc"}) == ["abc"]
    check_environment(msgspec.structs.replace(HTTP, api_key=["abc"]), {name: "abc"})
    assert caplog.messages == [f"the API key is that of {name}"]


def test_of_two_keys_ours_counts_and_the_line_names_the_other(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    both = {"VLLM_API_KEY": "theirs", "TOKENLOOM_API_KEY": "ours", "LLAMA_API_KEY": "ours"}
    assert key_of(**both) == ["ours"]
    check_environment(msgspec.structs.replace(HTTP, api_key=["ours"]), both)
    assert caplog.messages == ["the API key is that of TOKENLOOM_API_KEY, not that of VLLM_API_KEY"]
    assert key_of(LLAMA_API_KEY="a,b") == ["a", "b"] and key_of(VLLM_API_KEY="a,b") == ["a,b"]
    assert key_of(VLLM_API_KEY="") is None
    with pytest.raises(ConfigError, match="TOKENLOOM_API_KEY must be at least 1 printable ASCII character"):
        key_of(TOKENLOOM_API_KEY="")


@pytest.mark.parametrize(
    "name",
    [
        *("TOKENLOOM_APIKEY", "TOKENLOOM_API_KEYS", "TOKENLOOM_KEY", "TOKENLOM_API_KEY", "TOKENLOOM_API_KYE"),
        *("TOKENLOOM_TOKEN", "LLAMA_ARG_API_KEY_FILE", "VLLM_APIKEY", "VLLM_AUTH"),
        "VLLM_API_KEY",  # api-key: null in the file
    ],
)
def test_a_key_that_is_not_read_leaves_no_server_open(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        ConfigError, match=f"^{name} is set, but it is not read, and HTTP would be served without a key"
    ):
        check_environment(HTTP, {name: "secret"})
    for safe in (msgspec.structs.replace(HTTP, api_key=["k"]), EngineConfig()):
        check_environment(safe, {name: "secret"})
    assert name == "VLLM_API_KEY" or [name in line for line in caplog.messages] == [True, True]
    assert "secret" not in caplog.text


def test_an_engine_of_a_program_has_the_key_of_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "abc")
    assert config_from_keywords("LLM", None, {"http": "0"}).api_key == ["abc"]
    assert config_from_keywords("LLM", None, {"http": "0", "api_key": "own"}).api_key == ["own"]


def test_the_page_lists_the_variables_with_an_option_in_their_place() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("\n## Environment\n")[2].partition("\n## ")[0]
    listed = dict(re.findall(r"^\| `(\w+)` \| `(--[^`]+)` \|$", section, re.MULTILINE))
    assert listed == INSTEAD
    assert all(name in section for name in KEY_VARIABLES)
    fields = {"--" + name.replace("_", "-") for name in EngineConfig.__struct_fields__}
    assert {re.split("[. ]", option)[0] for option in INSTEAD.values()} <= fields
