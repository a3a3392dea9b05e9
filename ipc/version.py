"""The version of the installed package, and a digest of the sources that determine the numbers a model computes."""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_KINDS = (".py", ".c", ".h")


def tokenloom_version() -> str:
    """Return the installed version; "unknown" in a checkout that was never installed."""
    return _version_of("tokenloom")


def numerics_digest(root: Path = ROOT) -> str:
    """Return a digest, in hex, of the sources of kernels and workers below `root`, and of the versions of torch and of
    transformers, whose layers and encoders may be borrowed. All hosts of an engine must have the same, since their
    ranks must compute equal bits. Takes some milliseconds."""
    digest = hashlib.sha256(f"{_version_of('torch')} {_version_of('transformers')}".encode())
    rooms = (root / "kernels", root / "workers")
    for path in sorted(path for room in rooms for path in room.rglob("*") if path.suffix in _KINDS):
        digest.update(f"\n{path.relative_to(root)} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()


def _version_of(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # imports a parser of mails

    try:
        return version(package)
    except PackageNotFoundError:  # a checkout that was never installed
        return "unknown"
