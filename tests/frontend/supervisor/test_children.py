"""Children pass messages on in their order, and let the supervisor do its other work in between."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import ClassVar

import zmq

from tokenloom.frontend.supervisor.children import Children
from tokenloom.frontend.supervisor.launcher import CORE, ProcessSpec
from tokenloom.frontend.supervisor.local_launcher import LocalLauncher
from tokenloom.ipc.codec import encode
from tokenloom.ipc.messages.supervisor import Phase
from tokenloom.ipc.sockets import new_socket

NUM_MESSAGES = 300
HANDLING_S = 0.001
DEADLINE_S = 20.0


class EndingLauncher(LocalLauncher):
    """Its processes end at once: the test sends in their place."""

    modules: ClassVar = dict.fromkeys(LocalLauncher.modules, "tokenloom.no_such_module")


def handle_slowly() -> None:
    until = time.monotonic() + HANDLING_S
    while time.monotonic() < until:
        pass


def test_a_flood_of_messages_is_taken_in_parts(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/control.sock"
    children, spec = Children(address, EndingLauncher(os.environ, lambda line: None)), ProcessSpec(CORE)
    children.spawn(spec)
    with zmq.Context() as context, new_socket(context, zmq.DEALER, identity=spec.identity) as core:
        core.connect(address)
        for number in range(NUM_MESSAGES):
            core.send(encode(Phase(name=str(number), duration_s=0.0)))
        names, parts, deadline = list[str](), list[int](), time.monotonic() + DEADLINE_S
        while len(names) < NUM_MESSAGES:
            assert time.monotonic() < deadline
            before = len(names)
            for _, message in children.receive():
                assert isinstance(message, Phase)
                names.append(message.name)
                handle_slowly()
            parts.append(len(names) - before)
    children.close(0.0)
    assert names == [str(number) for number in range(NUM_MESSAGES)]
    assert max(parts) < NUM_MESSAGES / 2
