"""A release with missing or surplus files is refused with the file's name."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tokenloom.kernels.cpu.compiler import LEVELS
from tokenloom.kernels.cpu.library_store import prebuilt_name
from tokenloom.scripts.checks.release import DEMOS, MIN_LIBRARIES, check_wheel

NAME = "tokenloom-1.0-py3-none-manylinux_2_17_x86_64.whl"
METADATA = "tokenloom-1.0.dist-info/METADATA"
LIBRARIES = [
    f"tokenloom/kernels/cpu/prebuilt/{prebuilt_name(level, is_bf16)}" for level in LEVELS for is_bf16 in (False, True)
]
DEMO = ["tokenloom/demo/audio/clip.wav", *(f"tokenloom/demo/{name}.safetensors" for name in DEMOS)]
GOOD = {
    METADATA: "Author: us\nClassifier: x\n\n# tokenloom\n[a](https://example.org)",
    **dict.fromkeys([*LIBRARIES, *DEMO], ""),
}


def write(folder: Path, files: dict[str, str], name: str = NAME) -> Path:
    with zipfile.ZipFile(folder / name, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return folder / name


def test_a_wheel_with_all_kernels_passes(tmp_path: Path) -> None:
    assert len(LIBRARIES) == MIN_LIBRARIES
    check_wheel(write(tmp_path, GOOD))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"tokenloom/tests/test_x.py": ""}, "tests: .*test_x"),
        ({"kernels/contract.py": ""}, "outside the package"),
        ({METADATA: f"{GOOD[METADATA]}[b](docs/b.md)"}, "lead nowhere: .*docs/b.md"),
        ({METADATA: "Author: us\n\n"}, "no classifiers"),
    ],
)
def test_a_wheels_defect_is_named(tmp_path: Path, changed: dict[str, str], reason: str) -> None:
    with pytest.raises(SystemExit, match=reason):
        check_wheel(write(tmp_path, GOOD | changed))


def test_a_wheel_without_a_library_or_for_any_machine_is_refused(tmp_path: Path) -> None:
    lacking = {name: text for name, text in GOOD.items() if name != LIBRARIES[0]}
    with pytest.raises(SystemExit, match="7 prebuilt libraries of 8"):
        check_wheel(write(tmp_path, lacking))
    lacking = {name: text for name, text in GOOD.items() if not name.endswith("/audio/model.safetensors")}
    with pytest.raises(SystemExit, match=r"the wheel lacks .*demo/audio/model\.safetensors"):
        check_wheel(write(tmp_path, lacking))
    with pytest.raises(SystemExit, match="lacks the C library's version"):
        check_wheel(write(tmp_path, GOOD, "tokenloom-1.0-py3-none-any.whl"))
