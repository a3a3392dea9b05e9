"""Content keys of KV blocks: a sha256 chain over everything on which a block's K and V depend.

    key[i] = sha256(key[i-1] ‖ tokens of block i as u32 little-endian ‖ media),   key[-1] = root

`media` is empty unless spans of media touch the block. Then it has, for each of these media, the digest and the index
within the span of the first token that is in the block; so placeholders of different media never share a key, and a hit
may end within an image. The root is made from the namespace of the loaded weights and the request's adapter and salt.
All KV groups have the same keys; where blocks of several groups lie side by side, a block is found by its name, made
from key and group. The full digest is kept: equal keys mean equal content in every process, on every host and after a
restart. Knows no block ids.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Sequence

from ...ipc.messages.media import MediaSpan
from ..media_spans import key_extra

KEY_BYTES = 32


def random_namespace() -> bytes:
    """Return a new random namespace. No key under it equals a key under another one."""
    return secrets.token_bytes(KEY_BYTES)


def salted_root(namespace: bytes, salt: str) -> bytes:
    """Return the root for requests with the cache_salt `salt`. Other requests cannot find their blocks."""
    return hashlib.sha256(namespace + b"salt" + salt.encode()).digest()


def shared_root(namespace: bytes, salt: str | None, adapter: bytes = b"") -> bytes:
    """Return the root of the blocks that all requests with the same salt (or all without one) and adapter share.
    adapter: the adapter's digest, or empty."""
    weights = hashlib.sha256(namespace + b"adapter" + adapter).digest() if adapter else namespace
    return weights if salt is None else salted_root(weights, salt)


def object_name(key: bytes, group: int) -> bytes:
    """Return the name, 32 bytes, of a KV group's block outside the pool. For group 0 it is the key."""
    return hashlib.sha256(key + b"group" + bytes([group])).digest() if group else key


def block_key(parent: bytes, tokens: bytes, media: bytes = b"") -> bytes:
    """Return the key of the block that holds `tokens` (4 bytes each) and follows the block with key `parent`. media:
    the `key_extra` of the block."""
    return hashlib.sha256(parent + tokens + media).digest()


def block_keys(
    parent: bytes, tokens: bytes, block_size: int, media: Sequence[MediaSpan] = (), start: int = 0
) -> Iterator[bytes]:
    """Yield the keys of the whole blocks of `tokens`, which follow the block with key `parent`. media: the spans of the
    prompt; start: the index in the prompt of the first of these tokens."""
    for begin in range(start, start + len(tokens) // 4 - block_size + 1, block_size):
        first = 4 * (begin - start)
        extra = key_extra(media, begin, begin + block_size) if media else b""
        parent = block_key(parent, tokens[first : first + 4 * block_size], extra)
        yield parent
