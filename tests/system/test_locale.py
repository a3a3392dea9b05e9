"""The engine starts in any locale, with a model whose path has letters outside the locale."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER

ASCII = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
TIMEOUT_S = 60
PROGRAM = """
import sys
from tokenloom import LLM, SamplingParams
assert sys.getfilesystemencoding() == "ascii"
with LLM(sys.argv[1], num_threads=1) as llm:
    llm.generate("\\u00d6sterreich", SamplingParams(max_tokens=1), use_tqdm=False)
    print(llm.info().model.encode())
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO_FOLDER, tmp_path / "modèle_ö"))


def run(*command: str, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-P", *command],
        env=os.environ | ASCII | environment,
        cwd="/",
        capture_output=True,
        encoding="utf-8",
        timeout=TIMEOUT_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_program_in_an_ascii_locale_serves_a_model_with_a_unicode_path(model: Path) -> None:
    code, printed, said = run("-c", PROGRAM, str(model))
    assert (code, printed) == (0, f"{str(model).encode()!r}\n"), said
    assert all(" INFO " in line for line in said.splitlines()), said  # progress of a slow start, and no warnings


def test_the_command_in_an_ascii_locale_reads_a_model_with_a_unicode_path(model: Path) -> None:
    (model / "model.safetensors").unlink()
    code, _, errors = run("-m", "tokenloom.frontend.launch", "--model", str(model))
    assert code == 2 and f"{model} has neither" in errors, errors


def test_a_path_that_is_not_utf8_is_refused_by_name(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/latin\xf6")
    code, _, errors = run("-m", "tokenloom.frontend.launch", "--model", path)
    assert code == 2 and "--model" in errors and "is not UTF-8" in errors and "Traceback" not in errors
