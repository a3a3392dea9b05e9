"""The import table holds, the document repeats it, and the checks of imports and sizes report violations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tokenloom.scripts import check_imports, check_sizes

ROOT = Path(__file__).resolve().parent.parent


def test_every_folder_imports_only_allowed_modules() -> None:
    assert list(check_imports.offences()) == []


@pytest.mark.parametrize(
    ("file", "text", "offence"),
    [
        ("core/bad", "import torch", "core may not import torch"),
        ("frontend/bad", "import torch.nn", "frontend may not import torch"),
        ("frontend/client/bad", "import yaml", "frontend/client may not import yaml"),
        ("kernels/bad", "from ..ipc import codec", "kernels may not import ipc"),
        ("ipc/bad", "from ..core.engine import EngineCore", "ipc may not import core"),
        ("workers/bad", "def f():\n    import pickle", "pickle runs code from its input"),
        ("workers/bad", "import torch\ntorch.load('x')", "may run code from its input"),
        ("core/bad", "from ..workers import worker", "core may not import workers"),
        (
            "frontend/text/bad",
            "from ..requests.frontend import Frontend",
            "frontend/server/text may not import frontend/server/requests",
        ),
        ("core/new/bad", "", "core/new has no line in scripts/check_imports.py"),
        ("core/bad", "from .bad import x", "circle: core/bad.py → core/bad.py"),
    ],
)
def test_a_forbidden_import_is_reported(file: str, text: str, offence: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / f"{file}.py").write_text(text)
    found = list(check_imports.offences(tmp_path))
    assert len(found) == 1 and offence in found[0] and f"{file}.py" in found[0]


def test_a_circle_of_imports_is_found() -> None:
    targets = {"a": ["b"], "b": ["c", "d"], "c": [], "d": ["a"]}
    assert check_imports.circles(targets) == [["a", "b", "d", "a"]]
    assert check_imports.circles({"a": ["b", "c"], "b": ["c"], "c": []}) == []


def short(folders: tuple[str, ...]) -> str:
    """Format folders like the document: all of ipc as ipc/*."""
    left = sorted(set(folders) - set(check_imports.IPC)) if set(check_imports.IPC) <= set(folders) else sorted(folders)
    names = left if len(left) == len(set(folders)) else ["ipc/*", *left]
    return ", ".join(names) or "–"


def test_the_document_lists_every_folder_with_its_allowed_imports() -> None:
    document = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z_/]+)/` \| [^|]+ \| ([^|]+) \| ([^|]+) \|$", document, re.M)
    expected = [
        (name, short(folder.folders), ", ".join(sorted(folder.parties)) or "–")
        for name, folder in check_imports.FOLDERS.items()
    ]
    assert rows == expected
    assert {str(Path(file).parent) for file in check_imports.sources()} == {name for name, *_ in rows}


def test_the_tree_is_within_its_size_limits() -> None:
    assert list(check_sizes.offences()) == []
    assert len(list(check_sizes.report())) == len(check_sizes.BUDGETS)


def test_an_exceeded_size_limit_is_reported(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_much.py").write_text("a, b = 1, 2\n" * 1000)
    for room, _ in check_sizes.BUDGETS:
        (tmp_path / room).mkdir(exist_ok=True)
    for number in range(check_sizes.MAX_FILES + 1):
        (tmp_path / "core" / f"file{number}.py").write_text("")
    (tmp_path / "ipc" / "long.py").write_text("def long():\n" + "    pass\n" * 700)
    most = check_sizes.BUDGETS["kernels", ".c .h"]
    (tmp_path / "kernels" / "many.c").write_text("\n" * (most + 1))
    budget, files, lines, function, tests = *check_sizes.offences(tmp_path), *check_sizes.offences_of_tests(tmp_path)
    assert f"kernels has {most + 1} lines of .c .h, its budget is {most}" in budget
    assert "core has 17 files, at most 16" in files
    assert "ipc/long.py has 701 lines, at most 600" in lines and "long has 701 lines, at most 80" in function
    assert tests.startswith("the tests have 7000 tokens of code")
