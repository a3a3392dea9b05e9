"""A cached launch equals Triton's own, and most launches are cached."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def test_a_cached_launch_has_the_kernel_and_arguments_of_tritons(tmp_path: Path) -> None:
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
