"""Run engine-launch with scripted_worker.py in place of the workers: all else is as it is served."""

from __future__ import annotations

import sys
from typing import ClassVar

from tokenloom.frontend import launch
from tokenloom.frontend.launcher.supervisor.local_launcher import LocalLauncher


class ScriptedLauncher(LocalLauncher):
    """Launcher that starts the scripted worker in place of every worker."""

    modules: ClassVar = {**LocalLauncher.modules, "worker": "tokenloom.tests.support.scripted_worker"}


if __name__ == "__main__":
    launch.__dict__["LocalLauncher"] = ScriptedLauncher
    sys.exit(launch.main())
