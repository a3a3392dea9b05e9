"""Slots get the adapters of their orders, or none: a file that is damaged or belongs elsewhere is named."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.messages.adapter import FillSlot
from tokenloom.ipc.spec.adapters.adapter_config import CONFIG_NAME
from tokenloom.ipc.spec.adapters.digest import adapter_digest
from tokenloom.ipc.spec.adapters.tensor_header import TENSORS_NAME
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.scripts.bench.inputs.make_adapter import AdapterShape, write_adapter
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.family_checkpoints import reference_model
from tokenloom.tests.support.peft_adapters import KINDS, save_adapter
from tokenloom.tests.workers.features.adapters.adapted_model import CONFIG, fill, load_adaptable
from tokenloom.tests.workers.models.test_decoder import prompts_of
from tokenloom.tests.workers.paged_run import PagedRun
from tokenloom.workers.features.adapters.base_weights import PIECE_BYTES
from tokenloom.workers.models.decoder import DecoderModel

MIXTURES = {  # family and names of an expert's matrices
    "mixtral": ("w1", "w2", "w3", "q_proj"),
    "qwen3_moe": ("gate_proj", "up_proj", "down_proj", "o_proj"),
    "qwen2_moe": ("gate_proj", "down_proj", "shared_expert_gate", "gate"),
}


def merged_logits(checkpoint: Path, adapter: Path, shape: AdapterShape, tokens: dict[str, list[int]]) -> Tensor:
    """Return transformers' logits of a base with an adapter merged into its files, by the formulas of LoRA and DoRA."""
    tensors, updates = load_file(checkpoint / "model.safetensors"), load_file(adapter / TENSORS_NAME)
    for name, a in updates.items():
        module, _, part = name.removeprefix("base_model.model.").partition(".lora_")
        if part != "A.weight":
            continue
        weight = tensors[f"{module}.weight"]
        weight += shape.scale * updates[name.replace("lora_A", "lora_B")] @ a
        magnitude = updates.get(name.replace("lora_A.weight", "lora_magnitude_vector"))
        if magnitude is not None:
            weight *= (magnitude / weight.norm(dim=1))[:, None]
    merged = checkpoint.with_name("merged")
    merged.mkdir()
    save_file(tensors, merged / "model.safetensors", {"format": "pt"})
    (merged / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    with torch.inference_mode():
        logits: Tensor = reference_model(merged)(torch.tensor([tokens["a"]])).logits[0]
        return logits


def logits_of(model: DecoderModel, tokens: dict[str, list[int]], slot: int) -> Tensor:
    run = PagedRun(model, 8)
    run.slots["a"] = slot
    return run.step(tokens)["a"]


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_one_by_one_equal_a_merged_base(family: str, use_dora: bool, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", family)
    shape = AdapterShape(rank=3, alpha=6, modules=MIXTURES[family], use_dora=use_dora)
    adapter = write_adapter(tmp_path / "adapter", checkpoint, shape, 1)
    tokens = prompts_of({"a": 30}, load_model_config(checkpoint).vocab_size, seed=1)
    expected = merged_logits(checkpoint, adapter, shape, tokens)
    for ops in (ReferenceOps(), None):
        model, filler = load_adaptable(checkpoint, ops)
        base = logits_of(model, tokens, 1)
        fill(filler, 1, adapter)
        actual = logits_of(model, tokens, 1)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * expected.abs().max().item())
        assert (actual.argmax(-1) != base.argmax(-1)).any()


def test_experts_that_peft_took_for_transposed_ones_get_the_same_updates(tmp_path: Path) -> None:
    """Some versions of PEFT swap A and B of interleaved experts, both transposed."""
    checkpoint = tiny_checkpoint(tmp_path / "model", "gpt_oss")
    adapter = save_adapter(tmp_path / "adapter", checkpoint, KINDS["experts"], 1)
    config = load_model_config(checkpoint)
    assert config.experts is not None
    num_experts, rank = config.experts.num_experts, KINDS["experts"]["r"]
    tokens = prompts_of({"a": 20}, config.vocab_size, seed=1)
    model, filler = load_adaptable(checkpoint)
    fill(filler, 1, adapter)
    path = adapter / TENSORS_NAME
    tensors = load_file(path)
    for name, a in load_file(path).items():
        if ".experts." in name and "lora_A" in name:
            b = tensors[name.replace("lora_A", "lora_B")]
            swapped_a = b.view(len(b), rank, num_experts).permute(2, 1, 0).reshape(-1, len(b))
            swapped_b = a.view(num_experts, rank, a.shape[1]).permute(2, 1, 0).reshape(a.shape[1], -1)
            tensors[name], tensors[name.replace("lora_A", "lora_B")] = swapped_a.contiguous(), swapped_b.contiguous()
    save_file(tensors, path)
    fill(filler, 2, adapter)
    first, second, base = (logits_of(model, tokens, slot) for slot in (1, 2, 0))
    assert torch.equal(first, second) and not torch.allclose(first, base, atol=0.1)


def test_norms_of_quantized_layers_are_those_of_their_rounded_weights(tmp_path: Path) -> None:
    """A head is not quantized on load."""
    checkpoint = tiny_checkpoint(tmp_path / "model", tie_word_embeddings=False)
    shape = AdapterShape(rank=2, modules=("o_proj", "lm_head"), use_dora=True)
    adapter = write_adapter(tmp_path / "adapter", checkpoint, shape, 1)
    scales = {}
    for quantization in (None, "int8"):
        model, filler = load_adaptable(checkpoint, ReferenceOps(), quantization=quantization)
        fill(filler, 1, adapter)
        assert model.adapted is not None
        for layer in model.adapted.linears:
            update = layer.slots.updates[1]  # type: ignore[attr-defined]
            if update is not None:
                scales[layer.parts[0].module.rpartition(".")[2], quantization] = update.scale
    assert torch.equal(scales["lm_head", None], scales["lm_head", "int8"])
    assert not torch.equal(scales["o_proj", None], scales["o_proj", "int8"])
    torch.testing.assert_close(scales["o_proj", None], scales["o_proj", "int8"], rtol=0.01, atol=0)


def test_norms_of_many_pieces_equal_those_of_one(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", "glm")
    adapter = save_adapter(tmp_path / "adapter", checkpoint, KINDS["dora"], 1)
    tokens = prompts_of({"a": 20}, load_model_config(checkpoint).vocab_size, seed=1)
    logits = []
    for piece_bytes in (PIECE_BYTES, 7 * 4 * 64):
        model, filler = load_adaptable(checkpoint, piece_bytes=piece_bytes)
        fill(filler, 1, adapter)
        logits.append(logits_of(model, tokens, 1))
    whole, cut, base = *logits, logits_of(model, tokens, 0)
    torch.testing.assert_close(cut, whole, rtol=0, atol=1e-5)
    assert not torch.allclose(whole, base, atol=0.1)


def test_a_changed_file_is_refused_before_it_is_used(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter", checkpoint, AdapterShape(rank=4), 1)
    digest, path = adapter_digest(adapter), adapter / TENSORS_NAME
    order = FillSlot(slot=1, digest=digest, folder=str(adapter))
    _, filler = load_adaptable(checkpoint)
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RequestError, match="has changed since it was stored"):
        filler.fill(order)
    path.write_bytes(content)
    assert filler.fill(order) == len(content) - 8 - int.from_bytes(content[:8], "little"), "every tensor is read once"
    path.write_bytes(content[:-4])  # the digest is computed once
    with pytest.raises(RequestError, match=r"adapter_model.safetensors"):
        filler.fill(order)
    path.unlink()
    with pytest.raises(RequestError, match="cannot be read"):
        filler.fill(order)


def test_an_adapter_of_a_high_rank_or_other_modules_is_refused(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter", checkpoint, AdapterShape(rank=8, modules=("v_proj",)), 1)
    for config, words in (
        (EngineConfig(enable_lora=True, max_lora_rank=4), "--max-lora-rank is 4"),
        (EngineConfig(enable_lora=True, lora_target_modules=["q_proj"]), "--lora-target-modules leaves out"),
    ):
        _, filler = load_adaptable(checkpoint, config=config)
        with pytest.raises(RequestError, match=words):
            fill(filler, 1, adapter)


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_a_copy_of_other_base_weights_is_refused(module: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", tie_word_embeddings=False)
    kind = {"target_modules": [module], "r": 4}
    adapter = save_adapter(tmp_path / "adapter", checkpoint, kind, 1)
    path = adapter / TENSORS_NAME
    tensors = load_file(path)
    (name,) = (name for name in tensors if name.endswith("base_layer.weight"))
    _, filler = load_adaptable(checkpoint)
    fill(filler, 1, adapter)
    save_file({**tensors, name: tensors[name].bfloat16()}, path)
    fill(filler, 1, adapter)  # equal within its dtype
    tensors[name][-1, -1] += 1
    save_file(tensors, path)
    with pytest.raises(RequestError, match=f"{module}.base_layer.weight differs from the base's"):
        fill(filler, 1, adapter)


def test_scales_are_folded_in_float32(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model")
    shape = AdapterShape(rank=3, alpha=7, use_rslora=True, modules=("v_proj",), dtype="bfloat16")
    adapter = write_adapter(tmp_path / "adapter", checkpoint, shape, 1)
    assert json.loads((adapter / CONFIG_NAME).read_text())["use_rslora"] is True
    model, filler = load_adaptable(checkpoint, ReferenceOps())
    fill(filler, 1, adapter)
    assert model.adapted is not None
    layer = next(each for each in model.adapted.linears if any(part.module.endswith("v_proj") for part in each.parts))
    (update,) = (each for each in layer.slots.updates if each is not None)  # type: ignore[attr-defined]
    (part,) = update.parts
    stored = load_file(adapter / TENSORS_NAME)
    (b,) = (tensor for name, tensor in stored.items() if "layers.0" in name and "lora_B" in name)
    assert torch.equal(part.b, b.float() * (7 / math.sqrt(3)))
    assert part.first_output == sum(len(each.outputs) for each in layer.parts[:2])
    assert CONFIG.max_loras == 5
