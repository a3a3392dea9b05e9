"""EngineConfig: the single definition of the engine's options.

The command line, the YAML file and the keywords of LLM and AsyncLLM derive from the fields of this struct. An option
that vLLM has too keeps vLLM's name. The struct is frozen: `frontend/checkpoint/resolve.py` derives values that depend
on the model or the machine, and never writes them back.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ...errors import ConfigError
from ...messages.media import MediaKind
from ...process.log import LogLevel
from ...sockets.endpoints import DEFAULT_PORT, check_listen, check_ports, joined_http_address
from ...sockets.http_options import check_http
from .gateway_places import GatewayOptions, check_gateway
from .host_places import check_hosts
from .media_limits import media_limits
from .option_groups import GROUPS, InGroup, secret_options
from .option_ranges import AUTO, INT_RANGES, SHARES, TIMEOUTS
from .speculation import SpeculationOptions, speculation_options
from .tier_places import TIER_OPTIONS, check_events, check_places, check_replica_ports

API_KEY_VARIABLE = "TOKENLOOM_API_KEY"  # replaces --api-key, which every user of the machine can see in `ps`
CONFIG_VARIABLE = "TOKENLOOM_CONFIG"  # passes the configuration from a program to the engine that it starts


MAX_NUM_SEQS = 256  # default of max_num_seqs
_model, _answers, _devices, _memory, _tiers, _adapters, _media, _scheduling, _http, _clients, _limits, _logging = map(
    InGroup, GROUPS
)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of one engine. Sizes are in tokens unless a name says otherwise."""

    model: Annotated[
        str | None, _model("folder, GGUF file, or hub id, of GGUF files as owner/name:Q4_K_M; none, demo: the demo")
    ] = None
    tokenizer: Annotated[str | None, _model("folder or hub id of the tokenizer, if not the model's")] = None
    revision: Annotated[str | None, _model("branch, tag or commit of a hub id")] = None
    tokenizer_revision: Annotated[str | None, _model("branch, tag or commit of the tokenizer on the hub")] = None
    hf_token: Annotated[
        str | None, _model("key of the hub; none: as HF_TOKEN or `hf auth login` says", is_secret=True)
    ] = None
    download_dir: Annotated[str | None, _model("folder for downloads from the hub; none: the hub's cache")] = None
    load_format: Annotated[
        Literal["auto", "safetensors", "dummy"], _model("dummy: random weights, for measurements without weight files")
    ] = "auto"
    hf_overrides: Annotated[dict[str, Any] | None, _model("values that replace fields of config.json")] = None
    trust_remote_code: Annotated[bool, _model("let a hub tokenizer run its own Python code")] = False
    model_impl: Annotated[
        Literal["auto", "native", "transformers"],
        _model("whose layers run; auto: native where there are some for the architecture, else transformers'"),
    ] = "auto"
    skip_self_check: Annotated[
        bool, _model("do not compare transformers' layers with transformers' own forward pass at the start")
    ] = False
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], _model("auto: the checkpoint's")] = "auto"
    quantization: Annotated[
        Literal["none", "int8", "int4", "fp8", "awq", "gptq", "compressed-tensors", "gguf"],
        _model("int8, int4, fp8: round the layers' matrices while they are loaded; others: must be the checkpoint's"),
    ] = "none"
    device: Annotated[Literal["auto", "cpu", "cuda"], _devices("auto: cuda where there is one")] = "auto"
    tensor_parallel_size: Annotated[int, _devices("worker processes that share each layer")] = 1
    data_parallel_size: Annotated[
        int, _devices("replicas of the model: each has a core and workers, a router spreads the requests")
    ] = 1
    api_server_count: Annotated[int, _clients("frontend processes, each with an address; they share --http")] = 1
    spare_frontend: Annotated[
        bool, _clients("beside each frontend one that has loaded and takes its place if it is lost")
    ] = False
    distributed_executor_backend: Annotated[
        Literal["mp", "uni", "ray"],
        _devices("who starts the worker processes: mp, uni (for one rank): this command; ray: Ray, on --hosts nodes"),
    ] = "mp"
    hosts: Annotated[int, _devices("machines that share the worker processes; the others run `engine-launch join`")] = 1
    listen_hosts: Annotated[
        str | None, _devices("tcp://IP:PORT of this host for the others; its interface carries all between hosts")
    ] = None
    hosts_key_file: Annotated[
        str | None,
        _devices("keys made by `engine-launch keygen`, equal on all hosts and gateways, not those of --key-file"),
    ] = None
    core_listen: Annotated[
        str | None, _devices("tcp://IP:PORT at which gateways reach the core; of further replicas the next ports")
    ] = None
    cores: Annotated[
        str | None, _devices("of a gateway: the --core-listen addresses of its engines, with commas between")
    ] = None
    max_model_len: Annotated[int | None, _memory("longest prompt + answer; none: the model's; auto: what fits")] = None
    max_num_seqs: Annotated[int, _scheduling("requests that run at once")] = MAX_NUM_SEQS
    max_num_batched_tokens: Annotated[
        int | None, _scheduling("token budget of one step; none: 2048, on a CPU 512, at least --max-num-seqs")
    ] = None
    long_prefill_token_threshold: Annotated[
        int, _scheduling("most tokens of one prompt in a step while others run or wait; 0: a quarter of the budget")
    ] = 0
    flex_share: Annotated[
        float, _scheduling("share of a step that requests of the flex class get while others run")
    ] = 0.25
    block_size: Annotated[int, _memory("tokens in a KV block")] = 16
    num_kv_blocks: Annotated[int | None, _memory("size of the KV pool in blocks; none: measured")] = None
    kv_cache_memory_bytes: Annotated[int | None, _memory("size of the KV pool in bytes; none: measured")] = None
    gpu_memory_utilization: Annotated[float, _memory("share of the device's memory that a worker may use")] = 0.9
    kv_cache_dtype: Annotated[
        Literal["auto", "int8", "fp8"],
        _memory("numbers of the KV cache; auto: the model's; int8, fp8 (e4m3): 8 bits, a scale per vector"),
    ] = "auto"
    enable_prefix_caching: Annotated[bool, _memory("share KV blocks of equal prefixes")] = True
    kv_host_bytes: Annotated[
        int | None, _tiers("memory for blocks that the pool evicts, such as 32G; none: only what the others need")
    ] = None
    kv_disk: Annotated[str | None, _tiers("folder of its own for blocks on a disk; none: no disk")] = None
    kv_disk_bytes: Annotated[int, _tiers("most bytes in --kv-disk, such as 200G")] = 64 << 30
    kv_remote: Annotated[
        str | None,
        _tiers("redis://, rediss://, valkey:// or unix:// address of Redis or Valkey; none: no such", is_secret=True),
    ] = None
    kv_remote_salted: Annotated[bool, _tiers("blocks of requests with a cache_salt may go to --kv-remote")] = True
    kv_peers: Annotated[
        str | None, _tiers("--kv-listen addresses of other engines to load from, with commas between; none: no others")
    ] = None
    kv_listen: Annotated[
        str | None, _tiers("ipc:// or tcp:// address at which other engines load our blocks; none: they cannot")
    ] = None
    kv_key_file: Annotated[
        str | None,
        _tiers("secret that all engines share, which signs every block; required for a remote or peer on a network"),
    ] = None
    kv_quota: Annotated[float, _tiers("largest share of each tier that the blocks of one cache_salt may take")] = 1.0
    kv_events: Annotated[
        str | None, _tiers("address for vLLM's KV events, such as tcp://127.0.0.1:5557; none: no events")
    ] = None
    enable_lora: Annotated[bool, _adapters("serve LoRA adapters beside the model")] = False
    lora_modules: Annotated[
        list[str] | None, _adapters('adapters to load at the start: NAME=FOLDER or {"name": …, "path": …}')
    ] = None
    max_loras: Annotated[int, _adapters("adapters in one batch: slots that each worker holds in memory")] = 8
    max_lora_rank: Annotated[int, _adapters("largest rank of an adapter; memory for it is reserved in each slot")] = 64
    max_cpu_loras: Annotated[
        int | None, _adapters("adapters kept ready in host memory for GPUs; none: 4 × --max-loras")
    ] = None
    lora_target_modules: Annotated[
        list[str] | None, _adapters("last parts of module names that adapters may change; none: all that can be")
    ] = None
    adapter_folder: Annotated[
        str | None,
        _adapters("folder whose sub-folders are adapters by name, and the only one that HTTP requests may load from"),
    ] = None
    allow_runtime_lora: Annotated[bool, _adapters("let HTTP requests load and unload adapters")] = False
    adapter_store_bytes: Annotated[int, _adapters("most bytes of the engine's own copies of adapters, such as 32G")] = (
        32 << 30
    )
    limit_mm_per_prompt: Annotated[
        dict[str, Any] | None, _media('media in one prompt: {"image": 4}, image=4 or audio=2; none: as many as fit')
    ] = None
    mm_processor_kwargs: Annotated[
        dict[str, Any] | None, _media('settings of the image processor, such as {"max_pixels": 1003520}')
    ] = None
    mmproj: Annotated[
        str,
        _media("GGUF FILE with the encoder of a GGUF model; auto: an mmproj file beside the model; none: text alone"),
    ] = "auto"
    language_model_only: Annotated[bool, _media("serve a model of images or audio for text alone")] = False
    max_image_pixels: Annotated[int, _media("most pixels of an image as it is sent")] = 40_000_000
    max_audio_s: Annotated[float, _media("longest audio clip, in seconds")] = 600.0
    max_media_bytes: Annotated[int, _media("most bytes of an image or a clip as it is sent, such as 20M")] = 20 << 20
    media_store_bytes: Annotated[int, _media("most bytes of media in the run directory, such as 1G")] = 1 << 30
    media_processes: Annotated[int | None, _media("processes that decode media; none: cores / 4, from 1 to 4")] = None
    allowed_media_domains: Annotated[
        list[str] | None, _media("hosts from which the engine fetches media by URL; none: it fetches none")
    ] = None
    media_fetch_timeout_s: Annotated[float, _media("longest time to fetch a medium by URL")] = 5.0
    allowed_local_media_path: Annotated[
        str | None, _media("folder on the engine's machine below which file: URLs may name media; none: no file: URLs")
    ] = None
    encoder_cache_tokens: Annotated[
        int | None,
        _media("embeddings of media that a worker keeps; none: two of the largest medium, or a step's token budget"),
    ] = None
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        _scheduling("order of requests; priority: a new one may preempt those behind it"),
    ] = "fcfs"
    steps_in_flight: Annotated[int, _scheduling("steps sent ahead of their results: 1 or 2")] = 2
    speculation: Annotated[
        str | dict[str, Any],
        _scheduling("guess tokens from earlier ones where it pays: auto (if no bit changes), lookup, mtp, off or JSON"),
    ] = "auto"
    draft_model: Annotated[
        str | None,
        _scheduling("smaller model or EAGLE-3 head that guesses the next tokens: a folder, a GGUF file or a hub id"),
    ] = None
    num_speculative_tokens: Annotated[int | None, _scheduling("most guesses of an answer in a step; none: 15")] = None
    speculation_corpus: Annotated[
        Literal["request", "shared"],
        _scheduling("whose finished answers help others: those of one cache_salt; shared: also all without a salt"),
    ] = "request"
    speculation_corpus_tokens: Annotated[int, _memory("tokens of finished answers that are kept; 0: none")] = 1 << 20
    max_waiting_requests: Annotated[
        int, _limits("answers that may wait, a quarter of them to one request; beyond: Overloaded")
    ] = 65536
    max_waiting_tokens: Annotated[
        int, _limits("prompt tokens that may wait, counted for each answer, a quarter of them of one request")
    ] = 1 << 26
    max_logprobs: Annotated[int, _answers("largest logprobs that a request may ask for; -1: the vocabulary")] = 20
    allowed_logits_processors: Annotated[
        str | None,
        _answers("import paths module:function that requests may name, with commas between; none: no others"),
    ] = None
    deterministic: Annotated[bool, _devices("the same bits for a request in any batch, chunk or restart; slower")] = (
        False
    )
    enforce_eager: Annotated[bool, _devices("no CUDA graphs")] = False
    enforce_reference: Annotated[bool, _devices("plain torch instead of our own kernels")] = False
    cpu_isa: Annotated[
        Literal["auto", "amx", "avx512bf16", "avx512", "avx2"],
        _devices("instructions of the C kernels; auto: the processor's best"),
    ] = "auto"
    quantized_products: Annotated[
        Literal["auto", "integers", "floats"],
        _devices(
            "how CPUs multiply quantized weights; integers: a half to a third of the memory, less time, slightly other "
            "answers; auto: integers where processor and dtype allow it"
        ),
    ] = "auto"
    num_threads: Annotated[int | None, _devices("CPU threads of a worker; none: cores / local ranks")] = None
    seed: Annotated[int, _answers("seed from which requests without a seed get theirs")] = 0
    chat_template: Annotated[str | None, _answers("Jinja chat template or a file with one, if not the model's")] = None
    chat_template_name: Annotated[
        str | None,
        _answers("name of one of the model's chat templates; none: tool_use for chats with tools, else default"),
    ] = None
    default_chat_template_kwargs: Annotated[
        dict[str, Any] | None, _answers("variables of the chat template for requests that name none")
    ] = None
    generation_config: Annotated[
        str,
        _answers("sampling defaults: auto: generation_config.json of the model; vllm: the engine's; or of a FOLDER"),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any] | None, _answers('sampling defaults that win, such as {"temperature": 0.5}')
    ] = None
    default_max_tokens: Annotated[
        int | None, _answers("longest answer of requests that name none; none: the model's, else as long as fits")
    ] = None
    return_tokens_as_token_ids: Annotated[bool, _answers("tokens of logprobs are written token_id:ID")] = False
    enable_force_include_usage: Annotated[bool, _answers("every chunk of a stream tells its usage")] = False
    enable_per_request_metrics: Annotated[bool, _answers("answers tell how long they took: metrics")] = False
    served_model_name: Annotated[
        list[str] | None,
        _model("names that requests may give, the first is that of answers, '*': any; none: --model as given"),
    ] = None
    listen: Annotated[str | None, _clients("ipc:// or tcp:// address for clients; none: in the run directory")] = None
    listen_mode: Annotated[
        str, _clients("permissions of the ipc:// sockets of --listen, --kv-listen and --kv-events, in octal")
    ] = "600"
    http: Annotated[str | None, _http("[HOST:]PORT of the HTTP server with OpenAI's API; none: no HTTP")] = None
    host: Annotated[str | None, _http("host of the HTTP server; none: that of --http, or 127.0.0.1")] = None
    port: Annotated[int | None, _http(f"port of the HTTP server; none: that of --http, or {DEFAULT_PORT}")] = None
    uds: Annotated[str | None, _http("path of a unix socket on which HTTP is served too; none: no such socket")] = None
    uds_mode: Annotated[str, _http("permissions of --uds, in octal")] = "600"
    root_path: Annotated[str, _http("path under which a proxy shows the HTTP server, such as /llm")] = ""
    ssl_certfile: Annotated[str | None, _http("PEM file with the certificate chain of --http; none: no TLS")] = None
    ssl_keyfile: Annotated[str | None, _http("PEM file with its private key; none: in --ssl-certfile")] = None
    ssl_ca_certs: Annotated[str | None, _http("PEM file with the CAs of the clients' certificates")] = None
    ssl_cert_reqs: Annotated[int, _http("client certificates: 0: none, 1: checked if given, 2: required")] = 0
    http_timeout_s: Annotated[float, _http("an incomplete HTTP request is refused after so long without new bytes")] = (
        20.0
    )
    sse_keep_alive_s: Annotated[
        float, _http("no stream is silent for longer: it gets a comment meanwhile; 0: streams may be silent")
    ] = 5.0
    keep_connections: Annotated[
        bool, _http("HTTP connections and their answers go on after the loss of a frontend")
    ] = True
    http_journal_bytes: Annotated[int, _http("memory for that, of each frontend")] = 256 << 20
    access_log: Annotated[
        Literal["off", "errors", "all"], _logging("a line for each HTTP request at its end; errors: if it failed")
    ] = "errors"
    api_key: Annotated[
        list[str] | None,
        _http(
            f"Bearer tokens, of which HTTP requests must carry one; none: {API_KEY_VARIABLE}, or no token",
            is_secret=True,
        ),
    ] = None
    api_key_file: Annotated[
        str | None, _clients("file of HTTP keys with names and limits of their own, read again when it changes")
    ] = None
    cors_origins: Annotated[str | None, _http("web origins that may call, with commas between; *: any")] = None
    allowed_hosts: Annotated[
        str | None,
        _http("without a key: names of this server that a Host header may have, with commas between; *: any"),
    ] = None
    max_body_bytes: Annotated[int, _http("largest HTTP body that is read")] = 32 << 20
    state_dir: Annotated[
        str | None,
        _http(
            "folder of its own for files, batches and stored responses; none: responses alone, until the engine ends"
        ),
    ] = None
    file_quota_bytes: Annotated[int, _limits("most bytes of the files of one API key in --state-dir, such as 10G")] = (
        10 << 30
    )
    response_store_bytes: Annotated[
        int, _http("of /v1/responses and their conversations that are kept, the oldest go first; 0: none is kept")
    ] = 256 << 20
    response_store_count: Annotated[int, _http("most of them that are kept")] = 10_000
    response_store_age_s: Annotated[float, _http("for how long one is kept")] = 30 * 86400.0
    trust_request_chat_template: Annotated[
        bool, _http("let HTTP requests bring a chat_template of their own, which runs in a sandbox")
    ] = False
    strict_fields: Annotated[
        bool, _http("refuse unknown fields of HTTP bodies instead of ignoring them with a warning header")
    ] = False
    metrics_names: Annotated[Literal["tokenloom", "vllm"], _logging("prefix of the metrics")] = "tokenloom"
    enable_tokenizer_info_endpoint: Annotated[bool, _http("serve /tokenizer_info over HTTP")] = False
    otlp_endpoint: Annotated[
        str | None,
        _logging("URL of a collector of OpenTelemetry's spans; none: OTEL_EXPORTER_OTLP_ENDPOINT", is_secret=True),
    ] = None
    tool_call_parser: Annotated[
        Literal[
            "auto",
            "granite",
            "hermes",
            "lfm2",
            "llama",
            "mistral",
            "olmo3",
            "pythonic",
            "qwen3_coder",
            "openai",
            "none",
        ],
        _answers("how answers write tool calls; auto: as the template shows"),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "think", "deepseek_r1", "mistral", "seed_oss", "granite", "gpt_oss", "none"],
        _answers("how answers mark thoughts, which are returned as reasoning; auto: as the template shows"),
    ] = "auto"
    key_file: Annotated[str | None, _clients("keys made by `engine-launch keygen`, required on a tcp:// address")] = (
        None
    )
    insecure: Annotated[bool, _clients("let anyone who can reach a tcp:// address use the engine")] = False
    default_timeout_s: Annotated[float | None, _limits("timeout_s of requests that name none")] = None
    max_timeout_s: Annotated[float | None, _limits("longest timeout_s that a request may ask for")] = None
    step_timeout_s: Annotated[
        float | None, _limits("a step without a result for so long counts as hung; none: learned from earlier steps")
    ] = None
    hang_timeout_s: Annotated[float, _limits("core or frontend without a sign of life for so long are replaced")] = 6.0
    grammar_timeout_s: Annotated[float, _limits("longest compilation of a structured output's grammar")] = 2.0
    start_timeout_s: Annotated[float, _limits("longest start, weights included, and longest reload")] = 600.0
    drain_timeout_s: Annotated[float, _limits("how long running requests may finish after SIGTERM")] = 30.0
    disable_log_stats: Annotated[bool, _logging("no stats line every 10 s")] = False
    profile_dir: Annotated[
        str | None, _logging("folder for the traces of start_profile; none: `profiles` in the run directory")
    ] = None
    log_level: Annotated[LogLevel, _logging("least level that is logged")] = "info"

    @property
    def speculation_options(self) -> SpeculationOptions | None:
        """The options of speculation; None: it is off. ConfigError if they are invalid."""
        return speculation_options(self.speculation, self.draft_model, self.num_speculative_tokens)

    @property
    def has_tiers(self) -> bool:
        """Whether an option asks for KV blocks outside the pool."""
        return any(getattr(self, name) is not None for name in TIER_OPTIONS)

    @property
    def max_request_answers(self) -> int:
        """Most answers of one request, over all its prompts: a quarter of the queue."""
        return max(self.max_waiting_requests // 4, 1)

    @property
    def http_address(self) -> str | None:
        """[HOST:]PORT from --http, --host and --port; None if no HTTP server is wanted. ConfigError if they contradict
        each other."""
        return joined_http_address(self.http, self.host, self.port)

    def max_media(self, kind: MediaKind) -> int | None:
        """Return how many media of a kind one prompt may have; None: as many as fit."""
        return 0 if self.language_model_only else media_limits(self.limit_mm_per_prompt).get(kind)

    def __post_init__(self) -> None:
        for name, low, high in INT_RANGES:
            value = getattr(self, name)
            if value not in (None, AUTO.get(name)) and not low <= value <= high:
                raise ConfigError(f"{_flag(name)} must be in [{low}, {high}], got {value}")
        if not 0 < self.grammar_timeout_s <= 600:
            raise ConfigError(f"--grammar-timeout-s must be in (0, 600], got {self.grammar_timeout_s}")
        for name in SHARES:
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{_flag(name)} must be in (0, 1], got {getattr(self, name)}")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below --max-num-seqs {self.max_num_seqs}: "
                "a step could not hold one token of each running request; raise the first or lower the second"
            )
        for name in TIMEOUTS:
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1e9:
                raise ConfigError(f"{_flag(name)} must be in (0, 1e9] seconds, got {value}")
        for name in ("drain_timeout_s", "sse_keep_alive_s"):
            if not 0 <= getattr(self, name) <= 1e9:
                raise ConfigError(f"{_flag(name)} must be in [0, 1e9] seconds, got {getattr(self, name)}")
        default_s, max_s = self.default_timeout_s, self.max_timeout_s
        if default_s is not None and max_s is not None and default_s > max_s:
            raise ConfigError(
                f"--default-timeout-s {self.default_timeout_s} is above --max-timeout-s {self.max_timeout_s}: lower it"
            )
        if self.listen is not None:
            check_listen(self.listen)
            check_ports("--listen", self.listen, self.api_server_count, "frontends")
            if self.listen.startswith("tcp://") and self.key_file is None and not self.insecure:
                raise ConfigError(
                    f"--listen {self.listen} would admit anyone: give --key-file (made by `engine-launch keygen "
                    "FILE`) or --insecure"
                )
        check_hosts(self)
        check_gateway(
            GatewayOptions(
                core_listen=self.core_listen,
                cores=self.cores,
                hosts_key_file=self.hosts_key_file,
                num_replicas=self.data_parallel_size,
                is_insecure=self.insecure,
            )
        )
        check_places(self.kv_remote, self.kv_peers, self.kv_listen, self.kv_key_file is not None)
        if self.kv_events is not None:
            check_events(self.kv_events, has_key=self.key_file is not None, is_insecure=self.insecure)
        if self.data_parallel_size > 1:
            check_replica_ports(self.data_parallel_size, self.kv_listen, self.kv_events)
        media_limits(self.limit_mm_per_prompt)
        _ = self.speculation_options
        check_http(self)
        if not all(key and key.isascii() and key.isprintable() for key in self.api_key or ()):
            raise ConfigError("--api-key must be at least 1 printable ASCII character")

    @property
    def has_keys(self) -> bool:
        """Whether HTTP requests must carry a key."""
        return self.api_key is not None or self.api_key_file is not None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


SECRET_OPTIONS = secret_options(EngineConfig)  # shown nowhere: neither in answers nor in logs
