"""The digest of numerics changes with each source of kernels and workers, and with nothing else."""

from __future__ import annotations

from pathlib import Path

from tokenloom.ipc.version import ROOT, numerics_digest


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_digest_names_every_source_that_computes(tmp_path: Path) -> None:
    linear = write(tmp_path / "kernels" / "cpu" / "src" / "linear.c", "int f(void);")
    decoder = write(tmp_path / "workers" / "models" / "decoder.py", "x = 1")
    before = numerics_digest(tmp_path)
    write(tmp_path / "core" / "engine.py", "y = 2")
    write(tmp_path / "kernels" / "cpu" / "src" / "__pycache__" / "linear.pyc", "z")
    assert numerics_digest(tmp_path) == before
    seen = {before}
    for path in (linear, decoder):
        path.write_text(path.read_text() + "\n")
        seen.add(numerics_digest(tmp_path))
    decoder.rename(decoder.with_name("encoder.py"))
    seen.add(numerics_digest(tmp_path))
    assert len(seen) == 4


def test_this_package_has_sources_of_kernels_and_workers() -> None:
    assert numerics_digest() != numerics_digest(ROOT / "docs")
