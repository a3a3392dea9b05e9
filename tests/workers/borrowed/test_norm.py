"""A module is replaced by our norm exactly if it computes an RMS norm of its only input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tokenloom.kernels.reference import ReferenceOps
from tokenloom.workers.borrowed.norm import PackedNorm, pack_norms

SIZE = 12


class RMSNorm(nn.Module):
    """weight * x / rms(x)"""

    offset = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE))
        self.eps = 0.02

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (SIZE,), self.weight + self.offset, self.eps)


class OffsetRMSNorm(RMSNorm):
    offset = 1.0


class GatedRMSNorm(RMSNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x if gate is None else x * gate)


class GroupRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x.unflatten(-1, (2, 6)), (6,), None, self.eps).flatten(-2) * self.weight


class MeanNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (SIZE,), self.weight, None, self.eps)


@pytest.mark.parametrize(
    ("kind", "is_replaced"),
    [(RMSNorm, True), (OffsetRMSNorm, True), (GatedRMSNorm, False), (GroupRMSNorm, False), (MeanNorm, False)],
)
def test_only_a_plain_rms_norm_is_replaced(kind: type[RMSNorm], is_replaced: bool) -> None:
    model = nn.Sequential(kind())
    x = torch.randn(1, 3, 2, SIZE)
    expected = model(x)
    pack_norms(model, ReferenceOps(), torch.float32)
    assert isinstance(model[0], PackedNorm) is is_replaced
    torch.testing.assert_close(model(x), expected)


def test_a_norm_of_another_dtype_than_the_models_keeps_its_code_or_its_dtype() -> None:
    model, wide = nn.Sequential(RMSNorm()), nn.Sequential(RMSNorm()).bfloat16()
    pack_norms(model, ReferenceOps(), torch.bfloat16)
    pack_norms(wide, ReferenceOps(), torch.bfloat16)
    assert isinstance(model[0], RMSNorm)
    assert wide(torch.randn(2, SIZE)).dtype == torch.float32
