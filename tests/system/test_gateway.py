"""A gateway over two engines answers as one engine does, also while engines and links are lost."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx2
import psutil
import pytest

from tokenloom import Client, RequestOutput, SamplingParams
from tokenloom.ipc.keys import Keys
from tokenloom.scripts.engine_process import Engine
from tokenloom.tests.support.chaos_work import Work, difference, make_work
from tokenloom.tests.support.network_hosts import Network, obstacle

DEADLINE_S = 60.0
MODEL = ["--dtype", "float32"]
OPTIONS = ["--device", "cpu", "--num-threads", "1", "--num-kv-blocks", "256", *MODEL]
LONG = SamplingParams(temperature=0.8, seed=5, max_tokens=400, ignore_eos=True)
PROMPT = "The capital of Peru is"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Fleet:
    """A gateway and the engines behind it, which tests end and start again."""

    def __init__(
        self, folder: Path, key_file: Path, places: Sequence[str], prefixes: Sequence[Sequence[str]] = ((), (), ())
    ) -> None:
        """`prefixes`: before the commands of the engines and, last, of the gateway."""
        self._folder, self._keys, self.places = folder, ["--hosts-key-file", str(key_file)], places
        self._prefixes = prefixes
        self.engines: list[Engine | None] = [None for _ in places]
        runtime = folder / "gateway"
        runtime.mkdir()
        options = ["gateway", "--cores", ",".join(places), *self._keys, "--http", "0", *MODEL]
        self.gateway = Engine(runtime, options, prefix=prefixes[-1])
        for number in range(len(places)):
            self.start(number)
        self.gateway.wait_ready()
        for number in range(len(places)):
            self.wait_used(number, 1)

    def start(self, number: int) -> Engine:
        runtime = self._folder / f"engine-{number}"
        runtime.mkdir(exist_ok=True)
        options = [*OPTIONS, "--core-listen", self.places[number], *self._keys]
        options += ["--hang-timeout-s", str(2 * DEADLINE_S)]  # else an engine replaces its stopped core
        engine = self.engines[number] = Engine(runtime, options, prefix=self._prefixes[number])
        return engine

    def engine(self, number: int) -> Engine:
        engine = self.engines[number]
        assert engine is not None
        return engine

    def kill(self, *numbers: int) -> None:
        """Kill the supervisors of engines, and wait until their cores are gone, too."""
        cores = [self.engine(number).child("core") for number in numbers]
        for number in numbers:
            self.engine(number).process.kill()
        psutil.wait_procs(cores, DEADLINE_S)
        for number in numbers:
            self.engine(number).process.wait()

    def restart(self) -> None:
        """Start the engines that do not run, and wait until the gateway uses them."""
        for number, engine in enumerate(self.engines):
            if engine is None or engine.process.poll() is not None:
                count = self.num_uses(number)
                self.start(number).wait_ready()
                self.wait_used(number, count + 1)

    def lines(self, text: str) -> list[str]:
        return [line for line in self.gateway.errors.read_text(encoding="utf-8").splitlines() if text in line]

    def num_uses(self, number: int) -> int:
        return len(self.lines(f"the core at {self.places[number]} is used"))

    def wait_used(self, number: int, count: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self.num_uses(number) < count:
            assert time.monotonic() < deadline, self.gateway.errors.read_text(encoding="utf-8")
            time.sleep(0.02)

    def close(self) -> None:
        for engine in (self.gateway, *self.engines):
            if engine is not None:
                engine.__exit__(None, None, None)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "fleet.key"
    Keys.generate().save(path)
    return path


@pytest.fixture(scope="module")
def only_fleet(tmp_path_factory: pytest.TempPathFactory, key_file: Path) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    fleet = Fleet(folder, key_file, [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)])
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(only_fleet: Fleet) -> Fleet:
    """A gateway and two engines that run, also after a test that has killed some."""
    only_fleet.restart()
    return only_fleet


@pytest.fixture(scope="module")
def work() -> list[Work]:
    return make_work(random.Random(11))


@pytest.fixture(scope="module")
def calm(only_fleet: Fleet, work: list[Work]) -> list[RequestOutput]:
    """The answers of an engine at its own address, and last the long one."""
    with Client(only_fleet.engine(0).wait_ready()) as client:
        return answers_of(client, work)


def answers_of(client: Client, work: list[Work]) -> list[RequestOutput]:
    forms, params = [*(each.form for each in work), PROMPT], [*(each.params for each in work), LONG]
    return client.generate(forms, params, use_tqdm=False)


def check_equal(calm: list[RequestOutput], answers: list[RequestOutput]) -> None:
    assert not [found for pair in zip(calm, answers, strict=True) if (found := difference(*pair))]


def wait_running(client: Client, num_steps: int) -> None:
    step, deadline = client.health().step, time.monotonic() + DEADLINE_S
    while client.health().step < step + num_steps:
        assert time.monotonic() < deadline, client.health()


def harmed_answers(fleet: Fleet, work: list[Work], harm: object) -> list[RequestOutput]:
    """Return the gateway's answers to the work, in the midst of which `harm` is called."""
    assert callable(harm)
    with Client(fleet.gateway.address, reconnect_timeout_s=DEADLINE_S) as client:
        futures = [client.submit(each.form, each.params) for each in work]
        futures.append(client.submit(PROMPT, LONG))
        wait_running(client, 12)
        harm()
        return [future.result(timeout=DEADLINE_S) for future in futures]


@pytest.mark.timeout(120)
def test_a_gateway_answers_as_an_engine_does_and_uses_all(
    fleet: Fleet, work: list[Work], calm: list[RequestOutput]
) -> None:
    workers = [fleet.engine(number).child("worker 0") for number in (0, 1)]
    before = [sum(worker.cpu_times()[:2]) for worker in workers]
    with Client(fleet.gateway.address) as client:
        check_equal(calm, answers_of(client, work))
        info, health = client.info(), client.health()
    assert info.num_kv_blocks == 2 * 255 and health.is_ready and health.num_free_blocks > 0
    spent = [sum(worker.cpu_times()[:2]) - since for worker, since in zip(workers, before, strict=True)]
    assert min(spent) > 0.1 * sum(spent), spent
    assert not [each for each in fleet.gateway.processes() if "core" in " ".join(each.cmdline())], "no children"


@pytest.mark.timeout(150)
def test_an_engine_that_is_killed_changes_no_answer_and_is_used_again_when_it_is_back(
    fleet: Fleet, work: list[Work], calm: list[RequestOutput]
) -> None:
    count = fleet.num_uses(1)
    check_equal(calm, harmed_answers(fleet, work, lambda: fleet.kill(1)))
    assert fleet.num_uses(1) == count
    fleet.restart()
    with Client(fleet.gateway.address) as client:
        check_equal(calm, answers_of(client, work))


@pytest.mark.timeout(150)
def test_a_stopped_core_is_left_and_its_late_tokens_count_nowhere(
    fleet: Fleet, work: list[Work], calm: list[RequestOutput]
) -> None:
    count, core = fleet.num_uses(0), fleet.engine(0).child("core")
    check_equal(calm, harmed_answers(fleet, work, lambda: os.kill(core.pid, signal.SIGSTOP)))
    os.kill(core.pid, signal.SIGCONT)
    fleet.wait_used(0, count + 1)
    with Client(fleet.engine(0).address) as client:
        deadline = time.monotonic() + DEADLINE_S
        while client.health().num_running:
            assert time.monotonic() < deadline, "the requests of a gateway that went elsewhere still run"


@pytest.mark.timeout(150)
def test_without_any_engine_new_requests_are_refused_and_accepted_ones_wait(
    fleet: Fleet, calm: list[RequestOutput]
) -> None:
    with Client(fleet.gateway.address, reconnect_timeout_s=DEADLINE_S) as client:
        future = client.submit(PROMPT, LONG)
        wait_running(client, 10)
        fleet.kill(0, 1)
        deadline = time.monotonic() + DEADLINE_S
        while client.health().is_ready:
            assert time.monotonic() < deadline, "nobody has noticed the loss of all engines"
        refused = httpx2.post(f"{fleet.gateway.url}/v1/completions", json={"prompt": "Hi"}, timeout=20)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1, refused.text
        assert httpx2.get(f"{fleet.gateway.url}/ready", timeout=20).status_code == 503
        assert not future.done()
        fleet.restart()
        assert difference(calm[-1], future.result(timeout=DEADLINE_S)) is None


@pytest.mark.timeout(120)
def test_unequal_models_and_wrong_keys_are_refused_in_one_line(fleet: Fleet, key_file: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.key"
    Keys.generate().save(wrong)
    address = fleet.places[0]
    cases = (
        (key_file, ["--dtype", "bfloat16"], "the engine serves another model than the gateway: its dtype is"),
        (key_file, [*MODEL, "--block-size", "32"], "its block_size is 16, not 32"),
        (wrong, MODEL, "it does not take the key of --hosts-key-file, or is no --core-listen: check both"),
    )
    with ExitStack() as stack:
        gateways = []
        for number, (keys, model, _) in enumerate(cases):
            runtime = tmp_path / str(number)
            runtime.mkdir()
            options = ["gateway", "--cores", address, "--hosts-key-file", str(keys), "--http", "0", *model]
            gateways.append(stack.enter_context(Engine(runtime, options)))
        for gateway, (_, _, line) in zip(gateways, cases, strict=True):
            gateway.wait_ready()
            deadline = time.monotonic() + DEADLINE_S
            while not (found := [each for each in gateway.errors.read_text().splitlines() if line in each]):
                assert time.monotonic() < deadline, gateway.errors.read_text()
                time.sleep(0.02)
            assert httpx2.get(f"{gateway.url}/ready", timeout=20).status_code == 503
            assert gateway.stop() == 0 and len(found) == 1, found


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "they can")
def test_a_link_that_is_cut_and_healed_repeats_no_token(
    tmp_path: Path, work: list[Work], calm: list[RequestOutput]
) -> None:
    """Engines and gateway are on hosts of their own; the clients' address of the gateway is a file here."""
    with Network(tmp_path, 3) as network:
        places = [f"tcp://{network.addresses[number]}:6000" for number in (1, 2)]
        prefixes = [network.prefix(number)[:4] for number in (1, 2, 0)]
        fleet = Fleet(tmp_path, network.key_file, places, prefixes)
        try:
            count = fleet.num_uses(0)
            check_equal(calm, harmed_answers(fleet, work, lambda: network.cut(1)))
            assert fleet.lines(f"the core at {places[0]} is lost: it has been silent for 3 s")
            network.heal(1)
            fleet.wait_used(0, count + 1)
            with Client(fleet.gateway.address) as client:
                check_equal(calm, answers_of(client, work))
        finally:
            fleet.close()
