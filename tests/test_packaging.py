"""Packages ship every file of the tree's packages and nothing else; importing them is cheap and shadows no module.

The checkout's root is the package, so the list of packages in pyproject.toml is kept by hand, and the rooms (`kernels`,
`core`, …) must never become top-level modules.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tokenloom.frontend.cli.bench import BENCHMARKS
from tokenloom.kernels.cpu.compiler import FOR_ANY_MACHINE, LEVELS, library_digest
from tokenloom.kernels.cpu.library_store import prebuilt_name
from tokenloom.kernels.cpu.processor import instruction_levels

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("core", "frontend", "ipc", "kernels", "scripts", "workers")
SOURCES = (".py", ".c", ".h")  # a folder with any of these is a package
DATA = (".html", ".js", ".css", ".ico")
MAX_LIBRARY_BYTES = 100_000  # stripped
DEMO_FILES = (".wav", ".json", ".jinja", ".safetensors")
BUILD_TIMEOUT_S = 100
COMPILE_TIMEOUT_S = 300


def pyproject() -> dict[str, object]:
    loaded: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return loaded


def shipped_files() -> set[str]:
    """Return the paths, below the package, of all files that a user needs."""
    rooms = [room for room in ROOMS if room != "scripts"]
    sources = {file for room in rooms for file in (ROOT / room).rglob("*") if file.suffix in SOURCES + DATA}
    sources |= {*(ROOT / "scripts" / "bench").rglob("*.py")}
    demo = {file for file in (ROOT / "demo").rglob("*") if file.suffix in DEMO_FILES}
    return {str(file.relative_to(ROOT)) for file in sources | demo} | {"__init__.py", "py.typed"}


@pytest.fixture(scope="module")
def source_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the checkout without ignored files, so that building leaves nothing in the checkout."""
    copy = tmp_path_factory.mktemp("source") / "tokenloom"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)
    return copy


def run(command: Sequence[str], cwd: Path, timeout_s: float = 60, **environment: str) -> str:
    """Run a command and return its standard output and standard error."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **environment}, timeout=timeout_s, **options)
    assert done.returncode == 0, f"{' '.join(command)}:\n{done.stdout}"
    return str(done.stdout)


class Built(NamedTuple):
    """A wheel, a source distribution, and the build's log."""

    wheel: Path
    sdist: Path
    log: str


def build(source_tree: Path, folder: Path, timeout_s: float, **environment: str) -> Built:
    program = f"from setuptools import build_meta as b; b.build_wheel({str(folder)!r}); b.build_sdist({str(folder)!r})"
    log = run([sys.executable, "-c", program], source_tree, timeout_s, **environment)
    return Built(*folder.glob("*.whl"), *folder.glob("*.tar.gz"), log)


@pytest.fixture(scope="module")
def built(source_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build without a compiler, which is faster."""
    folder = tmp_path_factory.mktemp("built")
    return build(source_tree, folder, BUILD_TIMEOUT_S, PATH=str(folder))


@pytest.fixture(scope="module")
def metadata(built: Built) -> dict[str, str]:
    """The text of each file beside the package in the wheel, by its name."""
    archive = zipfile.ZipFile(built.wheel)
    return {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}


@pytest.fixture(scope="module")
def built_with_kernels(source_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Built:
    if not instruction_levels() or shutil.which("cc") is None:
        pytest.skip("the processor has no AVX2, or there is no compiler")
    return build(source_tree, tmp_path_factory.mktemp("kernels"), COMPILE_TIMEOUT_S)


@pytest.fixture(scope="module")
def wheel_with_kernels(built_with_kernels: Built) -> Path:
    return built_with_kernels.wheel


def test_pyproject_lists_exactly_the_packages_of_the_tree() -> None:
    tool = pyproject()["tool"]
    assert isinstance(tool, dict)
    listed = tool["setuptools"]["packages"]
    folders = {Path(name).parent for name in shipped_files() if not name.endswith(DATA)}
    folders -= {folder for folder in folders if Path("demo") in folder.parents}  # data of the package demo
    expected = {".".join(["tokenloom", *folder.parts]) for folder in folders}
    assert sorted(listed) == sorted(expected)


def test_benchmarks_use_no_script_that_is_not_shipped() -> None:
    texts = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "scripts" / "bench").rglob("*.py"))
    assert set(re.findall(r"tokenloom\.scripts\.\w+", texts)) == {"tokenloom.scripts.bench"}


def test_rooms_have_no_init_file() -> None:
    assert [str(file) for room in ROOMS for file in (ROOT / room).rglob("__init__.py")] == []


def test_wheel_holds_exactly_the_shipped_files(built: Built) -> None:
    names = set(zipfile.ZipFile(built.wheel).namelist())
    package = {name.removeprefix("tokenloom/") for name in names if name.startswith("tokenloom/")}
    assert package == shipped_files()
    others = {name.split("/")[0] for name in names} - {"tokenloom"}
    assert all(name.endswith(".dist-info") for name in others), f"top-level names in the wheel: {others}"


def test_source_distribution_holds_the_shipped_files_and_no_tests(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert shipped_files() <= names
    assert not {name for name in names if name.startswith(("tests/", ".typing", ".venv"))}


def test_without_a_compiler_the_wheel_is_for_any_machine_and_the_build_warns(built: Built) -> None:
    assert built.wheel.name.endswith("-py3-none-any.whl")
    assert "kernels are left out of the wheel and compiled at first use: there is no C compiler" in built.log


@pytest.mark.nightly
@pytest.mark.timeout(COMPILE_TIMEOUT_S + 60)
def test_a_build_says_which_kernels_it_compiles(built_with_kernels: Built) -> None:
    said = re.findall(r"^compiling the C kernels for (\S+), (bfloat16|float32)$", built_with_kernels.log, re.MULTILINE)
    assert len(said) == len(set(said)) == 2 * len(LEVELS) and {level for level, _ in said} == set(LEVELS)


@pytest.mark.nightly
@pytest.mark.timeout(COMPILE_TIMEOUT_S + 60)
def test_wheel_holds_kernels_of_each_level_that_load_with_old_glibc(wheel_with_kernels: Path) -> None:
    assert re.search(r"-py3-none-manylinux_2_(17|2\d)_x86_64\.whl$", wheel_with_kernels.name)
    archive = zipfile.ZipFile(wheel_with_kernels)
    size_by_name = {
        Path(each.filename).name: each.file_size for each in archive.infolist() if "/prebuilt/" in each.filename
    }
    digests = json.loads(archive.read("tokenloom/kernels/cpu/prebuilt/digests.json"))
    libraries = {prebuilt_name(level, is_bf16) for level in LEVELS for is_bf16 in (False, True)}
    assert size_by_name.keys() == libraries | {"digests.json"} and digests.keys() == libraries
    assert max(size_by_name.values()) < MAX_LIBRARY_BYTES
    assert digests["avx2-float32.so"] == library_digest("AVX2", False, FOR_ANY_MACHINE)


def test_wheel_has_the_command_and_the_license(metadata: dict[str, str]) -> None:
    assert "engine-launch = tokenloom.frontend.launch:main" in metadata["entry_points.txt"]
    assert "Apache License" in metadata["LICENSE"] and "License-Expression: Apache-2.0" in metadata["METADATA"]


def test_the_package_index_shows_author_and_description_without_dead_links(metadata: dict[str, str]) -> None:
    fields, _, description = metadata["METADATA"].partition("\n\n")
    for field in ("Author: tokenloom maintainers", "Keywords: LLM", "Requires-Python: >=3.11", "text/markdown"):
        assert field in fields
    assert "# tokenloom" in description and "`docs/operate/operations.md`" in description
    assert re.findall(r"\]\((?!https?://)[^)]*\)", description) == []


@pytest.fixture
def foreign_modules(tmp_path: Path) -> Path:
    """Create a folder with top-level packages named like our rooms, for example transformers' `kernels`."""
    for room in ROOMS:
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text("owner = 'somebody else'\n")
    return tmp_path


HEAVY = ("torch", "transformers", "numpy", "tokenizers", "jinja2", "tqdm", "psutil", "yaml")
STEPS = (  # of one process, each with modules that are not there after it
    ("import tokenloom; dir(tokenloom)", ("zmq", "msgspec", *HEAVY)),
    ("from tokenloom import Client, AsyncClient, SamplingParams, RequestOutput, LLM, AsyncLLM", HEAVY),
    ("import tokenloom.core.process", ("torch", "transformers", "tokenizers", "llguidance")),
    ("import tokenloom.frontend.launch, tokenloom.frontend.server.process", ("torch", "transformers")),
    (
        "import tokenloom.workers.machine.cpu_threads, tokenloom.kernels.cpu.compiler, tokenloom.scripts.bench.report",
        (),
    ),
)


def test_imports_load_no_unneeded_modules_and_none_named_like_our_rooms(foreign_modules: Path) -> None:
    program = f"""
import {", ".join(ROOMS)}
import sys
for step, absent in {STEPS!r}:
    exec(step)
    assert not set(absent) & sys.modules.keys(), (step, absent)
for name in tokenloom.__all__:
    getattr(tokenloom, name)
for module in ({", ".join(ROOMS)}):
    assert module.owner == "somebody else", module
    assert sys.modules["tokenloom." + module.__name__] is not module
print(tokenloom.__version__)
"""
    version = run([sys.executable, "-c", program], Path("/"), PYTHONPATH=str(foreign_modules)).strip()
    project = pyproject()["project"]
    assert isinstance(project, dict) and project["version"] == version


@pytest.mark.nightly
@pytest.mark.timeout(COMPILE_TIMEOUT_S + 120)
def test_wheel_serves_the_demo_in_a_separate_environment(
    wheel_with_kernels: Path, tmp_path: Path, foreign_modules: Path
) -> None:
    """Run without a compiler or a writable folder. A .pth file lends our dependencies, but not the editable install of
    this checkout."""
    environment = tmp_path / "venv"
    run([sys.executable, "-m", "venv", str(environment)], tmp_path, BUILD_TIMEOUT_S)
    python = str(environment / "bin" / "python")
    run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel_with_kernels)],
        tmp_path,
        BUILD_TIMEOUT_S,
    )
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = environment / "lib" / version / "site-packages"
    (site / "lent.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n{foreign_modules}\n")
    program = """
import kernels, tokenloom
from tokenloom import LLM, SamplingParams
assert kernels.owner == "somebody else" and "site-packages" in tokenloom.__file__, tokenloom.__file__
with LLM() as llm:
    print(llm.info().kernels)
    output = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0]
print(output.outputs[0].text)
"""
    (tmp_path / "home").write_text("")
    slim = {"PYTHONPATH": "", "PATH": str(environment / "bin"), "HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": ""}
    kernels, answer = run([python, "-c", program], tmp_path, BUILD_TIMEOUT_S, **slim).splitlines()
    assert kernels == f"C kernels, {instruction_levels()[0]}, prebuilt" and "Paris" in answer
    command = str(environment / "bin" / "engine-launch")
    assert "usage: engine-launch" in run([command, "--help"], tmp_path, **slim)
    for name in BENCHMARKS:
        assert "usage: engine-launch bench" in run([command, "bench", name, "--help"], tmp_path, **slim)
