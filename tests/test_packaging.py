"""What is shipped: every package of the tree and nothing else; importing it is cheap and clashes with nobody.

The checkout's root is the package, so that the list of packages in pyproject.toml must be kept by hand, and the rooms
(`kernels`, `core`, …) must never become top-level modules.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("core", "frontend", "ipc", "kernels", "scripts", "workers")
SOURCES = (".py", ".c", ".h")  # a folder that holds any is a package
DATA = (".html",)
DEMO_FILES = (".json", ".jinja", ".safetensors")
BUILD_TIMEOUT_S = 100


def pyproject() -> dict[str, object]:
    loaded: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return loaded


def shipped_files() -> set[str]:
    """Paths, below the package, of all that a user must get."""
    sources = {file for room in ROOMS for file in (ROOT / room).rglob("*") if file.suffix in SOURCES + DATA}
    demo = {file for file in (ROOT / "demo").iterdir() if file.suffix in DEMO_FILES}
    return {str(file.relative_to(ROOT)) for file in sources | demo} | {"__init__.py", "py.typed"}


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout without what git ignores, so that building leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("source") / "tokenloom"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)
    return copy


def run(command: Sequence[str], cwd: Path, timeout_s: float = 60, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(source_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    run([sys.executable, "-m", "pip", "wheel", *options, "-w", str(folder), str(source_tree)], folder, BUILD_TIMEOUT_S)
    (file,) = folder.iterdir()
    return file


def test_pyproject_lists_exactly_the_packages_of_the_tree() -> None:
    tool = pyproject()["tool"]
    assert isinstance(tool, dict)
    listed = tool["setuptools"]["packages"]
    folders = {Path(name).parent for name in shipped_files() if not name.endswith(DATA)}
    expected = {".".join(["tokenloom", *folder.parts]) for folder in folders}
    assert sorted(listed) == sorted(expected)


def test_rooms_have_no_init_file() -> None:
    assert [str(file) for room in ROOMS for file in (ROOT / room).rglob("__init__.py")] == []


def test_wheel_holds_what_is_shipped_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {name.removeprefix("tokenloom/") for name in names if name.startswith("tokenloom/")}
    assert package == shipped_files()
    others = {name.split("/")[0] for name in names} - {"tokenloom"}
    assert all(name.endswith(".dist-info") for name in others), f"top-level names in the wheel: {others}"


def test_wheel_has_the_command_and_the_license(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    texts = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert "engine-launch = tokenloom.frontend.launch:main" in texts["entry_points.txt"]
    assert "Apache License" in texts["LICENSE"] and "License-Expression: Apache-2.0" in texts["METADATA"]


def test_source_distribution_holds_what_is_shipped_and_no_tests(source_tree: Path, tmp_path: Path) -> None:
    program = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    run([sys.executable, "-c", program], source_tree, BUILD_TIMEOUT_S)
    (file,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert shipped_files() <= names
    assert not {name for name in names if name.startswith(("tests/", ".typing", ".venv"))}


HEAVY = ("torch", "transformers", "numpy", "tokenizers", "jinja2", "tqdm", "psutil", "yaml")


@pytest.mark.parametrize(
    ("program", "absent"),
    [
        ("import tokenloom; dir(tokenloom)", ("zmq", "msgspec", *HEAVY)),
        ("from tokenloom import Client, AsyncClient, SamplingParams, RequestOutput", HEAVY),
        ("from tokenloom import LLM, AsyncLLM", HEAVY),
        ("import tokenloom.frontend.launch, tokenloom.frontend.process", ("torch", "transformers")),
        ("import tokenloom.core.process", ("torch", "transformers", "tokenizers", "llguidance")),
    ],
)
def test_imports_bring_only_what_they_need(program: str, absent: tuple[str, ...]) -> None:
    check = f"{program}\nimport sys\nprint([name for name in {absent!r} if name in sys.modules])"
    assert run([sys.executable, "-c", check], Path("/")).strip() == "[]"


def test_all_public_names_load() -> None:
    program = "import tokenloom\nfor name in tokenloom.__all__: getattr(tokenloom, name)\nprint(tokenloom.__version__)"
    version = run([sys.executable, "-c", program], Path("/")).strip()
    project = pyproject()["project"]
    assert isinstance(project, dict) and project["version"] == version


@pytest.fixture
def foreign_modules(tmp_path: Path) -> Path:
    """A folder with top-level packages named like our rooms, as the `kernels` that transformers imports."""
    for room in ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("owner = 'somebody else'\n")
    return tmp_path


def test_nothing_clashes_with_packages_named_like_our_rooms(foreign_modules: Path) -> None:
    rooms = ", ".join(ROOMS)
    program = f"""
import {rooms}
import tokenloom.core.engine, tokenloom.frontend.service, tokenloom.ipc.messages, tokenloom.workers.worker
import tokenloom.kernels.ops, tokenloom.scripts.bench_report
import sys
for module in ({rooms}):
    assert module.owner == "somebody else", module
    assert sys.modules["tokenloom." + module.__name__] is not module
print("apart")
"""
    output = run([sys.executable, "-c", program], Path("/"), PYTHONPATH=str(foreign_modules))
    assert output.strip() == "apart"


@pytest.mark.slow
def test_wheel_serves_the_demo_in_an_environment_of_its_own(wheel: Path, tmp_path: Path, foreign_modules: Path) -> None:
    """Our dependencies are lent to it by a .pth file, which does not lend the editable install of this checkout."""
    environment = tmp_path / "venv"
    run([sys.executable, "-m", "venv", str(environment)], tmp_path, BUILD_TIMEOUT_S)
    python = str(environment / "bin" / "python")
    run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)], tmp_path, BUILD_TIMEOUT_S)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = environment / "lib" / version / "site-packages"
    (site / "lent.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n{foreign_modules}\n")
    program = """
import kernels, tokenloom
from tokenloom import LLM, SamplingParams
assert kernels.owner == "somebody else" and "site-packages" in tokenloom.__file__, tokenloom.__file__
with LLM() as llm:
    output = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0]
print(output.outputs[0].text)
"""
    assert "Paris" in run([python, "-c", program], tmp_path, BUILD_TIMEOUT_S, PYTHONPATH="")
    assert "usage: engine-launch" in run([str(environment / "bin" / "engine-launch"), "--help"], tmp_path)
