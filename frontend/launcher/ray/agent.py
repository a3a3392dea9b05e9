"""The agent of a host that Ray has chosen, and AgentActor, the Ray actor that starts it.

`python -m tokenloom.frontend.launcher.ray.agent ADDRESS PLACEMENT` is `engine-launch join` with the keys in its
environment. It ends with the actor, and its ranks end with it. The actor does nothing else: no step and no token passes
through Ray.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from typing import NamedTuple

import msgspec
import ray

from ....ipc.child import exit_code_of, spawn_child
from ....ipc.errors import TokenloomError
from ....ipc.process import log
from ....ipc.process.descriptors import raise_descriptor_limit
from ....ipc.process.lifeline import start_lifeline
from ....ipc.process.title import set_title
from ....ipc.sockets.keys import Keys
from ..hosts.agent import HostAgent
from ..hosts.head_link import HeadAddress

KEYS_VARIABLE = "TOKENLOOM_HOSTS_KEYS"
LAST_WORDS_S = 1.0


class Place(NamedTuple):
    """Node and devices on which Ray has placed a task or an actor."""

    node: str  # the node's id in the cluster
    address: str
    visible_devices: str | None  # its GPUs; None: no GPU was requested


class AgentEnd(NamedTuple):
    code: int  # exit code as subprocess.Popen gives it
    words: str  # last line of stderr that is not INFO

    def __str__(self) -> str:
        if self.code < 0:
            return f"its agent was killed by {signal.Signals(-self.code).name}"
        return f"its agent ended with code {self.code}: {self.words}"


def own_place() -> Place:
    """Return the place of the calling task or actor. The GPUs are those that Ray has assigned, even if
    RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES keeps Ray from setting CUDA_VISIBLE_DEVICES."""
    context = ray.get_runtime_context()
    devices = context.get_accelerator_ids().get("GPU", [])
    return Place(context.get_node_id(), ray.util.get_node_ip_address(), ",".join(devices) if devices else None)


class AgentActor:
    """Ray actor that starts one agent and waits for its end."""

    def start(self, address: str, placement: str, keys: str) -> Place:
        place = own_place()
        devices = {} if place.visible_devices is None else {"CUDA_VISIBLE_DEVICES": place.visible_devices}
        environment = {**os.environ, **devices, "PYTHONUTF8": "1", KEYS_VARIABLE: keys}
        module = "tokenloom.frontend.launcher.ray.agent"
        self._agent = spawn_child(module, [address, placement], environment, stdout=sys.stderr, stderr=subprocess.PIPE)
        self._last_words: deque[str] = deque(maxlen=1)
        self._reader = threading.Thread(target=self._read, name="stderr", daemon=True)
        self._reader.start()
        return place

    def _read(self) -> None:
        assert self._agent.stderr is not None
        for line in self._agent.stderr:
            text = line.decode(errors="replace").rstrip("\n")
            log.write_line(text, sys.stderr)
            if " INFO " not in text:
                self._last_words.append(text)

    def wait(self) -> AgentEnd:
        code = self._agent.wait()
        self._reader.join(LAST_WORDS_S)
        return AgentEnd(code, "".join(self._last_words))


def main() -> int:
    parser = argparse.ArgumentParser(prog="tokenloom.frontend.launcher.ray.agent")
    parser.add_argument("address", help="of the head")
    parser.add_argument("placement", help="name at the launcher")
    arguments = parser.parse_args()
    set_title("tokenloom host")
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)  # Ray starts it with niceness 15: other work would delay its ranks
    start_lifeline()
    log.configure("host", "info")
    raise_descriptor_limit()
    keys = msgspec.json.decode(os.environ.pop(KEYS_VARIABLE), type=Keys)
    try:
        HostAgent(HeadAddress(arguments.address, None), keys, arguments.placement).run()
    except TokenloomError as error:
        print(error, file=sys.stderr)
        return exit_code_of(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
