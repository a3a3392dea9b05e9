"""Errors of a state folder that cannot be used now: the cause, and the mend for the operator."""

from __future__ import annotations

import errno

from ...ipc.errors import InternalError, TokenloomError
from ...ipc.shortages.failure import failure_of

MENDS = {  # by the number of an OSError; shortages have their own
    errno.ENOENT: "put it back as it was, or stop the engine and start it again",
    errno.EACCES: "let the engine's user read and write it",
    errno.EPERM: "let the engine's user read and write it",
    errno.EROFS: "mount its disk for writing",
    errno.EIO: "look for faults of its disk",
}


def state_failure(error: Exception, subject: str) -> TokenloomError:
    """Return the error for a call that a folder's state does not allow. `subject`: start of the message."""
    if isinstance(error, OSError) and error.errno in MENDS:
        return InternalError(f"{subject}: {error.strerror}: {MENDS[error.errno]}")
    return failure_of(error, subject)
