"""A GGUF file of each architecture has the logits of the checkpoint that it was made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tokenloom.frontend.checkpoint.gguf.architectures import ARCHITECTURES
from tokenloom.frontend.checkpoint.gguf.encoders.encoder_architectures import ENCODER_ARCHITECTURES
from tokenloom.frontend.checkpoint.gguf.folder import checkpoint_folder
from tokenloom.frontend.checkpoint.gguf.hybrid_architectures import HYBRID_ARCHITECTURES
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.config.served_model import served_model, with_floats
from tokenloom.kernels.select import select_ops
from tokenloom.scripts.bench.inputs.adapter_requests import linked_cache
from tokenloom.scripts.bench.inputs.write_gguf import ARCHITECTURES as WRITTEN
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.gguf_conversions import CONVERSIONS, convert
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.models.test_decoder import prompts_of, run_schedule, schedule
from tokenloom.tests.workers.models.test_families import TOLERANCE, reference_logits
from tokenloom.tests.workers.paged_run import CPU, PagedRun
from tokenloom.workers.machine.parallel import ParallelGroup
from tokenloom.workers.models.load import load_model

ROOT = Path(__file__).resolve().parents[3]
LENGTHS = {"a": 97, "b": 1, "c": 33}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 300.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GIVEN_BASE = 10000.0  # the rotary base of files that name none, as the converter leaves it out for some architectures
GLM: dict[str, object] = {"rms_norm_eps": 1e-5, "rope_theta": GIVEN_BASE, "seq_length": 512}
SHARED_KEYS: dict[str, object] = {
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "output_hidden_states": True,  # without it transformers' shortcut for shared keys fails
}
NUM_TEXT_TOKENS = 256  # ids above may stand for media
CASES: dict[str, tuple[str, dict[str, object]]] = {  # GGUF's architecture, or one of its forms: family, its fields
    "arcee": ("arcee", {}),
    "cohere2": ("cohere2", {"sliding_window_pattern": 4}),
    "command-r": ("cohere", {}),
    "command-r, norms of heads": ("cohere_plus", {}),
    "ernie4_5": ("ernie4_5", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 24}),
    "gemma3": (
        "gemma3_text",
        {
            "query_pre_attn_scalar": 24,
            "num_hidden_layers": 7,
            "sliding_window_pattern": 6,
            "rope_local_base_freq": 10000.0,
        },
    ),
    "glm4": ("glm4", {}),
    "gpt-oss": ("gpt_oss", {"swiglu_limit": 7.0}),
    "granite": ("granite", {}),
    "llama": ("llama", {}),
    "llama, factors of frequencies": ("llama", {"rope_parameters": LLAMA3}),
    "llama, biases": ("llama", {"attention_bias": True}),
    "llama, experts": ("mixtral", {}),
    "nemotron": ("nemotron", {}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {}),
    "phi3, rotated in part": ("phi4_mini", {}),
    "qwen2": ("qwen2", {}),
    "qwen2moe": ("qwen2_moe", {"mlp_only_layers": []}),
    "qwen3": ("qwen3", {}),
    "qwen3moe": ("qwen3_moe", {"mlp_only_layers": []}),
    "seed_oss": ("seed_oss", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1], "no_rope_layer_interval": 4}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "chatglm": ("glm", GLM),
    "chatglm, fused": ("glm", GLM),
    "dots1": ("dots1", {}),
    "dots1, no dense layers, not normalized": ("dots1", {"first_k_dense_replace": 0, "norm_topk_prob": False}),
    "ernie4_5-moe": ("ernie4_5_moe", {}),
    "ernie4_5-moe, no shared expert, each second layer": (
        "ernie4_5_moe",
        {"moe_num_shared_experts": 0, "moe_layer_interval": 2, "moe_layer_end_index": -1},
    ),
    "exaone4": ("exaone4", {}),
    "exaone4, no window": ("exaone4", {"layer_types": ["full_attention"] * 3, "sliding_window_pattern": None}),
    "falcon": ("falcon", {"rope_theta": GIVEN_BASE}),
    "falcon, two norms": ("falcon_40b", {"rope_theta": GIVEN_BASE}),
    "falcon, one norm": ("falcon_40b", {"rope_theta": GIVEN_BASE, "num_ln_in_parallel_attn": 1}),
    "gemma4": ("gemma4", {}),
    "gemma4, experts": ("gemma4_moe", {}),
    "gemma4, a model that takes images": ("gemma4_vision", {}),
    "gemma4, shared keys": ("gemma4", SHARED_KEYS),
    "gemma4, values of their own": ("gemma4", {"attention_k_eq_v": False, "num_global_key_value_heads": None}),
    "glm4moe": ("glm4_moe", {"num_nextn_predict_layers": 1}),
    "glm4moe, one group, two dense layers": (
        "glm4_moe",
        {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 2, "use_qk_norm": False, "n_shared_experts": 2},
    ),
    "glm4moe, SolarOpen": ("solar_open", {"first_k_dense_replace": 0, "intermediate_size": 88}),
    "gpt2": ("gpt2", {}),
    "gptneox": ("gpt_neox", {"rotary_emb_base": 10000}),
    "gptneox, one after the other": ("gpt_neox", {"rotary_emb_base": 10000, "use_parallel_residual": False}),
    "hunyuan-dense": ("hunyuan_v1_dense", {}),
    "jais2": ("jais2", {}),
    "minimax-m2": ("minimax_m2", {}),
    "mistral3": ("ministral3", {}),
    "mistral3, a model that takes images": ("mistral3", {}),
    "mistral3, Mistral": ("mistral3", {"model_type": "mistral", "rope_parameters": None}),
    "olmo": ("olmo", {}),
    "olmoe": ("olmoe", {"rms_norm_eps": 1e-5}),
    "phi2": ("phi", {"intermediate_size": 256, "rope_theta": GIVEN_BASE}),
    "phi2, fused": ("phi", {"intermediate_size": 256, "rope_theta": GIVEN_BASE}),
    "qwen2vl": ("qwen2_vl", {}),
    "qwen2vl, Qwen2.5": ("qwen2_5_vl", {"use_sliding_window": False}),
    "qwen3vl": ("qwen3_vl", {}),
    "stablelm": ("stablelm", {"rope_theta": GIVEN_BASE}),
    "stablelm, norms of heads": ("stablelm_12b", {"rope_theta": GIVEN_BASE}),
}


NULL = {"exaone4, no window": "sliding_window"}  # a field that is null in config.json


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(linked_cache(tmp_path / "cache")))


def test_all_architectures_are_tested_and_documented() -> None:
    others = {*HYBRID_ARCHITECTURES, *ENCODER_ARCHITECTURES}  # of test_gguf_hybrids.py and test_gguf_encoders.py
    own = set(ARCHITECTURES) - others
    assert {case.partition(",")[0] for case in CASES} == own
    written = {*WRITTEN.values(), *(each.architecture for each in CONVERSIONS.values())}
    assert written == own
    listed = (ROOT / "docs/learn/models.md").read_text(encoding="utf-8").partition("<!-- gguf: begin -->")[2]
    assert listed.partition("<!-- gguf: end -->")[0] == ", ".join(ARCHITECTURES)


@pytest.mark.parametrize("case", some(list(CASES), 8))
def test_logits_are_those_of_the_original(case: str, tmp_path: Path) -> None:
    family, fields = CASES[case]
    folder = tiny_checkpoint(tmp_path / "model", family, seed=1, **fields)
    if case in NULL:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | {NULL[case]: None}), encoding="utf-8")
    convert(folder, tmp_path / "model.gguf", is_fused=case.endswith("fused"))
    made = checkpoint_folder(tmp_path / "model.gguf")
    model = with_floats(served_model(EngineConfig(), made))
    tokens = prompts_of(LENGTHS, NUM_TEXT_TOKENS, seed=2)
    expected = reference_logits(folder, tokens)
    ops = select_ops(CPU, torch.float32)
    run = PagedRun(load_model(made, model, 128, torch.float32, CPU, ops, ParallelGroup()), 8)
    actual = run_schedule(run, tokens, schedule(LENGTHS, seed=3))
    for name in tokens:
        tolerance = TOLERANCE * expected[name].abs().max().item()
        torch.testing.assert_close(actual[name], expected[name], atol=tolerance, rtol=0)


def test_a_model_without_native_layers_is_refused(tmp_path: Path) -> None:
    convert(tiny_checkpoint(tmp_path / "model", "ernie4_5_moe", use_bias=True), tmp_path / "model.gguf")
    words = r"model.gguf: use_bias true has no native layers in a model with experts: take the model's safetensors$"
    with pytest.raises(ConfigError, match=words):
        checkpoint_folder(tmp_path / "model.gguf")
