"""Environment variables: those that give the API keys, and those that are set but have no effect here.

A container or unit file made for vLLM or llama.cpp may set its key and its settings as variables. Such a key is used.
Other variables of such servers are not read: one log line names them. If one of them may hold a key, an engine that
would serve HTTP without a key does not start.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from typing import NamedTuple

from ....ipc.errors import ConfigError
from ....ipc.spec.config.engine_config import API_KEY_VARIABLE, EngineConfig
from .given import Given

logger = logging.getLogger("tokenloom.options")

KEY_VARIABLES = (API_KEY_VARIABLE, "VLLM_API_KEY", "LLAMA_API_KEY", "LLAMA_ARG_API_KEY")  # the first one set is used
INSTEAD = {  # variable of another server: the option that has its effect here
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "--hf-overrides.max_position_embeddings N",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "--allow-runtime-lora",
    "VLLM_AUDIO_FETCH_TIMEOUT": "--media-fetch-timeout-s",
    "VLLM_BATCH_INVARIANT": "--deterministic",
    "VLLM_CPU_KVCACHE_SPACE": "--kv-cache-memory-bytes",
    "VLLM_CPU_OMP_THREADS_BIND": "--num-threads",
    "VLLM_HOST_IP": "--listen-hosts",
    "VLLM_IMAGE_FETCH_TIMEOUT": "--media-fetch-timeout-s",
    "VLLM_LOGGING_LEVEL": "--log-level",
    "VLLM_LORA_RESOLVER_CACHE_DIR": "--adapter-folder",
    "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB": "--max-media-bytes",
    "VLLM_PORT": "--port",
    "VLLM_TORCH_PROFILER_DIR": "--profile-dir",
    "LLAMA_ARG_ALIAS": "--served-model-name",
    "LLAMA_ARG_CTX_SIZE": "--max-model-len",
    "LLAMA_ARG_HF_REPO": "--model",
    "LLAMA_ARG_HOST": "--host",
    "LLAMA_ARG_MODEL": "--model",
    "LLAMA_ARG_N_PARALLEL": "--max-num-seqs",
    "LLAMA_ARG_PORT": "--port",
    "LLAMA_ARG_THREADS": "--num-threads",
    "OLLAMA_HOST": "--http",
    "OLLAMA_ORIGINS": "--cors-origins",
}
OURS = frozenset(  # set by our own processes and tests, in addition to the key
    f"TOKENLOOM_{name}" for name in ("CONFIG", "SPEC", "HOSTS_KEYS", "FAULTS", "PROPOSER", "FAKE_CUDA")
)
_PREFIXES = re.compile("TOKENLOOM_|VLLM_|LLAMA_|SGLANG_|SGL_|OLLAMA_|LMDEPLOY_")
_SECRET = re.compile(r"(TOKENLOOM|VLLM|LLAMA)_\w*((?<![A-Z])(API_?)?KEYS?|AUTH|PASSWORD|SECRET|TOKEN)(?![A-Z])")
_SERVICE = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")  # Kubernetes' own
CLOSE = 0.85  # least difflib ratio of a misspelled API_KEY_VARIABLE


class KeyVariable(NamedTuple):
    """The environment variable that gives the API keys, and these keys."""

    name: str
    keys: list[str]


def key_of_environment(environment: Mapping[str, str]) -> KeyVariable | None:
    """Return the first of KEY_VARIABLES that is set; None if none is. An empty variable of another server counts as not
    set, as it does there; llama.cpp separates several keys by commas."""
    for name in KEY_VARIABLES:
        value = environment.get(name)
        if value or (value is not None and name == API_KEY_VARIABLE):
            return KeyVariable(name, value.split(",") if name.startswith("LLAMA_") else [value])
    return None


def with_key(options: dict[str, Given], environment: Mapping[str, str]) -> dict[str, Given]:
    """Return the options, with the API keys of the environment added if the options give none."""
    found = key_of_environment(environment)
    return options if found is None else {"api_key": Given(found.keys, found.name)} | options


def check_environment(config: EngineConfig, environment: Mapping[str, str]) -> None:
    """Log which variable the key comes from, and, in one line, the variables that are set but not read. ConfigError if
    one of these may hold a key and the engine would serve HTTP without one."""
    found = key_of_environment(environment)
    if found is not None and found.keys == config.api_key:
        others = [name for name in KEY_VARIABLES if environment.get(name) not in (None, "", environment[found.name])]
        but = f", not that of {', '.join(others)}" if others else ""
        logger.info("the API key is that of %s%s", found.name, but)
    unread = sorted(name for name, value in environment.items() if _is_unread(name, value))
    if not config.has_keys:
        unread = [name for name in KEY_VARIABLES if environment.get(name)] + unread
    secret = next((name for name in unread if _is_misspelled(name) or _SECRET.match(name)), None)
    if secret is not None and config.http_address is not None and not config.has_keys:
        raise ConfigError(
            f"{secret} is set, but it is not read, and HTTP would be served without a key: put the key into "
            f"{API_KEY_VARIABLE}, or unset {secret}"
        )
    if unread:
        shown = (f"{name} (see {INSTEAD[name]})" if name in INSTEAD else name for name in unread)
        logger.warning("set in the environment, but not read: %s", ", ".join(shown))


def _is_unread(name: str, value: str) -> bool:
    """Return whether a variable is meant for this engine or for another server, but has no effect here."""
    if name in KEY_VARIABLES or name in OURS or _SERVICE.search(name) or value.startswith("tcp://"):
        return False
    return _PREFIXES.match(name) is not None or _is_misspelled(name)


def _is_misspelled(name: str) -> bool:
    return bool(difflib.get_close_matches(name, [API_KEY_VARIABLE], 1, CLOSE))
