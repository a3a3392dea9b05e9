"""Aliases of options and of their values, mostly vLLM's spellings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....ipc.spec.config.option_ranges import AUTO_LENGTH

NAMES = {  # alias: option
    "tp": "tensor_parallel_size",
    "dp": "data_parallel_size",
    "frontends": "api_server_count",
    "asc": "api_server_count",
    "nnodes": "hosts",
    "n": "hosts",
    "speculative_config": "speculation",
    "sc": "speculation",
    "speculative_model": "draft_model",
    "spec_model": "draft_model",
    "model_draft": "draft_model",
    "spec_tokens": "num_speculative_tokens",
    "draft_max": "num_speculative_tokens",
    "address": "listen",
    "sse_keep_alive_interval": "sse_keep_alive_s",
    "q": "quantization",
    "mm": "mmproj",
    "num_gpu_blocks_override": "num_kv_blocks",
    "max_num_queued_reqs": "max_waiting_requests",
    "max_num_queued_tokens": "max_waiting_tokens",
    "allowed_origins": "cors_origins",
    "otlp_traces_endpoint": "otlp_endpoint",
    "shutdown_timeout": "drain_timeout_s",
}

_CALLS_OF_FAMILIES = (  # parsers of one family's calls: the form is learned from such a model's template
    *("apertus", "beam", "cohere_command3", "cohere_command4", "deepseek_v31", "deepseek_v32", "deepseek_v4"),
    *("deepseek_v41", "dots", "ernie45", "functiongemma", "gemma4", "gigachat3", "glm45", "glm47"),
    *("granite-20b-fc", "granite4", "hf", "hunyuan_a13b", "hy_v3", "hy_v4", "inkling", "internlm", "jamba"),
    *("k2_horizon", "kimi_k2", "kimi_k3", "ling3", "longcat", "mimo", "minicpm5", "minimax_m2", "minimax_m3"),
    *("muse", "muse_glimmer", "musespark1x", "phi4_mini_json", "plamo3", "poolside_v1", "seed_oss", "step3"),
    *("step3p5", "step5", "xlam"),
)
_THOUGHTS_OF_FAMILIES = (
    *("beam", "cohere_command3", "cohere_command4", "deepseek_v3", "deepseek_v4", "deepseek_v41", "ernie45"),
    *("gemma4", "granite_thinking_parser", "hf", "hunyuan_a13b", "hy_v3", "hy_v4", "inkling", "k2_horizon"),
    *("kimi_k3", "ling3", "minicpmv", "minimax_m2_append_think", "minimax_m3", "muse", "muse_glimmer", "musespark1x"),
    *("plamo3", "poolside_v1", "step3", "step3p5", "step5"),
)
TOOL_PARSERS = {  # alias of --tool-call-parser: parser
    "llama3_json": "llama",
    "llama4_json": "llama",
    "qwen3_json": "hermes",
    "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
    **dict.fromkeys(_CALLS_OF_FAMILIES, "auto"),
}
_THINK = ("glm45", "glm47", "holo2", "kimi_k2", "mimo", "minimax_m2", "nemotron_v3", "olmo3", "qwen3")
REASONING_PARSERS = dict.fromkeys(_THINK, "think") | dict.fromkeys(_THOUGHTS_OF_FAMILIES, "auto")  # as TOOL_PARSERS
VALUES: dict[str, Mapping[Any, Any]] = {  # option: {alias: value}
    "distributed_executor_backend": {"auto": "mp"},
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8", "fp8_per_token_head": "fp8", "int8_per_token_head": "int8"},
    "max_model_len": {"auto": AUTO_LENGTH},
    "model_impl": {"vllm": "native"},
    "quantization": {"awq_marlin": "awq", "gptq_marlin": "gptq", "fbgemm_fp8": "fp8"},
    "hf_token": {True: None},  # the key that the hub's own command has stored
    "tool_call_parser": TOOL_PARSERS,
    "reasoning_parser": {"": "auto", "openai_gptoss": "gpt_oss", **REASONING_PARSERS},
}
SWITCHES = {  # other boolean option: the option that has its place, and the value of true and of false
    "int8_activations": ("quantized_products", {True: "integers", False: "floats"}),
    "no_mmproj": ("mmproj", {True: "none", False: "auto"}),
}
COMMA_LISTS = ("cors_origins", "allowed_hosts", "allowed_logits_processors")  # comma-separated; lists are accepted, too
