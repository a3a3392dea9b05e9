"""engine-launch with null_worker.py in the place of the workers: real supervisor, frontend and core, no model.

EngineHandle(config, command=(sys.executable, "-m", "tokenloom.scripts.null_engine"))
"""

from __future__ import annotations

import sys

from tokenloom.frontend import launch
from tokenloom.frontend.supervisor import Supervisor

WORKER, NULL_WORKER = "tokenloom.workers.process", "tokenloom.scripts.null_worker"


class NullSupervisor(Supervisor):
    """Starts the null worker wherever a worker is due."""

    def _spawn(self, role: str, name: str, module: str, identity: str, arguments: list[str]) -> None:
        super()._spawn(role, name, NULL_WORKER if module == WORKER else module, identity, arguments)


if __name__ == "__main__":
    launch.__dict__["Supervisor"] = NullSupervisor
    sys.exit(launch.main())
