"""FiniteCheck names the first element of any tensor that is NaN or infinite, wherever the file is cut."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tokenloom.frontend.adapters.finite_check import FiniteCheck
from tokenloom.ipc.adapters.tensor_header import read_header
from tokenloom.ipc.errors import RequestError

TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


def check(path: Path, unchecked: str = "") -> None:
    """Check a file in pieces, which follow each other from its begin to its end."""
    content, at = memoryview(path.read_bytes()), 0
    finite = FiniteCheck([place for place in read_header(path).values() if place.name != unchecked], "shown")
    for start, stop in finite.pieces(len(content), 16):
        assert start == at < stop <= start + 16
        finite.check(start, content[start:stop])
        at = stop
    assert at == len(content)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_it_is_found_in_any_tensor_of_a_file_of_several_types(tmp_path: Path, value: float) -> None:
    tensors = {f"t{i}": torch.ones(5 + i, dtype=TYPES[i // 2 % 4]) for i in range(8)}
    tensors["large"] = torch.full((4,), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    path = tmp_path / "file"
    for name, tensor in tensors.items():
        for index in (0, len(tensor) - 1):
            bad = tensor.clone()
            bad[index] = value
            save_file(tensors | {name: bad}, path)
            with pytest.raises(RequestError, match=rf"^shown: element {index} of tensor {name} is NaN or infinite: "):
                check(path)
            check(path, unchecked=name)
    save_file(tensors, path)
    check(path)
