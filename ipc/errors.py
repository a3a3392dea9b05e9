"""The errors that reach people, as a tree by who is to blame.

    TokenloomError
    ├── RequestError      the caller       400: mend the request
    ├── Overloaded        nobody           503: retry after `retry_after_s`
    │   └── Draining      nobody           the same, but elsewhere: this engine is shutting down
    ├── ConfigError       the operator     one line, exit code 2
    ├── ProtocolError     us, or a client of another version
    ├── EngineDead        a process        which one, its exit code, its last words
    └── InternalError     us               one request failed; the engine goes on

Each message says what happened, with the numbers, and the mend.
"""

from __future__ import annotations

import msgspec


class TokenloomError(Exception):
    """Root of every error that tokenloom raises on purpose."""


class RequestError(TokenloomError, ValueError):
    """The request cannot be served as asked; the engine and all other requests go on."""


class Overloaded(TokenloomError):
    """The engine takes no more work just now; `retry_after_s` says when to ask again."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Draining(Overloaded):
    """The engine is shutting down: it finishes what it has and takes nothing new."""


class ConfigError(TokenloomError, ValueError):
    """The operator's configuration cannot be served."""


class ProtocolError(TokenloomError):
    """A peer speaks another protocol, or a message broke the rules of this one."""


class EngineDead(TokenloomError):
    """A process of the engine ended and the engine cannot serve any more."""


class InternalError(TokenloomError):
    """One request failed through a fault of the engine."""


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as it travels between processes."""

    kind: str  # a key of ERROR_BY_KIND
    message: str
    retry_after_s: float = 0.0

    def to_exception(self) -> TokenloomError:
        error_type = ERROR_BY_KIND.get(self.kind, InternalError)
        if issubclass(error_type, Overloaded):
            return error_type(self.message, self.retry_after_s)
        return error_type(self.message)


ERROR_BY_KIND: dict[str, type[TokenloomError]] = {
    "request": RequestError,
    "draining": Draining,  # before its base: error_info takes the first that fits
    "overloaded": Overloaded,
    "config": ConfigError,
    "protocol": ProtocolError,
    "dead": EngineDead,
    "internal": InternalError,
}


def error_info(error: BaseException) -> ErrorInfo:
    """The wire form of an exception; anything unforeseen is an internal error that names its type."""
    for kind, error_type in ERROR_BY_KIND.items():
        if isinstance(error, error_type):
            return ErrorInfo(kind, str(error), getattr(error, "retry_after_s", 0.0))
    return ErrorInfo("internal", describe(error))


def describe(error: BaseException) -> str:
    """An unforeseen exception in one line: its type, its words and the function that raised it."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    where = "" if traceback is None else f" (in {traceback.tb_frame.f_code.co_name})"
    return f"{type(error).__name__}: {error}{where}"
