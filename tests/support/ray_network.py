"""Hosts that are nodes of a Ray cluster: network namespaces with a raylet in each, and an engine on the first.

Nothing of Ray's touches this machine's own: token, session folders and the address of the cluster are in a folder of
the network, which has a short path, since Ray makes sockets below it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import psutil

from tokenloom.ipc.sockets.endpoints import tcp_address
from tokenloom.scripts.bench.engine_process import Engine
from tokenloom.tests.support import network_hosts
from tokenloom.tests.support.network_hosts import DEADLINE_S, Network
from tokenloom.tests.support.waiting import wait_until

RAY_PORT = 6379
STORE_BYTES = 80_000_000
START_S = 180.0  # of an engine: on a busy machine the processes that Ray starts one after the other wait in turn
WAIT_NODES = """
import sys, threading, ray
ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False)
while not {*sys.argv[2:]} <= {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}:
    threading.Event().wait(0.1)
"""
_numbers = itertools.count()


def obstacle() -> str:
    """Return why there can be no such cluster here; "" if there can."""
    return network_hosts.obstacle() if importlib.util.find_spec("ray") is not None else "ray is not installed"


class RayNetwork(Network):
    """`num_hosts` hosts; those numbers below `num_nodes` begin as nodes of the cluster. Leaving the `with` ends all."""

    def __init__(self, num_hosts: int, num_nodes: int | None = None, *, is_ipv6: bool = False) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="ray")), num_hosts, is_ipv6=is_ipv6)
        self._commands: list[subprocess.Popen[bytes]] = []
        self.ray_address = tcp_address(self.addresses[0], RAY_PORT).removeprefix("tcp://")
        home = self.folder / "home"
        (home / ".ray").mkdir(parents=True)
        token = home / ".ray" / "auth_token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(16), encoding="utf-8")
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        self.environment = {
            "HOME": str(home),
            "XDG_CACHE_HOME": cache,  # with the kernels that are compiled already
            "RAY_AUTH_MODE": "token",
            "RAY_ADDRESS": self.ray_address,
            "RAY_TMPDIR": str(self.folder),
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        for number in range(num_hosts if num_nodes is None else num_nodes):
            self.start_node(number)

    def start_node(self, number: int) -> None:
        """Start a raylet that claims two CPUs and two GPUs. The first host has the head of the cluster, which is waited
        for; on the others Ray leaves CUDA_VISIBLE_DEVICES alone."""
        node, head = self.folder / f"{number}", self.folder / "head"
        node.mkdir(exist_ok=True)
        head.mkdir(exist_ok=True)
        place = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"] if number == 0 else []
        place = place or [f"--address={self.ray_address}"]
        own = [f"--node-ip-address={self.addresses[number]}", f"--temp-dir={node}", "--num-cpus=2", "--num-gpus=2"]
        ray = [str(Path(sys.executable).parent / "ray"), "start", *place, *own, "--block", "--disable-usage-stats"]
        command = [*self.prefix(number, [head]), *ray, f"--object-store-memory={STORE_BYTES}"]
        named = ["unshare", "-u", "sh", "-c", f'hostname host{number} && exec "$@"', "sh", *command]
        environment = os.environ | self.environment | {"XDG_RUNTIME_DIR": str(node)}
        del environment["RAY_ADDRESS"]
        if number > 0:
            environment["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] = "1"
        with (node / "log").open("ab") as log:
            place = {"cwd": "/", "env": environment}
            self._commands.append(subprocess.Popen(named, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **place))
        if number == 0:
            self._wait_head()

    def _wait_head(self) -> None:
        probe = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 1)"
        command = [*self.prefix(0), sys.executable, "-c", probe, self.addresses[0], str(RAY_PORT)]
        log = self.folder / "0" / "log"
        wait_until(lambda: not subprocess.run(command, capture_output=True).returncode, log.read_text, DEADLINE_S)

    def wait_process(self, number: int, name: str) -> psutil.Process:
        return wait_until(lambda: self.processes(number, name), f"host {number} has no {name}", DEADLINE_S)[0]

    def wait_nodes(self, *numbers: int) -> None:
        """Wait until nodes can take actors."""
        self.run_program(WAIT_NODES, *(self.addresses[number] for number in numbers))

    def wait_none(self, number: int, name: str, within_s: float) -> None:
        left = [process.pid for process in self.processes(number, name)]
        wait_until(lambda: not self.processes(number, name), f"a {name} is still on host {number}", within_s, left)

    def run_program(self, text: str, *arguments: str, timeout_s: float = DEADLINE_S) -> str:
        """Run a program on the first host, which may join the cluster at its first argument; return its stdout."""
        settings = [f"{name}={value}" for name, value in self.environment.items()]
        program = [sys.executable, "-P", "-c", text, self.ray_address, *arguments]
        command = [*self.prefix(0), "env", *settings, *program]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=timeout_s)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def end_node(self, number: int, but: str = "no process") -> None:
        """Kill all processes of a host, except those with a title that begins with `but`."""
        kept = {each.pid for each in self.processes(number, but)}
        while found := [each for each in self.processes(number) if each.pid not in kept]:
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(found, DEADLINE_S)

    def restart_ray(self) -> None:
        """End Ray on all hosts and start another cluster there. What is not Ray's on the first host goes on."""
        for number in range(1, len(self.addresses)):
            self.end_node(number)
        self.end_node(0, but="tokenloom")
        for number in range(len(self.addresses)):
            self.start_node(number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number in reversed(range(len(self.addresses))):
            self.end_node(number)
        for command in self._commands:
            command.wait(DEADLINE_S)
        super().__exit__(kind, error, traceback)
        shutil.rmtree(self.folder, ignore_errors=True)


class RayEngine(Engine):
    """An engine on the first host. Ray places its ranks."""

    def __init__(self, network: RayNetwork, *arguments: str, changes: Sequence[tuple[str, str]] = ()) -> None:
        runtime = network.folder / "head" / f"{next(_numbers)}"
        runtime.mkdir(parents=True)
        options = ["--device", "cpu", "--num-threads", "1", "--distributed-executor-backend", "ray", *arguments]
        super().__init__(runtime, options, network.environment | dict(changes), prefix=network.prefix(0))

    def wait_ready(self, timeout_s: float = START_S) -> str:
        return super().wait_ready(timeout_s)

    def refusal(self) -> str:
        """Wait until its start has failed for its configuration and return its last line."""
        assert self.wait_exit() == 2, self.log()
        return self.log().strip().splitlines()[-1]
