"""A convolution of patches as a matrix product."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tokenloom.kernels.cpu.cpu_ops import make_cpu_ops
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.kernels.cpu.levels import LEVELS
from tokenloom.workers.encoders.images.patches import PackedPatches, pack_patches


@pytest.mark.parametrize(
    ("convolution", "shape"),
    [
        (nn.Conv2d(3, 40, 4, 4), (5, 3, 12, 8)),
        (nn.Conv2d(3, 40, (4, 2), (4, 2), bias=False), (1, 3, 4, 2)),
        (nn.Conv2d(3, 40, 4, 4, padding="valid"), (2, 3, 15, 9)),
        (nn.Conv3d(3, 40, (2, 4, 4), (2, 4, 4), bias=False), (7, 3, 2, 4, 4)),
        (nn.Conv3d(3, 40, (2, 4, 4), (2, 4, 4)), (2, 3, 6, 8, 4)),
    ],
)
@torch.inference_mode()
def test_patches_are_those_of_the_convolution(convolution: nn.Module, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    packed = PackedPatches(make_cpu_ops(torch.float32, LEVELS[-1]), convolution)  # type: ignore[arg-type]
    torch.testing.assert_close(packed(x), convolution(x), rtol=1e-4, atol=1e-5)
    assert torch.equal(torch.cat([packed(each[None]) for each in x]), packed(x))


def test_convolutions_of_other_kinds_stay() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 4, 4),
        nn.Conv2d(3, 8, 4, 2),
        nn.Conv2d(3, 8, 4, 4, padding=1),
        nn.Conv2d(4, 8, 4, 4, groups=2),
        nn.Conv2d(3, 8, 4, 4, dilation=2),
        nn.Conv2d(3, 8, 4, padding="same"),
        nn.Conv2d(3, 8, 4, 4).bfloat16(),
    )
    pack_patches(model, ReferenceOps(), torch.float32)
    assert [isinstance(each, PackedPatches) for each in model] == [True, *[False] * 6]
