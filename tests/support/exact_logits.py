"""The logits of transformers' model in double precision: an oracle without the rounding errors of float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode


class InFloat64(TorchFunctionMode):
    """Context in which code that asks for float32, as the models do for norms, softmax and scans, gets float64."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        changed = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widened, args), **changed)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@torch.inference_mode()
def exact_logits(folder: Path, tokens: dict[str, list[int]]) -> dict[str, Tensor]:
    """Return the logits of each prompt in float64. The weights are those of the checkpoint in float32."""
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = load(folder, dtype=torch.float32, **eager).eval().double()
    with InFloat64():
        return {name: model(torch.tensor([ids])).logits[0] for name, ids in tokens.items()}
