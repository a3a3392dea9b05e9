"""ApiKeys: the API keys that HTTP requests may carry, those of --api-key and those of --api-key-file.

A key of the file has a name and limits of its own (docs/operate/keys.md). The file is TOML or JSON, or has one key
without a name in each line. It is read again when it has changed; if it is invalid then, the keys from before stay.
Secrets are shown nowhere.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from ....ipc.errors import ConfigError

logger = logging.getLogger("tokenloom.http")

OWNER_BYTES = 16
CHECK_S = 1.0  # between two looks at the file
MAX_KEYS = 256
_NAME_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
MAX_NAME = 64


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A key, with the limits of all requests that carry it. Without a name it has none."""

    secret: str
    name: str = ""
    weight: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 1.0  # its part of the engine is in proportion to it
    kv_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0  # largest part of the KV pool, while others ask
    tokens_per_minute: Annotated[int, msgspec.Meta(ge=0)] = 0  # of prompts and answers; 0: no limit
    open_requests: Annotated[int, msgspec.Meta(ge=0)] = 0  # at a time; 0: no limit
    adapters: list[str] | None = None  # that it may use; None: all

    @property
    def owner(self) -> bytes:
        """The digest by which files and batches belong to this key."""
        return hashlib.sha256(self.secret.encode()).digest()[:OWNER_BYTES]

    def may_use(self, adapter: str) -> bool:
        return self.adapters is None or adapter in self.adapters


class _KeyFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[ApiKey] = msgspec.field(name="key")


def read_keys(path: Path) -> list[ApiKey]:
    """Return the keys of a file. ConfigError if it cannot be read or is invalid."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"--api-key-file {path} cannot be read: {why}") from None
    try:
        keys = _parsed(text)
    except (tomllib.TOMLDecodeError, msgspec.DecodeError) as error:
        raise ConfigError(f"--api-key-file {path} is invalid: {error}") from None
    _check(keys, path)
    return keys


def _parsed(text: str) -> list[ApiKey]:
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if text.lstrip().startswith("{"):
        return msgspec.json.decode(text, type=_KeyFile).keys
    if any(line.startswith("[") for line in lines):
        return msgspec.convert(tomllib.loads(text), _KeyFile).keys
    return [ApiKey(secret=line) for line in lines]


def _check(keys: Sequence[ApiKey], path: Path) -> None:
    """Raise ConfigError unless the keys are valid and differ."""
    where = f"--api-key-file {path}"
    if not 0 < len(keys) <= MAX_KEYS:
        raise ConfigError(f"{where} has {len(keys)} keys: give it at least one and at most {MAX_KEYS}")
    for number, key in enumerate(keys, 1):
        if not (key.secret and key.secret.isascii() and key.secret.isprintable()):
            raise ConfigError(f"{where}: the secret of key {number} must be at least 1 printable ASCII character")
        if len(key.name) > MAX_NAME or not _NAME_CHARACTERS.issuperset(key.name):
            message = f"{where}: the name of key {number} must be letters, digits, '.', '_' and '-', at most {MAX_NAME}"
            raise ConfigError(message)
    names = [key.name for key in keys if key.name]
    if len(set(names)) < len(names) or len({key.secret for key in keys}) < len(keys):
        raise ConfigError(f"{where} has two keys with the same name or secret: give each its own")
    if names and len(names) < len(keys):
        raise ConfigError(f"{where} has keys with and without a name: give each a name")


class ApiKeys:
    """The keys that are valid now. Reads the file again after a change, at most once in CHECK_S."""

    def __init__(
        self,
        given: Sequence[str] | None = None,
        path: str | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """given: secrets of keys without names. ConfigError if the file is invalid."""
        self._given = [ApiKey(secret=secret) for secret in given or ()]
        self._path, self._monotonic = None if path is None else Path(path), monotonic
        self._version: tuple[int, int, int] | None = None
        self._looked_at = monotonic()
        self._keys = self._given
        if self._path is not None:
            self._version = _version_of(self._path)
            self._keys = [*self._given, *read_keys(self._path)]

    @property
    def are_required(self) -> bool:
        return bool(self._keys)

    @property
    def named(self) -> list[ApiKey]:
        """The keys with names, which have limits and usage."""
        self._look()
        return [key for key in self._keys if key.name]

    def find(self, secret: bytes) -> ApiKey | None:
        """Return the key with a secret; the time it takes does not depend on which one it is."""
        self._look()
        found = [key for key in self._keys if hmac.compare_digest(secret, key.secret.encode())]
        return found[0] if found else None

    def of_owner(self, owner: bytes) -> ApiKey | None:
        """Return the key to which files and batches belong; None if it is not valid any more."""
        self._look()
        return next((key for key in self._keys if key.owner == owner), None)

    def _look(self) -> None:
        now = self._monotonic()
        if self._path is None or now < self._looked_at + CHECK_S:
            return
        self._looked_at = now
        version = _version_of(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._keys = [*self._given, *read_keys(self._path)]
        except ConfigError as error:
            logger.error("the keys from before stay: %s", error)
            return
        logger.info("--api-key-file has changed: %d keys are valid now", len(self._keys))


def _version_of(path: Path) -> tuple[int, int, int] | None:
    """Return numbers that change with a file; None if it is not there."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
