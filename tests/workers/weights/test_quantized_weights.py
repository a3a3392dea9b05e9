"""Quantized matrices equal an unpacking by numpy, whole and in shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokenloom.ipc.errors import ConfigError
from tokenloom.ipc.spec.models.model_file import load_model_config
from tokenloom.ipc.spec.models.quantization_config import QuantizationConfig
from tokenloom.kernels.quantized import as_floats
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.quantized_checkpoints import FORMATS, mxfp4_pair, quantized_pair
from tokenloom.tests.support.today import some, some_pairs
from tokenloom.tests.workers.models.test_decoder import prompts_of
from tokenloom.tests.workers.paged_run import CPU, PagedRun, load
from tokenloom.workers.weights.checkpoint import Checkpoint, TensorSlice
from tokenloom.workers.weights.quantized_weights import load_matrix

SHAPE = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
INNER = 208  # not a multiple of a group or a block; 26 words of eight codes
LAYER = "model.layers.1"
Q_PROJ = f"{LAYER}.self_attn.q_proj.weight"


def open_pair(folders: tuple[Path, Path]) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    """The quantized checkpoint, and the floats that it stands for."""
    quantized, plain = folders
    checkpoint = Checkpoint(quantized, torch.float32, CPU, load_model_config(quantized).quantization)
    return checkpoint, load_file(plain / "model.safetensors")


@pytest.mark.parametrize(("form", "num_ranks"), some_pairs(list(FORMATS), [1, 2, 4, 8], every=5))
def test_a_shard_may_begin_inside_a_quantization_group(form: str, num_ranks: int, tmp_path: Path) -> None:
    checkpoint, floats = open_pair(quantized_pair(tmp_path, form, intermediate_size=INNER, **SHAPE))
    with checkpoint:
        for name, axis in ((f"{LAYER}.mlp.up_proj.weight", 0), (f"{LAYER}.mlp.down_proj.weight", 1)):
            size = INNER // num_ranks
            for rank in range(num_ranks):
                shard = range(rank * size, (rank + 1) * size)
                weight = load_matrix(checkpoint, TensorSlice(name, tuple(floats[name].shape), axis, shard))
                expected = floats[name].narrow(axis, shard.start, size)
                torch.testing.assert_close(as_floats(weight), expected, atol=1e-7, rtol=1e-6)


def test_unquantized_matrices_stay_floats(tmp_path: Path) -> None:
    checkpoint, floats = open_pair(quantized_pair(tmp_path, "awq", **SHAPE))
    folder = checkpoint.folder
    names = [f"{LAYER}.self_attn.{name}_proj" for name in "qkv"]
    stored = load_file(folder / "model.safetensors")
    for name in names[:2]:
        for suffix in ("qweight", "qzeros", "scales"):
            del stored[f"{name}.{suffix}"]
        stored[f"{name}.weight"] = floats[f"{name}.weight"]
    save_file(stored, folder / "model.safetensors")
    slices = [TensorSlice(f"{name}.weight", tuple(floats[f"{name}.weight"].shape)) for name in names]
    with Checkpoint(folder, torch.float32, CPU, checkpoint.quantization) as edited:
        plain, mixed = load_matrix(edited, *slices[:2]), load_matrix(edited, *slices)
    assert isinstance(plain, torch.Tensor) and isinstance(mixed, torch.Tensor)
    assert torch.equal(plain, torch.cat([floats[wanted.name] for wanted in slices[:2]]))
    torch.testing.assert_close(mixed, torch.cat([floats[wanted.name] for wanted in slices]))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_quantizing_on_load_keeps_logits_near(kind: str, tmp_path: Path) -> None:
    """Within 5 % (int8: 1/254 of a row's largest element) or 15 % (e4m3: 1/16 of each) of the logits' deviation."""
    folder = tiny_checkpoint(tmp_path, "qwen3_moe")
    tokens = prompts_of({"a": 60}, 270, seed=3)
    exact = PagedRun(load(folder), 16).step(tokens)["a"]
    rough = PagedRun(load(folder, quantization=kind), 16).step(tokens)["a"]
    error = float((rough - exact).std() / exact.std())
    assert 1e-4 < error < {"int8": 0.05, "fp8": 0.15}[kind]


@pytest.mark.parametrize(
    ("form", "wrong", "message"),
    [
        (
            "fp8, blocks",
            QuantizationConfig(layout="scaled", weight_dtype="fp8", block=(16, 16)),
            r"q_proj.weight_scale_inv has shape \[2, 2\], blocks of 16 x 16 in \[96, 96\] ask for \[6, 6\]",
        ),
        (
            "int8, channels",
            QuantizationConfig(layout="scaled", weight_dtype="fp8"),
            "q_proj.weight is I8, only F8_E4M3 can be used here",
        ),
    ],
)
def test_codes_and_scales_of_another_kind_are_reported(
    form: str, wrong: QuantizationConfig, message: str, tmp_path: Path
) -> None:
    quantized, _ = quantized_pair(tmp_path, form, **SHAPE)
    with Checkpoint(quantized, torch.float32, CPU, wrong) as checkpoint, pytest.raises(ConfigError, match=message):
        load_matrix(checkpoint, TensorSlice(Q_PROJ, (96, 96)))


def add(folder: Path, **tensors: torch.Tensor) -> None:
    """Add tensors to the matrix of Q_PROJ."""
    stored = load_file(folder / "model.safetensors")
    added = {Q_PROJ.replace("weight", suffix): tensor for suffix, tensor in tensors.items()}
    save_file({**stored, **added}, folder / "model.safetensors")


@pytest.mark.parametrize("form", some(list(FORMATS), 3))
def test_only_tensors_that_change_nothing_may_be_surplus(form: str, tmp_path: Path) -> None:
    quantized, _ = quantized_pair(tmp_path, form, intermediate_size=INNER, **SHAPE)
    zeros = {"bias": torch.zeros(96, dtype=torch.float16), "weight_zero_point": torch.zeros(96, dtype=torch.int8)}
    add(quantized, input_scale=torch.ones(1), k_scale=torch.ones(1), **zeros)
    load(quantized)
    for suffix in ("bias", "rotation"):
        add(quantized, **zeros | {suffix: torch.ones(96)})
        with pytest.raises(ConfigError, match=rf"no place for tensor model.layers.1.self_attn.q_proj.{suffix}: "):
            load(quantized)


@pytest.mark.parametrize(
    ("write", "quantization"),
    [(tiny_checkpoint, "int8"), (lambda folder: mxfp4_pair(folder, intermediate_size=96)[0], None)],
)
def test_surplus_tensors_are_refused_beside_other_forms(
    write: Callable[[Path], Path], quantization: str | None, tmp_path: Path
) -> None:
    folder = write(tmp_path)
    load(folder, quantization=quantization)
    add(folder, input_scale=torch.ones(1))
    with pytest.raises(ConfigError, match=r"no place for tensor model.layers.1.self_attn.q_proj.input_scale: "):
        load(folder, quantization=quantization)
