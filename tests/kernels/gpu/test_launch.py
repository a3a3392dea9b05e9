"""A launch that is known is the one that triton would make, and few are not known."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_a_known_launch_is_of_the_kernel_and_the_arguments_that_triton_means(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", "from tokenloom.tests.kernels.gpu.launch_run import main; main()"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["num_kernels"] >= 8 and found["num_known"] >= 15
