"""The import table holds, and the script that holds it sees offences."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenloom.scripts import check_imports


def test_every_room_imports_what_the_table_allows() -> None:
    assert list(check_imports.offences()) == []


@pytest.mark.parametrize(
    ("room", "text", "offence"),
    [
        ("core", "import torch", "core may not import torch"),
        ("frontend", "import torch.nn", "frontend may not import torch"),
        ("kernels", "from ..ipc import config", "kernels may not import ipc"),
        ("ipc", "from ..core.engine import EngineCore", "ipc may not import core"),
        ("workers", "def f():\n    import pickle", "pickle runs what it reads"),
        ("workers", "import torch\ntorch.load('x')", "may run what it reads"),
        ("core", "from ..workers import worker", "core may not import workers"),
    ],
)
def test_an_offence_is_named(
    room: str, text: str, offence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in check_imports.ROOMS:
        (tmp_path / name).mkdir()
    (tmp_path / room / "bad.py").write_text(text)
    monkeypatch.setattr(check_imports, "ROOT", tmp_path)
    found = list(check_imports.offences())
    assert len(found) == 1 and offence in found[0] and f"{room}/bad.py" in found[0]
