"""How many files and sockets this process may have open."""

from __future__ import annotations

import contextlib
import resource

MAX_DESCRIPTORS = 1 << 20  # a limit of 2^30, as some container runtimes give, makes others allocate tables of that size


def raise_descriptor_limit() -> int:
    """Take as many as the hard limit lets this process and its children have; returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a kernel with a smaller limit for all
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return descriptor_limit()


def descriptor_limit() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
