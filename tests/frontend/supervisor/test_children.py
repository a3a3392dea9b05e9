"""Children reaps orphaned processes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tokenloom.frontend.supervisor.children import Child, Children
from tokenloom.tests.support.engine_specs import new_spec


def test_orphans_are_reaped_and_children_of_the_engine_keep_their_exit_code(tmp_path: Path) -> None:
    children = Children(new_spec(run_directory=str(tmp_path)))
    orphan, own = (subprocess.Popen([command]) for command in ("true", "false"))
    children.all.append(Child("worker", cast(Any, SimpleNamespace(pid=own.pid)), b""))
    try:
        os.waitid(os.P_PID, orphan.pid, os.WEXITED | os.WNOWAIT)
        children.reap_orphans()
        if own.poll() is None:
            os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)
            children.reap_orphans()
        assert own.wait() == 1
        children.reap_orphans()
        with pytest.raises(ChildProcessError):
            os.waitpid(orphan.pid, os.WNOHANG)
    finally:
        children.all.clear()
        children.close(0.0)
        orphan.wait()
