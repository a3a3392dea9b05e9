"""A process without a blob → a process that has it, DEALER/ROUTER: GetBlob. Back: BlobChunk, NoBlob.

The owner of the connection exchanges Hello. A reply to a repeated request is harmless.
"""

from __future__ import annotations

from typing import TypeAlias

from .base import Message

MAX_CHUNK_BYTES = 1 << 20
MAX_CHUNKS_IN_FLIGHT = 8  # of one blob: requested, or received before an earlier chunk


class GetBlob(Message, frozen=True, kw_only=True, tag="get_blob"):
    """Request of a part of a blob, cut at the blob's end; BlobChunk or NoBlob replies."""

    digest: bytes  # SHA-256 of the blob, 32 bytes
    offset: int
    length: int  # at most MAX_CHUNK_BYTES


class BlobChunk(Message, frozen=True, kw_only=True, tag="blob_chunk"):
    digest: bytes
    offset: int
    size: int  # of the whole blob
    data: bytes


class NoBlob(Message, frozen=True, kw_only=True, tag="no_blob"):
    """The store has no such blob, or it was damaged, or the offset lies behind its end."""

    digest: bytes


BlobReply: TypeAlias = BlobChunk | NoBlob
