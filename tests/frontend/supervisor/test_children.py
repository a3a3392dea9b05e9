"""What the supervisor does with the dead whose parents are gone."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tokenloom.frontend.supervisor.children import Child, Roster
from tokenloom.tests.support.engine_specs import new_spec


def test_orphans_are_buried_and_the_engines_own_dead_keep_their_exit_code(tmp_path: Path) -> None:
    roster = Roster(new_spec(run_directory=str(tmp_path)))
    orphan, own = (subprocess.Popen([command]) for command in ("true", "false"))
    roster.children.append(Child("worker", cast(Any, SimpleNamespace(pid=own.pid)), b""))
    try:
        os.waitid(os.P_PID, orphan.pid, os.WEXITED | os.WNOWAIT)
        roster.bury_orphans()
        if own.poll() is None:
            os.waitid(os.P_PID, own.pid, os.WEXITED | os.WNOWAIT)
            roster.bury_orphans()
        assert own.wait() == 1
        roster.bury_orphans()
        with pytest.raises(ChildProcessError):
            os.waitpid(orphan.pid, os.WNOHANG)
    finally:
        roster.children.clear()
        roster.close(0.0)
        orphan.wait()
