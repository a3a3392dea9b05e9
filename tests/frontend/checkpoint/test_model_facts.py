"""Facts of a model from its files, against what other libraries read from them."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from tokenloom.frontend.checkpoint.downloads.repository import HubFile, HubRepository
from tokenloom.frontend.checkpoint.machine import NUM_TOKENS, Need
from tokenloom.frontend.checkpoint.model_facts import facts_of, facts_of_repository
from tokenloom.frontend.checkpoint.weight_memory import kv_bytes
from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.processor import has_avx2
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.scripts.bench.inputs.write_gguf import convert
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.quantized_checkpoints import quantized_pair
from tokenloom.tests.workers.models.test_experts import SHARED_KEYS
from tokenloom.tests.workers.paged_run import load

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SIZES = HEADS | {"hidden_size": 128, "intermediate_size": 192}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def num_weights(folder: Path) -> int:
    return sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())


def test_a_checkpoint_has_the_parameters_size_and_context_of_its_files(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m", "llama", dtype="bfloat16", max_position_embeddings=777)
    facts = facts_of(folder)
    assert facts.num_parameters == num_weights(folder)
    assert facts.num_bytes == 2 * num_weights(folder)
    assert facts.format == "safetensors bfloat16" and facts.context_length == 777
    assert facts.architecture == "LlamaForCausalLM" and facts.media is None


@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("gptq, act-order", "gptq int4"),
        ("awq", "awq int4"),
        ("packed", "compressed-tensors int4"),
        ("fp8, blocks", "fp8"),
    ],
)
def test_a_quantized_checkpoint_has_the_parameters_of_its_floats(form: str, kind: str, tmp_path: Path) -> None:
    quantized, plain = quantized_pair(tmp_path, form, "llama", **SIZES)
    facts = facts_of(quantized)
    assert facts.num_parameters == facts_of(plain).num_parameters and facts.format == f"safetensors {kind}"
    as_floats = facts_of(plain).needs[0].num_bytes
    assert facts.needs[0].num_bytes == pytest.approx(as_floats, rel=0.05), "products in float32 are of floats"


def test_a_gguf_file_has_what_its_metadata_say(tmp_path: Path) -> None:
    convert(tiny_checkpoint(tmp_path / "m", "llama", **SIZES), tmp_path / "tiny-Q8_0.gguf", "Q8_0")
    reader = gguf.GGUFReader(tmp_path / "tiny-Q8_0.gguf")
    facts = facts_of(tmp_path / "tiny-Q8_0.gguf")
    assert facts.num_parameters == sum(int(tensor.n_elements) for tensor in reader.tensors)
    assert facts.context_length == reader.fields["llama.context_length"].contents()
    assert facts.format == "GGUF Q8_0" and facts.num_bytes == (tmp_path / "tiny-Q8_0.gguf").stat().st_size
    (need,) = facts.needs
    plain = facts_of(tmp_path / "m").needs[0]
    assert need.options == "" and (need.num_bytes < plain.num_bytes) == has_avx2(), "codes are kept where AVX2 is"
    assert facts_of(tmp_path) == facts, "the folder with the file"
    (tmp_path / "tiny-Q8_0.gguf").rename(tmp_path / "model.gguf")
    assert facts_of(tmp_path / "model.gguf").format == "GGUF Q8_0", "without a format in its name"


@pytest.mark.parametrize("place", ["chat_template.jinja", "tokenizer_config.json", "chat_template.json"])
def test_the_chat_template_is_found_in_each_of_its_places(place: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m", "llama")
    for name in ("chat_template.jinja", "tokenizer_config.json", "chat_template.json"):
        (folder / name).unlink(missing_ok=True)
    assert facts_of(folder).template is None
    text = "{{ tools }}" if place.endswith("jinja") else json.dumps({"chat_template": "{{ tools }}"})
    (folder / place).write_text(text)
    assert facts_of(folder).template == "{{ tools }}"


def test_sampling_and_license_are_those_that_the_files_name(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m", "llama")
    assert facts_of(folder).license is None
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: 'apache-2.0'\n---\nlicense: other\n")
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    assert facts_of(folder).license == "apache-2.0" and facts_of(folder).sampling == {"temperature": 0.6, "top_k": 20}
    (folder / "README.md").write_text("license: mit\n")
    assert facts_of(folder).license is None, "not at its head"


@pytest.mark.parametrize(("family", "fields"), [("llama", {}), ("gemma4", SHARED_KEYS), ("gpt2", {})])
def test_the_estimated_bytes_of_keys_and_values_are_those_of_the_cache(
    family: str, fields: dict[str, object], tmp_path: Path
) -> None:
    folder = tiny_checkpoint(tmp_path / "m", family, **fields)
    (spec,) = load(folder).kv_cache_specs(16, torch.float32)
    assert kv_bytes(load_model_config(folder), "float32", 16 * 3) == 3 * spec.block_bytes


def test_a_model_that_was_not_fetched_has_the_facts_of_the_hub(tmp_path: Path) -> None:
    listed = HubRepository("o/n", "c", [HubFile("a", 1, "e")], "mit", 7 << 30, "llama", 4096, "{{ x }}")
    facts = facts_of_repository(listed, "m-Q4_K_M.gguf", 4 << 30, tmp_path)
    assert facts.format == "GGUF Q4_K_M" and facts.num_parameters == 7 << 30 and facts.license == "mit"
    assert facts.needs == [Need("", 4 << 30 if has_avx2() else 14 << 30)] and facts.context_length == 4096
    folder = tiny_checkpoint(tmp_path / "m", "llama", dtype="bfloat16")
    facts = facts_of_repository(listed._replace(num_parameters=None), None, 1000, folder)
    assert facts.num_parameters is None and facts.architecture == "LlamaForCausalLM"
    assert facts.needs[0].num_bytes == 1000 + kv_bytes(load_model_config(folder), "bfloat16", NUM_TOKENS)


def test_what_cannot_be_served_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "m", "llama")
    (folder / "config.json").write_text('{"architectures": ["ViTModel"]}')
    with pytest.raises(ConfigError, match="ViTModel"):
        facts_of(folder)
    with pytest.raises(ConfigError, match="there is no such file"):
        facts_of(tmp_path / "none.gguf")
