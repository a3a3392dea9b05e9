"""EngineOptions: the keywords of LLM and AsyncLLM besides `model`, for editors and type checkers.

scripts/checks/engine_options.py writes this file from the fields of EngineConfig: change those. None selects the
default. Options of vLLM that have no effect here are accepted, but are not among these.
"""

from __future__ import annotations

import os
from typing import Any, Literal, Protocol, TypeAlias, TypedDict

Text: TypeAlias = str | os.PathLike[str]


class TorchDtype(Protocol):
    """torch.dtype, without the import."""

    @property
    def is_floating_point(self) -> bool: ...

    @property
    def is_complex(self) -> bool: ...


class EngineOptions(TypedDict, total=False):
    """Options of the engine; `engine-launch serve --help` shows them with their defaults."""

    tokenizer: Text | None
    """folder or hub id of the tokenizer, if not the model's"""
    revision: Text | None
    """branch, tag or commit of a hub id"""
    tokenizer_revision: Text | None
    """branch, tag or commit of the tokenizer on the hub"""
    hf_token: Text | bool | None
    """key of the hub; none: as HF_TOKEN or `hf auth login` says"""
    download_dir: Text | None
    """folder for downloads from the hub; none: the hub's cache"""
    load_format: Literal["auto", "safetensors", "dummy"] | None
    """dummy: random weights, for measurements without weight files (default: auto)"""
    hf_overrides: dict[str, Any] | str | None
    """values that replace fields of config.json"""
    trust_remote_code: bool | None
    """let a hub tokenizer run its own Python code (default: False)"""
    model_impl: Literal["auto", "native", "transformers", "vllm"] | None
    """whose layers run; auto: native where there are some for the architecture, else transformers' (default: auto)"""
    skip_self_check: bool | None
    """do not compare transformers' layers with transformers' own forward pass at the start (default: False)"""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "half", "float"] | TorchDtype | None
    """auto: the checkpoint's (default: auto)"""
    quantization: (
        Literal[
            "none",
            "int8",
            "int4",
            "fp8",
            "awq",
            "gptq",
            "compressed-tensors",
            "gguf",
            "awq_marlin",
            "gptq_marlin",
            "fbgemm_fp8",
        ]
        | None
    )
    """int8, int4, fp8: round the layers' matrices while they are loaded; others: must be the checkpoint's (default:
    none)"""
    device: Literal["auto", "cpu", "cuda"] | None
    """auto: cuda where there is one (default: auto)"""
    tensor_parallel_size: int | None
    """worker processes that share each layer (default: 1)"""
    data_parallel_size: int | None
    """replicas of the model: each has a core and workers, a router spreads the requests (default: 1)"""
    api_server_count: int | None
    """frontend processes, each with an address; they share --http (default: 1)"""
    frontends: int | None
    """the same as api_server_count"""
    spare_frontend: bool | None
    """beside each frontend one that has loaded and takes its place if it is lost (default: False)"""
    distributed_executor_backend: Literal["mp", "uni", "ray", "auto"] | None
    """who starts the worker processes: mp, uni (for one rank): this command; ray: Ray, on --hosts nodes (default:
    mp)"""
    hosts: int | None
    """machines that share the worker processes; the others run `engine-launch join` (default: 1)"""
    nnodes: int | None
    """the same as hosts"""
    listen_hosts: Text | None
    """tcp://IP:PORT of this host for the others; its interface carries all between hosts"""
    hosts_key_file: Text | None
    """keys made by `engine-launch keygen`, equal on all hosts and gateways, not those of --key-file"""
    core_listen: Text | None
    """tcp://IP:PORT at which gateways reach the core; of further replicas the next ports"""
    cores: Text | None
    """of a gateway: the --core-listen addresses of its engines, with commas between"""
    max_model_len: int | Literal["auto"] | None
    """longest prompt + answer; none: the model's; auto: what fits"""
    max_num_seqs: int | None
    """requests that run at once (default: 256)"""
    max_num_batched_tokens: int | None
    """token budget of one step; none: 2048, on a CPU 512, at least --max-num-seqs"""
    long_prefill_token_threshold: int | None
    """most tokens of one prompt in a step while others run or wait; 0: a quarter of the budget (default: 0)"""
    flex_share: float | None
    """share of a step that requests of the flex class get while others run (default: 0.25)"""
    block_size: int | None
    """tokens in a KV block (default: 16)"""
    num_kv_blocks: int | None
    """size of the KV pool in blocks; none: measured"""
    num_gpu_blocks_override: int | None
    """the same as num_kv_blocks"""
    kv_cache_memory_bytes: int | None
    """size of the KV pool in bytes; none: measured"""
    gpu_memory_utilization: float | None
    """share of the device's memory that a worker may use (default: 0.9)"""
    kv_cache_dtype: Literal["auto", "int8", "fp8", "fp8_e4m3", "fp8_per_token_head", "int8_per_token_head"] | None
    """numbers of the KV cache; auto: the model's; int8, fp8 (e4m3): 8 bits, a scale per vector (default: auto)"""
    enable_prefix_caching: bool | None
    """share KV blocks of equal prefixes (default: True)"""
    kv_host_bytes: int | None
    """memory for blocks that the pool evicts, such as 32G; none: only what the others need"""
    kv_disk: Text | None
    """folder of its own for blocks on a disk; none: no disk"""
    kv_disk_bytes: int | None
    """most bytes in --kv-disk, such as 200G (default: 68719476736)"""
    kv_remote: Text | None
    """redis://, rediss://, valkey:// or unix:// address of Redis or Valkey; none: no such"""
    kv_remote_salted: bool | None
    """blocks of requests with a cache_salt may go to --kv-remote (default: True)"""
    kv_peers: Text | None
    """--kv-listen addresses of other engines to load from, with commas between; none: no others"""
    kv_listen: Text | None
    """ipc:// or tcp:// address at which other engines load our blocks; none: they cannot"""
    kv_key_file: Text | None
    """secret that all engines share, which signs every block; required for a remote or peer on a network"""
    kv_quota: float | None
    """largest share of each tier that the blocks of one cache_salt may take (default: 1.0)"""
    kv_events: Text | None
    """address for vLLM's KV events, such as tcp://127.0.0.1:5557; none: no events"""
    enable_lora: bool | None
    """serve LoRA adapters beside the model (default: False)"""
    lora_modules: list[str] | Text | None
    """adapters to load at the start: NAME=FOLDER or {"name": …, "path": …}"""
    max_loras: int | None
    """adapters in one batch: slots that each worker holds in memory (default: 8)"""
    max_lora_rank: int | None
    """largest rank of an adapter; memory for it is reserved in each slot (default: 64)"""
    max_cpu_loras: int | None
    """adapters kept ready in host memory for GPUs; none: 4 × --max-loras"""
    lora_target_modules: list[str] | Text | None
    """last parts of module names that adapters may change; none: all that can be"""
    adapter_folder: Text | None
    """folder whose sub-folders are adapters by name, and the only one that HTTP requests may load from"""
    allow_runtime_lora: bool | None
    """let HTTP requests load and unload adapters (default: False)"""
    adapter_store_bytes: int | None
    """most bytes of the engine's own copies of adapters, such as 32G (default: 34359738368)"""
    limit_mm_per_prompt: dict[str, Any] | str | None
    """media in one prompt: {"image": 4}, image=4 or audio=2; none: as many as fit"""
    mm_processor_kwargs: dict[str, Any] | str | None
    """settings of the image processor, such as {"max_pixels": 1003520}"""
    mmproj: Text | None
    """GGUF FILE with the encoder of a GGUF model; auto: an mmproj file beside the model; none: text alone (default:
    auto)"""
    language_model_only: bool | None
    """serve a model of images or audio for text alone (default: False)"""
    max_image_pixels: int | None
    """most pixels of an image as it is sent (default: 40000000)"""
    max_audio_s: float | None
    """longest audio clip, in seconds (default: 600.0)"""
    max_media_bytes: int | None
    """most bytes of an image or a clip as it is sent, such as 20M (default: 20971520)"""
    media_store_bytes: int | None
    """most bytes of media in the run directory, such as 1G (default: 1073741824)"""
    media_processes: int | None
    """processes that decode media; none: cores / 4, from 1 to 4"""
    allowed_media_domains: list[str] | Text | None
    """hosts from which the engine fetches media by URL; none: it fetches none"""
    media_fetch_timeout_s: float | None
    """longest time to fetch a medium by URL (default: 5.0)"""
    allowed_local_media_path: Text | None
    """folder on the engine's machine below which file: URLs may name media; none: no file: URLs"""
    encoder_cache_tokens: int | None
    """embeddings of media that a worker keeps; none: two of the largest medium, or a step's token budget"""
    scheduling_policy: Literal["fcfs", "priority"] | None
    """order of requests; priority: a new one may preempt those behind it (default: fcfs)"""
    steps_in_flight: int | None
    """steps sent ahead of their results: 1 or 2 (default: 2)"""
    speculation: Text | dict[str, Any] | None
    """guess tokens from earlier ones where it pays: auto (if no bit changes), lookup, mtp, off or JSON (default:
    auto)"""
    speculative_config: Text | dict[str, Any] | None
    """the same as speculation"""
    draft_model: Text | None
    """smaller model or EAGLE-3 head that guesses the next tokens: a folder, a GGUF file or a hub id"""
    speculative_model: Text | None
    """the same as draft_model"""
    spec_model: Text | None
    """the same as draft_model"""
    model_draft: Text | None
    """the same as draft_model"""
    num_speculative_tokens: int | None
    """most guesses of an answer in a step; none: 15"""
    spec_tokens: int | None
    """the same as num_speculative_tokens"""
    draft_max: int | None
    """the same as num_speculative_tokens"""
    speculation_corpus: Literal["request", "shared"] | None
    """whose finished answers help others: those of one cache_salt; shared: also all without a salt (default:
    request)"""
    speculation_corpus_tokens: int | None
    """tokens of finished answers that are kept; 0: none (default: 1048576)"""
    max_waiting_requests: int | None
    """answers that may wait, a quarter of them to one request; beyond: Overloaded (default: 65536)"""
    max_num_queued_reqs: int | None
    """the same as max_waiting_requests"""
    max_waiting_tokens: int | None
    """prompt tokens that may wait, counted for each answer, a quarter of them of one request (default: 67108864)"""
    max_num_queued_tokens: int | None
    """the same as max_waiting_tokens"""
    max_logprobs: int | None
    """largest logprobs that a request may ask for; -1: the vocabulary (default: 20)"""
    allowed_logits_processors: Text | list[str] | None
    """import paths module:function that requests may name, with commas between; none: no others"""
    deterministic: bool | None
    """the same bits for a request in any batch, chunk or restart; slower (default: False)"""
    enforce_eager: bool | None
    """no CUDA graphs (default: False)"""
    enforce_reference: bool | None
    """plain torch instead of our own kernels (default: False)"""
    cpu_isa: Literal["auto", "amx", "avx512bf16", "avx512", "avx2"] | None
    """instructions of the C kernels; auto: the processor's best (default: auto)"""
    quantized_products: Literal["auto", "integers", "floats"] | None
    """how CPUs multiply quantized weights; integers: a half to a third of the memory, less time, slightly other
    answers; auto: integers where processor and dtype allow it (default: auto)"""
    num_threads: int | None
    """CPU threads of a worker; none: cores / local ranks"""
    seed: int | None
    """seed from which requests without a seed get theirs (default: 0)"""
    chat_template: Text | None
    """Jinja chat template or a file with one, if not the model's"""
    chat_template_name: Text | None
    """name of one of the model's chat templates; none: tool_use for chats with tools, else default"""
    default_chat_template_kwargs: dict[str, Any] | str | None
    """variables of the chat template for requests that name none"""
    generation_config: Text | None
    """sampling defaults: auto: generation_config.json of the model; vllm: the engine's; or of a FOLDER (default:
    auto)"""
    override_generation_config: dict[str, Any] | str | None
    """sampling defaults that win, such as {"temperature": 0.5}"""
    default_max_tokens: int | None
    """longest answer of requests that name none; none: the model's, else as long as fits"""
    return_tokens_as_token_ids: bool | None
    """tokens of logprobs are written token_id:ID (default: False)"""
    enable_force_include_usage: bool | None
    """every chunk of a stream tells its usage (default: False)"""
    enable_per_request_metrics: bool | None
    """answers tell how long they took: metrics (default: False)"""
    served_model_name: list[str] | Text | None
    """names that requests may give, the first is that of answers, '*': any; none: --model as given"""
    listen: Text | None
    """ipc:// or tcp:// address for clients; none: in the run directory"""
    address: Text | None
    """the same as listen"""
    listen_mode: Text | None
    """permissions of the ipc:// sockets of --listen, --kv-listen and --kv-events, in octal (default: 600)"""
    http: Text | None
    """[HOST:]PORT of the HTTP server with OpenAI's API; none: no HTTP"""
    host: Text | None
    """host of the HTTP server; none: that of --http, or 127.0.0.1"""
    port: int | None
    """port of the HTTP server; none: that of --http, or 8000"""
    uds: Text | None
    """path of a unix socket on which HTTP is served too; none: no such socket"""
    uds_mode: Text | None
    """permissions of --uds, in octal (default: 600)"""
    root_path: Text | None
    """path under which a proxy shows the HTTP server, such as /llm (default: )"""
    ssl_certfile: Text | None
    """PEM file with the certificate chain of --http; none: no TLS"""
    ssl_keyfile: Text | None
    """PEM file with its private key; none: in --ssl-certfile"""
    ssl_ca_certs: Text | None
    """PEM file with the CAs of the clients' certificates"""
    ssl_cert_reqs: int | None
    """client certificates: 0: none, 1: checked if given, 2: required (default: 0)"""
    http_timeout_s: float | None
    """an incomplete HTTP request is refused after so long without new bytes (default: 20.0)"""
    sse_keep_alive_s: float | None
    """no stream is silent for longer: it gets a comment meanwhile; 0: streams may be silent (default: 5.0)"""
    sse_keep_alive_interval: float | None
    """the same as sse_keep_alive_s"""
    keep_connections: bool | None
    """HTTP connections and their answers go on after the loss of a frontend (default: True)"""
    http_journal_bytes: int | None
    """memory for that, of each frontend (default: 268435456)"""
    access_log: Literal["off", "errors", "all"] | None
    """a line for each HTTP request at its end; errors: if it failed (default: errors)"""
    api_key: list[str] | Text | None
    """Bearer tokens, of which HTTP requests must carry one; none: TOKENLOOM_API_KEY, or no token"""
    api_key_file: Text | None
    """file of HTTP keys with names and limits of their own, read again when it changes"""
    cors_origins: Text | list[str] | None
    """web origins that may call, with commas between; *: any"""
    allowed_origins: Text | list[str] | None
    """the same as cors_origins"""
    allowed_hosts: Text | list[str] | None
    """without a key: names of this server that a Host header may have, with commas between; *: any"""
    max_body_bytes: int | None
    """largest HTTP body that is read (default: 33554432)"""
    state_dir: Text | None
    """folder of its own for files, batches and stored responses; none: responses alone, until the engine ends"""
    file_quota_bytes: int | None
    """most bytes of the files of one API key in --state-dir, such as 10G (default: 10737418240)"""
    response_store_bytes: int | None
    """of /v1/responses and their conversations that are kept, the oldest go first; 0: none is kept (default:
    268435456)"""
    response_store_count: int | None
    """most of them that are kept (default: 10000)"""
    response_store_age_s: float | None
    """for how long one is kept (default: 2592000.0)"""
    trust_request_chat_template: bool | None
    """let HTTP requests bring a chat_template of their own, which runs in a sandbox (default: False)"""
    strict_fields: bool | None
    """refuse unknown fields of HTTP bodies instead of ignoring them with a warning header (default: False)"""
    metrics_names: Literal["tokenloom", "vllm"] | None
    """prefix of the metrics (default: tokenloom)"""
    enable_tokenizer_info_endpoint: bool | None
    """serve /tokenizer_info over HTTP (default: False)"""
    otlp_endpoint: Text | None
    """URL of a collector of OpenTelemetry's spans; none: OTEL_EXPORTER_OTLP_ENDPOINT"""
    otlp_traces_endpoint: Text | None
    """the same as otlp_endpoint"""
    tool_call_parser: (
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
            "llama3_json",
            "llama4_json",
            "qwen3_json",
            "llama4_pythonic",
            "qwen3_xml",
            "apertus",
            "beam",
            "cohere_command3",
            "cohere_command4",
            "deepseek_v31",
            "deepseek_v32",
            "deepseek_v4",
            "deepseek_v41",
            "dots",
            "ernie45",
            "functiongemma",
            "gemma4",
            "gigachat3",
            "glm45",
            "glm47",
            "granite-20b-fc",
            "granite4",
            "hf",
            "hunyuan_a13b",
            "hy_v3",
            "hy_v4",
            "inkling",
            "internlm",
            "jamba",
            "k2_horizon",
            "kimi_k2",
            "kimi_k3",
            "ling3",
            "longcat",
            "mimo",
            "minicpm5",
            "minimax_m2",
            "minimax_m3",
            "muse",
            "muse_glimmer",
            "musespark1x",
            "phi4_mini_json",
            "plamo3",
            "poolside_v1",
            "seed_oss",
            "step3",
            "step3p5",
            "step5",
            "xlam",
        ]
        | None
    )
    """how answers write tool calls; auto: as the template shows (default: auto)"""
    reasoning_parser: (
        Literal[
            "auto",
            "think",
            "deepseek_r1",
            "mistral",
            "seed_oss",
            "granite",
            "gpt_oss",
            "none",
            "",
            "openai_gptoss",
            "glm45",
            "glm47",
            "holo2",
            "kimi_k2",
            "mimo",
            "minimax_m2",
            "nemotron_v3",
            "olmo3",
            "qwen3",
            "beam",
            "cohere_command3",
            "cohere_command4",
            "deepseek_v3",
            "deepseek_v4",
            "deepseek_v41",
            "ernie45",
            "gemma4",
            "granite_thinking_parser",
            "hf",
            "hunyuan_a13b",
            "hy_v3",
            "hy_v4",
            "inkling",
            "k2_horizon",
            "kimi_k3",
            "ling3",
            "minicpmv",
            "minimax_m2_append_think",
            "minimax_m3",
            "muse",
            "muse_glimmer",
            "musespark1x",
            "plamo3",
            "poolside_v1",
            "step3",
            "step3p5",
            "step5",
        ]
        | None
    )
    """how answers mark thoughts, which are returned as reasoning; auto: as the template shows (default: auto)"""
    key_file: Text | None
    """keys made by `engine-launch keygen`, required on a tcp:// address"""
    insecure: bool | None
    """let anyone who can reach a tcp:// address use the engine (default: False)"""
    default_timeout_s: float | None
    """timeout_s of requests that name none"""
    max_timeout_s: float | None
    """longest timeout_s that a request may ask for"""
    step_timeout_s: float | None
    """a step without a result for so long counts as hung; none: learned from earlier steps"""
    hang_timeout_s: float | None
    """core or frontend without a sign of life for so long are replaced (default: 6.0)"""
    grammar_timeout_s: float | None
    """longest compilation of a structured output's grammar (default: 2.0)"""
    start_timeout_s: float | None
    """longest start, weights included, and longest reload (default: 600.0)"""
    drain_timeout_s: float | None
    """how long running requests may finish after SIGTERM (default: 30.0)"""
    shutdown_timeout: float | None
    """the same as drain_timeout_s"""
    disable_log_stats: bool | None
    """no stats line every 10 s (default: False)"""
    profile_dir: Text | None
    """folder for the traces of start_profile; none: `profiles` in the run directory"""
    log_level: Literal["debug", "info", "warning", "error"] | None
    """least level that is logged (default: warning)"""
