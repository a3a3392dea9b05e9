"""The form that uploads a file, and the objects that describe files, in OpenAI's form."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias

import msgspec

from ...field import means
from ..generation import Body
from ..transcription_body import Upload

HOUR_S = 3600
LEAST_S, MOST_S = HOUR_S, 30 * 24 * HOUR_S  # of the life of a file that expires
BATCH_S = MOST_S  # life of a batch's files, unless their maker says otherwise
Purpose: TypeAlias = Literal["assistants", "batch", "evals", "fine-tune", "user_data", "vision"]
Seconds: TypeAlias = Annotated[int, msgspec.Meta(ge=LEAST_S, le=MOST_S)]


class FileExpiry(Body, frozen=True, kw_only=True):
    """When a file expires."""

    anchor: Annotated[Literal["created_at"], means("The time from which the seconds count: that of the upload.")]
    seconds: Annotated[Seconds, means("Seconds until the file expires, an hour to 30 days.")]


class FileRequest(Body, frozen=True, kw_only=True):
    """POST /v1/files, as multipart/form-data. The file streams to the disk; its place in this struct is empty."""

    EXAMPLE: ClassVar = {"purpose": "batch"}  # beside the file

    file: Annotated[Upload, means("The file, with its name.")]
    purpose: Annotated[Purpose, means("The use of the file; batch: the requests of a batch, as JSON lines.")]
    expires_after: Annotated[
        FileExpiry | None,
        means("When the file expires, in a form as expires_after[anchor] and expires_after[seconds].", "see purpose"),
    ] = None

    @property
    def expires_s(self) -> int | None:
        """The life of the file in seconds; None: until it is deleted."""
        if self.expires_after is not None:
            return self.expires_after.seconds
        return BATCH_S if self.purpose == "batch" else None


class FileObject(msgspec.Struct, kw_only=True):
    """A file, as clients see it. Times are unix seconds."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: str = "processed"
    status_details: str | None = None


class FileList(msgspec.Struct, kw_only=True):
    """One page of files."""

    object: str = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, kw_only=True):
    """Answer to the deletion of a file."""

    id: str
    object: str = "file"
    deleted: bool = True
