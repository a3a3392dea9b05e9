"""A convolution of patches as a matrix product."""

from __future__ import annotations

import torch
from torch import nn

from tokenloom.kernels.reference import ReferenceOps
from tokenloom.workers.encoders.images.patches import PackedPatches, pack_patches


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
