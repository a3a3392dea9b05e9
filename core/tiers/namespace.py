"""Namespace: the root of the keys of all blocks, made from everything that determines the bytes of a block.

    namespace = sha256(object format's version ‖ digest of the weights ‖ facts), or HMAC-SHA256 with the shared secret

The weights count by their content, never by name or path: the hub's blobs are named by their sha256; other files are
read, and their digests kept in the user's cache until the files change. Dummy weights count by the model's config. If
there is a secret, only those who have it can find out from the keys in a remote store whether a prompt was processed.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...ipc.errors import ConfigError
from ...ipc.messages.base import Rank
from ...ipc.sockets.keys import read_private
from ...ipc.spec.config.cache_folder import private_cache
from ...ipc.spec.config.engine_spec import EngineSpec
from ...ipc.spec.config.weight_files import file_by_tensor
from .object_format import VERSION

MIN_SECRET_BYTES = 16
MAX_TRIES = 10
RECENT_S = 2.0  # a file changed so recently may change again without a new mtime
MAX_KEPT = 1000  # digests in the file

_BLOB_NAME = re.compile("[0-9a-f]{64}")


def new_namespace(weights: bytes, facts: bytes, secret: bytes, version: int = VERSION) -> bytes:
    """Return the namespace, 32 bytes. `weights`: the digest of the weights, 32 bytes."""
    content = version.to_bytes(4, "little") + weights + facts
    return hmac.digest(secret, content, "sha256") if secret else hashlib.sha256(content).digest()


def namespace_of_parts(namespace: bytes, ranks: Sequence[Rank], num_ranks: int) -> bytes:
    """Return the namespace of objects that hold only the parts of `ranks`, since other hosts store the other parts
    under the same keys. Objects with the parts of all ranks have `namespace` itself."""
    if len(ranks) == num_ranks:
        return namespace
    return hashlib.sha256(namespace + " ".join(map(str, ranks)).encode()).digest()


def read_secret(path: str | None) -> bytes:
    """Return the content of --kv-key-file without white space at its ends, or b"" if `path` is None. ConfigError if the
    file cannot be read, can be read by other users, or is too short."""
    if path is None:
        return b""
    try:
        secret = read_private(path, f"--kv-key-file {path}").strip()
    except OSError as error:
        raise ConfigError(f"--kv-key-file {path} cannot be read: {error.strerror}") from None
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"--kv-key-file {path} has {len(secret)} bytes, at least {MIN_SECRET_BYTES} are needed: "
            f"head -c 32 /dev/urandom | base64 > {path}"
        )
    return secret


def digest_weights(spec: EngineSpec, folder: str) -> bytes:
    """Return the digest of the weights in a model folder, 32 bytes. ConfigError if they cannot be read or change all
    the time. May take minutes."""
    if spec.config.load_format == "dummy":
        return hashlib.sha256(b"dummy" + msgspec.json.encode(spec.model, order="deterministic")).digest()
    kept = _KeptDigests(_cache_folder(spec) / "weight_digests.json")
    paths = sorted(set(file_by_tensor(Path(folder)).values()))
    try:
        digests = sorted(_blob_digest(path) or kept.digest(path) for path in paths)
    except OSError as error:
        raise ConfigError(f"{error.filename or folder} cannot be read: {error.strerror}") from None
    return hashlib.sha256("".join(digests).encode()).digest()


def _cache_folder(spec: EngineSpec) -> Path:
    """Return the user's cache folder, or the run directory if the user has no private one."""
    try:
        return private_cache()
    except (RuntimeError, OSError):
        return Path(spec.run_directory)


def _blob_digest(path: Path) -> str | None:
    """Return the sha256 by which the hub's cache names a file's content; None for other files."""
    if not path.is_symlink():
        return None
    target = Path(os.readlink(path))
    return target.name if target.parent.name == "blobs" and _BLOB_NAME.fullmatch(target.name) else None


class _KeptDigests:
    """Cache of files' sha256 by (device, inode, size, mtime), in a JSON file. Without that file they are computed
    again."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def digest(self, path: Path) -> str:
        """Return the sha256 of a file in hex. If the file changes while it is read, it is read again; ConfigError after
        MAX_TRIES reads. OSError if it cannot be read."""
        for _ in range(MAX_TRIES):
            with path.open("rb", buffering=0) as file:
                identity = _identity(os.fstat(file.fileno()))
                digest = self._read().get(identity)
                if digest is not None:
                    return digest
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                status = os.fstat(file.fileno())
            if _identity(status) == identity:
                if abs(time.time() - status.st_mtime) > RECENT_S:
                    self._keep(identity, digest)
                return digest
        raise ConfigError(f"{path} changes all the time: start the engine when it is complete")

    def _read(self) -> dict[str, str]:
        try:
            kept = json.loads(self._path.read_text(encoding="utf-8"))
            return {str(identity): str(digest) for identity, digest in kept.items() if _BLOB_NAME.fullmatch(digest)}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def _keep(self, identity: str, digest: str) -> None:
        entries = list({**self._read(), identity: digest}.items())
        pending = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            pending.write_text(json.dumps(dict(entries[-MAX_KEPT:])), encoding="utf-8")
            pending.rename(self._path)


def _identity(status: os.stat_result) -> str:
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"
