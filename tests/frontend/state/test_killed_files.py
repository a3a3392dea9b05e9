"""Files survive the kill of a process between any two of its system calls."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tokenloom.tests.support.today import seeds

NUM_CHANGES = 40


@pytest.mark.parametrize("seed", seeds(1, 20))
def test_each_change_is_whole_or_undone_and_done_if_it_was_acknowledged(seed: int, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "tokenloom.tests.frontend.state.killed_files", str(tmp_path), str(seed)]
    ended = subprocess.run([*command, str(NUM_CHANGES)], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    outcomes = ended.stdout.split()
    assert len(outcomes) == NUM_CHANGES and {"acknowledged", "undone"} <= set(outcomes)
