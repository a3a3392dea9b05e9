"""Parts of several channels' messages that name media: images and audio. Their embeddings replace placeholder tokens.

The frontend decodes a medium in a media process and puts the result into the engine's blob store as a
media file (`blobs/media_file.py`); its digest names it from then on: in keys of KV blocks, in the core's table of
encoded media and in orders to workers. Its tokens in a prompt are a span: placeholders, which embeddings replace one
by one, and tokens that the family puts between them.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

MediaKind: TypeAlias = Literal["image", "audio"]

A_MEDIUM: dict[MediaKind, str] = {"image": "an image", "audio": "an audio clip"}  # in errors


class MediaSpan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A medium of a prompt: from its first placeholder to its last. Spans of a prompt do not overlap."""

    kind: MediaKind = "image"
    digest: bytes  # SHA-256 of the media file, which is in the blob store while the request is open
    start: int  # index of the first placeholder in the prompt
    length: int  # tokens up to the last placeholder, others in between included
    num_embeds: int  # placeholders in the span
    grid: tuple[int, int, int]  # of the media file


class Encode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Order to run pieces [first_piece, first_piece + num_pieces) of the encoder's work on a medium. Each of its stages
    (`stages` of its config) is cut into `pieces_per_stage`, which run one after the other. The order for piece 0
    takes the entry of the encoder cache, the one for the last piece completes it."""

    entry: int  # ≥ 1, of the encoder cache
    kind: MediaKind = "image"
    digest: bytes  # of the media file
    grid: tuple[int, int, int]
    num_embeds: int
    pieces_per_stage: int = 1
    first_piece: int
    num_pieces: int


class FailedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """An entry that a rank could not encode, as its file is missing or damaged; the entry is free."""

    entry: int
    error: str


class EncoderProgress(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The core's state of the workers' encoder caches, in Progress. Numbers but the first three are totals since this
    core's start; the core counts in a struct of its own, so it is not frozen."""

    capacity: int  # embeddings
    num_entries: int = 0  # media, now
    num_used_embeds: int = 0  # embeddings, now
    num_encodes: int = 0  # media that steps began to encode
    num_failed: int = 0  # of them, those with missing or damaged files
    num_hits: int = 0  # spans of prompts that were computed from an entry that another had used
    num_cached: int = 0  # spans of prompts that were in the prefix cache, whole
