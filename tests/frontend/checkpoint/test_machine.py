"""Whether a model fits a machine: on its CPU, on one of its GPUs, or on several."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenloom.frontend.checkpoint.machine import (
    ENGINE_BYTES,
    GPU_RESERVE_BYTES,
    Fit,
    Gpu,
    Machine,
    Need,
    visible_gpus,
)
from tokenloom.ipc.errors import ConfigError

GIB = 1 << 30
NEEDS = [Need("", 16 * GIB, 8), Need("--quantization int8", 5 * GIB, 8)]


@pytest.mark.parametrize(
    ("usable", "is_fit", "options", "num_gib"),
    [(16, True, "", 16), (15, True, "--quantization int8", 5), (4, False, "", 16)],
)
def test_a_cpu_takes_a_model_with_the_first_options_that_fit(
    usable: int, is_fit: bool, options: str, num_gib: int
) -> None:
    fit = Machine(usable * GIB + ENGINE_BYTES).fit(NEEDS)
    assert fit == Fit(is_fit, options, num_gib * GIB, usable * GIB)


def gpu(usable_gib: int) -> Gpu:
    return Gpu(100 * GIB, usable_gib * GIB + GPU_RESERVE_BYTES + 10 * GIB)


@pytest.mark.parametrize(
    ("usable", "is_fit", "options"),
    [
        ([16], True, ""),
        ([15], False, ""),
        ([15, 9], True, "--tp 2"),
        ([6, 6, 6], False, ""),  # three do not divide eight heads
        ([6, 6, 6, 6], True, "--tp 4"),
    ],
)
def test_gpus_share_a_model_whose_heads_they_divide(usable: list[int], is_fit: bool, options: str) -> None:
    fit = Machine(1000 * GIB, [gpu(each) for each in usable]).fit(NEEDS)
    assert (fit.is_fit, fit.options) == (is_fit, options)


def test_a_fit_is_said_with_its_numbers() -> None:
    assert str(Fit(True, "", GIB, 2 * GIB)) == "yes, 1.00 GiB of 2.00 GiB"
    assert str(Fit(True, "--tp 2", GIB, 2 * GIB)) == "with --tp 2, 1.00 GiB of 2.00 GiB"
    assert str(Fit(False, "", 3 * GIB, 2 * GIB)) == "no, 3.00 GiB of 2.00 GiB"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a command in the place of nvidia-smi, which prints the file `answer` and notes its arguments."""
    command = tmp_path / "nvidia-smi"
    command.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\ncat {tmp_path}/answer\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def test_the_memory_of_the_visible_gpus_is_what_nvidias_command_says(
    smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (smi / "answer").write_text("143771, 143262\n143771, 100\n")
    assert visible_gpus() == [Gpu(143771 << 20, 143262 << 20), Gpu(143771 << 20, 100 << 20)]
    assert "--id" not in (smi / "asked").read_text()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    visible_gpus()
    assert "--id=1" in (smi / "asked").read_text()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_a_command_that_does_not_tell_is_one_line(smi: Path) -> None:
    (smi / "answer").write_text("No devices were found\n")
    with pytest.raises(ConfigError, match="nvidia-smi does not tell the memory of the GPUs"):
        visible_gpus()
