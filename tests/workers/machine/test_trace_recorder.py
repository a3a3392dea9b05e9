"""A profile is written as a whole, or not at all: torch does not say that a disk is full."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import torch

from tokenloom.workers.machine.trace_recorder import TraceRecorder

FEW_BYTES = 200  # of a file: the kernel refuses more, as a full disk does


def test_a_profile_without_room_is_an_error_and_the_next_one_is_written(tmp_path: Path) -> None:
    recorder, (soft, hard) = (
        TraceRecorder(tmp_path, "rank-0", torch.device("cpu")),
        resource.getrlimit(resource.RLIMIT_FSIZE),
    )
    assert recorder.switch(True) == ""
    resource.setrlimit(resource.RLIMIT_FSIZE, (FEW_BYTES, hard))
    try:
        assert "has no room for the profile: make some, and repeat it" in recorder.switch(False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
    assert recorder.switch(True) == "" == recorder.switch(False)
    (path,) = tmp_path.iterdir()
    assert "traceEvents" in json.loads(path.read_bytes())
