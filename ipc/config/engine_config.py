"""EngineConfig: every option of the engine, once.

The command line, the YAML file and the keywords of LLM and AsyncLLM are all made from the fields of this struct;
their names are those that vLLM's users know. Frozen; what depends on the model or the machine is settled by
`frontend/supervisor/resolve.py` and never written back.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..errors import ConfigError
from ..process.log import LogLevel

API_KEY_VARIABLE = "TOKENLOOM_API_KEY"  # stands for --api-key, which every user of the machine sees in `ps`
CONFIG_VARIABLE = "TOKENLOOM_CONFIG"  # in which a program hands its configuration to the engine that it starts


def _help(text: str) -> Meta:
    return Meta(description=text)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of one engine. Sizes are in tokens unless a name says otherwise."""

    model: Annotated[str | None, _help("folder or hub id of the checkpoint; none, demo: the demo model")] = None
    tokenizer: Annotated[str | None, _help("folder or hub id of the tokenizer, if not the model's")] = None
    revision: Annotated[str | None, _help("branch, tag or commit of a hub id")] = None
    trust_remote_code: Annotated[bool, _help("let a hub tokenizer run its own Python code")] = False
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], _help("auto: the checkpoint's")] = "auto"
    quantization: Annotated[
        Literal["none", "int8", "fp8"], _help("round the layers' matrices to 8 bits while they are loaded")
    ] = "none"
    device: Annotated[Literal["auto", "cpu", "cuda"], _help("auto: cuda where there is one")] = "auto"
    tensor_parallel_size: Annotated[int, _help("worker processes that share each layer")] = 1
    max_model_len: Annotated[int | None, _help("longest prompt + answer; none: the model's")] = None
    max_num_seqs: Annotated[int, _help("requests that run at once")] = 256
    max_num_batched_tokens: Annotated[
        int | None, _help("token budget of one step; none: 2048, on a CPU 512, at least --max-num-seqs")
    ] = None
    long_prefill_token_threshold: Annotated[
        int, _help("most tokens of one prompt in a step while others run or wait; 0: a quarter of the budget")
    ] = 0
    block_size: Annotated[int, _help("tokens in a KV block")] = 16
    num_kv_blocks: Annotated[int | None, _help("size of the KV pool in blocks; none: measured")] = None
    kv_cache_memory_bytes: Annotated[int | None, _help("size of the KV pool in bytes; none: measured")] = None
    gpu_memory_utilization: Annotated[float, _help("share of the device's memory that a worker may use")] = 0.9
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"], _help("numbers of the KV cache; auto: the model's; fp8: e4m3 with scales")
    ] = "auto"
    enable_prefix_caching: Annotated[bool, _help("share KV blocks of equal prefixes")] = True
    scheduling_policy: Annotated[Literal["fcfs", "priority"], _help("who runs first")] = "fcfs"
    steps_in_flight: Annotated[int, _help("steps sent ahead of their results: 1 or 2")] = 2
    max_waiting_requests: Annotated[
        int, _help("answers that may wait, a quarter of them to one request; beyond: Overloaded")
    ] = 65536
    max_waiting_tokens: Annotated[
        int, _help("prompt tokens that may wait, counted for each answer, a quarter of them of one request")
    ] = 1 << 26
    max_logprobs: Annotated[int, _help("most tokens that a request may ask logprobs of; -1: all")] = 20
    allowed_logits_processors: Annotated[
        str | None, _help("import paths module:function that requests may name, separated by commas; none: no others")
    ] = None
    deterministic: Annotated[bool, _help("the same bits for a request in any batch, chunk or restart; slower")] = False
    enforce_eager: Annotated[bool, _help("no CUDA graphs")] = False
    enforce_reference: Annotated[bool, _help("plain torch instead of our own kernels")] = False
    num_threads: Annotated[int | None, _help("CPU threads of a worker; none: cores / local ranks")] = None
    seed: Annotated[int, _help("seeds the seeds of unseeded requests")] = 0
    chat_template: Annotated[str | None, _help("file with a Jinja chat template, if not the model's")] = None
    served_model_name: Annotated[str | None, _help("the name that clients see; none: --model as given")] = None
    listen: Annotated[str | None, _help("ipc:// or tcp:// address for clients; none: in the run directory")] = None
    http: Annotated[str | None, _help("[HOST:]PORT of the HTTP server with OpenAI's API; none: no HTTP")] = None
    uds: Annotated[str | None, _help("path of a unix socket on which HTTP is served too; none: no such socket")] = None
    uds_mode: Annotated[str, _help("permissions of --uds, in octal")] = "600"
    root_path: Annotated[str, _help("path under which a proxy shows the HTTP server, such as /llm")] = ""
    ssl_certfile: Annotated[str | None, _help("PEM file with the certificate chain of --http; none: no TLS")] = None
    ssl_keyfile: Annotated[str | None, _help("PEM file with its private key; none: in --ssl-certfile")] = None
    ssl_ca_certs: Annotated[str | None, _help("PEM file with the CAs of the clients' certificates")] = None
    ssl_cert_reqs: Annotated[int, _help("client certificates: 0: none, 1: checked if given, 2: required")] = 0
    http_timeout_s: Annotated[
        float, _help("HTTP requests that have not come whole, and of which nothing came for so long, are refused")
    ] = 20.0
    access_log: Annotated[
        Literal["off", "errors", "all"], _help("a line for each HTTP request at its end; errors: if it failed")
    ] = "errors"
    api_key: Annotated[
        str | None,
        _help(f"what HTTP requests must carry as a Bearer token; none: as {API_KEY_VARIABLE} says, or nothing"),
    ] = None
    cors_origins: Annotated[str | None, _help("web origins that may call, with commas between; *: any")] = None
    max_body_bytes: Annotated[int, _help("largest HTTP body that is read")] = 32 << 20
    strict_fields: Annotated[
        bool, _help("refuse unknown fields of HTTP bodies instead of ignoring them with a warning header")
    ] = False
    metrics_names: Annotated[Literal["tokenloom", "vllm"], _help("prefix of the metrics")] = "tokenloom"
    enable_tokenizer_info_endpoint: Annotated[bool, _help("serve /tokenizer_info over HTTP")] = False
    otlp_endpoint: Annotated[
        str | None, _help("URL of an OpenTelemetry collector for spans; none: as OTEL_EXPORTER_OTLP_ENDPOINT says")
    ] = None
    tool_call_parser: Annotated[
        Literal["auto", "hermes", "llama", "mistral", "pythonic", "qwen3_coder", "openai", "none"],
        _help("how answers write tool calls; auto: as the template shows"),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "think", "mistral", "seed_oss", "granite", "gpt_oss", "none"],
        _help("how answers mark thoughts, which are told apart; auto: as the template shows"),
    ] = "auto"
    key_file: Annotated[str | None, _help("keys made by `engine-launch keygen`: who may use a tcp:// address")] = None
    insecure: Annotated[bool, _help("let anyone who can reach a tcp:// address use the engine")] = False
    default_timeout_s: Annotated[float | None, _help("timeout_s of requests that name none")] = None
    max_timeout_s: Annotated[float | None, _help("longest timeout_s that a request may ask for")] = None
    step_timeout_s: Annotated[
        float | None, _help("a step without a result for so long proves a hang; none: learned from the steps before")
    ] = None
    hang_timeout_s: Annotated[float, _help("core or frontend without a sign of life for so long are replaced")] = 6.0
    grammar_timeout_s: Annotated[float, _help("longest compilation of a structured output's grammar")] = 2.0
    start_timeout_s: Annotated[float, _help("longest start, weights included, and longest reload")] = 600.0
    drain_timeout_s: Annotated[float, _help("how long running requests may finish after SIGTERM")] = 30.0
    disable_log_stats: Annotated[bool, _help("no stats line every 10 s")] = False
    log_level: Annotated[LogLevel, _help("least level that is logged")] = "info"

    @property
    def max_request_answers(self) -> int:
        """That one request may ask for, of all its prompts together: a quarter of the queue."""
        return max(self.max_waiting_requests // 4, 1)

    def __post_init__(self) -> None:
        for name, low, high in _INT_RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{_flag(name)} must be in [{low}, {high}], got {value}")
        if not 0 < self.grammar_timeout_s <= 600:
            raise ConfigError(f"--grammar-timeout-s must be in (0, 600], got {self.grammar_timeout_s}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(f"--gpu-memory-utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below --max-num-seqs {self.max_num_seqs}: "
                "a step could not hold one token of each running request; raise the first or lower the second"
            )
        for name in _TIMEOUTS:
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1e9:
                raise ConfigError(f"{_flag(name)} must be in (0, 1e9] seconds, got {value}")
        if not 0 <= self.drain_timeout_s <= 1e9:
            raise ConfigError(f"--drain-timeout-s must be in [0, 1e9] seconds, got {self.drain_timeout_s}")
        default_s, max_s = self.default_timeout_s, self.max_timeout_s
        if default_s is not None and max_s is not None and default_s > max_s:
            raise ConfigError(
                f"--default-timeout-s {self.default_timeout_s} is above --max-timeout-s {self.max_timeout_s}: lower it"
            )
        if self.listen is not None:
            _check_address(self.listen)
            if self.listen.startswith("tcp://") and self.key_file is None and not self.insecure:
                raise ConfigError(
                    f"--listen {self.listen} would admit anyone: give --key-file (made by `engine-launch keygen "
                    "FILE`), or say --insecure"
                )
        if self.http is not None:
            http_endpoint(self.http)
        self._check_http()
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError(f"--api-key or {API_KEY_VARIABLE} must be at least 1 printable ASCII character")

    def _check_http(self) -> None:
        """What belongs to the HTTP server."""
        if not re.fullmatch("[0-7]{3,4}", self.uds_mode):
            raise ConfigError(f"--uds-mode {self.uds_mode} must be 3 or 4 octal digits, such as 660")
        if not re.fullmatch(r"(/[\w.~-]+)*", self.root_path, re.ASCII):
            raise ConfigError(f"--root-path {self.root_path} must begin with / and not end with it, such as /llm")
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_cert_reqs):
            raise ConfigError("--ssl-keyfile, --ssl-ca-certs and --ssl-cert-reqs need --ssl-certfile")
        if self.ssl_certfile is not None and self.http is None:
            raise ConfigError("--ssl-certfile is for --http, which is not given: give both, or neither")
        if self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(f"--ssl-cert-reqs {self.ssl_cert_reqs} needs --ssl-ca-certs, which CAs to trust")


_TIMEOUTS = (
    *("default_timeout_s", "max_timeout_s", "step_timeout_s", "hang_timeout_s", "start_timeout_s"),
    "http_timeout_s",
)
_INT_RANGES = (
    ("tensor_parallel_size", 1, 64),
    ("max_model_len", 1, 1 << 24),
    ("max_num_seqs", 1, 16384),
    ("max_body_bytes", 1, 1 << 30),
    ("ssl_cert_reqs", 0, 2),
    ("max_num_batched_tokens", 1, 1 << 20),
    ("long_prefill_token_threshold", 0, 1 << 20),
    ("block_size", 1, 1024),
    ("num_kv_blocks", 2, 2**31 - 1),
    ("kv_cache_memory_bytes", 1, 1 << 50),
    ("steps_in_flight", 1, 2),
    ("max_waiting_requests", 1, 1 << 30),
    ("max_waiting_tokens", 1, 1 << 40),
    ("num_threads", 1, 4096),
    ("max_logprobs", -1, 1 << 20),
    ("seed", -(2**63), 2**63 - 1),
)


def _check_address(address: str) -> None:
    """ipc://PATH or tcp://HOST:PORT; ZeroMQ itself would take any port modulo 65536."""
    if address.startswith("tcp://"):
        port = address.rpartition(":")[2]
        if port != "*" and not (port.isdecimal() and int(port) <= 65535):
            raise ConfigError(f"--listen {address}: the port must be in [0, 65535] (0: any free one), got {port!r}")
    elif not address.startswith("ipc:///"):
        raise ConfigError(f"--listen {address} must be ipc:///PATH or tcp://HOST:PORT")


def http_endpoint(address: str) -> tuple[str, int]:
    """(host, port) of `[HOST:]PORT`; without a host, this machine only. An IPv6 host stands in brackets."""
    host, _, port = address.rpartition(":")
    if not (port.isdecimal() and int(port) <= 65535):
        raise ConfigError(f"--http {address} must be [HOST:]PORT with a port in [0, 65535] (0: any free one)")
    return host.strip("[]") or "127.0.0.1", int(port)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
