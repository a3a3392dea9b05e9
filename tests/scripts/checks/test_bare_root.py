"""A root with a compiler is known as one, and a wheel answers in a root without."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tokenloom.scripts.checks.bare_root import Row, compilers_in, pip_paths, show, size_of
from tokenloom.tests.system.real_model import model_file, needs_real_model

ROOT = Path(__file__).resolve().parents[3]
BUILD_TIMEOUT_S, RUN_TIMEOUT_S = 900, 3600


@pytest.mark.parametrize(
    "name", ["cc", "gcc", "gcc-12", "x86_64-linux-gnu-gcc", "x86_64-linux-gnu-gcc-12", "clang-19", "c++", "g++-13"]
)
def test_a_compiler_is_found_by_its_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "usr/bin").mkdir(parents=True)
    for other in ("python3", "ccache", "gccgo-doc", "dash", "c_rehash", "objcopy"):
        (tmp_path / "usr/bin" / other).touch()
    assert compilers_in(tmp_path) == []
    (tmp_path / "usr/bin" / name).touch()
    assert compilers_in(tmp_path) == [f"usr/bin/{name}"]


def test_sizes_count_each_file_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(1 << 20))
    before = size_of(tmp_path)
    os.link(tmp_path / "a", tmp_path / "b")
    (tmp_path / "c").symlink_to("a")
    assert size_of(tmp_path) == before >= 1 << 20


def test_pip_sees_what_its_variables_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", f"{tmp_path} /nonexistent https://example.org")
    monkeypatch.setenv("PIP_RETRIES", "3")
    assert str(tmp_path) in pip_paths() and not {"/nonexistent", "3"} & {*pip_paths()}


def test_the_table_has_a_line_for_each_command(tmp_path: Path) -> None:
    (tmp_path / "w.whl").write_bytes(bytes(10_000_000))
    text = show(
        [Row("a", 1.5, 2_000_000), Row("b", 2.0, 0)], 275_000_000, tmp_path / "w.whl", tmp_path, tmp_path / "w.whl"
    )
    assert re.search(r"^a +1\.5 +2\.0$", text, re.MULTILINE) and re.search(
        r"^the root before +275\.0$", text, re.MULTILINE
    )


@pytest.mark.nightly
@needs_real_model
@pytest.mark.timeout(BUILD_TIMEOUT_S + RUN_TIMEOUT_S)
@pytest.mark.skipif(os.getuid() != 0 or shutil.which("debootstrap") is None, reason="needs root and debootstrap")
def test_a_wheel_answers_in_a_root_without_a_compiler(tmp_path: Path) -> None:
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True, timeout=60).stdout
    (tmp_path / "tree").mkdir()
    subprocess.run(["tar", "-x"], cwd=tmp_path / "tree", input=archive, check=True, timeout=60)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(tmp_path / "tree")]
    subprocess.run(pip, check=True, timeout=BUILD_TIMEOUT_S)
    (wheel,) = tmp_path.glob("*.whl")
    command = [sys.executable, "scripts/checks/bare_root.py", str(wheel), str(model_file())]
    has_torch = any(Path(os.environ.get("PIP_FIND_LINKS", "/nonexistent")).glob("torch-*+cpu-*.whl"))
    environment = os.environ | ({"TORCH_INDEX_URL": ""} if has_torch else {})
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False, env=environment
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prebuilt, no compiler" in done.stdout and "Paris" in done.stdout
