"""Quantized checkpoints with random codes, written in numpy from the formats' descriptions, and their float twins.

    quantized, plain = quantized_pair(tmp_path, "gptq, act-order", "llama", hidden_size=128)

Both are ordinary checkpoints of one model: the first holds the codes, the second the floats that they encode.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from tokenloom.tests.support.checkpoints import tiny_checkpoint

Array = npt.NDArray[Any]
Tensors = dict[str, torch.Tensor]
Writer = Callable[[np.random.Generator, int, int], tuple[Tensors, Array]]  # (out, in) → tensors, weight [out, in]

GROUP = 32
BLOCK = 48  # of a block of e4m3; no size divides by it
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # by code
MATRIX = re.compile(r"(.*\.(?:[qkvo]_proj|gate_proj|up_proj|down_proj|w[123]))\.weight")


def words_of(codes: Array) -> torch.Tensor:
    """Pack codes below 16, [n, m, 8] → [n, m] int32, the first of each eight in the lowest bits."""
    words = np.zeros(codes.shape[:2], np.uint32)
    for place in range(8):
        words |= codes[:, :, place].astype(np.uint32) << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32))


def draw_grid(rng: np.random.Generator, num_out: int, num_in: int, group: int) -> tuple[Array, Array, Array]:
    """Draw codes [in, out], zeros [groups, out] and float16 scales [groups, out] for weights of a usual size."""
    num_groups = -(-num_in // group)
    scales = rng.uniform(0.5, 1.5, (num_groups, num_out)) / (4.6 * np.sqrt(num_in))
    return rng.integers(0, 16, (num_in, num_out)), rng.integers(5, 12, (num_groups, num_out)), scales.astype(np.float16)


def gptq(has_order: bool, is_symmetric: bool, is_v2: bool, group: int = GROUP) -> Writer:
    def write(rng: np.random.Generator, num_out: int, num_in: int) -> tuple[Tensors, Array]:
        size = num_in if group == -1 else group
        codes, zeros, scales = draw_grid(rng, num_out, num_in, size)
        if is_symmetric:
            zeros[:] = 8
        g_idx = np.arange(num_in) // size
        if has_order:
            rng.shuffle(g_idx)
        weight = (codes - zeros[g_idx]) * scales[g_idx].astype(np.float64)
        stored_zeros = zeros if is_v2 else zeros - 1
        return {
            "qweight": words_of(codes.reshape(num_in // 8, 8, num_out).transpose(0, 2, 1)),
            "qzeros": words_of(stored_zeros.reshape(len(zeros), num_out // 8, 8)),
            "scales": torch.from_numpy(scales),
            "g_idx": torch.from_numpy(g_idx.astype(np.int32)),
        }, weight.T

    return write


def awq(rng: np.random.Generator, num_out: int, num_in: int) -> tuple[Tensors, Array]:
    codes, zeros, scales = draw_grid(rng, num_out, num_in, GROUP)
    weight = (codes - zeros.repeat(GROUP, 0)[:num_in]) * scales.repeat(GROUP, 0)[:num_in].astype(np.float64)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # bits 4 p to 4 p + 3 hold the code of output order[p]
    return {
        "qweight": words_of(codes.reshape(num_in, num_out // 8, 8)[:, :, order]),
        "qzeros": words_of(zeros.reshape(len(zeros), num_out // 8, 8)[:, :, order]),
        "scales": torch.from_numpy(scales),
    }, weight.T


def packed(rng: np.random.Generator, num_out: int, num_in: int) -> tuple[Tensors, Array]:
    codes, _, scales = draw_grid(rng, num_out, num_in, GROUP)
    weight = (codes - 8) * scales.repeat(GROUP, 0)[:num_in].astype(np.float64)
    return {
        "weight_packed": words_of(codes.T.reshape(num_out, num_in // 8, 8)),
        "weight_scale": torch.from_numpy(scales.T.copy()),
        "weight_shape": torch.tensor([num_out, num_in]),
    }, weight.T


def scaled(kind: str, form: str, name: str = "weight_scale") -> Writer:
    """Return a writer of fp8 or int8 weights; `form` of the scales: tensor, channel, row (a vector) or block."""

    def write(rng: np.random.Generator, num_out: int, num_in: int) -> tuple[Tensors, Array]:
        if kind == "int8":
            codes = torch.from_numpy(rng.integers(-127, 128, (num_out, num_in)).astype(np.int8))
        else:
            noise = rng.standard_normal((num_out, num_in)).astype(np.float32) * 70
            codes = torch.from_numpy(noise).clamp(-448, 448).to(torch.float8_e4m3fn)
        values = codes.double().numpy()
        shape = {
            "tensor": (1, 1),
            "channel": (num_out, 1),
            "row": (num_out, 1),
            "block": (-(-num_out // BLOCK), -(-num_in // BLOCK)),
        }[form]
        scales = (rng.uniform(0.5, 1.5, shape) / (70 * np.sqrt(num_in))).astype(np.float32)
        spread = scales.astype(np.float64)
        if form == "block":
            spread = spread.repeat(BLOCK, 0).repeat(BLOCK, 1)[:num_out, :num_in]
        stored = scales.reshape({"tensor": (1,), "row": (num_out,)}.get(form, shape))
        return {"weight": codes, name: torch.from_numpy(stored)}, values * spread

    return write


def _compressed(weights: dict[str, object], file_format: str) -> dict[str, object]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": file_format, "config_groups": groups, "ignore": ["lm_head"]}


FORMATS: dict[str, tuple[Writer, dict[str, object]]] = {  # writer, quantization_config
    "gptq": (gptq(False, False, False), {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}),
    "gptq, act-order": (
        gptq(True, False, False),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False},
    ),
    "gptq, symmetric, one group": (
        gptq(False, True, False, -1),
        {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False, "sym": True},
    ),
    "gptq v2": (
        gptq(True, False, True),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "packed": (
        packed,
        _compressed(
            {"type": "int", "num_bits": 4, "strategy": "group", "group_size": GROUP, "symmetric": True},
            "pack-quantized",
        ),
    ),
    "int8, channels": (
        scaled("int8", "channel"),
        _compressed({"type": "int", "num_bits": 8, "strategy": "channel", "symmetric": True}, "int-quantized"),
    ),
    "fp8, channels": (scaled("fp8", "row"), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "fp8, tensors": (
        scaled("fp8", "tensor"),
        _compressed({"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True}, "float-quantized"),
    ),
    "fp8, blocks": (
        scaled("fp8", "block", "weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"},
    ),
}


def quantized_pair(root: Path, form: str, family: str = "llama", seed: int = 0, **fields: object) -> tuple[Path, Path]:
    """Write two checkpoints: quantized, and the same weights in float32. `fields` are those of `tiny_checkpoint`."""
    writer, config = FORMATS[form]
    rng = np.random.default_rng(seed)

    def quantize(name: str, tensor: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
        if (found := MATRIX.fullmatch(name)) is None:
            return None
        parts, weight = writer(rng, tensor.shape[0], tensor.shape[1])
        stored = {f"{found[1]}.{suffix}": part.contiguous() for suffix, part in parts.items()}
        return stored, torch.from_numpy(np.ascontiguousarray(weight.astype(np.float32)))

    return _pair(root, family, config, quantize, fields)


def mxfp4_pair(root: Path, seed: int = 0, **fields: object) -> tuple[Path, Path]:
    """Write two checkpoints of gpt-oss: with experts in mxfp4, and the same weights in float32."""
    rng = np.random.default_rng(seed)

    def quantize(name: str, tensor: torch.Tensor) -> tuple[Tensors, torch.Tensor] | None:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return None
        num_experts, num_in, num_out = tensor.shape
        blocks = rng.integers(0, 256, (num_experts, num_out, num_in // 32, 16)).astype(np.uint8)
        scales = rng.integers(120, 124, blocks.shape[:3]).astype(np.uint8)
        values = E2M1[np.stack((blocks % 16, blocks // 16), axis=-1)].reshape(*blocks.shape[:3], 32)
        values = (values * np.exp2(scales[..., None].astype(np.float64) - 127)).reshape(num_experts, num_out, num_in)
        stored = {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
        return stored, torch.from_numpy(values.astype(np.float32)).transpose(1, 2).contiguous()

    return _pair(root, "gpt_oss", {"quant_method": "mxfp4"}, quantize, fields)


def _pair(
    root: Path,
    family: str,
    config: dict[str, object],
    quantize: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor] | None],
    fields: dict[str, object],
) -> tuple[Path, Path]:
    """Write both checkpoints. `quantize` returns what is stored of a tensor and the floats that it encodes."""
    plain = tiny_checkpoint(root / "plain", family, **fields)
    quantized = shutil.copytree(plain, root / "quantized")
    floats, stored = load_file(plain / "model.safetensors"), Tensors()
    for name, tensor in sorted(floats.items()):  # the file gives them in any order
        parts, floats[name] = quantize(name, tensor) or ({name: tensor}, tensor)
        stored |= parts
    save_file(floats, plain / "model.safetensors")
    save_file(stored, quantized / "model.safetensors")
    raw = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    return quantized, plain
