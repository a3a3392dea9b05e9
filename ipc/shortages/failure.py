"""Errors for resources that have run out for a while: the client retries, and the operator gets a remedy."""

from __future__ import annotations

import errno

from ..errors import InternalError, Overloaded, StorageFull, TokenloomError

TASKS = "raise the limit of processes (ulimit -u, pids.max of the cgroup)"
MEMORY = "free memory, or raise the limit of its cgroup"
REMEDIES = {  # by the number of an OSError
    errno.EAGAIN: TASKS,
    errno.EMFILE: "raise the limit of open files (ulimit -n, LimitNOFILE)",
    errno.ENFILE: "raise the machine's limit of open files (sysctl fs.file-max)",
    errno.ENOMEM: MEMORY,
    errno.ENOSPC: "free space or choose another folder",
    errno.EDQUOT: "free space, raise the quota or choose another folder",
}
FULL = (errno.ENOSPC, errno.EDQUOT)
RETRY_S = 5.0


def shortage_of(error: Exception, subject: str) -> Overloaded | None:
    """Return Overloaded, with a remedy, if `error` shows that the system is short of threads, descriptors, memory or
    disk space (then StorageFull); else None. `subject`: start of the message, such as «the file cannot be read»."""
    if isinstance(error, OSError) and error.errno in REMEDIES:
        kind = StorageFull if error.errno in FULL else Overloaded
        return kind(f"{subject}: {error.strerror}: {REMEDIES[error.errno]}", RETRY_S)
    if isinstance(error, MemoryError):
        return Overloaded(f"{subject}: out of memory: {MEMORY}", RETRY_S)
    return None


def failure_of(error: Exception, subject: str) -> TokenloomError:
    """Return `error` if it is a TokenloomError, Overloaded for a shortage (`shortage_of`), else InternalError."""
    if isinstance(error, TokenloomError):
        return error
    return shortage_of(error, subject) or InternalError(f"{subject}: {type(error).__name__}: {error}")
