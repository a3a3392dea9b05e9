"""Numbers round as in torch and quantize as in numpy."""

from __future__ import annotations

import base64
import math
from array import array

import numpy as np
import pytest
import torch

from tokenloom.frontend.forms.openai.vectors import COHERE_TYPES, NARROW, packed
from tokenloom.ipc.errors import RequestError

TORCH_TYPES = {
    "float16": (torch.float16, torch.int16),
    "bfloat16": (torch.bfloat16, torch.int16),
    "fp8_e4m3": (torch.float8_e4m3fn, torch.uint8),
    "fp8_e5m2": (torch.float8_e5m2, torch.uint8),
}
EDGES = [0.0, -0.0, 1.0, -1.0, 448.0, 464.0, 465.0, 57344.0, 61440.0, 65504.0, 65519.9, 65520.0, 3.4e38, -3.4e38]
EDGES += [2.0**-9, 2.0**-10, 1.5 * 2**-10, 2.0**-16, 2.0**-17, 2.0**-24, 2.0**-25, 2.0**-126, 1e-45, math.inf]


@pytest.mark.parametrize("name", NARROW)
def test_numbers_round_as_in_torch(name: str) -> None:
    dtype, codes = TORCH_TYPES[name]
    drawn = torch.randn(4000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-12, 6, 4000)
    halves = torch.arange(1, 4000) / 64  # of which many lie between two neighbours
    numbers = torch.cat([torch.tensor(EDGES), drawn, halves, -halves]).to(torch.float32)
    expected = numbers.to(dtype).view(codes).numpy()
    assert packed(array("f", numbers.tolist()), name, "little") == expected.tobytes()
    assert packed(array("f", numbers.tolist()), name, "big") == expected.byteswap().tobytes()


def test_cohere_types_match_numpy() -> None:
    numbers = np.random.default_rng(1).standard_normal(64).astype(np.float32) / 8
    vector = array("f", numbers.tolist())
    bits = np.packbits(numbers >= 0)
    assert COHERE_TYPES["ubinary"](vector) == bits.tolist()
    assert COHERE_TYPES["binary"](vector) == (bits.astype(int) - 128).tolist()
    steps = np.rint(numbers.astype(float) * 127 / np.abs(numbers).max()).astype(int)
    assert COHERE_TYPES["int8"](vector) == steps.tolist() and max(map(abs, steps.tolist())) == 127
    assert COHERE_TYPES["uint8"](vector) == (steps + 128).tolist()
    assert COHERE_TYPES["float"](vector) == numbers.tolist()
    assert base64.b64decode(str(COHERE_TYPES["base64"](vector))) == numbers.tobytes()
    assert COHERE_TYPES["int8"](array("f", [0.0] * 8)) == [0] * 8
    with pytest.raises(RequestError, match="embedding_types has bits of 12 numbers"):
        COHERE_TYPES["binary"](array("f", [1.0] * 12))
