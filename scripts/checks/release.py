"""Check the files that `scripts/release` has built, and that the wheel generates text in a bare environment.

    python scripts/checks/release.py dist

The wheel is installed into a new environment from pip's configured index, under constraints.txt, and runs there
without a compiler. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INSTALL_TIMEOUT_S = 1800
RUN_TIMEOUT_S = 120
DEMOS = ("model", "adapters/json/adapter_model", "adapters/pirate/adapter_model", "audio/model", "vision/model")
MIN_LIBRARIES = 8  # levels × element types
PROGRAM = """
from tokenloom import LLM, SamplingParams
with LLM(device="cpu") as llm:
    answer = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0]
    kernels = llm.info().kernels
print(kernels, answer.outputs[0].text, sep=": ")
assert "Paris" in answer.outputs[0].text and kernels.endswith("prebuilt")
"""


def check_wheel(wheel: Path) -> None:
    """Check the wheel's contents; raise SystemExit with the first defect."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    strangers = [name for name in names if not re.match(r"tokenloom(-[^/]+\.dist-info)?/", name)]
    demand(not strangers, f"files outside the package: {strangers}")
    tests = [name for name in names if "/tests/" in name or "test_" in Path(name).name or "conftest" in name]
    demand(not tests, f"tests: {tests}")
    libraries = [name for name in names if re.search(r"/prebuilt/[\w-]+\.so$", name)]
    demand(len(libraries) == MIN_LIBRARIES, f"{len(libraries)} prebuilt libraries of {MIN_LIBRARIES}: {libraries}")
    files = {"tokenloom/demo/audio/clip.wav", *(f"tokenloom/demo/{name}.safetensors" for name in DEMOS)}
    demand(files <= {*names}, f"the wheel lacks {sorted(files - {*names})}")
    demand("-py3-none-manylinux_" in wheel.name, f"the name lacks the C library's version: {wheel.name}")
    dead = re.findall(r"\]\((?!https?:)[^)]*\)", metadata)
    demand(not dead, f"links in the description that lead nowhere: {dead}")
    demand("Classifier: " in metadata and "Author: " in metadata, "no classifiers or no author")


def check_source(source: Path) -> None:
    """Check that the source distribution holds every needed file and no tests."""
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    missing = {
        "setup.py",
        "constraints.txt",
        "docs/operate/operations.md",
        "docs/operate/deploy/Dockerfile.cpu",
        "LICENSE",
    } - names
    demand(not missing, f"the source distribution lacks {sorted(missing)}")
    tests = sorted(name for name in names if name.startswith("tests/"))
    demand(not tests, f"tests in the source distribution: {tests}")


def check_installed(wheel: Path) -> None:
    """Generate with the demo model from the installed wheel alone, without a compiler or a writable folder."""
    with tempfile.TemporaryDirectory(prefix="release-") as name:
        folder = Path(name)
        venv.create(folder / "venv", with_pip=True)
        binaries = folder / "venv" / "bin"
        install = ["-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(wheel)]
        subprocess.run([binaries / "python", *install], check=True, timeout=INSTALL_TIMEOUT_S, cwd=folder)
        (folder / "home").write_bytes(b"")
        environment = {"PATH": str(binaries), "HOME": str(folder / "home")}
        for command in (["python", "-c", PROGRAM], ["engine-launch", "--version"]):
            path = binaries / command[0]
            subprocess.run([path, *command[1:]], check=True, timeout=RUN_TIMEOUT_S, cwd=folder, env=environment)


def demand(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise SystemExit(f"the release is not fit: {otherwise}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("dist"))
    parser.add_argument("--print-program", action="store_true", help="print the program that the installed wheel runs")
    options = parser.parse_args()
    if options.print_program:
        print(PROGRAM)
        return 0
    wheels, sources = sorted(options.folder.glob("*.whl")), sorted(options.folder.glob("*.tar.gz"))
    demand(
        len(wheels) == len(sources) == 1, f"one wheel and one source distribution wanted: {os.listdir(options.folder)}"
    )
    check_wheel(wheels[0])
    check_source(sources[0])
    check_installed(wheels[0].resolve())
    print(f"{wheels[0].name} and {sources[0].name} are fit")
    return 0


if __name__ == "__main__":
    sys.exit(main())
