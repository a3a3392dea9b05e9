"""A checkpoint that transformers' layers cannot serve is refused with the reason."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.family_checkpoints import randomize
from tokenloom.tests.support.recurrent_families import RECURRENT, recurrent_checkpoint
from tokenloom.tests.support.today import some
from tokenloom.tests.workers.models.test_decoder import prompts_of, run_schedule
from tokenloom.tests.workers.paged_run import CPU, PagedRun
from tokenloom.workers.borrowed.attention import PagedAttention, Unserved, attention_function
from tokenloom.workers.borrowed.load import AS_TEXT, REFUSED, check_state, language_model, load_borrowed
from tokenloom.workers.borrowed.model import BorrowedModel


def load(folder: Path, max_model_len: int = 64, is_dummy: bool = False, **options: Any) -> BorrowedModel:
    config = load_model_config(folder, implementation="transformers")
    settings = EngineConfig(**{"skip_self_check": True, **options})
    return load_borrowed(folder, config, settings, max_model_len, torch.float32, CPU, ReferenceOps(), is_dummy=is_dummy)


def edit(folder: Path, **fields: object) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


@pytest.mark.parametrize("model_type", some(list(REFUSED), 4))
def test_types_known_to_give_wrong_answers_are_refused_by_name(model_type: str, tmp_path: Path) -> None:
    config = transformers.CONFIG_MAPPING[model_type]()
    config.architectures = [f"{model_type}ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"{model_type}ForCausalLM cannot be served with transformers' layers"):
        load(tmp_path, is_dummy=True)


def test_the_refusal_names_the_nearest_native_family(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "qwen3")
    edit(folder, architectures=["Qwen3OmniForCausalLM"], model_type="rwkv", vocab_size=271)
    with pytest.raises(ConfigError, match="the nearest native model is Qwen3ForCausalLM"):
        load(folder)


def test_a_name_that_shares_no_more_than_the_kind_of_model_is_not_suggested(tmp_path: Path) -> None:
    folder = edit(tiny_checkpoint(tmp_path), architectures=["DeepseekV32ForCausalLM"], model_type="deepseek_v32")
    with pytest.raises(ConfigError, match=r"an indexer \(sparse attention\), so that answers would be wrong$"):
        load(folder)


VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
SIGLIP = {"model_type": "siglip_vision_model", **VISION, "image_size": 28, "patch_size": 14}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 271,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
OF_MEDIA: dict[str, dict[str, Any]] = {
    "aya_vision": {"text_config": {**TEXT, "model_type": "cohere2", "logit_scale": 0.3}, "vision_config": SIGLIP},
    "cohere2_vision": {"text_config": {**TEXT, "model_type": "cohere2", "logit_scale": 0.3}, "vision_config": SIGLIP},
    "lfm2_vl": {
        "text_config": {**TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        "vision_config": {**SIGLIP, "model_type": "siglip2_vision_model", "num_patches": 4},
    },
    "llava_next": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**SIGLIP, "model_type": "clip_vision_model"},
    },
    "llava_onevision": {"text_config": {**TEXT, "model_type": "qwen2"}, "vision_config": SIGLIP},
    "qwen3_5": {
        "text_config": {**RECURRENT["qwen3_5"], "model_type": "qwen3_5_text"},
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 48,
            "out_hidden_size": 64,
        },
    },
}


@pytest.mark.parametrize("model_type", some([*sorted(AS_TEXT), "qwen3_5"], 1))
def test_the_language_model_of_a_model_of_media_has_the_logits_of_the_whole(model_type: str, tmp_path: Path) -> None:
    config = transformers.CONFIG_MAPPING[model_type](**OF_MEDIA[model_type], dtype="float32")
    whole: Any = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    randomize(whole, 1)
    config.architectures = [type(whole).__name__]
    whole.save_pretrained(tmp_path)
    tokens = prompts_of({"a": 24, "b": 9}, 256, seed=1)
    actual = run_schedule(PagedRun(load(tmp_path), 8), tokens, [{"a": 11, "b": 9}, {"a": 13}])
    with torch.inference_mode():
        for name, ids in tokens.items():
            expected = whole(torch.tensor([ids])).logits[0]
            torch.testing.assert_close(actual[name], expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


@pytest.mark.parametrize("model_type", some(sorted(set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) | {"mistral4"}), 20))
def test_each_model_of_media_is_native_or_served_as_text_or_refused_in_a_clear_line(model_type: str) -> None:
    config = transformers.CONFIG_MAPPING[model_type]()
    try:
        text = language_model(config, "TheArchitecture")
    except ConfigError as refusal:
        assert re.fullmatch(
            rf"TheArchitecture cannot be served: transformers \S+ has no causal language model of type {model_type}, "
            "and its language model is not served alone",
            str(refusal),
        )
    else:
        assert type(text) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    folder = edit(tiny_checkpoint(tmp_path), model_type="own", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    (folder / "modeling_own.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(ConfigError, match=r"model_type own is unknown to transformers .* which is never run"):
        load(folder)


def drop(weights: dict[str, Any]) -> None:
    del weights["model.layers.1.mlp.down_proj.weight"]


def add(weights: dict[str, Any]) -> None:
    weights["model.layers.1.mlp.extra.weight"] = torch.zeros(3)


def narrow(weights: dict[str, Any]) -> None:
    weights["model.layers.0.mlp.down_proj.weight"] = torch.zeros(3, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, "lacks the tensors model.layers.1.mlp.down_proj.weight"),
        (add, "has tensors that the model does not use model.layers.1.mlp.extra.weight"),
        (narrow, r"has tensors of other shapes model.layers.0.mlp.down_proj.weight \[3, 5\]"),
    ],
)
def test_a_wrong_tensor_is_named(change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "olmo2")
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        load(folder)


def test_tensors_of_parts_that_are_not_served_are_ignored(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "olmo2")
    weights = load_file(folder / "model.safetensors")
    for name in ("mtp.layers.0.weight", "visual.blocks.0.norm.weight", "model.vision_tower.x.weight"):
        weights[name] = torch.zeros(3)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    load(folder)


def test_native_models_start_without_transformers() -> None:
    modules = "tokenloom.workers.process, tokenloom.core.process, tokenloom.frontend.launcher.supervisor.supervisor"
    check = f"import sys, {modules}; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_a_rotary_embedding_that_depends_on_other_requests_bounds_the_length(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "phi3")
    load(folder, max_model_len=128)
    with pytest.raises(ConfigError, match=r"longrope.* depend on the other requests.*: give --max-model-len 128"):
        load(folder, max_model_len=129)


def test_states_that_config_json_does_not_tell_are_refused(tmp_path: Path) -> None:
    folder = recurrent_checkpoint(tmp_path, "lfm2")
    config = load_model_config(folder, implementation="transformers")
    plain = msgspec.structs.replace(config, has_state=False)
    with pytest.raises(ConfigError, match=r"keeps states in model.layers.0.conv, which its config.json does not tell"):
        load_borrowed(folder, plain, EngineConfig(skip_self_check=True), 64, torch.float32, CPU, ReferenceOps())


def test_states_that_do_not_fit_name_the_option(tmp_path: Path) -> None:
    model = load(recurrent_checkpoint(tmp_path, "lfm2"))
    model.rows.state_bytes = 1 << 40
    config = load_model_config(tmp_path, implementation="transformers")
    with pytest.raises(
        ConfigError, match=r"the states of 16 requests take 16384.00 GiB, .*: lower --max-num-seqs to 0 or"
    ):
        check_state(model, config, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position_bias": torch.zeros(1)}, "gives attention an argument that is not served: position_bias"),
        ({"is_causal": False}, "attends to later tokens"),
    ],
)
def test_an_argument_of_attention_that_would_be_ignored_is_refused(options: dict[str, Any], message: str) -> None:
    module, heads = torch.nn.Identity(), torch.zeros(1, 2, 3, 8)
    attention = PagedAttention(ReferenceOps())
    with attention.trial(module, CPU):
        attention_function(torch.nn.Identity(), heads, heads, heads, None, position_ids=torch.zeros(3), dropout=0.0)
        with pytest.raises(Unserved, match=message):
            attention_function(module, heads, heads, heads, None, **options)


def test_a_layer_that_attends_twice_or_over_keys_of_its_own_is_refused() -> None:
    module, heads = torch.nn.Identity(), torch.zeros(1, 2, 3, 8)
    attention = PagedAttention(ReferenceOps())
    with attention.trial(module, CPU):
        with pytest.raises(Unserved, match="from 3 tokens to 1 keys of its own making"):
            attention_function(module, heads, heads[:, :, :1], heads[:, :, :1], None)
        attention_function(module, heads, heads, heads, None)
        with pytest.raises(Unserved, match="attends twice in a step"):
            attention_function(module, heads, heads, heads, None)
        with pytest.raises(Unserved, match="mask of its own"):
            attention_function(torch.nn.Identity(), heads, heads, heads, torch.zeros(1))
