"""Messages by which a process fetches a blob from another: GetBlob; replies: BlobChunk, NoBlob. DEALER/ROUTER.

The owner of the connection exchanges Hello, if it is needed. A second reply to a repeated request is harmless.
"""

from __future__ import annotations

from typing import TypeAlias

from .base import Message

MAX_CHUNK_BYTES = 1 << 20
MAX_CHUNKS_IN_FLIGHT = 8  # of one blob: requested, or received before an earlier chunk


class GetBlob(Message, frozen=True, kw_only=True, tag="get_blob"):
    """Request for a part of a blob, cut at the blob's end. The reply is BlobChunk or NoBlob."""

    digest: bytes  # SHA-256 of the blob, 32 bytes
    offset: int
    length: int  # at most MAX_CHUNK_BYTES


class BlobChunk(Message, frozen=True, kw_only=True, tag="blob_chunk"):
    digest: bytes
    offset: int
    size: int  # of the whole blob
    data: bytes


class NoBlob(Message, frozen=True, kw_only=True, tag="no_blob"):
    """Reply to GetBlob: the store has no such blob, or it was damaged, or the offset is after its end."""

    digest: bytes


BlobReply: TypeAlias = BlobChunk | NoBlob
