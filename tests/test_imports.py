"""The import table holds, the document repeats it, and the checks of imports and sizes report violations."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tokenloom.scripts.checks import imports, sizes

ROOT = Path(__file__).resolve().parent.parent


def test_every_folder_imports_only_allowed_modules() -> None:
    assert list(imports.offences()) == []


@pytest.mark.parametrize(
    ("file", "text", "offence"),
    [
        ("core/bad", "import torch", "core may not import torch"),
        ("core/new/bad", "import torch", "core/new may not import torch"),
        ("frontend/bad", "import torch.nn", "frontend may not import torch"),
        ("frontend/client/bad", "import yaml", "frontend/client may not import yaml"),
        ("kernels/bad", "from ..ipc import codec", "kernels may not import ipc"),
        ("ipc/bad", "from ..core.engine import EngineCore", "ipc may not import core"),
        ("workers/bad", "def f():\n    import pickle", "pickle runs code from its input"),
        ("workers/bad", "import torch\ntorch.load('x')", "may run code from its input"),
        ("core/bad", "from ..workers import worker", "core may not import workers"),
        (
            "frontend/forms/bad",
            "from ..server.requests.frontend import Frontend",
            "frontend/forms may not import frontend/server",
        ),
        ("core/bad", "from .bad import x", "circle in core: bad.py → bad.py"),
    ],
)
def test_a_forbidden_import_is_reported(file: str, text: str, offence: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / f"{file}.py").write_text(text)
    found = list(imports.offences(tmp_path))
    assert len(found) == 1 and offence in found[0] and Path(file).name in found[0]


def test_a_circle_of_imports_is_found() -> None:
    targets = {"a": {"b"}, "b": {"c", "d"}, "c": set[str](), "d": {"a"}}
    assert imports.circles(targets) == [["a", "b", "d", "a"]]
    assert imports.circles({"a": {"b", "c"}, "b": {"c"}}) == []


def test_a_circle_of_folders_is_found_where_no_files_make_one(tmp_path: Path) -> None:
    for file, text in (
        ("kv/pool", "from ..links.port import x"),
        ("links/port", ""),
        ("links/order", "from ..kv import log"),
    ):
        (tmp_path / "core" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "core" / f"{file}.py").write_text(text)
    assert list(imports.offences(tmp_path)) == ["circle in core: kv → links → kv"]


def test_the_command_starts_without_what_only_some_starts_need() -> None:
    """Its imports are the first 0.15 s of each start."""
    rare = "{'torch', 'transformers', 'numpy', 'huggingface_hub', 'tqdm', 'yaml', 'importlib.metadata', 'jinja2'}"
    code = f"import sys\nfrom tokenloom.frontend import launch\nlaunch._parse([])\nprint({rare} & sys.modules.keys())"
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


def test_the_document_lists_every_folder_and_the_walls() -> None:
    document = (ROOT / "docs/design/processes.md").read_text(encoding="utf-8")
    walls = dict(re.findall(r"^\| `([a-z_/]+)/` \| ([^|]+) \|$", document, re.M))
    assert walls == {room: ", ".join(others) or "–" for room, others in imports.WALLS.items()}
    parties = {
        name: set(found.split(", "))
        for name, found in re.findall(r"^\| `([a-z_/]+)/` \| [^|]+ \| ([^|]+) \|$", document, re.M)
    }
    for name, found in parties.items():
        assert found == set(imports.PARTIES[imports.nearest(name, imports.PARTIES)].split())
    assert parties.keys() == {str(Path(file).parent) for file in imports.sources()}


def test_the_tree_is_within_its_size_limits() -> None:
    """Numbers that may only fall are counted by scripts/check alone: it takes ten seconds."""
    assert list(sizes.offences()) == []


def test_exceeded_limits_of_folders_files_and_functions_are_reported(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    for number in range(sizes.MAX_FILES + 1):
        (tmp_path / "core" / f"file{number}.py").write_text("")
    (tmp_path / "ipc").mkdir()
    (tmp_path / "ipc" / "long.py").write_text("def long():\n" + "    pass\n" * 700)
    folder, file, function = sizes.offences(tmp_path)
    assert "core has 17 files, at most 16" in folder
    assert "ipc/long.py has 701 lines, at most 600" in file and "long has 701 lines, at most 80" in function


def test_numbers_that_may_only_fall_are_counted_and_compared(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    packed = "def f(x):\n    a, b = x, 1\n    words = (a, b)\n    return g(*words) if a else g(*x)\n"
    (tmp_path / "core" / "packed.py").write_text(packed)
    (tmp_path / "core" / "long.py").write_text("a = 1\n" * 1001)
    for name in sizes.FEATURES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("# adapters\nprint('adapters', adapters,\n  adapter)\n")
    found = sizes.measure(tmp_path)
    assert found.tokens["core"] == 3003 + 34 + 8 and found.long_files == {"core/long.py": 3003}
    assert (found.packed_calls["core"], found.paired_assignments["core"]) == (1, 1)
    assert found.conditional_expressions["core"] == 1
    assert set(found.feature_lines.values()) == {2}
    held = msgspec.structs.replace(found, tokens=found.tokens | {"core": 3000, "ipc": 5}, long_files={})
    above, below, long = sizes.compare(found, held)
    assert above == (True, "core has 3045 tokens, at most 3000: see scripts/checks/ratchets.toml")
    assert below == (False, "scripts/checks/ratchets.toml: [tokens] ipc = 0, was 5")
    assert long == (True, "core/long.py has 3003 long files, at most 3000: see scripts/checks/ratchets.toml")
    assert list(sizes.compare(found, found)) == []


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("return g(*(a, 1))", 1),
        ("both: tuple = (a, 1)\n    return g(*both), g(*both[1:])", 2),
        ("both, c = (a, 1), 2\n    return g(*both)", 1),
        ("both = (a, *b)\n    return lambda: g(*both)", 1),
        ("def h():\n        both = [a, 1]\n        return g(*both)", 1),
        ("texts = []\n    texts.append(a)\n    return g(*texts)", 0),
        ("all = [*a, *b]\n    return g(*all)", 0),
        ("words = ['ls', f'-{a}']\n    return g(*words)", 0),
        ("return g(*b, *(each for each in b))", 0),
    ],
)
def test_packed_are_groups_of_fixed_values_and_no_sequences(body: str, count: int, tmp_path: Path) -> None:
    (tmp_path / "packed.py").write_text(f"def f(a, b):\n    {body}\n")
    assert sizes.num_packed_calls(tmp_path / "packed.py") == count
