"""Options of vLLM that have no field in EngineConfig, so that scripts written for vLLM start.

Two tables map a reason to options. IGNORED options have no effect on answers: they are accepted with a log line.
REFUSED options name features that this engine lacks: only values that leave the feature off are accepted. A name with
`?` is a boolean, one with `*` takes several words. The accepted values follow `=`, separated by `|`. An empty value is
always accepted: null (not the word none), false, 0, an empty text, {} or [].
"""

from __future__ import annotations

import json
from typing import NamedTuple

IGNORED = {
    "prompts are always computed in chunks": "enable_chunked_prefill? max_num_partial_prefills "
    "max_long_partial_prefills long_prefill_token_threshold_adaptive? disable_chunked_mm_input?",
    "KV blocks are computed again, never swapped": "swap_space preemption_mode",
    "one block manager serves all layers": "use_v2_block_manager? disable_hybrid_kv_cache_manager? prefix_match_unit "
    "kv_sharing_fast_prefill? swa_bounded_replay? prefix_cache_retention_interval watermark",
    "block keys are SHA-256": "prefix_caching_hash_algo",
    "a KV cache of 8 bits has scales of its own": "calculate_kv_scales?",
    "steps are sent ahead of their results, see --steps-in-flight": "async_scheduling? disable_async_output_proc? "
    "num_scheduler_steps multi_step_stream_outputs? prefill_schedule_interval scheduler_reserve_full_isl? "
    "max_num_scheduled_tokens max_num_active_seqs scheduler_delay_factor",
    "a step's tokens are sent as soon as it ends": "stream_interval",
    "each device has one set of kernels": "attention_backend attention_config moe_backend linear_backend kernel_config "
    "ir_op_priority all2all_backend enable_flashinfer_autotune? disable_cascade_attn? use_fp64_gumbel? "
    "gdn_prefill_backend kda_prefill_backend kda_decode_backend sparse_indexer_topk_backend",
    "CUDA graphs and compilation are settled at the start, see --enforce-eager": "compilation_config cc O "
    "optimization_level performance_mode cudagraph_capture_sizes* max_cudagraph_capture_size max_seq_len_to_capture "
    "max_context_len_to_capture jit_monitor_mode jit_monitor_verbose? cudagraph_metrics?",
    "ranks add up in one way": "disable_custom_all_reduce? enable_shm_tensor_arena? numa_bind? numa_bind_nodes* "
    "numa_bind_cpus* distributed_timeout_seconds cpu_distributed_timeout_seconds enable_batch_sharded_sampling?",
    "experts are shared like other layers": "enable_expert_parallel? enable_eplb? eplb_config enable_dbo? ubatch_size "
    "dbo_decode_token_threshold dbo_prefill_token_threshold expert_placement_strategy enable_ep_weight_filter?",
    "ranks find each other": "data_parallel_address data_parallel_rpc_port data_parallel_backend "
    "max_parallel_loading_workers ray_workers_use_nsight? disable_nccl_for_dp_synchronization? dcp_comm_backend "
    "dcp_kv_cache_interleave_size cp_kv_cache_interleave_size",
    "weights are mapped from safetensors files": "safetensors_load_strategy safetensors_prefetch_num_threads "
    "safetensors_prefetch_block_size model_loader_extra_config ignore_patterns* pt_load_map_location "
    "use_tqdm_on_load? allow_deprecated_quantization?",
    "the model's code is this engine's": "code_revision",
    "media are kept once, on disk: see --media-store-bytes": "mm_processor_cache_gb mm_processor_cache_type "
    "mm_shm_cache_max_object_size_mb mm_tensor_ipc mm_hasher_algorithm disable_mm_preprocessor_cache?",
    "media are decoded by processes of their own, see --media-processes": "renderer_num_workers media_io_kwargs "
    "enable_mm_processor_stats?",
    "each rank has the whole encoder": "mm_encoder_tp_mode mm_encoder_attn_backend skip_mm_profiling?",
    "placeholders stand where the chat's parts do": "interleave_mm_strings?",
    "videos are not served": "video_pruning_rate",
    "transformers keeps the states of layers": "mamba_backend mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size "
    "mamba_cache_mode enable_mamba_cache_stochastic_rounding? mamba_cache_philox_rounds mamba_ssu_algorithm",
    "adapters have one form in each kind of memory": "lora_dtype fully_sharded_loras? lora_extra_vocab_size "
    "specialize_active_lora? enable_tower_connector_lora?",
    "grammars are compiled by llguidance": "guided_decoding_backend",
    "tool calls are read whenever tools are given": "enable_auto_tool_choice? exclude_tools_when_tool_choice_none?",
    "--reasoning-parser enables it": "enable_reasoning?",
    "the tokenizer is always there": "skip_tokenizer_init?",
    "sleeping needs no preparation": "enable_sleep_mode? enable_cumem_allocator? sleep_mode_offload_cudagraph?",
    "--access-log has lines for requests, none of them shows a prompt": "enable_log_requests? disable_log_requests? "
    "max_log_len enable_log_outputs? enable_log_deltas? uvicorn_log_level disable_uvicorn_access_log? "
    "disable_access_log_for_endpoints log_error_stack? aggregate_engine_logging? log_config_file logging_config",
    "metrics and spans have no finer setting": "show_hidden_metrics_for_version collect_detailed_traces* "
    "kv_cache_metrics? kv_cache_metrics_sample custom_histogram_buckets enable_mfu_metrics? "
    "enable_layerwise_nvtx_tracing? enable_logging_iteration_details? profiler_config",
    "it is always so": "enable_prompt_tokens_details? enable_request_id_headers? enable_server_load_tracking? "
    "disable_fastapi_docs? enable_offline_docs? disable_frontend_multiprocessing? enable_trace_replay?",
    "CORS allows GET and POST with any header": "allowed_methods allowed_headers",
    "certificates are read at the start": "enable_ssl_refresh?",
    "answers have no fingerprint": "fingerprint_mode fingerprint_value",
    "settings of another machine's backend": "override_neuron_config num_lookahead_slots",
}
REFUSED = {
    "there are no pipeline stages; --tensor-parallel-size shares layers": "pipeline_parallel_size=1 pp=1",
    "replicas of --data-parallel-size are spread evenly over --hosts": "data_parallel_size_local=1 "
    "data_parallel_rank=0 data_parallel_start_rank=0 "
    "data_parallel_hybrid_lb? data_parallel_external_lb? data_parallel_multi_port_external_lb? enable_elastic_ep? "
    "enable_fault_tolerance? decode_context_parallel_size=1 dcp=1 prefill_context_parallel_size=1 pcp=1 device_ids*",
    "they name the place of a host among --nnodes": "node_rank r master_addr master_port headless?",  # see nodes.py
    "ranks are processes of our own": "worker_use_ray? engine_use_ray? "
    "worker_cls=auto worker_extension_cls scheduler_cls",
    "adapters are LoRA adapters that requests name": "default_mm_loras prompt_adapters* enable_prompt_adapter?",
    "--speculation and --draft-model say how tokens are guessed": "spec_method diffusion_config dc",
    "KV tiers have options of their own: --kv-host-bytes, --kv-disk, --kv-remote, --kv-events": "kv_transfer_config "
    "kv_events_config kv_connector kv_offloading_size kv_offloading_backend=native",
    "no weights or encoder outputs leave their worker": "ec_transfer_config weight_transfer_config",
    "weights stay in the memory of their device": "cpu_offload_gb=0 cpu_offload_params* offload_backend=auto "
    "offload_group_size=0 offload_num_in_group=1 offload_prefetch_step=1 offload_params*",
    "the tokenizer is the one of tokenizer.json": "tokenizer_mode=auto|slow|hf tokenizer_pool_size=0",
    "models are read by this engine's own code": "config_format=auto|hf hf_config_path "
    "model_class_overrides quantization_config quantization_param_path io_processor_plugin additional_config",
    "fields of config.json are replaced with --hf-overrides": "rope_scaling rope_theta disable_sliding_window?",
    "the architecture and sentence-transformers' files say what is served": "task=auto|generate|embed|embedding|"
    "classify|score|reward runner=auto|generate|pooling convert=auto|none|embed|classify|reward pooler_config "
    "override_pooler_config",
    "logprobs are those of the model, before sampling": "logprobs_mode=raw_logprobs",
    "functions are named with --allowed-logits-processors": "logits_processors* logits_processor_pattern",
    "code of others is not loaded": "tool_parser_plugin reasoning_parser_plugin middleware* tool_server",
    "grammars are compiled by llguidance; it can only name a backend": 'structured_outputs_config={"backend":"auto"}|'
    '{"backend":"xgrammar"}|{"backend":"guidance"}|{"backend":"outlines"}|{"disable_fallback":true} reasoning_config',
    "prompts are text, token ids, images and audio, not their embeddings": "enable_prompt_embeds? enable_mm_embeds?",
    "the encoder serves its language model": "mm_encoder_only?",
    "template, roles and parts are those of the chat template": "response_role=assistant "
    "chat_template_content_format=auto|string",
    "answers carry no such thing": "enable_return_routed_experts? return_sampling_mask? "
    "tokens_only? tool_strict_level=auto",
    "there is one HTTP server": "grpc_port grpc? ssl_ciphers allow_credentials? enable_scale_out?",
    "the KV cache has one kind of numbers": "kv_cache_dtype_skip_layers*",
}


_TYPES: dict[str, type[bool] | type[list[str]]] = {"?": bool, "*": list}


class VllmOption(NamedTuple):
    """One option of vLLM that EngineConfig does not have. `why`: the reason in the table."""

    why: str
    type: type[bool] | type[list[str]] | type[str]
    harmless: tuple[object, ...] | None  # accepted values besides the empty ones; None: all values are ignored

    def is_refused(self, value: object) -> bool:
        """Return whether `value` asks for a feature that this engine lacks; always False for an ignored option."""
        plain, harmless = json_or_same(value), self.harmless
        if harmless is None or not plain or plain in harmless:
            return False
        return not isinstance(plain, dict) or any(each and {key: each} not in harmless for key, each in plain.items())

    def refusal(self, value: object) -> str:
        harmless = " or ".join(str(each) for each in self.harmless or () if not isinstance(each, dict))
        mend = f"leave it out, or give {harmless}" if harmless else "leave it out"
        shown = "" if self.type is bool else f"{value!s:.80} "
        return f"{shown}is not served: {self.why}: {mend}"


def json_or_same(value: object) -> object:
    """Return a text parsed as JSON, which is the value that a keyword would have; return any other text or value
    unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _options(table: dict[str, str], is_refused: bool) -> dict[str, VllmOption]:
    found = {}
    for why, words in table.items():
        for word in words.split():
            written, _, values = word.partition("=")
            harmless = tuple(map(json_or_same, filter(None, values.split("|")))) if is_refused else None
            found[written.rstrip("?*")] = VllmOption(why, _TYPES.get(written[-1], str), harmless)
    return found


VLLM_OPTIONS = _options(IGNORED, False) | _options(REFUSED, True)
