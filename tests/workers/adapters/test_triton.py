"""Logits of models with adapters by the Triton kernels, in the interpreter, equal those by plain torch.

test_peft.py compares the latter with peft. Tolerance, relative to the largest logit: 1e-4, in float32.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tokenloom.tests.kernels.gpu.interpreter  # noqa: F401
from tokenloom.ipc.models.model_file import load_model_config
from tokenloom.kernels.gpu.ops import TritonOps
from tokenloom.kernels.reference import ReferenceOps
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.peft_adapters import KINDS, save_adapter
from tokenloom.tests.workers.adapters.adapted_model import fill, load_adaptable
from tokenloom.tests.workers.models.test_decoder import prompts_of
from tokenloom.tests.workers.paged_run import PagedRun

CASES = (  # family, kinds of the adapters in slots 1 and 2
    ("llama", ("dora", "patterns")),
    ("gemma3_text", ("embedding and head", "rslora")),
    ("gpt2", ("dora", "r8")),
    ("phi4", ("dora", "patterns")),
    ("mixtral", ("experts and router", "r8")),
    ("gpt_oss", ("experts", "r8")),
    ("gemma4_moe", ("experts", "r8")),
)


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "kinds"), CASES)
def test_logits_equal_the_references(family: str, kinds: tuple[str, str], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    checkpoint = tiny_checkpoint(tmp_path / "model", family)
    folders = [save_adapter(tmp_path / kind, checkpoint, KINDS[kind], seed) for seed, kind in enumerate(kinds)]
    lengths = {"one": 9, "none": 4, "two": 5, "one again": 2}
    tokens = prompts_of(lengths, load_model_config(checkpoint).vocab_size, seed=2)
    found = []
    for ops in (TritonOps(90), ReferenceOps()):
        model, filler = load_adaptable(checkpoint, ops)
        for slot, folder in enumerate(folders, 1):
            fill(filler, slot, folder)
        run = PagedRun(model, 16)
        run.slots |= {"one": 1, "two": 2, "one again": 1}
        first = run.step({name: ids[:-1] for name, ids in tokens.items() if name != "one again"})
        last = run.step({name: ids[-1:] for name, ids in tokens.items()})
        found.append({**{f"{name}, first": logits for name, logits in first.items()}, **last})
    actual, expected = found
    base = PagedRun(model, 16).step({"one": tokens["one"][:-1]})["one"]
    assert not torch.allclose(expected["one, first"], base, rtol=0, atol=1e-2)
    for name, logits in expected.items():
        torch.testing.assert_close(actual[name], logits, rtol=0, atol=1e-4 * logits.abs().max().item())
