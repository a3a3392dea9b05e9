"""The ranges of the engine's numeric options, which EngineConfig checks."""

from __future__ import annotations

AUTO_LENGTH = -1  # max_model_len auto: the longest length that fits into the KV cache
MAX_MEDIA_BYTES = 63 << 20  # a medium is one frame of a client, of at most 64 MiB

TIMEOUTS = (
    *("default_timeout_s", "max_timeout_s", "step_timeout_s", "hang_timeout_s", "start_timeout_s"),
    *("http_timeout_s", "media_fetch_timeout_s", "max_audio_s", "response_store_age_s"),
)
SHARES = ("gpu_memory_utilization", "kv_quota", "flex_share")  # in (0, 1]
AUTO = {"max_model_len": AUTO_LENGTH}  # option → a value outside its range that is valid too
INT_RANGES = (
    ("tensor_parallel_size", 1, 64),
    ("data_parallel_size", 1, 64),
    ("api_server_count", 1, 64),
    ("hosts", 1, 64),
    ("max_model_len", 1, 1 << 24),
    ("max_num_seqs", 1, 16384),
    ("max_body_bytes", 1, 1 << 30),
    ("http_journal_bytes", 0, 1 << 40),
    ("file_quota_bytes", 0, 1 << 60),
    ("response_store_bytes", 0, 1 << 40),
    ("response_store_count", 1, 1_000_000),
    ("port", 0, 65535),
    ("ssl_cert_reqs", 0, 2),
    ("max_num_batched_tokens", 1, 1 << 20),
    ("long_prefill_token_threshold", 0, 1 << 20),
    ("block_size", 1, 1024),
    ("num_kv_blocks", 2, 2**31 - 1),
    ("kv_host_bytes", 1, 1 << 50),
    ("kv_disk_bytes", 1, 1 << 60),
    ("kv_cache_memory_bytes", 1, 1 << 50),
    ("max_loras", 1, 1024),
    ("max_lora_rank", 1, 4096),
    ("max_cpu_loras", 1, 1 << 20),
    ("adapter_store_bytes", 1, 1 << 50),
    ("max_image_pixels", 1, 1 << 40),
    ("max_media_bytes", 1, MAX_MEDIA_BYTES),
    ("media_store_bytes", 1, 1 << 50),
    ("media_processes", 1, 64),
    ("encoder_cache_tokens", 1, 1 << 24),
    ("steps_in_flight", 1, 2),
    ("speculation_corpus_tokens", 0, 1 << 28),
    ("max_waiting_requests", 1, 1 << 30),
    ("max_waiting_tokens", 1, 1 << 40),
    ("num_threads", 1, 4096),
    ("max_logprobs", -1, 1 << 20),
    ("default_max_tokens", 1, 1 << 30),
    ("seed", -(2**63), 2**63 - 1),
)
