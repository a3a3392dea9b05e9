"""Network namespaces as the hosts of an engine: a bridge, and for each host an interface, /dev/shm and files.

Needs root and iproute2. The head of an engine keeps this machine's files, so that clients outside reach its sockets;
other hosts do not see its runtime directory.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tokenloom.ipc.sockets.endpoints import tcp_address
from tokenloom.scripts.bench.engine_process import Engine, is_alive
from tokenloom.tests.support.waiting import wait_until

PORT = 7100
DEADLINE_S = 60.0
_numbers = itertools.count()


def obstacle() -> str:
    """Return why namespaces cannot be made here; "" if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command `ip` (iproute2)"
    probe = subprocess.run(["ip", "netns", "add", f"tokenloom{os.getpid()}"], capture_output=True, text=True)
    if probe.returncode == 0:
        _run("ip", "netns", "del", f"tokenloom{os.getpid()}")
        return ""
    return f"network namespaces cannot be made here: {probe.stderr.strip()}"


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=DEADLINE_S)


class Network:
    """`num_hosts` hosts on one bridge; the first is the head. Leaving the `with` kills their agents and removes all."""

    def __init__(self, folder: Path, num_hosts: int, *, is_ipv6: bool = False) -> None:
        self._name = f"tl{os.getpid()}x{next(_numbers)}"
        self._bridge = f"{self._name}-sw"
        self.folder, self.key_file = folder, folder / "hosts.key"
        self.agents: list[Agent] = []
        self.private: list[Path] = []  # folders of which each host has its own
        self._namespaces = [self._bridge]
        _run("ip", "netns", "add", self._bridge)
        _run("ip", "-n", self._bridge, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self._bridge, "link", "set", "br0", "up")
        prefix, self._prefix_bits = ("fd44::", 64) if is_ipv6 else ("10.44.0.", 24)
        self.addresses = [f"{prefix}{number}" for number in range(1, num_hosts + 1)]
        for number in range(num_hosts):
            self._add_host(number)
        _run(sys.executable, "-P", "-m", "tokenloom.frontend.launch", "keygen", str(self.key_file))

    def _add_host(self, number: int) -> None:
        name = self.namespace(number)
        _run("ip", "netns", "add", name)
        self._namespaces.append(name)
        port = f"p{number}"
        _run("ip", "link", "add", "eth9", "netns", name, "type", "veth", "peer", "name", port, "netns", self._bridge)
        _run("ip", "-n", self._bridge, "link", "set", port, "master", "br0", "up")
        place = f"{self.addresses[number]}/{self._prefix_bits}"
        nodad = ["nodad"] if ":" in place else []  # usable at once
        _run("ip", "-n", name, "addr", "add", place, "dev", "eth9", *nodad)
        for device in ("eth9", "lo"):
            _run("ip", "-n", name, "link", "set", device, "up")

    def namespace(self, number: int) -> str:
        return f"{self._name}-{number}"

    def head(self, number: int = 0) -> str:
        """Return the address of a host that is a head, for agents."""
        return tcp_address(self.addresses[number], PORT)

    def runtime(self, number: int) -> Path:
        """Return the folder of the run directories of an engine with its head on a host."""
        return self.folder / ("head" if number == 0 else f"head-{number}")

    def prefix(self, number: int, hidden: Sequence[Path] = ()) -> list[str]:
        """Return the words before a command that runs it on a host, with `hidden` folders and /dev/shm empty, and the
        host's own `private` folders."""
        inside = ["ip", "netns", "exec", self.namespace(number)]
        if number == 0:
            return inside
        mounts = [f"mount -t tmpfs tmpfs {path}" for path in ("/dev/shm", *hidden)]
        for path in self.private:
            own = path.with_name(f"{path.name}-{number}")
            for folder in (path, own):
                folder.mkdir(exist_ok=True)
            mounts.append(f"mount --bind {own} {path}")
        return [*inside, "unshare", "-m", "sh", "-c", " && ".join([*mounts, 'exec "$@"']), "sh"]

    def cut(self, number: int) -> None:
        """Cut the link of a host."""
        _run("ip", "-n", self._bridge, "link", "set", f"p{number}", "down")

    def heal(self, number: int) -> None:
        _run("ip", "-n", self._bridge, "link", "set", f"p{number}", "up")

    def processes(self, number: int, name: str = "") -> list[psutil.Process]:
        """Return the processes of a host with a title that begins with `name`, or with a program of that name."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace(number)], capture_output=True, text=True)
        found = []
        for pid in listed.stdout.split():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(int(pid))
                words = process.cmdline()  # none of a zombie
                if words and (" ".join(words).startswith(name) or words[0].endswith(f"/{name}")):
                    found.append(process)
        return found

    def ranks(self, number: int) -> list[psutil.Process]:
        """Return the processes that the agent of a host has started."""
        return [each for role in ("worker", "tier") for each in self.processes(number, f"tokenloom {role}")]

    def listening(self, number: int) -> list[str]:
        """Return the tcp sockets of a host that listen."""
        command = ["ip", "netns", "exec", self.namespace(number), "cat", "/proc/net/tcp", "/proc/net/tcp6"]
        lines = subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S).stdout
        fields = [line.split() for line in lines.splitlines()]
        return [f"{self.addresses[number]}: {each[1]}" for each in fields if each[3] == "0A"]

    def join(self, number: int, *options: str, key_file: Path | None = None, head: int = 0) -> Agent:
        """Start the agent of a host, for an engine with its head on another one."""
        runtime = self.folder / f"host-{number}"
        runtime.mkdir(exist_ok=True)
        self.runtime(head).mkdir(exist_ok=True)
        command = [sys.executable, "-P", "-m", "tokenloom.frontend.launch", "join", self.head(head)]
        keys = ["--key-file", str(key_file or self.key_file)]
        agent = Agent(
            number,
            self.addresses[number],
            runtime,
            [*self.prefix(number, [self.runtime(head)]), *command, *keys, *options],
        )
        self.agents.append(agent)
        return agent

    def wait_agent(self) -> Agent:
        """Return an agent that has a rank, as soon as there is one."""

        def found() -> list[Agent]:
            return [agent for agent in self.agents if agent.is_running() and agent.rank() is not None]

        return wait_until(found, "no agent has a rank", DEADLINE_S)[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for agent in self.agents:
            agent.end()
        for name in self._namespaces:
            _run("ip", "netns", "del", name)


class Agent:
    """A host's agent, with the processes that it has started."""

    def __init__(self, number: int, address: str, runtime: Path, command: Sequence[str]) -> None:
        self.number, self.address = number, address
        self.runtime, self.errors = runtime, runtime / "stderr"
        self._seen: dict[int, psutil.Process] = {}
        environment = os.environ | {"XDG_RUNTIME_DIR": str(runtime)}
        with self.errors.open("a", encoding="utf-8") as errors:
            self.process = subprocess.Popen(command, stderr=errors, cwd="/", env=environment)

    def is_running(self) -> bool:
        return self.process.poll() is None

    def rank(self) -> psutil.Process | None:
        """Return a rank that it has started, if there is one now."""
        ranks = [each for each in self.processes()[1:] if each.name().startswith("tokenloom w")]
        return ranks[0] if ranks else None

    def wait_rank(self) -> psutil.Process:
        rank = wait_until(self.rank, lambda: f"no rank: {self.log()}", DEADLINE_S)
        assert rank is not None
        return rank

    def processes(self) -> list[psutil.Process]:
        """Return the agent and its descendants, and note them for `leftovers`."""
        try:
            agent = psutil.Process(self.process.pid)
            found = [agent, *agent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        self._seen |= {process.pid: process for process in found}
        return found

    def log(self) -> str:
        """Return its stderr so far."""
        return self.errors.read_text(encoding="utf-8")

    def wait_exit(self) -> int:
        wait_until(lambda: not self.is_running(), "the agent runs", DEADLINE_S)
        return int(self.process.returncode)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def alive(self) -> list[str]:
        """Return those of the noted processes that live, but the agent."""
        return [str(each) for each in self._seen.values() if each.pid != self.process.pid and is_alive(each)]

    def files(self) -> list[str]:
        """Return the files in its folder of run directories. An agent that was killed leaves one to the next agent."""
        tree = os.walk(self.runtime / "tokenloom")
        found = (f"{path}/{name}" for path, folders, names in tree for name in (*folders, *names))
        return [path for path in found if not path.endswith(".lock")]

    def wait_none(self, leftovers: Callable[[], list[str]], within_s: float = 5.0) -> None:
        """Wait until `alive` or `files` finds nothing."""
        wait_until(lambda: not leftovers(), lambda: f"left behind: {leftovers()}", within_s, [*self._seen])

    def end(self) -> None:
        """Kill the agent, if it still runs, and wait for its end."""
        self.process.kill()
        self.process.wait()


class SpreadEngine(Engine):
    """An engine with its head on a host of a network, the first unless another one is given."""

    def __init__(self, network: Network, *arguments: str, more: Mapping[str, str] | None = None, head: int = 0) -> None:
        runtime = network.runtime(head)
        runtime.mkdir(exist_ok=True)
        options = ["--device", "cpu", "--num-threads", "1", "--listen-hosts", network.head(head)]
        options += ["--hosts-key-file", str(network.key_file), *arguments]
        super().__init__(runtime, options, more, prefix=network.prefix(head))
