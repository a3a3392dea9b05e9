"""Object format: one block of the KV cache outside the arena: a header of one page, then the payload.

    magic 8 │ version u32 │ 0 u32 │ payload length u64 │ owner u64 │ namespace 32 │ key 32 │ xxh3_128 of the payload 16
    zeros, up to the last 16 bytes of the page │ xxh3_128 of all bytes before

Numbers are little-endian. The header has the length of a page, so that one O_DIRECT read or write moves both parts
without a copy. The checksums detect damage, not manipulation; an object from a network needs a MAC in addition.
"""

from __future__ import annotations

import struct
from typing import Literal, TypeAlias

from xxhash import xxh3_128_digest

from ...ipc.process.arena import PAGE

Buffer: TypeAlias = bytes | bytearray | memoryview
Defect: TypeAlias = Literal["version", "checksum", "key", "length"]

MAGIC = b"kvblock\n"
VERSION = 1  # also a part of every namespace (namespace.py)
HEADER_BYTES = PAGE
_FIELDS = struct.Struct("<8sIIQQ32s32s16s")
_HASHED_BYTES = HEADER_BYTES - 16


def write_header(page: memoryview, namespace: bytes, key: bytes, payload: Buffer, owner: int) -> None:
    """Fill `page`, of HEADER_BYTES, with the header of an object."""
    page[:] = bytes(HEADER_BYTES)
    _FIELDS.pack_into(page, 0, MAGIC, VERSION, 0, len(payload), owner, namespace, key, xxh3_128_digest(payload))
    page[_HASHED_BYTES:] = xxh3_128_digest(page[:_HASHED_BYTES])


def find_defect(page: Buffer, namespace: bytes, key: bytes, payload: Buffer) -> Defect | None:
    """Return why `page` and `payload` are not the complete object of `key`; None if they are."""
    if len(page) != HEADER_BYTES:
        return "length"
    magic, version, _, num_bytes, _, its_namespace, its_key, payload_hash = _FIELDS.unpack_from(page)
    if (magic, version) != (MAGIC, VERSION):
        return "version"
    if xxh3_128_digest(page[:_HASHED_BYTES]) != page[_HASHED_BYTES:]:
        return "checksum"
    if (its_namespace, its_key) != (namespace, key):
        return "key"
    if num_bytes != len(payload):
        return "length"
    return None if xxh3_128_digest(payload) == payload_hash else "checksum"
