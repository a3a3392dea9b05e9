"""A client with the addresses of several frontends uses one, and goes to the next when it loses that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom.frontend.client.client import Client
from tokenloom.ipc.errors import ConfigError, EngineDead
from tokenloom.tests.frontend.fake_frontend import DEADLINE_S, FakeFrontend, expected_text, greedy
from tokenloom.tests.support.waiting import Deadline


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[FakeFrontend, FakeFrontend]]:
    fakes = FakeFrontend(f"ipc://{tmp_path}/a"), FakeFrontend(f"ipc://{tmp_path}/b")
    yield fakes
    for fake in fakes:
        fake.close()


def num_clients(fake: FakeFrontend) -> int:
    return fake.do(lambda service: len(service.sessions))


def test_open_requests_resume_at_the_next_frontend_after_a_loss(pair: tuple[FakeFrontend, FakeFrontend]) -> None:
    with Client([fake.address for fake in pair]) as client:
        used, other = pair if num_clients(pair[0]) else reversed(pair)
        assert num_clients(other) == 0, "one address is used at a time"
        used.set(max_deltas=3)
        future = client.submit("p", greedy())
        used.until(lambda service: service.is_paused)
        used.hang_up()
        assert future.result(DEADLINE_S).outputs[0].text == expected_text("p", 40)
        submits = other.do(lambda service: list(service.submits))
        assert [submit.attempt for submit in submits] == [1] and submits[0].children[0].output_token_ids


def test_a_frontend_that_does_not_answer_is_passed_over(
    pair: tuple[FakeFrontend, FakeFrontend], tmp_path: Path
) -> None:
    mute, good = pair
    mute.set(is_mute=True)
    deadline = Deadline(DEADLINE_S)
    for _ in range(8):  # the first address is chosen at random
        with Client([mute.address, f"ipc://{tmp_path}/nobody", good.address]) as client:
            assert client.submit("p", greedy()).result(DEADLINE_S).finished
    assert not deadline.has_passed()


def test_clients_spread_over_the_frontends(pair: tuple[FakeFrontend, FakeFrontend]) -> None:
    clients = [Client([fake.address for fake in pair]) for _ in range(24)]
    counts = [num_clients(fake) for fake in pair]
    for client in clients:
        client.close()
    assert sum(counts) == 24 and min(counts) > 0


def test_without_any_frontend_the_error_names_all_addresses(tmp_path: Path) -> None:
    addresses = [f"ipc://{tmp_path}/a", f"ipc://{tmp_path}/b"]
    with pytest.raises(EngineDead, match=rf"no engine answers at {addresses[0]} or {addresses[1]} for 0.5 s"):
        Client(addresses, connect_timeout_s=0.5)


def test_addresses_must_be_given() -> None:
    with pytest.raises(ConfigError, match="no address is given"):
        Client([])
    with pytest.raises(ConfigError, match="ipc:// or tcp://, as engine-launch prints it; clients of OpenAI's API take"):
        Client("http://localhost:8000")
    with pytest.raises(ConfigError, match="address 'localhost' must begin with ipc:// or tcp://"):
        Client(["tcp://127.0.0.1:1", "localhost"])
