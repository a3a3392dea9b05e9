"""Commands in a mount namespace of their own, in which folders cannot be written, are full or are missing."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

FULL_BYTES = 65536
_PROBE = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
CAN_MOUNT = subprocess.run(_PROBE, capture_output=True, check=False, timeout=30).returncode == 0
needs_mounts = pytest.mark.skipif(not CAN_MOUNT, reason="this machine allows no mount in a user namespace")


def inside(*commands: str) -> list[str]:
    """Return a prefix that runs a command after these shell commands, in a mount namespace of its own."""
    return ["unshare", "-rm", "sh", "-c", " && ".join([*commands, 'exec "$@"']), "sh"]


def read_only(folder: Path) -> list[str]:
    """Return a prefix for a command that sees `folder` empty and cannot write to it."""
    return inside(f"mount -t tmpfs -o ro tmpfs {folder}")


def read_only_as_it_is(folder: Path) -> list[str]:
    """Return a prefix for a command that cannot write to `folder` and sees what is in it."""
    return inside(f"mount --bind {folder} {folder}", f"mount -o remount,ro,bind {folder}")


def full(folder: Path) -> list[str]:
    """Return a prefix for a command that sees `folder` on a disk without room."""
    fill = f"(head -c {FULL_BYTES} /dev/zero > {folder}/filler || true) 2>/dev/null"
    return inside(f"mount -t tmpfs -o size={FULL_BYTES} tmpfs {folder}", fill)


def without_home() -> list[str]:
    """Return a prefix for a command whose user has no home: neither HOME nor a line in /etc/passwd, and no service of
    the C library that knows the user."""
    files = [path for path in ("/etc/passwd", "/etc/nsswitch.conf") if Path(path).exists()]
    return inside(*(f"mount --bind /dev/null {path}" for path in files), "unset HOME")
