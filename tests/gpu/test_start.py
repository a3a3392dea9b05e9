"""On a GPU: what a start launches was compiled while the weights were read."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
import triton

from tokenloom.ipc.kv.pool_shape import PoolShape
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.workers.worker_harness import make_spec
from tokenloom.workers.worker import Worker

pytestmark = pytest.mark.gpu


def test_a_start_compiles_nothing_once_the_weights_are_loaded(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "qwen3", head_dim=80)  # of a shape that no other test compiles
    spec = msgspec.structs.replace(make_spec(folder, tmp_path / "run"), device=device.type)
    worker = Worker(spec, rank=0, generation=0)
    phases = list(worker.load())
    assert [phase.name for phase in phases] == ["load weights", "compile kernels"]
    assert not phases[-1].detail.startswith("0 "), phases
    late: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **facts: late.append(str(facts["repr"])))
    measured = worker.measure()
    worker.initialize(PoolShape.of(measured.pool_bytes, measured.block_bytes))
    assert late == []
