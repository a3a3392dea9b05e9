"""Content keys of KV blocks: a sha256 chain over everything that a block's K and V depend on.

    key[i] = sha256(key[i-1] ‖ tokens of block i as u32 little-endian),   key[-1] = root

The root is the namespace of the loaded weights, or of a salt within it. The full digest is kept, so that equal keys
mean equal content in every process, host and restart. Knows no block ids.
"""

from __future__ import annotations

import hashlib
import secrets

KEY_BYTES = 32


def random_namespace() -> bytes:
    """A root that no other load of weights shares; used while no outer tier is configured."""
    return secrets.token_bytes(KEY_BYTES)


def salted_root(namespace: bytes, salt: str) -> bytes:
    """The root of requests with `salt`."""
    return hashlib.sha256(namespace + b"salt" + salt.encode()).digest()


def block_key(parent: bytes, tokens: bytes) -> bytes:
    """Key of the block that holds `tokens` (4 bytes each) after the block `parent`."""
    return hashlib.sha256(parent + tokens).digest()
