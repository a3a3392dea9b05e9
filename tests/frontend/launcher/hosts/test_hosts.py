"""The head's Hosts and the HostAgent, each with a scripted peer: admission of hosts, and silences."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil
import pytest
import zmq

from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.frontend.launcher.hosts.head_link import HeadAddress
from tokenloom.frontend.launcher.hosts.hosts import Hosts
from tokenloom.frontend.launcher.supervisor.launcher import CORE, TIER, WORKERS, ProcessSpec
from tokenloom.frontend.launcher.supervisor.local_launcher import LocalLauncher
from tokenloom.ipc.errors import ConfigError, error_info
from tokenloom.ipc.messages.base import LEASE_S, PROTOCOL_VERSION, Message, Ping, Rank
from tokenloom.ipc.messages.hosts import (
    AgentToHead,
    Ended,
    HeadToAgent,
    HostAccepted,
    HostFailed,
    HostHello,
    HostLeaving,
    HostPrepared,
    HostRefused,
    HostReleased,
    HostReport,
    HostUnknown,
    Kill,
    ProcessUse,
    Spawn,
    Spawned,
)
from tokenloom.ipc.messages.supervisor import HostGone, HostPlaced
from tokenloom.ipc.sockets.channel import Channel
from tokenloom.ipc.sockets.client_auth import HOSTS, ZapHandler
from tokenloom.ipc.sockets.endpoints import Endpoints
from tokenloom.ipc.sockets.keys import Keys
from tokenloom.ipc.sockets.zmq_sockets import new_socket
from tokenloom.ipc.spec.config.checkpoint_digest import checkpoint_digest
from tokenloom.ipc.spec.config.engine_config import EngineConfig
from tokenloom.ipc.version import numerics_digest, tokenloom_version
from tokenloom.tests.support.engine_specs import new_spec
from tokenloom.tests.support.waiting import wait_until

DEADLINE_S = 20.0
T = TypeVar("T", bound=Message)
DIGEST = checkpoint_digest(DEMO_FOLDER)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    keys = Keys.generate()
    keys.save(tmp_path / "hosts.key")
    return keys


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


# ── the head ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Head:
    """Hosts of an engine of `num_hosts`, without a supervisor."""

    def __init__(
        self, folder: Path, context: zmq.Context[zmq.Socket[bytes]], num_hosts: int, **changes: object
    ) -> None:
        config = EngineConfig(
            tensor_parallel_size=4,
            hosts=num_hosts,
            listen_hosts="tcp://127.0.0.1:0",
            hosts_key_file=str(folder / "hosts.key"),
        )
        fields = {"config": config, "model_folder": str(DEMO_FOLDER), "host_address": "127.0.0.1"} | changes
        endpoints = msgspec.structs.replace(Endpoints.in_folder(folder), agents="tcp://127.0.0.1:0")
        keys = Keys.generate()
        self.spec = new_spec(run_directory=str(folder), group_keys=keys, endpoints=endpoints, **fields)
        self.hosts = Hosts(self.spec, LocalLauncher({}))
        self._control = new_socket(context, zmq.ROUTER)
        self._control.bind(f"ipc://{folder}/control.sock")
        self.reports: list[HostGone] = []  # of Ray's, not read yet
        self.hosts.listen(context, self._control, self._receive_placements)
        self.host_keys = Keys.load(folder / "hosts.key")
        self._agents: list[ScriptedAgent] = []

    def _receive_placements(self) -> None:
        while self.reports:
            self.hosts.on_placement(self.reports.pop())

    def close(self) -> None:
        for agent in self._agents:
            agent.close()
        self.hosts.close()
        self._control.close()

    def agent(self, number: int, keys: Keys | None = None, **changes: object) -> ScriptedAgent:
        """Connect an agent at 10.0.0.`number`."""
        self._agents.append(ScriptedAgent(self, keys or self.host_keys, f"10.0.0.{number}", **changes))
        return self._agents[-1]

    def until(self, is_done: Callable[[], object]) -> None:
        wait_until(lambda: self.hosts.turn() or is_done())

    def rank(self, rank: int, generation: int = 0) -> ProcessSpec:
        return ProcessSpec(WORKERS, generation, Rank(0, rank), self.spec.host_of(Rank(0, rank)), ["--rank", str(rank)])


@pytest.fixture
def head(tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> Iterator[Head]:
    head = Head(tmp_path, context, 3)
    yield head
    head.close()


class ScriptedAgent:
    """An agent with the messages that a test gives it."""

    def __init__(self, head: Head, keys: Keys, name: str, **changes: object) -> None:
        self._head, self.received = head, list[HeadToAgent]()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = new_socket(self._context, zmq.DEALER, identity=os.urandom(8))
        keys.secure_client(socket)
        socket.connect(head.hosts.joined.address)
        self._channel: Channel[HeadToAgent, AgentToHead] = Channel(socket, HeadToAgent, "head")
        fields: dict[str, object] = {"version": tokenloom_version(), "numerics": numerics_digest()}
        fields |= {"protocol_version": PROTOCOL_VERSION, "address": name, "num_gpus": 0, "num_cpus": 2}
        self.send(HostHello(**fields | changes))  # type: ignore[arg-type]

    def send(self, message: AgentToHead) -> None:
        self._channel.send(message)

    def turn(self) -> None:
        for message in self._channel.receive():
            self.received.append(message)
            if isinstance(message, Ping):
                self.send(HostReport())

    def wait(self, kind: type[T]) -> T:
        """Let the head work until it has sent a message of this type; return and forget it."""

        def is_done() -> bool:
            self._head.hosts.turn()
            self.turn()
            return any(isinstance(each, kind) for each in self.received)

        wait_until(is_done)
        found = next(each for each in self.received if isinstance(each, kind))
        self.received.remove(found)
        return found

    def join(self, digest: str = DIGEST) -> ScriptedAgent:
        self.wait(HostAccepted)
        self.send(HostPrepared(digest=digest))
        return self

    def close(self) -> None:
        self._context.destroy(linger=0)


def test_ranks_wait_for_all_hosts_and_then_start_where_they_belong(head: Head) -> None:
    assert head.hosts.obstacle(CORE) == ""
    assert head.hosts.obstacle(WORKERS).startswith("2 more hosts of 3: run `engine-launch join tcp://127.0.0.1:")
    first, second = head.agent(2).join(), head.agent(3)
    second.wait(HostAccepted)
    head.until(lambda: head.hosts.obstacle(WORKERS).startswith("1 more host of 3"))
    second.send(HostPrepared(digest=DIGEST))
    head.until(lambda: not head.hosts.obstacle(WORKERS))
    assert [head.spec.host_of(rank) for rank in head.spec.ranks] == [0, 0, 1, 2]
    processes = [head.hosts.spawn(head.rank(rank)) for rank in (2, 3)]
    orders = [agent.wait(Spawn) for agent in (first, second)]
    assert [order.arguments for order in orders] == [["--rank", "2"], ["--rank", "3"]]
    first.send(Spawned(process="worker-2-0", pid=77))
    first.send(HostReport(processes=[ProcessUse("worker-2-0", 0.5, 1 << 20)] * 2))
    second.send(Ended(process="worker-3-0", how="worker 3 exited with code 1: no memory"))
    head.until(lambda: processes[1].has_ended and processes[0].resident_bytes() > 0)
    assert processes[0].place == "pid 77 on host 10.0.0.2" and processes[0].take_starved_s() == 1.0
    assert processes[0].take_starved_s() == 0.0
    assert processes[1].describe_exit() == "worker 3 exited with code 1: no memory (on host 10.0.0.3)"
    assert not processes[1].is_blameless
    first.send(Ended(process="worker-2-0", how="worker 2 was killed by SIGKILL"))  # it crosses the order
    processes[0].close()
    assert processes[0].has_ended and first.wait(Kill) == Kill(process="worker-2-0")


def test_the_head_looks_at_a_host_again_when_its_lease_ends(head: Head) -> None:
    head.agent(2).join()
    head.until(lambda: bool(head.hosts.joined.all))
    head.hosts.turn()
    (host,) = head.hosts.joined.all
    host.last_sign_at = time.monotonic() - LEASE_S + 0.01  # the next ping is due later
    assert head.hosts.next_at == host.last_sign_at + LEASE_S


def test_a_host_that_ray_says_is_gone_is_lost_at_once_and_no_other(head: Head) -> None:
    for name in ("one", "two"):
        head.hosts.on_placement(HostPlaced(placement=name, address="10.0.0.2"))
    first = head.agent(2, placement="one").join()
    head.until(lambda: head.hosts.places_taken.placements == ["one"])
    head.hosts.on_placement(HostGone(placement="two", reason="never came"))
    assert head.hosts.places_taken.placements == ["one"]
    head.agent(3).join()
    head.until(lambda: len(head.hosts.places_taken.placements) == 2)
    process = head.hosts.spawn(head.rank(2))
    head.hosts.on_placement(HostGone(placement="one", reason="it was killed"))
    assert process.has_ended and process.is_blameless and "it was killed" in process.describe_exit()
    assert head.hosts.places_taken.placements == [""]
    first.send(HostReport())
    assert first.wait(HostUnknown)


def test_a_process_of_a_silent_host_ends_with_its_lease_and_a_spare_host_takes_its_place(
    head: Head, caplog: pytest.LogCaptureFixture
) -> None:
    silent, other = head.agent(2).join(), head.agent(3).join()
    head.until(lambda: not head.hosts.obstacle(WORKERS))
    process = head.hosts.spawn(head.rank(2))
    head.hosts.joined.all[0].last_sign_at -= LEASE_S - 0.2
    process.close()  # its agent does not kill it
    assert process.has_ended and process.is_blameless and head.hosts.obstacle(WORKERS)
    said = re.match(r"worker 2 is lost with host 10\.0\.0\.2: no sign of life for (\d+\.\d) s", process.describe_exit())
    assert said and float(said[1]) >= LEASE_S
    assert any("requests wait for 1 more host of 3" in line for line in caplog.messages)
    silent.wait(Spawn)
    silent.send(HostReport())
    silent.wait(HostUnknown)  # its message comes too late
    head.agent(4).join()
    head.until(lambda: other.turn() or not head.hosts.obstacle(WORKERS))


def test_each_host_has_a_tier_process_and_only_the_loss_of_one_with_a_place_loses_an_arena(head: Head) -> None:
    first, second = head.agent(2).join(), head.agent(3).join()
    assert head.hosts.obstacle(TIER)
    head.until(lambda: not head.hosts.obstacle(TIER))
    specs = [ProcessSpec(TIER, 3, host=host, arguments=["--number=3"]) for host in (1, 2)]
    processes = [head.hosts.spawn(spec) for spec in specs]
    assert [spec.identity for spec in specs] == [b"tier-of-host-1-3", b"tier-of-host-2-3"]
    for host, agent in enumerate((first, second), 1):
        order = agent.wait(Spawn)
        assert order == Spawn(
            process=f"tier-of-host-{host}-3", role="tier", number=3, host=host, arguments=["--number=3"]
        )
    spare = head.agent(4).join()
    spare.send(HostReport())
    head.until(lambda: sum(each.is_prepared for each in head.hosts.joined.all) == 3)
    spare.send(HostLeaving())
    head.until(lambda: len(head.hosts.joined.all) == 2)
    assert head.hosts.num_hosts_lost(0) == 0 and not processes[0].has_ended
    first.send(HostLeaving())
    head.until(lambda: processes[0].has_ended)
    assert head.hosts.num_hosts_lost(0) == 1 and processes[0].is_blameless and not processes[1].has_ended


def test_a_host_that_leaves_or_fails_is_lost_at_once(head: Head, caplog: pytest.LogCaptureFixture) -> None:
    first, second = head.agent(2).join(), head.agent(3)
    second.wait(HostAccepted)
    second.send(HostFailed(error=error_info(ConfigError("--model x is not here"))))
    first.send(HostLeaving())
    head.until(lambda: len(head.hosts.joined.all) == 0)
    assert "host 10.0.0.3 cannot serve: --model x is not here" in caplog.messages
    assert "host 10.0.0.2 is lost: its agent was stopped" in caplog.messages


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"version": "0.0.9"}, "host 10.0.0.2 runs tokenloom 0.0.9"),
        ({"protocol_version": 99}, "protocol 99"),
        ({"numerics": "f" * 64}, "(ffffffff"),
    ],
)
def test_another_version_is_refused(head: Head, changes: dict[str, object], text: str) -> None:
    refused = head.agent(2, **changes).wait(HostRefused)
    assert text in refused.error.message and "install the same version" in refused.error.message


def test_an_agent_that_starts_where_one_has_joined_takes_its_place_and_only_if_it_may_serve(head: Head) -> None:
    first, second = head.agent(2, placement="one").join(), head.agent(3).join()
    head.until(lambda: not head.hosts.obstacle(WORKERS))
    process, other = head.hosts.spawn(head.rank(2)), head.hosts.spawn(head.rank(3))
    head.agent(2, version="0.0.9").wait(HostRefused)
    assert not process.has_ended
    head.agent(2, placement="two").join()  # before Ray has reported the end of the first
    process.close()
    assert process.describe_exit() == "worker 2 is lost with host 10.0.0.2: another agent has started there"
    assert process.is_blameless and not other.has_ended and head.hosts.num_hosts_lost(0) == 1
    head.until(lambda: second.turn() or head.hosts.places_taken.placements == ["", "two"])
    head.hosts.on_placement(HostGone(placement="one", reason="it was killed"))
    assert head.hosts.places_taken.placements == ["", "two"] and not head.hosts.obstacle(WORKERS)
    first.send(HostReport())
    first.wait(HostUnknown)


def test_a_report_of_ray_ends_the_wait_for_a_process_of_a_killed_agent(head: Head) -> None:
    head.agent(2, placement="one").join()
    head.agent(3).join()
    head.until(lambda: not head.hosts.obstacle(WORKERS))
    process = head.hosts.spawn(head.rank(2))
    head.reports.append(HostGone(placement="one", reason="it was killed"))
    process.close()
    assert process.describe_exit() == "worker 2 is lost with host 10.0.0.2: it was killed"


def test_a_host_with_another_checkpoint_is_refused(head: Head) -> None:
    refused = head.agent(3).join(digest="0" * 64).wait(HostRefused)
    assert f"another checkpoint of demo (00000000) than the head ({DIGEST:.8})" in refused.error.message


def test_a_host_with_too_few_gpus_is_refused(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]], keys: Keys
) -> None:
    head = Head(tmp_path, context, 2, device="cuda")
    refused = head.agent(2, num_gpus=1).wait(HostRefused)
    assert "has 1 GPUs, --tensor-parallel-size 4 over --hosts 2 needs 2 on a host" in refused.error.message
    head.close()


def test_the_key_of_one_ring_opens_no_other(head: Head, keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    assert head.spec.group_keys is not None
    stolen = msgspec.structs.replace(
        head.spec.group_keys, server_public=keys.server_public, server_secret=keys.server_secret
    )
    head.agent(2, stolen)
    head.until(lambda: any("was refused: it has another key" in line for line in caplog.messages))
    assert not head.hosts.joined.all


# ── the agent ────────────────────────────────────────────────────────────────────────────────────────────────────────


class ScriptedHead:
    """A head with the messages that a test gives it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self.zap = ZapHandler(context, keys.client_public, HOSTS)
        socket = new_socket(context, zmq.ROUTER)
        self.address = keys.listen(socket, HOSTS, "tcp://127.0.0.1:0")
        self.channel: Channel[AgentToHead, HeadToAgent] = Channel(socket, AgentToHead, "agents")
        self.received: list[tuple[bytes, AgentToHead]] = []
        self.pings = True
        self._pinged_at = 0.0

    def turn(self) -> None:
        self.zap.answer()
        for identity, message in self.channel.receive_from():
            self.received.append((identity, message))
        if self.pings and self.received and time.monotonic() > self._pinged_at + 1:
            self._pinged_at = time.monotonic()
            self.channel.send_to(self.received[-1][0], Ping())

    def wait(self, kind: type[T]) -> tuple[bytes, T]:
        """Wait for a message of this type; return and forget it with its sender."""

        def is_done() -> bool:
            self.turn()
            return any(isinstance(message, kind) for _, message in self.received)

        wait_until(is_done)
        found = next(each for each in self.received if isinstance(each[1], kind))
        self.received.remove(found)
        return found

    def accept(self, folder: Path) -> bytes:
        """Let an agent join and prepare; return its identity."""
        identity, hello = self.wait(HostHello)
        assert (hello.address, hello.version) == ("127.0.0.1", tokenloom_version())
        spec = new_spec(run_directory=str(folder), model_folder=str(DEMO_FOLDER), group_keys=Keys.generate())
        self.channel.send_to(identity, HostAccepted(spec=msgspec.json.encode(spec)))
        assert self.wait(HostPrepared)[1] == HostPrepared(digest=DIGEST)
        return identity


@pytest.fixture
def peer(context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> ScriptedHead:
    return ScriptedHead(context, keys)


Agent = subprocess.Popen[str]
Join = Callable[..., Agent]


@pytest.fixture
def join(tmp_path: Path, keys: Keys) -> Iterator[Join]:
    agents: list[Agent] = []

    def start(address: str, *options: str) -> Agent:
        words = ["join", address, "--key-file", str(tmp_path / "hosts.key"), *options]
        command = [sys.executable, "-P", "-m", "tokenloom.frontend.launch", *words]
        environment = os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)}
        agents.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd="/", env=environment))
        return agents[-1]

    yield start
    for agent in agents:
        agent.kill()
        agent.wait()
        assert agent.stderr is not None
        agent.stderr.close()


def test_an_agent_serves_one_head_after_another_and_leaves_nothing(
    peer: ScriptedHead, join: Join, tmp_path: Path
) -> None:
    agent = join(peer.address)
    identity = peer.accept(tmp_path)
    order = Spawn(process="worker-0-0", role="worker", number=0, rank="0", arguments=["--nonsense"])
    peer.channel.send_to(identity, order)
    peer.wait(Spawned)
    _, ended = peer.wait(Ended)
    assert ended.how.startswith("worker 0 exited with code 2: ")
    assert list((tmp_path / "tokenloom").glob("*/lock"))
    peer.channel.send_to(identity, HostReleased())
    again, _ = peer.wait(HostHello)
    assert again != identity, "an agent that comes back is a new one"
    assert not list((tmp_path / "tokenloom").glob("*/lock"))
    agent.send_signal(signal.SIGTERM)
    peer.wait(HostLeaving)
    assert agent.wait(DEADLINE_S) == 0


def test_an_agent_reports_a_process_when_it_has_reaped_it_and_leaves_a_silent_head(
    peer: ScriptedHead, join: Join, tmp_path: Path
) -> None:
    join(peer.address)
    identity = peer.accept(tmp_path)
    arguments = ["--rank", "0", "--generation", "0"]
    peer.channel.send_to(identity, Spawn(process="x", role="worker", number=0, rank="0", arguments=arguments))
    _, spawned = peer.wait(Spawned)
    peer.channel.send_to(identity, Kill(process="x"))
    assert peer.wait(Ended)[1] == Ended(process="x", how="worker 0 was killed by SIGKILL")
    assert not psutil.pid_exists(spawned.pid)
    peer.pings = False
    begun = time.monotonic()
    peer.wait(HostHello)
    assert time.monotonic() - begun > LEASE_S - 1.5


def test_a_second_agent_of_a_machine_waits_until_the_first_has_ended(peer: ScriptedHead, join: Join) -> None:
    first = join(peer.address)
    peer.wait(HostHello)
    second = join(peer.address)
    assert second.stderr is not None
    words = f"another agent on this machine serves {peer.address}: stop one of them; waits for {peer.address}"
    assert words in second.stderr.readline()
    assert not peer.received
    first.kill()
    identity, _ = peer.wait(HostHello)
    peer.channel.send_to(identity, HostRefused(error=error_info(ConfigError("another version"))))
    _, errors = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 2 and errors.endswith("engine-launch join: another version\n")


@pytest.mark.parametrize("which", ["client", pytest.param("both", marks=pytest.mark.nightly)])
def test_an_agent_with_another_key_ends_with_the_reason(
    peer: ScriptedHead, join: Join, keys: Keys, tmp_path: Path, which: str
) -> None:
    other = Keys.generate()
    if which == "client":
        other = msgspec.structs.replace(other, server_public=keys.server_public, server_secret=keys.server_secret)
    other.save(tmp_path / "other.key")
    agent = join(peer.address, "--key-file", str(tmp_path / "other.key"))
    wait_until(lambda: peer.turn() or agent.poll() is not None)
    _, errors = agent.communicate(timeout=DEADLINE_S)
    assert agent.returncode == 2 and "has other keys than --key-file: give the head's --hosts-key-file" in errors
    assert not peer.received


def test_a_name_that_cannot_be_resolved_is_waited_for(join: Join, keys: Keys) -> None:
    agent = join("tcp://nowhere.invalid:7100")
    assert agent.stderr is not None
    line = agent.stderr.readline()
    assert "nowhere.invalid" in line and "waits for tcp://nowhere.invalid:7100" in line
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(DEADLINE_S) == 0


# ── addresses ────────────────────────────────────────────────────────────────────────────────────────────────────────

HEAD_ADDRESS = "tcp://127.0.0.1:7100"


def test_the_address_of_this_machine_is_that_of_the_way_to_the_head_or_the_chosen_one() -> None:
    assert HeadAddress(HEAD_ADDRESS, None).resolve() == ("127.0.0.1", "127.0.0.1")
    assert HeadAddress(HEAD_ADDRESS, "127.0.0.2").resolve() == ("127.0.0.1", "127.0.0.2")


@pytest.mark.parametrize("address", ["tcp://127.0.0.1", "ipc:///tmp/x"])
def test_an_address_that_is_none_is_an_error(address: str) -> None:
    with pytest.raises(ConfigError, match=r"is not of the form tcp://HOST:PORT: give the address that the head logs"):
        HeadAddress(address, None)


@pytest.mark.parametrize("own", ["192.0.2.1", "2001:db8::1", "no address"])
def test_an_address_that_this_machine_does_not_have_is_named(own: str) -> None:
    with pytest.raises(OSError, match=f"--own-address {own} is no address of this machine"):
        HeadAddress(HEAD_ADDRESS, own).resolve()
