"""InfoEndpoints: the engine's configuration in vLLM's groups, and the tokenizer's configuration.

Secrets are left out: keys, tokens, and URLs that may contain them.
"""

from __future__ import annotations

import os
import platform
from functools import cached_property
from pathlib import Path

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from ....ipc.codec import JsonObject
from ....ipc.errors import hide_credentials
from ....ipc.spec.config.engine_config import SECRET_OPTIONS
from ....ipc.spec.config.engine_spec import EngineSpec
from ....ipc.version import tokenloom_version
from ...forms.openai.errors import HttpError, json_response
from ..answer_forms.shown_form import form_object
from ..requests.frontend import Frontend
from .endpoint import Endpoint

GROUPS = {  # vLLM's groups, and our options in each
    "model_config": "model tokenizer revision trust_remote_code quantization seed enforce_eager max_logprobs "
    "served_model_name dtype max_model_len",
    "cache_config": "block_size gpu_memory_utilization enable_prefix_caching cache_dtype num_gpu_blocks",
    "scheduler_config": "max_num_seqs long_prefill_token_threshold max_num_batched_tokens policy",
    "lora_config": "enable_lora max_loras max_lora_rank max_cpu_loras lora_target_modules lora_modules",
    "parallel_config": "tensor_parallel_size pipeline_parallel_size data_parallel_size",
}
PATH_FIELDS = ("vocab_file", "merges_file")  # fields of tokenizer_config.json that show local paths


class InfoEndpoints:
    """Handlers for the configuration; /tokenizer_info exists only if enabled. Both need the API key if one is set."""

    def __init__(self, frontend: Frontend, spec: EngineSpec, chat_template: str | None) -> None:
        self._frontend, self._spec, self._chat_template = frontend, spec, chat_template

    def endpoints(self) -> list[Endpoint]:
        found = [Endpoint("/server_info", self.server_info, "The engine's configuration")]
        if self._spec.config.enable_tokenizer_info_endpoint:
            found.append(Endpoint("/tokenizer_info", self.tokenizer_info, "The tokenizer's configuration"))
        return found

    async def server_info(self, request: Request) -> Response:
        """Return a JSON object with configuration, system and version, as vLLM does, and the form of answers. The
        configuration is text, or objects with `?config_format=json`. HttpError 400 for any other format."""
        config_format = request.query_params.get("config_format", "text")
        if config_format not in ("text", "json"):
            message = f"config_format {config_format!r:.100} is neither text nor json"
            raise HttpError(400, message, param="config_format")
        groups = self._groups()
        text = ", ".join(f"{name}={value!r}" for group in groups.values() for name, value in group.items())
        system = {"os": platform.platform(), "python": platform.python_version(), "cpus": os.cpu_count()}
        return json_response(
            {
                "vllm_config": groups if config_format == "json" else text,
                "vllm_env": {},
                "system_env": {**system, "device": self._spec.device, "kernels": self._frontend.metrics.kernels},
                "version": tokenloom_version(),
                "answer_form": form_object(await self._frontend.forms.choice()),
            }
        )

    def _groups(self) -> dict[str, JsonObject]:
        """Return all options except secrets, in vLLM's groups, with the remaining ones in engine_config. Model,
        tokenizer, device, numbers and lengths have the values that the engine uses; other automatic options, such as
        the parsers, stay "auto"."""
        spec, metrics = self._spec, self._frontend.metrics
        options = {
            name: hide_credentials(value) if isinstance(value, str) else value
            for name, value in msgspec.to_builtins(spec.config).items()
            if name not in SECRET_OPTIONS
        }
        options |= {"model": spec.model_folder, "tokenizer": spec.tokenizer_folder, "dtype": spec.dtype}
        options |= {"served_model_name": spec.served_model_name, "max_model_len": self._frontend.inputs.max_model_len}
        options |= {"max_num_batched_tokens": spec.max_num_batched_tokens, "policy": options.pop("scheduling_policy")}
        options |= {"cache_dtype": options.pop("kv_cache_dtype"), "num_gpu_blocks": metrics.num_kv_blocks}
        options |= {"pipeline_parallel_size": 1, "device": spec.device}
        options |= {"quantized_products": ("floats", "integers")[spec.has_integer_products]}
        groups = {group: {name: options.pop(name) for name in names.split()} for group, names in GROUPS.items()}
        return {**groups, "engine_config": options}

    async def tokenizer_info(self, request: Request) -> Response:
        return json_response(await run_in_threadpool(lambda: self._tokenizer_info))

    @cached_property
    def _tokenizer_info(self) -> JsonObject:
        """tokenizer_config.json without paths, with special tokens as text, and with the chat template in use."""
        path = Path(self._spec.tokenizer_folder, "tokenizer_config.json")
        config: JsonObject = msgspec.json.decode(path.read_bytes()) if path.is_file() else {}
        info = {name: _plain(value) for name, value in config.items() if name not in PATH_FIELDS}
        info.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        return info if self._chat_template is None else info | {"chat_template": self._chat_template}


def _plain(value: object) -> object:
    """Return the value with each token that is an object replaced by its text, at any depth."""
    if isinstance(value, dict):
        return value["content"] if "content" in value else {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value
