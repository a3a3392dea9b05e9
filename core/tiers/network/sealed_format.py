"""Sealed format: the form of an object that leaves this machine, for a remote store or another engine.

    header, HEADER_BYTES (object_format.py) │ payload │ MAC, 32 bytes, if there is a secret

The MAC is a keyed BLAKE2b over the header, which holds namespace and key, and the payload.
"""

from __future__ import annotations

import hmac
from hashlib import blake2b

from ..object_format import HEADER_BYTES, Buffer, find_defect, write_header
from ..source import Namespace

MAC_BYTES = 32


class SealedFormat:
    """Writer and checker of the objects of one namespace in sealed form."""

    def __init__(self, namespace: Namespace) -> None:
        self.digest = namespace.digest
        self.slot_bytes = namespace.slot_bytes
        self._mac_key = derive(namespace.secret, b"kv object") if namespace.secret else b""
        self.tail_bytes = MAC_BYTES if self._mac_key else 0

    def num_bytes(self, slot_bytes: int) -> int:
        """Return the size of an object with a payload of `slot_bytes`."""
        return HEADER_BYTES + slot_bytes + self.tail_bytes

    def seal(self, key: bytes, payload: Buffer) -> tuple[bytes, bytes]:
        """Return the bytes to put before and after the payload."""
        page = bytearray(HEADER_BYTES)
        write_header(memoryview(page), self.digest, key, payload, owner=0)  # a tenant's number has no meaning elsewhere
        head = bytes(page)
        return head, self._mac(head, payload)

    def find_defect(self, key: bytes, head: Buffer, payload: Buffer, tail: Buffer) -> str | None:
        """Return why the three parts are not the object of `key`; None if they are."""
        defect = find_defect(head, self.digest, key, payload)
        if defect is None and not hmac.compare_digest(self._mac(head, payload), bytes(tail)):
            return "mac"
        return defect

    def _mac(self, head: Buffer, payload: Buffer) -> bytes:
        if not self._mac_key:
            return b""
        mac = blake2b(head, digest_size=MAC_BYTES, key=self._mac_key)
        mac.update(payload)
        return mac.digest()


def derive(secret: bytes, purpose: bytes) -> bytes:
    """Return a key of 32 bytes for one purpose, derived from the secret of --kv-key-file. `purpose`: at most 16
    bytes."""
    return blake2b(secret, digest_size=32, person=purpose).digest()
