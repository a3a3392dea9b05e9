"""The errors that users see, as a tree by cause.

    TokenloomError
    ├── RequestError      the caller       400: fix the request
    ├── Overloaded        the load         503: retry after `retry_after_s`
    │   ├── RateLimited   the caller       429: retry after `retry_after_s`
    │   ├── Draining      a shutdown       503: retry on another engine
    │   └── StorageFull   a disk           507: free space
    ├── ConfigError       the operator     one line, exit code 2
    ├── ProtocolError     a bug, or a client of another version
    ├── EngineDead        a process        its name, exit code and last output
    └── InternalError     a bug            one request failed; the engine continues

Each message says what happened, with numbers, and the remedy.
"""

from __future__ import annotations

import re

import msgspec

_CREDENTIALS = re.compile(r"(?<=://)[^\s/?#]*@")
_UNPRINTED = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # ends a line, moves a cursor or lacks UTF-8
MAX_LINE_CHARACTERS = 2000


def hide_credentials(text: str) -> str:
    """Return a text with *** in place of the user names and passwords of its URLs."""
    return _CREDENTIALS.sub("***@", text)


def one_line(text: str) -> str:
    """Return a text as one line for a terminal: control characters are escaped, and the middle of a text of more than
    MAX_LINE_CHARACTERS is left out."""
    if len(text) > MAX_LINE_CHARACTERS:
        text = f"{text[: MAX_LINE_CHARACTERS // 2]} … {text[-MAX_LINE_CHARACTERS // 2 :]}"
    return _UNPRINTED.sub(lambda found: ascii(found[0])[1:-1], text)


class TokenloomError(Exception):
    """Root of the errors that callers and operators see. HttpError, and errors that other code of the engine always
    handles, are not below it. No message shows the user names and passwords of URLs."""

    def __init__(self, message: str = "") -> None:
        super().__init__(hide_credentials(message))


class RequestError(TokenloomError, ValueError):
    """The request is invalid; the engine and all other requests continue."""


class Overloaded(TokenloomError):
    """The engine has no room for the request now; retry after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Draining(Overloaded):
    """The engine is shutting down: it finishes open requests and accepts no new ones."""


class RateLimited(Overloaded):
    """The caller's API key has reached one of its limits; others are not affected."""


class StorageFull(Overloaded):
    """The disk, or the caller's quota of it, is full: what the request brings cannot be kept."""


class ConfigError(TokenloomError, ValueError):
    """The configuration, the checkpoint or the machine does not allow the engine to run. Its message is one line."""

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))


class ProtocolError(TokenloomError):
    """A message violates the protocol, or its sender uses another version."""


class EngineDead(TokenloomError):
    """A process of the engine has ended and the engine cannot continue."""


class InternalError(TokenloomError):
    """One request failed because of a fault in the engine."""


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error in a message between processes."""

    kind: str  # a key of ERROR_BY_KIND
    message: str
    retry_after_s: float = 0.0

    def to_exception(self) -> TokenloomError:
        """Return the exception; for an unknown `kind` an InternalError."""
        error_type = ERROR_BY_KIND.get(self.kind, InternalError)
        if issubclass(error_type, Overloaded):
            return error_type(self.message, self.retry_after_s)
        return error_type(self.message)


ERROR_BY_KIND: dict[str, type[TokenloomError]] = {
    "request": RequestError,
    "draining": Draining,  # before its base class: error_info takes the first match
    "limited": RateLimited,
    "overloaded": Overloaded,
    "config": ConfigError,
    "protocol": ProtocolError,
    "dead": EngineDead,
    "internal": InternalError,
}


def error_info(error: BaseException) -> ErrorInfo:
    """Return an exception as an ErrorInfo; an exception of an unexpected type becomes an internal error that names the
    type."""
    for kind, error_type in ERROR_BY_KIND.items():
        if isinstance(error, error_type):
            return ErrorInfo(kind, str(error), getattr(error, "retry_after_s", 0.0))
    return ErrorInfo("internal", describe(error))


def describe(error: BaseException) -> str:
    """Return an unexpected exception in words: its type, its message and the function that raised it."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    where = "" if traceback is None else f" (in {traceback.tb_frame.f_code.co_name})"
    return f"{type(error).__name__}: {error}{where}"
