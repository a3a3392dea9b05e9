"""Runs commands against a hub of the test, with a cache of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from tokenloom.frontend.launch import main
from tokenloom.scripts.bench.inputs.write_gguf import convert
from tokenloom.tests.support.checkpoints import tiny_checkpoint
from tokenloom.tests.support.fake_hub import FakeHub, fake_hub

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """Return the files of repositories: safetensors, GGUF files, others."""
    folder = tmp_path_factory.mktemp("models")
    tiny = tiny_checkpoint(folder / "tiny", "llama", dtype="bfloat16")
    for form in ("F16", "Q8_0"):
        convert(tiny_checkpoint(folder / f"for-{form}", "llama"), folder / f"m-{form}.gguf", form)
    files = {path.name: path.read_bytes() for path in tiny.iterdir()}
    ggufs = {f"m-{form}.gguf": (folder / f"m-{form}.gguf").read_bytes() for form in ("F16", "Q8_0")}
    return {
        "org/tiny": files | {"README.md": b"---\nlicense: mit\n---\n"},
        "org/gguf": ggufs,
        "org/odd": {"a-F16.gguf": b"x" * 3000, "a-Q6_K.gguf": b"y" * 4000},
        "org/bin": {"config.json": b"{}", "pytorch_model.bin": b"x"},
    }


@pytest.fixture
def hub(models: dict[str, dict[str, bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with the models, and an empty cache of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with fake_hub(monkeypatch) as hub:
        hub.files |= models
        yield hub


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process; return its exit code and what it printed."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        return code, *capsys.readouterr()

    return run
