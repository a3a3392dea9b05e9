"""The body that creates a batch, and the object that describes one, in OpenAI's form."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal, TypeAlias

import msgspec
from msgspec import Meta

from .....ipc.errors import RequestError
from ...field import means
from ..generation import Body, matching, within

Status: TypeAlias = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
MAX_METADATA = 16
MAX_KEY_CHARACTERS = 64
MAX_VALUE_CHARACTERS = 512
HOUR_S = 3600
SECONDS = {"h": HOUR_S, "d": 24 * HOUR_S}
LEAST_S, MOST_S = HOUR_S, 30 * 24 * HOUR_S  # of a window, and of the life of output files
WINDOW_PATTERN = "^([1-9]|[12][0-9]|30)d$|^([1-9]|[1-9][0-9]|[1-6][0-9]{2}|7[01][0-9]|720)h$"


Metadata: TypeAlias = Annotated[
    dict[
        Annotated[str, Meta(extra_json_schema={"maxLength": MAX_KEY_CHARACTERS})],
        Annotated[str, Meta(extra_json_schema={"maxLength": MAX_VALUE_CHARACTERS})],
    ],
    Meta(extra_json_schema={"maxProperties": MAX_METADATA}),
]


class ExpiresAfter(Body, frozen=True, kw_only=True):
    """When the files of a batch expire."""

    anchor: Annotated[Literal["created_at"], means("The time from which the seconds count: that of the file.")]
    seconds: Annotated[int, within(LEAST_S, MOST_S), means("Seconds until the file expires, an hour to 30 days.")]


class BatchRequest(Body, frozen=True, kw_only=True):
    """POST /v1/batches: run the requests of a file."""

    EXAMPLE: ClassVar = {
        "input_file_id": "file-0123456789abcdef0123456789abcdef",
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    }

    input_file_id: Annotated[str, means("A file of purpose batch: each line is a request.")]
    endpoint: Annotated[str, means("The path that all requests of the file are for.")]
    completion_window: Annotated[
        str,
        matching(WINDOW_PATTERN),
        means("The time in which the requests run, from 1h to 30d; those left then end with an error."),
    ]
    metadata: Annotated[Metadata | None, means("Up to 16 texts by name, for the caller's own use.")] = None
    output_expires_after: Annotated[ExpiresAfter | None, means("When the output files expire.", "after 30 days")] = None

    @property
    def window_s(self) -> int:
        """Return the seconds of the window; RequestError if it is none."""
        if re.fullmatch(WINDOW_PATTERN, self.completion_window) is None:
            raise RequestError(f"completion_window is {self.completion_window!r:.80}: give 24h, or 1h to 30d")
        return int(self.completion_window[:-1]) * SECONDS[self.completion_window[-1]]

    def check(self) -> None:
        """Raise RequestError if a value is out of range."""
        _ = self.window_s
        expiry = self.output_expires_after
        if expiry is not None and not LEAST_S <= expiry.seconds <= MOST_S:
            raise RequestError(
                f"output_expires_after.seconds must be in [{LEAST_S}, {MOST_S}], got {expiry.seconds}: give an hour to "
                "30 days"
            )
        _check_metadata(self.metadata or {})


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise RequestError(f"metadata has {len(metadata)} entries, at most {MAX_METADATA} are kept: send fewer")
    for key, value in metadata.items():
        if len(key) > MAX_KEY_CHARACTERS or len(value) > MAX_VALUE_CHARACTERS:
            raise RequestError(
                f"metadata has a key of {len(key)} characters with a value of {len(value)}: at most "
                f"{MAX_KEY_CHARACTERS} and {MAX_VALUE_CHARACTERS} are kept"
            )


class BatchError(msgspec.Struct, frozen=True):
    """A fault of the input file."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct, frozen=True):
    """The faults of the input file."""

    data: list[BatchError]
    object: str = "list"


class RequestCounts(msgspec.Struct):
    """How many requests a batch has, and how many have ended with an answer, and without one."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class CachedTokens(msgspec.Struct):
    cached_tokens: int = 0


class ReasoningTokens(msgspec.Struct):
    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct):
    """Tokens of all answers of a batch."""

    input_tokens: int = 0
    input_tokens_details: CachedTokens = msgspec.field(default_factory=CachedTokens)
    output_tokens: int = 0
    output_tokens_details: ReasoningTokens = msgspec.field(default_factory=ReasoningTokens)
    total_tokens: int = 0


class Batch(msgspec.Struct, kw_only=True):
    """A batch, as clients see it. Times are unix seconds."""

    id: str
    object: str = "batch"
    endpoint: str
    model: str | None = None
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    usage: BatchUsage = msgspec.field(default_factory=BatchUsage)
    metadata: dict[str, str] | None = None
