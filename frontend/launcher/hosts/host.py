"""Host: a machine whose agent is connected to the head, with the engine's processes there."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

from ....ipc.messages.hosts import Ended, HostHello, HostReport, ProcessNews, Spawned
from ....ipc.process.log import write_line
from .remote_process import RemoteProcess


@dataclass(eq=False)
class Host:
    """Connected host. `hello`: its agent's first message; the host can run processes once it `is_prepared`."""

    identity: bytes  # its agent's
    hello: HostHello
    is_prepared: bool = False
    last_sign_at: float = field(default_factory=time.monotonic)
    processes: dict[str, RemoteProcess] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.hello.address

    def on_news(self, message: ProcessNews) -> None:
        """Apply a message of the agent about the host's processes."""
        if isinstance(message, HostReport):
            for use in message.processes:
                if use.process in self.processes:
                    self.processes[use.process].on_use(use)
        elif isinstance(message, Spawned):
            if message.process in self.processes:
                self.processes[message.process].on_spawned(message.pid)
        elif isinstance(message, Ended):
            if message.process in self.processes:
                self.processes.pop(message.process).on_ended(message.how)
        else:
            for line in message.lines:
                write_line(line, sys.stderr)

    def on_lost(self, reason: str) -> None:
        """Mark all processes of the host as ended: they die with the host."""
        for process in self.processes.values():
            process.on_host_lost(reason)
