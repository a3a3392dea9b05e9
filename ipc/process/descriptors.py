"""The limit of open files and sockets of this process."""

from __future__ import annotations

import contextlib
import os
import resource

MAX_DESCRIPTORS = 1 << 20  # some container runtimes set 2^30, for which some programs allocate tables


def raise_descriptor_limit() -> int:
    """Raise the soft limit of this process and its children to the hard limit, at most MAX_DESCRIPTORS; return the soft
    limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # the kernel's limit for all processes is smaller
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return descriptor_limit()


def descriptor_limit() -> int:
    """Return this process's soft limit of descriptors; MAX_DESCRIPTORS if it has no limit."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def num_open() -> int:
    """Return the number of descriptors that this process has open; one too many on kernels before 6.2."""
    return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd"))


def check_free(count: int) -> None:
    """Raise OSError (EMFILE, ENFILE) if this process or the machine has fewer than `count` free descriptors."""
    with contextlib.ExitStack() as opened:
        for _ in range(count):
            opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
