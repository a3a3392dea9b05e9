"""The pause of both acceptors of HTTP connections, the supervisor's and a frontend's, when descriptors run out."""

from __future__ import annotations

import errno
import logging

from ...ipc.process.descriptors import descriptor_limit
from ...ipc.process.log import is_worth_a_line

logger = logging.getLogger("tokenloom.http")

PAUSE_S = 0.25  # pause before the next attempt to accept
MAX_ACCEPTS = 64  # most connections accepted at a time
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def warn_of_pause(error: OSError, num_pauses: int) -> None:
    """Log that accepting is paused, more rarely the more often that happens. num_pauses: this one included."""
    if is_worth_a_line(num_pauses):
        logger.warning(
            "no HTTP connection can be accepted (%s; %d descriptors may be open): new ones wait until others end; "
            "raise the limit of open files (ulimit -n, LimitNOFILE)",
            error.strerror,
            descriptor_limit(),
        )
