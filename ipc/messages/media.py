"""Structs about media (images and audio) as parts of messages. Embeddings of media replace placeholder tokens.

The frontend has a medium decoded by a media process, which puts the result into the engine's blob store as a media file
(`blobs/media_file.py`). From then on the file's digest names the medium: in keys of KV blocks, in the core's table of
encoded media and in orders to workers. The tokens of a medium in a prompt are a span: placeholders, each of which is
replaced by an embedding, and tokens that the model family puts between them.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

MediaKind: TypeAlias = Literal["image", "audio"]

MEDIUM: dict[MediaKind, str] = {"image": "image", "audio": "audio clip"}  # kind → its name in errors
A_MEDIUM: dict[MediaKind, str] = {kind: f"an {name}" for kind, name in MEDIUM.items()}


class MediaSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tokens of a medium in a prompt, from its first placeholder to its last. Spans of a prompt do not overlap."""

    kind: MediaKind = "image"
    digest: bytes  # SHA-256 of the media file, which is in the blob store while the request is open
    start: int  # index of the first placeholder in the prompt
    length: int  # tokens of the span: placeholders, and others between them
    num_embeds: int  # placeholders in the span, and so embeddings
    grid: tuple[int, int, int]  # of the media file


class Encode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Order to run pieces [first_piece, first_piece + num_pieces) of the encoder's work on a medium. Each stage of the
    encoder (`stages` of its config) is cut into `pieces_per_stage` pieces, which run one after the other. The order for
    piece 0 takes the entry of the encoder cache, the order for the last piece completes it."""

    entry: int  # number ≥ 1 of an entry of the encoder cache
    kind: MediaKind = "image"
    digest: bytes  # of the media file
    grid: tuple[int, int, int]
    num_embeds: int
    pieces_per_stage: int = 1
    first_piece: int
    num_pieces: int


class FailedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry that a rank could not encode, since its media file is missing or damaged; the entry is free again."""

    entry: int
    error: str


class EncoderProgress(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The core's state of the workers' encoder caches, in Progress. All numbers after the first three are totals since
    this core's start. Not frozen, since the core counts in its own instance."""

    capacity: int  # embeddings
    num_entries: int = 0  # media, now
    num_used_embeds: int = 0  # embeddings, now
    num_encodes: int = 0  # media that steps began to encode
    num_failed: int = 0  # of num_encodes: those with missing or damaged files
    num_hits: int = 0  # spans of prompts that were computed from an entry that another span had used
    num_cached: int = 0  # spans of prompts that were completely in the prefix cache
