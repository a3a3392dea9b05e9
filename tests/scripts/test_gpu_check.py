"""scripts/gpu_check reports a missing GPU; with one, it finds every marked test and reads the outcomes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tokenloom.scripts import gpu_check

SCRIPT = gpu_check.ROOT / "scripts" / "gpu_check"
TIMEOUT_S = 60


@pytest.mark.skipif(torch.cuda.is_available(), reason="covers the case without a GPU")
def test_without_a_gpu_the_check_reports_that_and_succeeds(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    out = tmp_path / "out.json"
    done = subprocess.run(
        [SCRIPT, str(out)], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "nothing to check" in done.stdout
    document = json.loads(out.read_text())
    assert document["gpu"] is None and "CUDA" in document["reason"] and document["versions"]["torch"]
    assert "tests" not in document and "benchmark" not in document


def test_every_file_with_a_gpu_mark_is_found() -> None:
    files = gpu_check.gpu_test_files()
    assert {f"tokenloom/tests/gpu/test_{name}.py" for name in ("kernels", "parity", "processes")} <= set(files)
    assert "tokenloom/tests/workers/models/test_decoder.py" in files


@pytest.mark.parametrize("num_processes", [1, 2])
def test_outcomes_are_read_and_a_failure_is_reported(num_processes: int) -> None:
    with gpu_check.bare_package() as (folder, environment):
        (folder / "pytest.ini").write_text(gpu_check.PYTEST_INI)
        test_file = folder / "test_some.py"
        test_file.write_text(
            "import pytest, tokenloom\npytestmark = pytest.mark.gpu\n"
            "@pytest.mark.parametrize('x', ['a b', 'c'])\ndef test_good(x): assert tokenloom.__version__\n"
            "def test_bad(): assert 1 == 2\ndef test_away(): pytest.skip('no')\n"
        )
        report = gpu_check.run_tests(folder, environment, TIMEOUT_S, ["test_some.py"], num_processes)
    assert sorted(report["passed"]) == ["test_some.py::test_good[a b]", "test_some.py::test_good[c]"]
    assert report["failed"] == ["test_some.py::test_bad"] and report["skipped"] == ["test_some.py::test_away"]
    assert not report["ok"] and any("assert 1 == 2" in line for line in report["last_lines"])
    assert any("assert 1 == 2" in line for line in report["again"]["test_some.py::test_bad"])


def test_a_failed_test_runs_again_alone_with_blocking_launches() -> None:
    with gpu_check.bare_package() as (folder, environment):
        (folder / "test_some.py").write_text(
            "import os, pytest\npytestmark = pytest.mark.gpu\n"
            "def test_broken_context(): assert os.environ.get('CUDA_LAUNCH_BLOCKING') == '1'\n"
        )
        report = gpu_check.run_tests(folder, environment, TIMEOUT_S, ["test_some.py"])
    assert report["failed"] == ["test_some.py::test_broken_context"]
    assert report["again"] == {"test_some.py::test_broken_context": "passes alone"}


def test_a_two_gpu_test_is_reported_as_not_measured_on_one_gpu() -> None:
    with gpu_check.bare_package() as (folder, environment):
        (folder / "test_two.py").write_text("import pytest\npytestmark = pytest.mark.gpu\ndef test_two(): pass\n")
        reports = [gpu_check.run_shared(folder, environment, TIMEOUT_S, ["test_two.py"], count) for count in (1, 2)]
    assert reports[0]["ok"] and "one GPU" in reports[0]["not_measured"] and "passed" not in reports[0]
    assert reports[1]["passed"] == ["test_two.py::test_two"]


def test_the_bare_package_imports_this_checkout() -> None:
    with gpu_check.bare_package() as (folder, environment):
        program = "import tokenloom, tokenloom.scripts.gpu_check; print(tokenloom.__file__)"
        found = subprocess.check_output([sys.executable, "-c", program], env=environment, cwd=folder, text=True)
        assert Path(found.strip()) == folder / "tokenloom" / "__init__.py"


@pytest.mark.parametrize("handler", ["default_int_handler", "SIG_IGN"])
def test_a_command_over_its_time_limit_is_stopped(handler: str, tmp_path: Path) -> None:
    program = f"import signal, sys, threading; signal.signal(signal.SIGINT, signal.{handler}); print('started')"
    program += "; sys.stdout.flush(); threading.Event().wait(30)"
    command = [sys.executable, "-c", program]
    result = gpu_check.run_streamed(command, tmp_path, dict(os.environ), timeout_s=2.0, grace_s=2.0)
    assert result["code"] is None and result["lines"][0] == "started"
    assert (result["lines"][-1] == "KeyboardInterrupt") == (handler != "SIG_IGN")
