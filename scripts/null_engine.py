"""Run engine-launch with null_worker.py in place of the workers: real supervisor, frontend and core, no model.

ChildEngine(config, command=(sys.executable, "-m", "tokenloom.scripts.null_engine"))
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tokenloom.frontend import launch
from tokenloom.frontend.supervisor import supervisor
from tokenloom.frontend.supervisor.children import Children

NULL_WORKER = "tokenloom.scripts.null_worker"


class NullChildren(Children):
    """Starts the null worker in place of every worker."""

    def spawn(
        self,
        role: str,
        name: str,
        module: str,
        identity: str,
        arguments: Sequence[str],
        inherited_fds: Sequence[int] = (),
    ) -> None:
        module = NULL_WORKER if role == "worker" else module
        super().spawn(role, name, module, identity, arguments, inherited_fds)


if __name__ == "__main__":
    supervisor.__dict__["Children"] = NullChildren
    sys.exit(launch.main())
