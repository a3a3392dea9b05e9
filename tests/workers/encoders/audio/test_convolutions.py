"""Convolutions over windows of frames give the same outputs for any range, by torch and as products."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from tokenloom.kernels.cpu.cpu_ops import make_cpu_ops
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.kernels.cpu.levels import LEVELS
from tokenloom.workers.encoders.audio.convolutions import FrameConvolutions, PackedConvolution, pack_convolutions

NUM_BINS = 12
KINDS = {
    "whisper": lambda: nn.Sequential(nn.Conv1d(NUM_BINS, 20, 3, padding=1), nn.Conv1d(20, 24, 3, stride=2, padding=1)),
    "qwen3_asr": lambda: nn.Sequential(
        nn.Conv2d(1, 8, 3, 2, padding=1),
        nn.Conv2d(8, 10, 3, 2, padding=1, bias=False),
        nn.Conv2d(10, 8, 3, 2, padding=1),
    ),
}


def by_torch(model: nn.Module, frames: Tensor) -> Tensor:
    """All outputs of whole windows, [n, channels, …, outputs]."""
    x = frames.unsqueeze(1) if isinstance(next(model.children()), nn.Conv2d) else frames
    for layer in model.children():
        x = nn.functional.gelu(layer(x))
    return x


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("num_frames", [100, 37])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_outputs_of_any_range_are_those_of_the_whole_windows(kind: str, num_frames: int, is_packed: bool) -> None:
    torch.manual_seed(0)
    model, frames = KINDS[kind](), torch.randn((3, NUM_BINS, num_frames))
    expected = by_torch(model, frames)
    convolutions = FrameConvolutions(model, [name for name, _ in model.named_children()], num_frames)
    if is_packed:
        pack_convolutions(model, make_cpu_ops(torch.float32, LEVELS[-1]), torch.float32)
        assert all(isinstance(layer, PackedConvolution) for layer in model.children())
    whole = convolutions.outputs(lambda low, high: frames[:, :, low:high], 0, expected.shape[-1])
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)
    for seed in range(5):
        rng = random.Random(seed)
        cuts = sorted({0, expected.shape[-1], *(rng.randrange(expected.shape[-1]) for _ in range(4))})
        parts = [
            convolutions.outputs(lambda low, high: frames[:, :, low:high], first, last)
            for first, last in pairwise(cuts)
        ]
        found = torch.cat(parts, dim=-1)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_convolutions_of_other_kinds_stay() -> None:
    model = nn.Sequential(
        nn.Conv1d(3, 8, 3, padding=1),
        nn.Conv2d(3, 8, 3, 2),
        nn.Conv2d(4, 8, 3, groups=2),
        nn.Conv2d(3, 8, 3, dilation=2),
        nn.Conv1d(3, 8, 3, padding="same"),
        nn.Conv1d(3, 8, 3, padding=1, padding_mode="reflect"),
        nn.Conv3d(3, 8, 3),
        nn.Conv1d(3, 8, 3).bfloat16(),
    )
    pack_convolutions(model, ReferenceOps(), torch.float32)
    assert [isinstance(each, PackedConvolution) for each in model] == [True, True, *[False] * 6]
