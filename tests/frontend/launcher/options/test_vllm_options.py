"""vLLM's flags and keywords: most are accepted, the others are refused by name."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import pytest

from tokenloom.frontend.cli.serve import new_serve_parser
from tokenloom.frontend.launcher.options.arguments import add_engine_arguments, given_options
from tokenloom.frontend.launcher.options.options import KINDS, config_from_keywords, log_ignored, new_config
from tokenloom.frontend.launcher.options.synonyms import NAMES, VALUES
from tokenloom.frontend.launcher.options.vllm_options import IGNORED, REFUSED, VLLM_OPTIONS
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.engine_config import EngineConfig

TAKEN_FLAGS = """
--host 0.0.0.0|--port 8000|--uds /run/vllm.sock|--api-key sk-1|--root-path /llm|--allowed-origins ["*"]
--allowed-methods ["*"]|--allowed-headers ["*"]|--uvicorn-log-level warning|--disable-uvicorn-access-log
--ssl-cert-reqs 0|--enable-ssl-refresh|--enable-auto-tool-choice|--tool-call-parser hermes
--tool-call-parser llama3_json|--tool-call-parser llama4_pythonic|--tool-call-parser qwen3_xml
--reasoning-parser openai_gptoss|--reasoning-parser qwen3
--reasoning-parser deepseek_r1|--reasoning-parser glm45|--chat-template ./template.jinja
--chat-template-content-format auto|--response-role assistant|--return-tokens-as-token-ids
--enable-force-include-usage|--enable-prompt-tokens-details|--enable-server-load-tracking
--enable-request-id-headers|--enable-tokenizer-info-endpoint|--disable-fastapi-docs
--disable-frontend-multiprocessing|--exclude-tools-when-tool-choice-none|--max-log-len 100
--default-chat-template-kwargs {"enable_thinking": false}|--enable-log-outputs|--log-error-stack|--model m
--tokenizer t|--tokenizer-mode auto|--tokenizer-mode slow|--tokenizer-revision main|--revision main
--code-revision main|--trust-remote-code|--dtype auto|--dtype half|--dtype float|--dtype bfloat16|--seed 1
--max-model-len 8k|--max-model-len 2K|--max-model-len auto|--max-model-len -1|--quantization awq|-q gptq
--enforce-eager|--max-logprobs -1|--logprobs-mode raw_logprobs|--disable-cascade-attn|--skip-tokenizer-init
--served-model-name a b|--config-format auto|--hf-token hf_x|--hf-overrides {"rope_theta": 1e6}
--generation-config vllm|--runner auto|--convert none|--task generate
--override-generation-config {"temperature": 0.5}|--enable-sleep-mode|--model-impl vllm|--load-format auto
--model-impl transformers|--load-format safetensors|--load-format dummy|--download-dir /models|--use-tqdm-on-load
--model-loader-extra-config {"a": 1}|--safetensors-load-strategy lazy|--ignore-patterns original/*
--guided-decoding-backend xgrammar|--distributed-executor-backend mp|--pipeline-parallel-size 1|-pp 1
--tensor-parallel-size 1|-tp 1|--data-parallel-size 1|-dp 1|--nnodes 1|--node-rank 0|--master-addr 127.0.0.1
--master-port 29501|--enable-expert-parallel|--disable-custom-all-reduce|--max-parallel-loading-workers 2
--enable-eplb|--enable-dbo|--worker-cls auto|--decode-context-parallel-size 1|--block-size 16
--gpu-memory-utilization 0.9|--kv-cache-memory-bytes 2G|--kv-cache-dtype auto|--kv-cache-dtype fp8_e4m3
--num-gpu-blocks-override 100|--enable-prefix-caching|--no-enable-prefix-caching|--prefix-caching-hash-algo sha256
--swap-space 4|--cpu-offload-gb 0|--calculate-kv-scales|--limit-mm-per-prompt {"image": 0}
--limit-mm-per-prompt image=4,video=0|--limit-mm-per-prompt {"image": {"count": 2, "width": 512}}
--limit-mm-per-prompt.image 3|--allowed-media-domains a.example b.example|--mm-processor-kwargs {}
--allowed-local-media-path /tmp|--skip-mm-profiling|--mm-processor-cache-gb 0|--language-model-only|--lora-dtype auto
--fully-sharded-loras|--otlp-traces-endpoint http://otel:4317|--collect-detailed-traces all
--show-hidden-metrics-for-version 0.10|--kv-cache-metrics|--enable-mfu-metrics|--max-num-batched-tokens 8k
--max-num-seqs 64|--max-num-partial-prefills 1|--max-long-partial-prefills 1|--long-prefill-token-threshold 0
--scheduling-policy fcfs|--enable-chunked-prefill|--no-enable-chunked-prefill|--disable-hybrid-kv-cache-manager
--async-scheduling|--stream-interval 1|--num-scheduler-steps 1|--cudagraph-capture-sizes 1 2 4
--max-seq-len-to-capture 8192|--compilation-config {"level": 3}|-O3|-cc {"mode": 3}|--attention-backend FLASH_ATTN
--moe-backend auto|--optimization-level 2|--performance-mode balanced
--structured-outputs-config {"backend": "xgrammar"}|--additional-config {}|--disable-log-stats|--enable-log-requests
--disable-log-requests|--aggregate-engine-logging|--shutdown-timeout 30|--api-server-count 4
--speculative-model m --spec-tokens 4
--speculative-config {"method": "draft_model", "model": "m", "num_speculative_tokens": 4, "max_model_len": 100}
--speculative-config {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
-sc {"method": "suffix", "suffix_decoding_max_tree_depth": 24}|-sc {"method": "eagle3", "model": "m"}
-sc {"method": "deepseek_mtp", "num_speculative_tokens": 1}|--speculation mtp
--enable_chunked_prefill|--max_model_len 4096|--gpu_memory_utilization=0.5
"""
REFUSED_FLAGS = """
--default-mm-loras {"a": 1}|--enable-prompt-adapter|--speculative-config {"method": "eagle"}
--spec-method eagle|--kv-transfer-config {"a": 1}|--kv-events-config {"a": 1}|--pipeline-parallel-size 2
--headless|--cpu-offload-gb 4|--distributed-executor-backend external_launcher|--tokenizer-mode mistral
--load-format gguf|--logits-processors a:b|--logprobs-mode raw_logits|--tool-parser-plugin x.py|--middleware a.b
--enable-prompt-embeds|--task transcription|--pooler-config {"a": 1}|--worker-cls a.B|--ssl-ciphers AES
--response-role bot|--chat-template-content-format openai
--structured-outputs-config {"disable_any_whitespace": true}|--rope-scaling {"a": 1}|--disable-sliding-window
--model-impl terratorch|--config-format mistral|--kv-cache-dtype fp8_e5m2|--tool-call-parser pythonic2
--enable-mm-embeds|--mm-encoder-only|--limit-mm-per-prompt {"pictures": 1}|--limit-mm-per-prompt {"image": -1}
--reasoning-parser thinker|--quantization bitsandbytes|--kv-offloading-size 4|--allow-credentials
"""
KEYWORDS: dict[str, object] = {  # keywords of LLM with values from scripts; the refused ones are below
    "tokenizer": "t", "tokenizer_mode": "auto", "skip_tokenizer_init": False, "trust_remote_code": True,
    "allowed_local_media_path": "", "allowed_media_domains": None, "tensor_parallel_size": 1, "dtype": "half",
    "quantization": None, "revision": None, "tokenizer_revision": None, "code_revision": None, "chat_template": None,
    "seed": None, "gpu_memory_utilization": 0.9, "swap_space": 4, "cpu_offload_gb": 0, "enforce_eager": False,
    "disable_custom_all_reduce": True, "hf_token": True, "hf_overrides": {}, "mm_processor_kwargs": None,
    "pooler_config": None, "structured_outputs_config": None, "profiler_config": None, "attention_config": None,
    "kv_cache_memory_bytes": None, "compilation_config": 3, "logits_processors": None, "runner": "auto",
    "convert": "auto", "task": "generate", "max_model_len": 2048, "max_num_seqs": 8, "max_num_batched_tokens": None,
    "enable_prefix_caching": None, "enable_chunked_prefill": True, "block_size": 16, "load_format": "auto",
    "download_dir": None, "served_model_name": ["a", "b"], "generation_config": "auto",
    "override_generation_config": {}, "limit_mm_per_prompt": {"image": 0}, "pipeline_parallel_size": 1,
    "data_parallel_size": 1, "distributed_executor_backend": None, "enable_expert_parallel": False,
    "max_seq_len_to_capture": 8192, "kv_cache_dtype": "auto", "num_gpu_blocks_override": None, "max_logprobs": 20,
    "disable_log_stats": True, "enable_lora": False, "max_loras": 1, "max_lora_rank": 16, "enable_sleep_mode": True,
    "guided_decoding_backend": "auto", "speculative_config": None, "kv_transfer_config": None, "model_impl": "auto",
    "use_tqdm_on_load": False, "async_scheduling": True, "scheduling_policy": "fcfs", "language_model_only": True,
    "device": "auto", "config_format": "auto", "reasoning_parser": "", "worker_cls": "auto",
    "disable_cascade_attn": True, "long_prefill_token_threshold": 0,
}  # fmt: skip
REFUSED_KEYWORDS: dict[str, object] = {
    "enable_prompt_adapter": True, "speculative_config": {"method": "eagle", "model": "m"},
    "kv_transfer_config": {"kv_role": "kv_both"},
    "logits_processors": ["a:b"], "cpu_offload_gb": 2, "pipeline_parallel_size": 2, "runner": "draft",
    "logprobs_mode": "processed_logprobs", "enable_prompt_embeds": True, "worker_extension_cls": "a.B",
}  # fmt: skip


def lines(text: str) -> list[str]:
    return [line for line in text.replace("\n", "|").split("|") if line]


def words(line: str) -> list[str]:
    flag, _, value = line.partition(" ")
    if value.startswith(("{", "[")):
        return [flag, value]
    return line.split()


PARSER = new_serve_parser()


def taken(line: str) -> EngineConfig:
    return new_config(given_options(PARSER.parse(words(line))))


def refusal(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Return why a line of arguments is refused, empty if it is taken."""
    try:
        taken(line)
    except ConfigError as error:
        return str(error)
    except SystemExit:
        return capsys.readouterr().err
    return ""


def test_a_flag_of_vllm_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    assert not {line: why for line in lines(TAKEN_FLAGS) if (why := refusal(line, capsys))}


def test_a_flag_of_a_missing_feature_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    found = {line: refusal(line, capsys) for line in lines(REFUSED_FLAGS)}
    assert not {line: said for line, said in found.items() if words(line)[0] not in said or said.count("\n") > 1}


def test_a_keyword_of_vllm_is_accepted() -> None:
    for name, value in KEYWORDS.items():
        config_from_keywords("LLM", "m", {name: value})


@pytest.mark.parametrize("name", REFUSED_KEYWORDS)
def test_a_keyword_of_a_missing_feature_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"^LLM\(\): {name} .*: "):
        config_from_keywords("LLM", "m", {name: REFUSED_KEYWORDS[name]})


def test_the_tables_hold_no_option_of_ours_and_none_twice() -> None:
    assert not VLLM_OPTIONS.keys() & (KINDS.keys() | NAMES.keys())
    assert set(NAMES.values()) <= KINDS.keys() and VALUES.keys() <= KINDS.keys()
    listed = [
        word.partition("=")[0].rstrip("?*")
        for table in (IGNORED, REFUSED)
        for row in table.values()
        for word in row.split()
    ]
    assert len(listed) == len(VLLM_OPTIONS)


def test_every_row_of_the_tables_is_a_flag_with_a_reason() -> None:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    flags = {action.dest: action.option_strings for action in parser._actions}
    ignored = " ".join(IGNORED.values()).replace("?", "").replace("*", "").split()
    for name, option in VLLM_OPTIONS.items():
        assert "--" + name.replace("_", "-") in flags[name]
        assert option.why and (option.harmless is None) == (name in ignored), name
        if option.harmless is not None:
            assert option.is_refused(True if option.type is bool else "other") and not option.is_refused(None), name
            assert not any(map(option.is_refused, option.harmless)), name


def test_options_without_effect_are_logged_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tokenloom.options"):
        config_from_keywords("LLM", "m", {"swap_space": 4, "enable_chunked_prefill": True, "pipeline_parallel_size": 1})
    (line,) = caplog.messages
    assert "swap_space (" in line and "enable_chunked_prefill (" in line and "pipeline" not in line
    file = tmp_path / "engine.yaml"
    file.write_text("swap-space: 4\npipeline-parallel-size: 2\n")
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    arguments = parser.parse_args(["--config", str(file)])
    with pytest.raises(ConfigError, match=r"engine.yaml line 2: pipeline-parallel-size 2 is not served: .* give 1$"):
        new_config(given_options(arguments))
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tokenloom.options"):
        log_ignored(given_options(arguments))
    assert [message.count("swap-space (") for message in caplog.messages] == [1]


def test_none_selects_the_default_of_every_keyword() -> None:
    everything = dict.fromkeys([*KINDS, *NAMES, *VLLM_OPTIONS])
    named = {name: None for name in everything if name != "model" and len(name) > 3}
    assert config_from_keywords("LLM", None, named) == EngineConfig(log_level="warning")


@pytest.mark.parametrize(
    ("line", "limit"),
    [
        ("--limit-mm-per-prompt image=4", 4),
        ('--limit-mm-per-prompt {"image": 3, "video": 0}', 3),
        ('--limit-mm-per-prompt {"image": {"count": 2, "width": 512}}', 2),
        ("--limit-mm-per-prompt.image 1", 1),
        ('--limit-mm-per-prompt {"video": 0}', None),
        ("--language-model-only", 0),
    ],
)
def test_each_form_of_a_limit_on_images_gives_the_number(line: str, limit: int | None) -> None:
    assert taken(line).max_media("image") == limit
