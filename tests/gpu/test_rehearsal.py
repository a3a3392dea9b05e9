"""The fake device for rehearsals of the tests for a GPU keeps its promises, and some of these tests pass on it.

`PYTHONPATH=tests/support/fake_cuda TOKENLOOM_FAKE_CUDA=1 pytest -m gpu` rehearses all of them. At night
`scripts/gpu_check` rehearses its first stages.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tokenloom
from tokenloom.tests.support.today import some

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine needs no fake device")

ROOT = Path(tokenloom.__file__).parent
SOME = (  # kernels, and an engine with graphs
    "tests/gpu/test_kernels.py::test_linears_and_norms_agree_with_the_reference[torch.bfloat16-7]",
    "tests/gpu/test_parity.py::test_greedy_on_a_gpu_is_transformers_under_every_schedule[qwen2-chunked]",
)
PROMISES = """
import os, pytest, torch, triton, triton.language as tl

@triton.jit
def double_kernel(x, y, N: tl.constexpr):
    index = tl.arange(0, N)
    tl.store(y + index, tl.load(x + index) * 2)

@pytest.mark.gpu
def test_promises():
    device = torch.device("cuda")
    assert os.path.exists("/dev/nvidiactl") and torch.cuda.is_available() and torch.cuda.device_count() == 1
    x, y = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device), torch.zeros(4, device="cuda")
    assert x.is_cuda and x.device == torch.device("cuda:0") and x.to(device) is x and not x.cpu().is_cuda
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cpu"):
        x + torch.ones(4)
    with pytest.raises(RuntimeError, match="numpy"):
        x.numpy()
    assert torch.empty(2, pin_memory=True)[1:].is_pinned() and not torch.empty(2).is_pinned()

    before = torch.cuda.memory_allocated()
    big = torch.empty(1 << 20, dtype=torch.uint8, device=device)
    part = big[:7]
    del big
    assert torch.cuda.memory_allocated() == before + (1 << 20)
    del part
    assert torch.cuda.memory_allocated() == before and torch.cuda.max_memory_allocated() >= before + (1 << 20)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        torch.empty(1 << 40, dtype=torch.uint8, device=device)

    double_kernel[(1,)](x, y, N=4)
    assert y.tolist() == [2, 4, 6, 8]
    with pytest.raises(ValueError, match="cpu tensor"):
        double_kernel[(1,)](torch.ones(4), y, N=4)
    assert triton.testing.do_bench(lambda: double_kernel[(1,)](x, y, N=4)) > 0

    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        x.add_(1)
        double_kernel[(1,)](x, y, N=4)
        z = y + 1
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            z.sum().item()
    assert x.tolist() == [1, 2, 3, 4] and y.tolist() == [2, 4, 6, 8]
    for _ in range(2):
        graph.replay()
    assert (x.tolist(), y.tolist(), z.tolist()) == ([3, 4, 5, 6], [6, 8, 10, 12], [7, 9, 11, 13])

    torch.cuda.set_sync_debug_mode("error")
    for wait in (lambda: x.sum().item(), lambda: x.cpu(), lambda: torch.tensor([1], device=device), lambda: x[x > 3]):
        with pytest.raises(RuntimeError, match="synchronizing"):
            wait()
    x.copy_(torch.empty(4, pin_memory=True), non_blocking=True)
    torch.cuda.set_sync_debug_mode("default")
"""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", some(SOME, 1))
def test_the_fake_device_keeps_its_promises_and_tests_for_a_gpu_pass_on_it(name: str, tmp_path: Path) -> None:
    program = tmp_path / "test_promises.py"  # Triton reads the source of kernels
    program.write_text(PROMISES, encoding="utf-8")
    path = os.pathsep.join([str(ROOT / "tests" / "support" / "fake_cuda"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), "TOKENLOOM_FAKE_CUDA": "1"}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_timeout"}
    command = [sys.executable, "-P", "-m", "pytest", "-m", "gpu", program, name]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "2 passed" in done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_the_first_stages_of_the_check_pass_on_the_fake_device(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    command = [ROOT / "scripts" / "gpu_check", "--rehearse", tmp_path / "out.json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "Nothing is left." in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
