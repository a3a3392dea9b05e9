"""The count of open HTTP requests outlives a killed process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tokenloom.frontend.listening.open_requests import OpenRequests, path_of, take_left

COUNT_AND_DIE = """
import os, sys
from pathlib import Path
from tokenloom.frontend.listening.open_requests import OpenRequests
requests = OpenRequests(Path(sys.argv[1]))
for change in (1, 1, 1, -1):
    requests.add(change)
os.kill(os.getpid(), 9)
"""


def test_the_count_of_a_killed_process_is_read_once(tmp_path: Path) -> None:
    path = path_of(str(tmp_path), "frontend-0")
    killed = subprocess.run([sys.executable, "-P", "-c", COUNT_AND_DIE, str(path)], timeout=30, check=False)
    assert killed.returncode == -9
    assert take_left(path) == 2
    assert take_left(path) == 0 and not path.exists()


def test_a_new_process_counts_from_zero(tmp_path: Path) -> None:
    path = tmp_path / "count"
    OpenRequests(path).add(5)
    assert OpenRequests(path).count == 0 and OpenRequests().count == 0


def test_a_file_of_another_size_counts_as_zero(tmp_path: Path) -> None:
    (tmp_path / "count").write_bytes(b"torn")
    assert take_left(tmp_path / "count") == 0
