"""A gateway over two engines answers as one engine does, with adapters that only the gateway has, also while engines
and links are lost."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from safetensors.torch import load_file, save_file

from tokenloom import Client, RequestError, RequestOutput, SamplingParams
from tokenloom.frontend.checkpoint.resolve import DEMO_FOLDER
from tokenloom.ipc.sockets.endpoints import tcp_address
from tokenloom.ipc.sockets.keys import Keys
from tokenloom.tests.support.adapters import write_adapters
from tokenloom.tests.support.chaos_work import (
    Work,
    answers,
    check_equal,
    difference,
    make_work,
    submit,
    with_adapters,
    without_effect,
)
from tokenloom.tests.support.network_hosts import Network, obstacle
from tokenloom.tests.support.waiting import wait_until
from tokenloom.tests.system.fleet import DEADLINE_S, Fleet, free_port, wait_running
from tokenloom.tests.system.launched import reconnecting

LONG = SamplingParams(temperature=0.8, seed=5, max_tokens=200, ignore_eos=True)
PROMPT = "The capital of Peru is"
LORA = ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "16"]
NAMES = ("a0", "a1")


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "fleet.key"
    Keys.generate().save(path)
    return path


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapters(tmp_path_factory.mktemp("adapters"), DEMO_FOLDER, 3)[0].parent


@pytest.fixture(scope="module")
def of_gateway(adapters: Path) -> list[str]:
    """The options of the gateway alone."""
    modules = [f"{name}={adapters / name}" for name in NAMES]
    return ["--adapter-folder", str(adapters), "--allow-runtime-lora", "--lora-modules", *modules]


@pytest.fixture(scope="module")
def only_fleet(tmp_path_factory: pytest.TempPathFactory, key_file: Path, of_gateway: list[str]) -> Iterator[Fleet]:
    folder, places = tmp_path_factory.mktemp("fleet"), [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    fleet = Fleet(folder, key_file, places, options=LORA, of_gateway=of_gateway)
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(only_fleet: Fleet) -> Fleet:
    """A gateway and two engines that run, also after a test that has killed some."""
    only_fleet.restart()
    return only_fleet


@pytest.fixture(scope="module")
def work() -> list[Work]:
    """Requests with and without adapters, and last a long one."""
    rng = random.Random(11)
    return [*with_adapters(make_work(rng)[::2], NAMES, rng), Work("long", PROMPT, LONG)]


@pytest.fixture(scope="module")
def calm(only_fleet: Fleet, work: list[Work], adapters: Path) -> list[RequestOutput]:
    """The answers of an engine at its own address, which reads the adapters itself."""
    with Client(only_fleet.engine(0).address) as client:
        for name in NAMES:
            client.load_adapter(name, adapters / name)
        found = answers(client, work)
        for name in NAMES:
            client.unload_adapter(name)
    assert not without_effect(work, found)
    return found


def harmed_answers(fleet: Fleet, work: list[Work], harm: Callable[[], None]) -> list[RequestOutput]:
    """Return the gateway's answers to the work, in the midst of which `harm` is called."""
    with reconnecting(fleet.gateway) as client:
        futures = submit(client, work)
        wait_running(client, 12)
        harm()
        return [future.result(timeout=DEADLINE_S) for future in futures]


def test_a_gateway_answers_as_an_engine_does_and_uses_all(
    fleet: Fleet, work: list[Work], calm: list[RequestOutput]
) -> None:
    workers = [fleet.engine(number).child("worker 0") for number in (0, 1)]
    before = [sum(worker.cpu_times()[:2]) for worker in workers]
    with reconnecting(fleet.gateway) as client:
        check_equal(calm, answers(client, work))
        info, health = client.info(), client.health()
    assert info.num_kv_blocks == 2 * 255 and health.is_ready and health.num_free_blocks > 0
    spent = [sum(worker.cpu_times()[:2]) - since for worker, since in zip(workers, before, strict=True)]
    assert min(spent) > 0.1 * sum(spent), spent
    assert not [each for each in fleet.gateway.processes() if "core" in " ".join(each.cmdline())], "no children"


def test_each_engine_gets_the_adapters_from_the_gateway(
    fleet: Fleet, work: list[Work], calm: list[RequestOutput]
) -> None:
    with reconnecting(fleet.gateway) as client:

        def have_all() -> bool:
            check_equal(calm, answers(client, work))
            return all(fleet.blobs(number, "gateway-adapters") for number in (0, 1))  # they have no other way to them

        wait_until(have_all, "the requests with adapters all go to one engine", DEADLINE_S)


def test_an_engine_that_is_killed_changes_no_answer_and_is_used_again_when_it_is_back(
    fleet: Fleet, work: list[Work], calm: list[RequestOutput]
) -> None:
    count = fleet.num_uses(1)
    check_equal(calm, harmed_answers(fleet, work, lambda: fleet.kill(1)))
    assert fleet.num_uses(1) == count
    fleet.restart()
    with reconnecting(fleet.gateway) as client:
        check_equal(calm, answers(client, work))


def test_without_any_engine_new_requests_are_refused_and_accepted_ones_wait(fleet: Fleet) -> None:
    for_seconds = LONG.replace(max_tokens=1200)
    with reconnecting(fleet.gateway) as client:
        calm = client.generate(PROMPT, for_seconds, use_tqdm=False)
        future = client.submit(PROMPT, for_seconds)
        wait_running(client, 10)
        fleet.kill(0, 1)
        wait_until(lambda: not client.health().is_ready, "the loss of all engines is not noticed", DEADLINE_S)
        refused = httpx2.post(f"{fleet.gateway.url}/v1/completions", json={"prompt": "Hi"}, timeout=20)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1, refused.text
        assert httpx2.get(f"{fleet.gateway.url}/ready", timeout=20).status_code == 503
        assert not future.done()
        fleet.restart()
        check_equal(calm, [future])


@pytest.mark.nightly
def test_an_adapter_that_is_loaded_while_an_engine_is_away_serves_there_when_it_is_back(
    fleet: Fleet, adapters: Path
) -> None:
    with Client(fleet.engine(1).address) as client:
        client.load_adapter("a2", adapters / "a2")
        expected = client.generate(PROMPT, LONG, use_tqdm=False, model="a2")
    fleet.kill(0)
    body = {"lora_name": "new", "lora_path": "a2"}
    loaded = httpx2.post(f"{fleet.gateway.url}/v1/load_lora_adapter", json=body, timeout=DEADLINE_S)
    assert loaded.status_code == 200, loaded.text
    fleet.restart()
    fleet.kill(1)  # so that only the one that was away is left
    with reconnecting(fleet.gateway) as client:
        check_equal(expected, client.generate(PROMPT, LONG, use_tqdm=False, model="new"))
        client.unload_adapter("new")
        assert [info.name for info in client.list_adapters()] == [*NAMES]


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(DEMO_FOLDER, tmp_path_factory.mktemp("models") / "other")
    (file,) = folder.glob("*.safetensors")
    tensors = {name: tensor.roll(1, 0) if "mlp" in name else tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.nightly
def test_a_reload_goes_to_all_engines_and_to_one_that_comes_back_with_the_weights_of_its_start(
    fleet: Fleet, calm: list[RequestOutput], other_weights: Path, tmp_path: Path
) -> None:
    def answer(address: str) -> RequestOutput:
        with Client(address, reconnect_timeout_s=DEADLINE_S) as client:
            return client.generate(PROMPT, LONG, use_tqdm=False)[0]

    with reconnecting(fleet.gateway) as client:
        for folder, reason in ((str(tmp_path / "missing"), "missing"), ("some/name", "is no absolute path")):
            with pytest.raises(RequestError, match=reason):
                client.reload(folder)
        check_equal(calm[-1:], [answer(fleet.gateway.address)])
        client.reload(other_weights)
        expected = answer(fleet.engine(0).address)
        assert difference(calm[-1], expected), "they are other weights"
        check_equal([expected] * 2, [answer(fleet.engine(1).address), answer(fleet.gateway.address)])
        fleet.kill(1)
        fleet.restart()
        assert fleet.lines(f"the core at {fleet.places[1]} reads the weights in {other_weights}")
        fleet.kill(0)
        check_equal([expected], [answer(fleet.gateway.address)])
        fleet.restart()
        client.reload(DEMO_FOLDER)
        check_equal(calm[-1:], [answer(fleet.gateway.address)])


@pytest.mark.nightly
@pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "they can")
@pytest.mark.parametrize("is_ipv6", [False, True])
def test_a_link_that_is_cut_and_healed_repeats_no_token(
    tmp_path: Path, work: list[Work], calm: list[RequestOutput], of_gateway: list[str], is_ipv6: bool
) -> None:
    """Engines and gateway are on hosts of their own; the clients' address of the gateway is a file here."""
    with Network(tmp_path, 3, is_ipv6=is_ipv6) as network:
        places = [tcp_address(network.addresses[number], 6000) for number in (1, 2)]
        prefixes = [network.prefix(number)[:4] for number in (1, 2, 0)]
        fleet = Fleet(tmp_path, network.key_file, places, prefixes, options=LORA, of_gateway=of_gateway)
        try:
            count = fleet.num_uses(0)
            check_equal(calm, harmed_answers(fleet, work, lambda: network.cut(1)))
            assert fleet.lines(f"the core at {places[0]} is lost: it has been silent for 3 s")
            network.heal(1)
            fleet.wait_used(0, count + 1)
            with reconnecting(fleet.gateway) as client:
                check_equal(calm, answers(client, work))
        finally:
            fleet.close()
