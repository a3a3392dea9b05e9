"""A checkpoint is read by the slice, from one file or many; an error names the defect in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tokenloom.ipc.errors import ConfigError
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.today import some_pairs
from tokenloom.tests.workers.paged_run import CPU, PagedRun, load
from tokenloom.workers.weights.checkpoint import Checkpoint, TensorSlice

SHARDED = 40_000  # bytes: some ten files
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def open_checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(folder, torch.float32, CPU)


def edit(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) take away tensors of a checkpoint in one file."""
    tensors = load_file(folder / "model.safetensors") | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def same_logits(first: Path, second: Path) -> bool:
    hidden = torch.randn(3, 96)
    return torch.equal(load(first).compute_logits(hidden), load(second).compute_logits(hidden))


def test_slices_are_concatenated_and_padded_with_zeros(tmp_path: Path) -> None:
    a, b = torch.randn(6, 4), torch.randn(5, 8)
    save_file({"a": a, "b": b}, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        loaded = checkpoint.load(
            TensorSlice("a", (6, 4), 0, range(2, 5)),
            TensorSlice("b", (5, 8), 1, range(4, 8)),
            TensorSlice("a", (6, 4), 0, range(4, 8)),
        )
        outside = checkpoint.load(TensorSlice("a", (6, 4), 0, range(8, 10)))
    assert torch.equal(loaded, torch.cat((a[2:5], b[:, 4:8], a[4:], torch.zeros(2, 4))))
    assert torch.equal(outside, torch.zeros(2, 4))


def test_a_sharded_checkpoint_loads_the_same_tensors_as_one_file(tmp_path: Path) -> None:
    one = tiny_checkpoint(tmp_path / "one", seed=4)
    many = tiny_checkpoint(tmp_path / "many", seed=4, shard_bytes=SHARDED)
    assert len(list(many.glob("*.safetensors"))) > 3
    names = load_file(one / "model.safetensors")
    with open_checkpoint(many) as checkpoint:
        for name, tensor in names.items():
            assert torch.equal(checkpoint.load(TensorSlice(name, tuple(tensor.shape))), tensor)


@pytest.mark.parametrize(
    ("family", "save_original_format"), some_pairs(["mixtral", "qwen3_moe"], [True, False], every=2)
)
def test_experts_load_as_transformers_saves_them(family: str, save_original_format: bool, tmp_path: Path) -> None:
    """One by one under the names of the family, or (its own form) stacked in one tensor per layer."""
    ours, theirs = tiny_checkpoint(tmp_path / "ours", family), tmp_path / "theirs"
    load_theirs: Any = transformers.AutoModelForCausalLM.from_pretrained
    load_theirs(ours).save_pretrained(theirs, save_original_format=save_original_format)
    is_stacked = any(name.endswith("experts.gate_up_proj") for name in load_file(theirs / "model.safetensors"))
    assert is_stacked is not save_original_format
    tokens = {"a": [5, 9, 200, 7], "b": [1]}
    logits = [PagedRun(load(folder), block_size=16).step(tokens) for folder in (ours, theirs)]
    for name in tokens:
        assert torch.equal(logits[0][name], logits[1][name])


def test_unused_tensors_are_ignored(tmp_path: Path) -> None:
    plain, more = tiny_checkpoint(tmp_path / "plain"), tiny_checkpoint(tmp_path / "more")
    edit(more, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16), "lm_head.weight": torch.ones(307, 96)})
    assert same_logits(plain, more)


def test_a_stored_head_of_a_model_that_sees_replaces_the_tied_one(tmp_path: Path) -> None:
    """As in transformers, where the defaults of some of these models tie heads that their files have."""
    folder, head, hidden = tiny_checkpoint(tmp_path, "smolvlm"), torch.randn(271, 64), torch.randn(3, 64)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    edit(folder, {"lm_head.weight": head})
    torch.testing.assert_close(load(folder).compute_logits(hidden), hidden @ head.T)
    theirs = transformers.SmolVLMForConditionalGeneration.from_pretrained(folder)
    assert torch.equal(theirs.lm_head.weight, head)


@pytest.mark.parametrize(
    ("fields", "change", "message"),
    [
        ({}, {Q_PROJ: None}, rf"{Q_PROJ} is missing, among 19 .*config.json"),
        ({"tie_word_embeddings": False}, {"lm_head.weight": None}, "lm_head.weight is missing"),
        (
            {},
            {Q_PROJ: torch.zeros(64, 96)},
            rf"model.safetensors: tensor {Q_PROJ} has shape \[64, 96\].*\[96, 96\]",
        ),
        (
            {},
            {Q_PROJ: torch.zeros(96, 96, dtype=torch.int8)},
            rf"{Q_PROJ} is I8, only F64, F32, F16, BF16 can be used here",
        ),
    ],
)
def test_a_tensor_that_is_missing_or_does_not_fit_is_named(
    fields: dict[str, object], change: dict[str, torch.Tensor | None], message: str, tmp_path: Path
) -> None:
    folder = tiny_checkpoint(tmp_path, **fields)
    edit(folder, change)
    with pytest.raises(ConfigError, match=message):
        load(folder)


@pytest.mark.parametrize(("kept", "shard_bytes"), some_pairs([0, 7, 300, 50_000], [1 << 30, SHARDED], every=2))
def test_truncated_file_is_named_with_its_size(kept: int, shard_bytes: int, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, shard_bytes=shard_bytes)
    file = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    kept = min(kept, file.stat().st_size - 1)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(
        ConfigError, match=rf"{file.name} \({kept} bytes\) is truncated or damaged.*fetch the file again"
    ):
        load(folder)


def test_a_damaged_header_is_reported(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:20] = b"\xff" * 12
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="truncated or damaged"):
        load(folder)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, shard_bytes=SHARDED)
    file = sorted(folder.glob("*.safetensors"))[1]
    file.unlink()
    with pytest.raises(ConfigError, match=rf"{file.name} does not exist, model.safetensors.index.json lists it"):
        load(folder)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_damaged_index_is_reported(content: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, shard_bytes=SHARDED)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigError, match=r"model.safetensors.index.json cannot be read"):
        load(folder)


def test_the_index_selects_the_file_of_a_tensor(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, shard_bytes=SHARDED)
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index["weight_map"][Q_PROJ] = index["weight_map"]["model.embed_tokens.weight"]
    index_file.write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=rf"does not hold tensor {Q_PROJ}, {index_file.name} says it does"):
        load(folder)


def test_pickled_weights_are_refused_with_a_remedy(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"only pytorch_model.bin.*save_pretrained"):
        load(folder)


def test_a_folder_without_weights_is_reported(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"neither model.safetensors nor"):
        load(folder)
