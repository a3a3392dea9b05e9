"""Run engine-launch with null_worker.py in place of the workers: real supervisor, frontend and core, no model.

ChildEngine(config, command=(sys.executable, "-m", "tokenloom.scripts.bench.null_engine"))
"""

from __future__ import annotations

import sys
from typing import ClassVar

from tokenloom.frontend import launch
from tokenloom.frontend.launcher.supervisor.local_launcher import LocalLauncher


class NullLauncher(LocalLauncher):
    """Launcher that starts the null worker in place of every worker."""

    modules: ClassVar = {**LocalLauncher.modules, "worker": "tokenloom.scripts.bench.null_worker"}


if __name__ == "__main__":
    launch.__dict__["LocalLauncher"] = NullLauncher
    sys.exit(launch.main())
