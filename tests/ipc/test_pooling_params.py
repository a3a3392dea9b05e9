"""Pooling of a prompt: vLLM's names, and values out of range."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tokenloom.ipc.errors import RequestError
from tokenloom.ipc.pooling_params import PoolingParams


@pytest.mark.parametrize("is_normal", [True, False])
def test_use_activation_is_another_name_of_normalize(is_normal: bool) -> None:
    params = PoolingParams(use_activation=is_normal, dimensions=8)
    assert params == PoolingParams(normalize=is_normal, dimensions=8) and params.normalize is is_normal
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=PoolingParams) == params


@pytest.mark.parametrize("wrong", [{"method": "max"}, *({"dimensions": each} for each in (0, 1 << 21, 1.5, "8"))])
def test_what_is_out_of_range_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"^{next(iter(wrong))} "):
        PoolingParams(**wrong)
